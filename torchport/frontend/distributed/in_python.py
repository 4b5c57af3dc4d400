"""Functional collectives over process groups that are written in Python, such as one whose ranks are threads.

PyTorch would call such a group's methods below functionalization, with handles; what they write would be lost. So a
functional collective over one is made of the collective that writes, on the program's own tensors.

Private torch APIs used here: ``torch._C._distributed_c10d._resolve_process_group``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group

from ..device.custom import first_port_tensor

__all__ = ["KERNELS", "unless_in_python"]


def _group(named: Any) -> Any:
    return _resolve_process_group(named) if isinstance(named, str) else named  # type: ignore[arg-type]


def _operation(name: str) -> Any:
    return getattr(dist.ReduceOp, name.upper())


def _rows(given: torch.Tensor, count: int) -> torch.Tensor:
    return given.new_empty((count, *given.shape[1:]))


def all_reduce(given: torch.Tensor, reduce_op: str, group: Any) -> torch.Tensor:
    out = given.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, _operation(reduce_op), _group(group))
    return out


def broadcast(given: torch.Tensor, source: int, group: Any) -> torch.Tensor:
    out = given.clone(memory_format=torch.contiguous_format)
    dist.broadcast(out, group=_group(group), group_src=source)
    return out


def all_gather_into_tensor(given: torch.Tensor, size: int, group: Any) -> torch.Tensor:
    out = _rows(given, (given.shape[0] if given.dim() else 1) * size)
    _group(group).all_gather_single(out, given.contiguous()).wait()
    return out


def reduce_scatter_tensor(given: torch.Tensor, reduce_op: str, size: int, group: Any) -> torch.Tensor:
    out, options = _rows(given, given.shape[0] // size), dist.ReduceScatterOptions()
    options.reduceOp = _operation(reduce_op)
    _group(group).reduce_scatter_single(out, given.contiguous(), options).wait()
    return out


def all_to_all_single(given: torch.Tensor, received: Sequence[int], sent: Sequence[int], group: Any) -> torch.Tensor:
    out = _rows(given, sum(received)) if received else torch.empty_like(given, memory_format=torch.contiguous_format)
    dist.all_to_all_single(out, given.contiguous(), list(received) or None, list(sent) or None, group=_group(group))
    return out


def _of_each(one: Callable[..., torch.Tensor]) -> Callable[..., list[torch.Tensor]]:
    return lambda inputs, *args: [one(given, *args) for given in inputs]


KERNELS: Final[Mapping[str, Callable[..., Any]]] = {
    "all_reduce": all_reduce,
    "all_reduce_coalesced": _of_each(all_reduce),
    "broadcast": broadcast,
    "all_gather_into_tensor": all_gather_into_tensor,
    "all_gather_into_tensor_coalesced": _of_each(all_gather_into_tensor),
    "reduce_scatter_tensor": reduce_scatter_tensor,
    "reduce_scatter_tensor_coalesced": _of_each(reduce_scatter_tensor),
    "all_to_all_single": all_to_all_single,
}


def unless_in_python(kernel: Callable[..., Any], stock: Any) -> Callable[..., Any]:
    """Where functionalization would be asked: ``kernel`` for the device's tensors over a group that is in Python."""

    def call(keys: Any, *args: Any) -> Any:
        if type(_group(args[-1])) is dist.ProcessGroup or first_port_tensor(args) is None:
            return stock.call_boxed(keys, *args)
        with torch.no_grad():
            return kernel(*args)

    return call
