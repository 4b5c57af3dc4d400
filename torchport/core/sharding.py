"""How a value lies on several devices: a mesh with named axes, and the axes that split each of its dimensions."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from .errors import ConfigError

__all__ = ["Mesh", "Sharding", "is_partitioned", "note_partitioned"]

_partitioned: Final[weakref.WeakSet[object]] = weakref.WeakSet()
"""Backends that have values on several devices."""


def note_partitioned(backend: object) -> bool:
    """Some value of a backend lies on several devices from now on; whether that is new."""
    new = backend not in _partitioned
    _partitioned.add(backend)
    return new


def is_partitioned(backend: object) -> bool:
    """Whether values of a backend may lie on several devices: what computes with them is the backend's alone."""
    return bool(_partitioned) and backend in _partitioned


@dataclass(frozen=True, slots=True)
class Mesh:
    """Devices in named dimensions."""

    axes: tuple[str, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """How many devices."""
        return math.prod(self.shape)

    def parts(self, axes: Sequence[str]) -> int:
        """Into how many parts a dimension is split by these axes."""
        return math.prod(self.shape[self.axes.index(axis)] for axis in axes)

    def __str__(self) -> str:
        return " x ".join(f"{axis}={size}" for axis, size in zip(self.axes, self.shape, strict=True))


@dataclass(frozen=True, slots=True)
class Sharding:
    """A mesh, and per dimension of a value the axes that split it, outermost first; none: every device has all of it.

    Trailing dimensions that nothing splits may be left out. ``gathered`` are axes over which the parts are brought
    together before something is computed from the value: it is stored in parts, and used as a whole.
    """

    mesh: Mesh
    dims: tuple[tuple[str, ...], ...]
    gathered: tuple[str, ...] = ()

    @property
    def used(self) -> tuple[tuple[str, ...], ...]:
        """The axes that split each dimension where something is computed from the value."""
        return tuple(tuple(axis for axis in axes if axis not in self.gathered) for axes in self.dims)

    def check(self, shape: Sequence[int]) -> None:
        """Raise :class:`ConfigError` where a value of this shape cannot lie so: parts are of one size."""
        if len(self.dims) > len(shape):
            raise ConfigError(f"a sharding of {len(self.dims)} dimensions, for a tensor of {len(shape)}")
        for at, (size, axes) in enumerate(zip(shape, self.dims, strict=False)):
            parts = self.mesh.parts(axes)
            if size % parts:
                raise ConfigError(
                    f"dimension {at} of a tensor of shape {tuple(shape)} has {size} elements, which "
                    f"{' and '.join(axes)} of the mesh ({self.mesh}) would split into {parts} parts; parts have to be "
                    "of one size: pad the tensor, or replicate it"
                )

    def __str__(self) -> str:
        split = ", ".join(f"dimension {at} by {' and '.join(axes)}" for at, axes in enumerate(self.dims) if axes)
        gathered = f", {' and '.join(self.gathered)} gathered for use" if self.gathered else ""
        return f"{split or 'replicated'} over {self.mesh}{gathered}"
