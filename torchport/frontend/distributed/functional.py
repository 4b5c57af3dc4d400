"""Kernels of the device for functional collectives: what DTensor, and programs that are traced, are written with.

They are below functionalization: handles come, and handles go whose values arrive by themselves, so ``wait_tensor`` has
nothing to wait for. Those that write are where functionalization would refuse them.

Private torch APIs used here: ``torch.ops._c10d_functional``, ``torch._C._distributed_c10d._resolve_process_group``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch._C._distributed_c10d import _resolve_process_group
from torch.utils._pytree import tree_leaves

from ...core.releases import operators
from ...trace.handle import LazyTensor, make_handle
from ...trace.wrapping import call_above, is_bypassed
from ..device.inplace import overriding
from ..device.opaque import opaque
from . import collectives, in_python, point_to_point
from .collectives import Launched, contiguous, counts
from .communicator import Communicator, communicator_of
from .kernels import for_ours, write
from .staging import handles_of

__all__ = ["install"]

Tensors = Sequence[torch.Tensor]
aten = torch.ops.aten


_NAMESPACE: Final = "_c10d_functional"


def _group(named: Any) -> Communicator:
    return communicator_of(_resolve_process_group(named) if isinstance(named, str) else named)  # type: ignore[arg-type]


def _like(handle: LazyTensor, rows: int | None = None) -> LazyTensor:
    """A handle that only says what is to come: with so many rows, or as many as another has."""
    shape = tuple(handle.shape) if rows is None else (rows, *handle.shape[1:])
    return make_handle(contiguous(shape, handle.dtype), handle.get_device())


def _results(outcome: Launched, given: Sequence[LazyTensor]) -> list[torch.Tensor]:
    return [
        aten.alias_copy.default(old) if new is None else new for old, new in zip(given, outcome.handles, strict=True)
    ]


def all_reduce_coalesced(inputs: Tensors, reduce_op: str, group: Any, name: str = "all_reduce_coalesced") -> Any:
    handles = handles_of(name, inputs)
    return _results(collectives.all_reduce(_group(group), handles, reduce_op, name), handles)


def all_reduce(given: torch.Tensor, reduce_op: str, group: Any) -> Any:
    return all_reduce_coalesced([given], reduce_op, group, "all_reduce")[0]


def broadcast(given: torch.Tensor, source: int, group: Any) -> Any:
    handles = handles_of("broadcast", [given])
    return _results(collectives.broadcast(_group(group), handles, source), handles)[0]


def all_gather_into_tensor_coalesced(
    inputs: Tensors, size: int, group: Any, name: str = "all_gather_into_tensor_coalesced"
) -> Any:
    handles = handles_of(name, inputs)
    outputs = [_like(one, (one.shape[0] if one.dim() else 1) * size) for one in handles]
    outcome = collectives.all_gather(_group(group), [[one] for one in outputs], handles, name)
    return _results(outcome, outputs)


def all_gather_into_tensor(given: torch.Tensor, size: int, group: Any) -> Any:
    return all_gather_into_tensor_coalesced([given], size, group, "all_gather_into_tensor")[0]


def reduce_scatter_tensor_coalesced(
    inputs: Tensors, reduce_op: str, size: int, group: Any, name: str = "reduce_scatter_tensor_coalesced"
) -> Any:
    handles = handles_of(name, inputs)
    outputs = [_like(one, one.shape[0] // size) for one in handles]
    outcome = collectives.reduce_scatter(_group(group), outputs, [[one] for one in handles], reduce_op, name)
    return _results(outcome, outputs)


def reduce_scatter_tensor(given: torch.Tensor, reduce_op: str, size: int, group: Any) -> Any:
    return reduce_scatter_tensor_coalesced([given], reduce_op, size, group, "reduce_scatter_tensor")[0]


def all_to_all_single(given: torch.Tensor, received: Sequence[int], sent: Sequence[int], group: Any) -> Any:
    name = "all_to_all_single"
    communicator, (handle,) = _group(group), handles_of(name, [given])
    output = _like(handle, sum(received)) if received else _like(handle)
    coming = counts(name, output, list(received), communicator.size)
    going = counts(name, handle, list(sent), communicator.size)
    outcome = collectives.all_to_all(communicator, [output], [handle], coming, going, name)
    return _results(outcome, [output])[0]


def wait_tensor(given: torch.Tensor) -> Any:
    return aten.alias_copy.default(given)


def isend(given: torch.Tensor, to: int, tag: int, group: Any) -> Any:
    (handle,) = handles_of("isend", [given])
    point_to_point.send(_group(group), handle, to, tag)
    return aten.alias_copy.default(handle)


def irecv(given: torch.Tensor, source: int, tag: int, group: Any) -> Any:
    (handle,) = handles_of("irecv", [given])
    return point_to_point.receive(_group(group), handle, source, tag)[1]


def batch_p2p_ops(ops: Sequence[str], peers: Sequence[int], tags: Sequence[int], tensors: Tensors, group: Any) -> Any:
    done = {"isend": isend, "irecv": irecv}
    given = zip(ops, tensors, peers, tags, strict=True)
    return [done[op](one, peer, tag, group) for op, one, peer, tag in given]


_FUNCTIONAL: Final = (
    all_reduce,
    all_reduce_coalesced,
    broadcast,
    all_gather_into_tensor,
    all_gather_into_tensor_coalesced,
    reduce_scatter_tensor,
    reduce_scatter_tensor_coalesced,
    all_to_all_single,
    wait_tensor,
    isend,
    irecv,
    batch_p2p_ops,
)


# -- those that write: they see the program's tensors ------------------------------------------------------------------
def _writing(functional: Callable[..., Any]) -> Callable[..., Any]:
    """The form of a functional collective that writes its result to the first argument, or to ``out``."""

    def call(given: Any, *args: Any, out: torch.Tensor | None = None) -> Any:
        listed = isinstance(given, (list, tuple))
        results = functional(given, *args)
        targets = given if out is None else out
        for target, result in zip(targets if listed else [targets], results if listed else [results], strict=True):
            write(target, result)
        return targets

    return call


_WRITING: Final[dict[str, Callable[..., Any]]] = {
    "all_reduce_": _writing(all_reduce),
    "all_reduce_coalesced_": _writing(all_reduce_coalesced),
    "broadcast_": _writing(broadcast),
    "all_gather_into_tensor_out": _writing(all_gather_into_tensor),
    "reduce_scatter_tensor_out": _writing(reduce_scatter_tensor),
}


def _below(op: Any, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel on handles; what the user holds goes through functionalization first."""

    def call(given: Any, *args: Any) -> Any:
        if any(map(is_bypassed, tree_leaves((given, args)))):
            return call_above(op, (given, *args), {})
        return kernel(given, *args)

    return call


_library: Final[list[torch.library.Library]] = []


def install() -> None:
    """Register the kernels, once in a process."""
    if _library:
        return
    library = torch.library.Library(_NAMESPACE, "IMPL")
    _library.append(library)
    with overriding():
        for kernel in _FUNCTIONAL:
            # PyTorch 2.11 has none that send and receive.
            for op in operators(getattr(torch.ops, _NAMESPACE), kernel.__name__):
                library.impl(kernel.__name__, opaque(_below(op, kernel)), "PrivateUse1")
        for name, kernel in in_python.KERNELS.items():
            for _ in operators(getattr(torch.ops, _NAMESPACE), name):
                stock = torch.library.get_kernel(f"{_NAMESPACE}::{name}", "Functionalize")
                fn = in_python.unless_in_python(kernel, stock)
                library.impl(name, opaque(fn), "Functionalize", with_keyset=True)
        for name, writing in _WRITING.items():
            stock = torch.library.get_kernel(f"{_NAMESPACE}::{name}", "Functionalize")
            library.impl(name, opaque(for_ours(writing, stock)), "Functionalize", with_keyset=True)
