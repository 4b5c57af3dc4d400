"""Kernels of the device for PyTorch's ``c10d`` operators, which every ``torch.distributed`` call comes to.

They are registered where functionalization would be asked, so they see the tensors that the program holds and write to
them; the operators' schemas say nothing of what is written. Composites below functionalization bring handles instead.

Private torch APIs used here: ``torch.ops.c10d``, ``ProcessGroup.unbox``, ``Work.boxed``,
``torch._functionalize_replace``, ``torch._functionalize_commit_update``, ``torch._functionalize_sync``.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from ...run.device_runtime import runtimes
from ...trace.handle import DEVICE_TYPE, LazyTensor
from ..device import ready
from ..device.inplace import overriding, unwrapped
from ..device.opaque import opaque
from . import collectives, point_to_point
from .collectives import Launched
from .communicator import Communicator, communicator_of
from .staging import handles_of
from .transfer import Transfer, TransferWork

__all__ = ["for_ours", "install", "write"]

Tensors = Sequence[torch.Tensor]
c10d = torch.ops.c10d
_FUNCTIONALIZE: Final = torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize)


def _group(boxed: Any) -> Communicator:
    return communicator_of(dist.ProcessGroup.unbox(boxed))  # type: ignore[attr-defined]


def _op(boxed: Any) -> Any:
    return boxed.op()


def write(tensor: torch.Tensor, handle: LazyTensor) -> None:
    """Give a tensor another value. Autograd is not told, as it is not on other devices."""
    inner: Any = unwrapped(tensor)
    if inner is tensor:  # below functionalization
        torch.ops.aten.copy_.default(tensor, handle)
        return
    if handle.stride() != inner.stride():
        handle = torch.ops.aten.copy.default(inner, handle)
    torch._functionalize_replace(tensor, handle)  # type: ignore[attr-defined]
    torch._functionalize_commit_update(tensor)  # type: ignore[attr-defined]
    torch._functionalize_sync(tensor)  # type: ignore[attr-defined]


def _finish(outcome: Launched, written: Iterable[torch.Tensor], shown: Sequence[Any]) -> Any:
    """Write what came, and give the boxed ``Work``; ``shown`` is what its future gives."""
    with torch.no_grad():
        for tensor, handle in zip(written, outcome.handles, strict=True):
            if handle is not None:
                write(tensor, handle)
    return _work(outcome.transfer, shown)


def _work(transfer: Transfer, shown: Sequence[Any]) -> Any:
    return TransferWork(transfer, shown).boxed()  # type: ignore[attr-defined]


# -- one function per operator ----------------------------------------------------------------------------------------
def allreduce_(tensors: Tensors, group: Any, op: Any, sparse: Any = None, *_: Any) -> Any:
    outcome = collectives.all_reduce(_group(group), handles_of("all_reduce", tensors), _op(op))
    return tensors, _finish(outcome, tensors, tensors)


def allreduce_coalesced_(tensors: Tensors, group: Any, op: Any, *_: Any) -> Any:
    handles = handles_of("all_reduce_coalesced", tensors)
    outcome = collectives.all_reduce(_group(group), handles, _op(op), "all_reduce_coalesced")
    return _finish(outcome, tensors, tensors)


def reduce_(tensors: Tensors, group: Any, op: Any, root: int, root_tensor: int, *_: Any) -> Any:
    outcome = collectives.reduce(_group(group), handles_of("reduce", tensors), _op(op), root)
    return _finish(outcome, tensors, tensors)


def broadcast_(tensors: Tensors, group: Any, root: int, root_tensor: int, *_: Any) -> Any:
    outcome = collectives.broadcast(_group(group), handles_of("broadcast", tensors), root)
    return tensors, _finish(outcome, tensors, tensors)


def allgather_(outputs: Sequence[Tensors], inputs: Tensors, group: Any, *_: Any) -> Any:
    return outputs, _all_gather(outputs, inputs, group, "all_gather")


def allgather_coalesced_(outputs: Sequence[Tensors], inputs: Tensors, group: Any, *_: Any) -> Any:
    # The lists are one per rank here, of one tensor per input.
    return _all_gather(list(zip(*outputs, strict=True)), inputs, group, "all_gather_coalesced")


def _allgather_base_(output: torch.Tensor, given: torch.Tensor, group: Any, *_: Any) -> Any:
    return output, _all_gather([[output]], [given], group, "all_gather_into_tensor")


def allgather_into_tensor_coalesced_(outputs: Tensors, inputs: Tensors, group: Any, *_: Any) -> Any:
    return _all_gather([[one] for one in outputs], inputs, group, "all_gather_into_tensor_coalesced")


def _all_gather(outputs: Sequence[Tensors], inputs: Tensors, group: Any, name: str) -> Any:
    handles = [handles_of(name, parts) for parts in outputs]
    outcome = collectives.all_gather(_group(group), handles, handles_of(name, inputs), name)
    flat = [one for parts in outputs for one in parts]
    return _finish(outcome, flat, flat)


def gather_(outputs: Sequence[Tensors], inputs: Tensors, group: Any, root: int, *_: Any) -> Any:
    targets = list(outputs[0]) if outputs else []
    (given,) = handles_of("gather", inputs)
    outcome = collectives.gather(_group(group), handles_of("gather", targets), given, root)
    return _finish(outcome, targets, targets)


def scatter_(outputs: Tensors, inputs: Sequence[Tensors], group: Any, root: int, *_: Any) -> Any:
    (output,) = handles_of("scatter", outputs)
    given = handles_of("scatter", inputs[0]) if inputs else []
    outcome = collectives.scatter(_group(group), output, given, root)
    return outputs, _finish(outcome, outputs, outputs)


def reduce_scatter_(outputs: Tensors, inputs: Sequence[Tensors], group: Any, op: Any, *_: Any) -> Any:
    return outputs, _reduce_scatter(outputs, inputs, group, op, "reduce_scatter")


def _reduce_scatter_base_(output: torch.Tensor, given: torch.Tensor, group: Any, op: Any, *_: Any) -> Any:
    return output, _reduce_scatter([output], [[given]], group, op, "reduce_scatter_tensor")


def reduce_scatter_tensor_coalesced_(outputs: Tensors, inputs: Tensors, group: Any, op: Any, *_: Any) -> Any:
    return _reduce_scatter(outputs, [[one] for one in inputs], group, op, "reduce_scatter_tensor_coalesced")


def _reduce_scatter(outputs: Tensors, inputs: Sequence[Tensors], group: Any, op: Any, name: str) -> Any:
    handles = [handles_of(name, parts) for parts in inputs]
    outcome = collectives.reduce_scatter(_group(group), handles_of(name, outputs), handles, _op(op), name)
    return _finish(outcome, outputs, outputs)


def alltoall_(outputs: Tensors, inputs: Tensors, group: Any, *_: Any) -> Any:
    received, sent = [one.numel() for one in outputs], [one.numel() for one in inputs]
    outcome = collectives.all_to_all(
        _group(group), handles_of("all_to_all", outputs), handles_of("all_to_all", inputs), received, sent
    )
    return outputs, _finish(outcome, outputs, outputs)


def alltoall_base_(
    output: torch.Tensor, given: torch.Tensor, group: Any, received: Sequence[int], sent: Sequence[int], *_: Any
) -> Any:
    communicator, name = _group(group), "all_to_all_single"
    (target,), (source,) = handles_of(name, [output]), handles_of(name, [given])
    coming = collectives.counts(name, target, received, communicator.size)
    going = collectives.counts(name, source, sent, communicator.size)
    outcome = collectives.all_to_all(communicator, [target], [source], coming, going, name)
    return _finish(outcome, [output], [output])


def barrier(tensor: torch.Tensor, group: Any, *_: Any) -> Any:
    handle = unwrapped(tensor)
    return _work(collectives.barrier(_group(group), runtimes.get(handle.get_device())), [])


def send(tensors: Tensors, group: Any, to: int, tag: int) -> Any:
    (handle,) = handles_of("send", tensors)
    return _work(point_to_point.send(_group(group), handle, to, tag), tensors)


def recv_(tensors: Tensors, group: Any, source: int, tag: int) -> Any:
    return _receive(tensors, group, source, tag)


def recv_any_source_(tensors: Tensors, group: Any, tag: int) -> Any:
    return _receive(tensors, group, None, tag)


def _receive(tensors: Tensors, group: Any, source: int | None, tag: int) -> Any:
    (handle,) = handles_of("recv", tensors)
    transfer, result, received = point_to_point.receive(_group(group), handle, source, tag)
    with torch.no_grad():
        write(tensors[0], result)
    return TransferWork(transfer, tensors, received).boxed()  # type: ignore[attr-defined]


_KERNELS: Final = (
    allreduce_,
    allreduce_coalesced_,
    reduce_,
    broadcast_,
    allgather_,
    allgather_coalesced_,
    _allgather_base_,
    allgather_into_tensor_coalesced_,
    gather_,
    scatter_,
    reduce_scatter_,
    _reduce_scatter_base_,
    reduce_scatter_tensor_coalesced_,
    alltoall_,
    alltoall_base_,
    barrier,
    send,
    recv_,
    recv_any_source_,
)

_library: Final[list[torch.library.Library]] = []


def install() -> None:
    """Register the kernels, once in a process: when the first process group for the device is made."""
    if _library:
        return
    library = torch.library.Library("c10d", "IMPL")
    _library.append(library)
    with overriding():
        for kernel in _KERNELS:
            name = kernel.__name__
            stock = torch.library.get_kernel(f"c10d::{name}", "Functionalize")
            shown = getattr(c10d, name).default
            library.impl(name, opaque(for_ours(kernel, stock, shown)), "Functionalize", with_keyset=True)
            library.impl(name, opaque(kernel), "PrivateUse1", allow_override=True)
        stock = torch.library.get_kernel("c10d::barrier", "CPU")
        library.impl("barrier", opaque(_cpu_barrier(stock)), "CPU", with_keyset=True, allow_override=True)


def _cpu_barrier(stock: Any) -> Callable[..., Any]:
    """The CPU's barrier is a collective among others in a group that has the device: the ranks agree on it, too."""

    def barrier(keys: Any, tensor: torch.Tensor, boxed: Any, *args: Any) -> Any:
        group = dist.ProcessGroup.unbox(boxed)  # type: ignore[attr-defined]
        config = dist.get_backend_config(group)
        if any(f"{DEVICE_TYPE}:{carrier}" in config for carrier in (DEVICE_TYPE, "fake")):
            communicator = communicator_of(group)
            communicator.agree("barrier")
            collectives.begin(communicator, ())
            assert communicator.latest is not None
            communicator.latest.arrive(time.perf_counter())  # all have come; what follows brings nothing
        return stock.call_boxed(keys, tensor, boxed, *args)

    return barrier


def for_ours(kernel: Callable[..., Any], stock: Any, shown: Any = None) -> Callable[..., Any]:
    """A kernel where functionalization would be asked; it is for other devices' tensors.

    ``shown``: the operator, where the kernel is also at PrivateUse1. PyTorch shows modes such as ``CommDebugMode`` what
    comes after functionalization, so the operator goes past it if there is a mode.
    """

    @functools.wraps(kernel)
    def call(keys: Any, *args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(leaf, torch.Tensor) and leaf.device.type == DEVICE_TYPE for leaf in tree_leaves(args)):
            return stock.call_boxed(keys, *args, **kwargs)
        ready.init()
        if shown is not None and torch._C._len_torch_dispatch_stack():
            with torch._C._ExcludeDispatchKeyGuard(_FUNCTIONALIZE):
                return shown(*args, **kwargs)
        return kernel(*args, **kwargs)

    return call
