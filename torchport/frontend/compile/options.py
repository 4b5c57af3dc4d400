"""What ``torch.compile(..., backend="torchport", options={...}, mode=...)`` may be told, checked by name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ...backend.buckets import Buckets
from ...backend.interface import Backend
from ...backend.registry import registry
from ...core.errors import ConfigError
from ...core.specs import CompileSpec, CompileSpecs

__all__ = ["Options"]

_OWN: Final = {
    "backend": "a backend's name, or several in order of preference",
    "ordinal": "which of the backend's devices, for models on the CPU",
    "buckets": "True, or sizes: what changes is padded up to them where that is exact, for models on the CPU",
}
_SHARED: Final = {
    "mesh": "devices in named dimensions, as JSON, for backends that can use several",
    "input_shardings": "how each input is split over the mesh, as JSON, for backends that can",
}
"""Compile specs of no one backend: each gets them, and those that cannot use them ignore them."""


def _bytes(name: str, value: Any) -> bytes:
    """An option's value as a compile spec: bytes and text as they are, everything else as JSON."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode()
    try:
        return json.dumps(value).encode()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"option {name!r} is a {type(value).__name__}, which JSON cannot hold: {error}") from error


@dataclass(frozen=True)
class Options:
    """The options as given. ``names`` are backends in order of preference, empty where none was named."""

    names: tuple[str, ...]
    ordinal: int
    given: Mapping[str, Any]
    buckets: Buckets | None = None

    @classmethod
    def parse(cls, options: Mapping[str, Any] | None, mode: str | None) -> Options:
        """Raises :class:`ConfigError` for a malformed option; :meth:`specs` looks at the names of compile specs."""
        given = dict(options or {})
        if mode not in (None, "default"):
            given["mode"] = mode
        backend, ordinal = given.pop("backend", ()), given.pop("ordinal", 0)
        buckets = Buckets.parse(given.pop("buckets", None))
        names = (backend,) if isinstance(backend, str) else backend
        if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
            raise ConfigError(f'option "backend" is {backend!r}, but must be {_OWN["backend"]}')
        if not isinstance(ordinal, int) or isinstance(ordinal, bool):
            raise ConfigError(f'option "ordinal" is {ordinal!r}, but must be a whole number')
        return cls(tuple(names), ordinal, given, buckets)

    def backends(self) -> list[Backend]:
        """The named backends. Raises :class:`BackendNotFound` or :class:`BackendUnavailable`."""
        return [registry.get(name) for name in self.names]

    def specs(self, backends: Sequence[Backend]) -> dict[str, CompileSpecs]:
        """Compile specs per backend: each gets the options it reads.

        Raises :class:`ConfigError`, listing what there is, for an option that none of them reads.
        """
        known = {name for backend in backends for name in backend.capabilities.compile_options}
        unknown = sorted(set(self.given).difference(known, _SHARED))
        if unknown:
            lines = [f"  {name}: {text}" for name, text in {**_OWN, **_SHARED}.items()]
            for backend in backends:
                own = {name: text for name, text in backend.capabilities.compile_options.items() if name not in _SHARED}
                lines += [f"  {name} ({backend.name}): {text}" for name, text in own.items()]
            what, there_is = ", ".join(map(repr, unknown)), "\n".join(lines)
            raise ConfigError(f"torch.compile was given options that nothing here reads: {what}. Known are\n{there_is}")
        return {
            backend.name: CompileSpecs(
                [
                    CompileSpec(name, _bytes(name, value))
                    for name, value in self.given.items()
                    if name in backend.capabilities.compile_options or name in _SHARED
                ]
            )
            for backend in backends
        }
