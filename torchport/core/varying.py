"""Dimensions of which a program says in advance that they will vary."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from .errors import ConfigError
from .forks import guarded_lock

if TYPE_CHECKING:
    import torch

__all__ = ["VaryingDim", "mark", "marks", "marks_of", "put_by", "replace_marks", "take_put_by"]

_AT_MOST: Final = 256


@dataclass(frozen=True, slots=True)
class VaryingDim:
    """A dimension that varies, of tensors of a dtype whose other dimensions are as in ``shape``; from ``low`` to
    ``high``, if these are given."""

    dtype: str
    shape: tuple[int, ...]
    dim: int
    low: int | None = None
    high: int | None = None

    def is_of(self, dtype: str, shape: Sequence[int]) -> bool:
        """Whether tensors of this dtype and shape are meant."""
        return (
            dtype == self.dtype
            and len(shape) == len(self.shape)
            and all(at == self.dim or own == size for at, (own, size) in enumerate(zip(self.shape, shape, strict=True)))
            and (self.low or 0) <= shape[self.dim]
            and (self.high is None or shape[self.dim] <= self.high)
        )


_marks: Final[OrderedDict[tuple[str, tuple[int, ...], int], VaryingDim]] = OrderedDict()
_lock: Final = guarded_lock()
"""Held while marks are looked through: a thread that prepares batches marks them while another one compiles."""


def mark(tensor: torch.Tensor, dim: int, low: int | None, high: int | None) -> VaryingDim:
    """Remember that a dimension of tensors like this one varies. Raises ``IndexError``, :class:`ConfigError`."""
    rank = tensor.dim()
    if not -rank <= dim < rank:
        raise IndexError(f"there is no dimension {dim} to vary: the tensor has {rank}, shape {list(tensor.shape)}")
    dim %= rank
    size = tensor.shape[dim]
    if (low is not None and size < low) or (high is not None and size > high):
        raise ConfigError(
            f"dimension {dim} is said to vary from {low if low is not None else 0} to "
            f"{high if high is not None else 'any size'}, but has {size} now: give bounds that it is within"
        )
    shape = tuple(-1 if at == dim else int(one) for at, one in enumerate(tensor.shape))
    made = VaryingDim(str(tensor.dtype).removeprefix("torch."), shape, dim, low, high)
    key = made.dtype, shape, dim
    with _lock:
        _marks[key] = made
        _marks.move_to_end(key)
        while len(_marks) > _AT_MOST:
            _marks.popitem(last=False)
    return made


def marks() -> tuple[VaryingDim, ...]:
    """What was marked, the first mark first."""
    with _lock:
        return tuple(_marks.values())


def replace_marks(known: Iterable[VaryingDim]) -> None:
    """Have these marks and no others: those of the program that a process compiles for."""
    made = {(one.dtype, one.shape, one.dim): one for one in known}
    with _lock:
        _marks.clear()
        _marks.update(made)


def marks_of(dtype: str, shape: Sequence[int]) -> list[VaryingDim]:
    """The marks of tensors of a dtype and shape."""
    return [one for one in marks() if one.is_of(dtype, shape)] if _marks else []


# -- for Dynamo, which is not imported before it is needed -------------------------------------------------------------
_put_by: Final[OrderedDict[tuple[int, int], tuple[weakref.ref[torch.Tensor], VaryingDim]]] = OrderedDict()
"""By the tensor's ``id`` and the dimension."""


def put_by(tensor: torch.Tensor, made: VaryingDim) -> None:
    """Keep a tensor's mark, as long as the tensor is there, until :func:`take_put_by`."""
    with _lock:
        _put_by[id(tensor), made.dim] = weakref.ref(tensor), made
        while len(_put_by) > _AT_MOST:
            _put_by.popitem(last=False)


def take_put_by() -> list[tuple[torch.Tensor, VaryingDim]]:
    """What was put by, for once."""
    with _lock:
        known = list(_put_by.values())
        _put_by.clear()
    return [(tensor, made) for ref, made in known if (tensor := ref()) is not None]
