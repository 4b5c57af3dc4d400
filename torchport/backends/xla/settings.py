"""The compile specs that ``xla`` reads, validated.

=========================  =======================================================================================
``xla.matmul_precision``   ``highest`` (default: float32 products in full float32), ``high`` or ``default`` (the
                           hardware's fastest, such as bfloat16 passes on TPU and TF32 on GPU)
``xla.options``            a JSON object of XLA compiler options (``DebugOptions`` names)
=========================  =======================================================================================
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from torchport.core.errors import ConfigError
from torchport.core.specs import CompileSpecs

__all__ = ["Settings"]

_PRECISIONS: Final = ("highest", "high", "default")
_OPTIONS: Final[dict[str, Any]] = {
    # Every operator rounds to its dtype, as in PyTorch: no bfloat16 value is kept in float32 between two operators.
    "xla_allow_excess_precision": False,
}
_KNOWN: Final = {"xla.matmul_precision", "xla.options"}


@dataclass(frozen=True, slots=True)
class Settings:
    """How a graph is compiled."""

    matmul_precision: str = "highest"
    options: Mapping[str, Any] = field(default_factory=lambda: dict(_OPTIONS))

    @classmethod
    def of(cls, specs: CompileSpecs) -> Settings:
        """Read compile specs. Raises :class:`ConfigError` for a malformed value and for an unknown ``xla.*`` key."""
        unknown = sorted(key for key in specs if key.startswith("xla.") and key not in _KNOWN)
        if unknown:
            raise ConfigError(f"xla has no compile spec {unknown[0]!r}; it has: {', '.join(sorted(_KNOWN))}")
        precision = specs.text("xla.matmul_precision", "highest")
        if precision not in _PRECISIONS:
            raise ConfigError(
                f'compile spec "xla.matmul_precision" is {precision!r}, but must be one of {", ".join(_PRECISIONS)}'
            )
        return cls(precision, {**_OPTIONS, **_json_object(specs, "xla.options")})

    def to_json(self) -> dict[str, Any]:
        """Plain data for the artifact's metadata."""
        return {"matmul_precision": self.matmul_precision, "options": dict(self.options)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Settings:
        """The settings :meth:`to_json` wrote."""
        return cls(value["matmul_precision"], value["options"])


def _json_object(specs: CompileSpecs, key: str) -> dict[str, Any]:
    try:
        value = json.loads(specs.text(key, "{}"))
    except ValueError as error:
        raise ConfigError(f'compile spec "{key}" is not JSON: {error}') from error
    if not isinstance(value, dict):
        raise ConfigError(f'compile spec "{key}" must be a JSON object')
    return value
