"""Adding many rows to rows of a tensor by PyTorch's own kernel, which sorts the rows' numbers first.

Inductor's code adds element by element, each addition atomic, since two threads may add to one row. For 88,000 rows of
128 elements that took five times as long as PyTorch's kernel on one core, where nothing else could write either.
The kernel takes that way only if the index is one number per row, expanded over the row and not written out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from torchport.backend.normal_form import at_hint

__all__ = ["additions"]

_aten = torch.ops.aten

_MANY: Final = 1 << 14
"""Elements to add below which a call and the memory for what is added cost more than atomic additions."""
_WIDE: Final = 8
"""Elements of a row below which the kernel's sorting is not worth it."""
_KERNEL: Final = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16})


def additions(table: Mapping[Any, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """Decompositions of what adds rows, and the ``table``'s own for few rows, short ones and other dtypes."""
    originals = {op: table.get(op) for op in (_aten.index_add.default, _aten.index_put.default)}

    def index_add(x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, *, alpha: Any = 1) -> Any:
        if index.dim() != 1 or x.dim() < 2 or dim % x.dim() or not _pays(x, source):
            return otherwise(_aten.index_add.default, x, dim, index, source, alpha=alpha)
        return _added(x, index, source if alpha == 1 else source * alpha)

    def index_put(x: torch.Tensor, indices: Sequence[Any], values: torch.Tensor, accumulate: bool = False) -> Any:
        index = indices[0] if accumulate and len(indices) == 1 else None
        if index is None or index.dim() != 1 or index.dtype not in (torch.int64, torch.int32):
            return otherwise(_aten.index_put.default, x, indices, values, accumulate)
        if not (values.dim() == x.dim() > 1 and values.shape[0] == index.shape[0] and _pays(x, values)):
            return otherwise(_aten.index_put.default, x, indices, values, accumulate)
        return _added(x, torch.where(index < 0, index + x.shape[0], index), values)

    def otherwise(op: Any, *args: Any, **kwargs: Any) -> Any:
        original = originals[op]
        return original(*args, **kwargs) if original else NotImplemented

    return {_aten.index_add.default: index_add, _aten.index_put.default: index_put}


def _pays(x: torch.Tensor, source: torch.Tensor) -> bool:
    row = math.prod(map(at_hint, source.shape[1:]))
    same = x.dtype == source.dtype and x.dtype in _KERNEL and tuple(x.shape[1:]) == tuple(source.shape[1:])
    return same and row >= _WIDE and row * at_hint(source.shape[0]) >= _MANY


def _added(x: torch.Tensor, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """``x`` with each row of ``source`` added to the row whose number ``index`` tells."""
    numbers = index.to(torch.int64).reshape(-1, *(1 for _ in source.shape[1:]))
    return _aten.scatter_add(x, 0, numbers.expand_as(source), source)
