"""How arrays lie on several devices: two compile specs that name no backend, for engines that can use them.

``mesh``
    a JSON object: ``{"axes": ["data", "model"], "shape": [2, 4]}``, eight devices in two named dimensions.
``input_shardings``
    a JSON list with one entry per input of the computation: ``null`` for a copy on every device, or a list with one
    entry per dimension: the name of the mesh axis it is split over, a list of several, or ``null``.

``xla`` validates both, keeps them in the compiled bytes and, for a mesh of more than one device, gives them to
``jax.jit``; XLA finds the shardings of everything else. Backends that do not know the keys ignore them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from torchport.core.errors import ConfigError
from torchport.core.sharding import Mesh
from torchport.core.specs import CompileSpecs, TensorSpec

__all__ = ["Placement"]

Dimension = tuple[str, ...]
"""The mesh axes one dimension of an array is split over; empty: it is whole on every device."""


@dataclass(frozen=True, slots=True)
class Placement:
    """A mesh and, per input, what each of its dimensions is split over (``None``: a copy on every device)."""

    mesh: Mesh
    inputs: tuple[tuple[Dimension, ...] | None, ...]

    @classmethod
    def of(cls, specs: CompileSpecs, inputs: Sequence[TensorSpec]) -> Placement | None:
        """Read compile specs; ``None`` where there is no mesh. Raises :class:`ConfigError` naming what is wrong."""
        mesh, given = _json(specs, "mesh"), _json(specs, "input_shardings")
        if mesh is None:
            if given is not None:
                raise ConfigError('compile spec "input_shardings" needs "mesh", the devices that it splits over')
            return None
        return cls.from_json({"mesh": mesh, "inputs": given}, inputs)

    def to_json(self) -> dict[str, Any]:
        """Plain data for the artifact's metadata."""
        shardings = [None if one is None else [list(dim) for dim in one] for one in self.inputs]
        return {"mesh": {"axes": list(self.mesh.axes), "shape": list(self.mesh.shape)}, "inputs": shardings}

    @classmethod
    def from_json(cls, value: Any, inputs: Sequence[TensorSpec]) -> Placement:
        """What :meth:`to_json` wrote, or what the two compile specs hold. Raises :class:`ConfigError`."""
        mesh = _mesh(value["mesh"])
        given = value["inputs"]
        if given is None:
            return cls(mesh, (None,) * len(inputs))
        if not isinstance(given, list) or len(given) != len(inputs):
            raise ConfigError(
                f'compile spec "input_shardings" must be a JSON list of {len(inputs)} entries, one per input'
            )
        return cls(mesh, tuple(_sharding(mesh, n, one, inputs[n]) for n, one in enumerate(given)))


def _json(specs: CompileSpecs, key: str) -> Any:
    if key not in specs:
        return None
    try:
        return json.loads(specs.text(key))
    except ValueError as error:
        raise ConfigError(f'compile spec "{key}" is not JSON: {error}') from error


def _mesh(value: Any) -> Mesh:
    wanted = 'compile spec "mesh" must be like {"axes": ["data"], "shape": [4]}'
    if not isinstance(value, dict) or set(cast("dict[str, Any]", value)) != {"axes", "shape"}:
        raise ConfigError(wanted)
    axes, shape = value["axes"], value["shape"]
    if not (isinstance(axes, list) and isinstance(shape, list) and axes and len(axes) == len(shape)):
        raise ConfigError(f"{wanted}: as many names as sizes")
    if not all(isinstance(axis, str) for axis in axes) or len(set(axes)) != len(axes):
        raise ConfigError(f"{wanted}: the names must be different strings")
    if not all(isinstance(size, int) and size > 0 for size in shape):
        raise ConfigError(f"{wanted}: the sizes must be whole numbers above 0")
    return Mesh(tuple(axes), tuple(shape))


def _sharding(mesh: Mesh, number: int, value: Any, spec: TensorSpec) -> tuple[Dimension, ...] | None:
    if value is None:
        return None
    where = f"the sharding of input {number} ({spec})"
    if not isinstance(value, list) or len(value) > len(spec.shape):
        raise ConfigError(f"{where} must be null or a list of at most {len(spec.shape)} entries, one per dimension")
    dims: list[Dimension] = []
    for size, entry in zip(spec.shape, value, strict=False):
        names = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        unknown = [name for name in names if name not in mesh.axes]
        if unknown:
            raise ConfigError(f"{where} names {unknown[0]!r}; the mesh has: {', '.join(mesh.axes)}")
        parts = math.prod(mesh.shape[mesh.axes.index(name)] for name in names)
        if size % parts:
            raise ConfigError(f"{where} splits a dimension of {size} into {parts} parts; it must divide evenly")
        dims.append(names)
    used = [name for dim in dims for name in dim]
    if len(set(used)) != len(used):
        raise ConfigError(f"{where} uses a mesh axis twice; each may split one dimension")
    return tuple(dims)
