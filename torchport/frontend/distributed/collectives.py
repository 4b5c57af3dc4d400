"""Every collective on handles: agree, hand host tensors to gloo, and give handles of what will come.

A function per collective. Each takes the values first (what is pending is computed, so a flush cuts here), then agrees
with the other ranks, and only then starts gloo. They give the transfer and, for each tensor that the collective writes,
the new handle.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch.distributed import distributed_c10d as c10d

from ...core import metrics
from ...core.specs import TensorSpec, contiguous_strides
from ...run.device_runtime import DeviceRuntime, runtimes
from ...trace.handle import LazyTensor
from ...trace.wrapping import call_above, is_below
from ..device.inplace import unwrapped
from .communicator import Communicator
from .staging import Reduction, as_bytes, describe, host_values, reduction_of
from .transfer import Transfer, launch

__all__ = [
    "Launched",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "begin",
    "broadcast",
    "contiguous",
    "counts",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
]

Handles = Sequence[LazyTensor]
_ZEROS: Final = torch.ops.aten.zeros.default


class Launched(NamedTuple):
    """A transfer, and the new handles in the order of the tensors that are written; ``None``: it stays as it is."""

    transfer: Transfer
    handles: list[LazyTensor | None]


def _runtime(handle: LazyTensor) -> DeviceRuntime:
    return runtimes.get(handle.get_device())


def _options(kind: Any, communicator: Communicator, nbytes: int, **values: Any) -> Any:
    options = kind()
    options.timeout = communicator.limit(nbytes)
    for name, value in values.items():
        setattr(options, name, value)
    return options


def begin(communicator: Communicator, hosts: Sequence[torch.Tensor]) -> int:
    """How many bytes there are in what this rank gives; they are on their way now."""
    count = sum(host.numel() * host.element_size() for host in hosts)
    metrics.count("CollectiveBytes", count)
    assert communicator.latest is not None
    communicator.latest.start(count)
    return count


def _values(communicator: Communicator, name: str, handles: Handles, private: bool = False) -> Sequence[torch.Tensor]:
    """Host tensors with the values; without any, where it is only a rehearsal."""
    if communicator.rehearses:
        return [torch.empty(handle.shape, dtype=handle.dtype, device="meta") for handle in handles]
    return host_values(name, handles, private)


def _blank(like: LazyTensor, spec: torch.Tensor) -> LazyTensor:
    """A traced tensor in the place of what a rehearsal does not bring."""
    given: dict[str, Any] = {"dtype": spec.dtype, "device": like.device}
    # Below functionalization PyTorch would give a shallow copy of what is made, which is in no trace.
    blank: Any = call_above(_ZEROS, (spec.shape,), given) if is_below() else _ZEROS(spec.shape, **given)
    return unwrapped(blank)


def _empty(communicator: Communicator, handle: torch.Tensor) -> torch.Tensor:
    return torch.empty(handle.shape, dtype=handle.dtype, device=communicator.memory)


def contiguous(shape: Sequence[int], dtype: torch.dtype) -> TensorSpec:
    """The spec of a contiguous tensor."""
    return TensorSpec(tuple(shape), dtype, contiguous_strides(shape))


def _start(
    communicator: Communicator,
    like: LazyTensor,
    what: str,
    works: Callable[[], Sequence[Any]],
    results: Sequence[tuple[torch.Tensor, Callable[[], torch.Tensor]] | None],
) -> Launched:
    if communicator.rehearses:
        nothing = launch(communicator, _runtime(like), (), what)
        return Launched(nothing, [None if one is None else _blank(like, one[0]) for one in results])
    started = communicator.post(works, what) if communicator.size > 1 else ()
    transfer = launch(communicator, _runtime(like), started, what)
    handles = [
        None if one is None else transfer.result(contiguous(one[0].shape, one[0].dtype), one[1]) for one in results
    ]
    return Launched(transfer, handles)


def _reduced(reduction: Reduction, staged: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: reduction.restore(staged)


def _as_is(host: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: host


# -- reductions ------------------------------------------------------------------------------------------------------
def _staged(reduction: Reduction, hosts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What gloo may write over: the host tensors are the caller's copies."""
    return [reduction.prepare(host).contiguous() for host in hosts]


def all_reduce(communicator: Communicator, tensors: Handles, reduce_op: Any, name: str = "all_reduce") -> Launched:
    """Every tensor becomes the reduction of those of all ranks."""
    reduction = reduction_of(reduce_op, tensors[0].dtype, communicator.size)
    hosts = _values(communicator, name, tensors, private=True)
    what = f"{name}({reduction.name}) of {describe(tensors)}"
    communicator.agree(what)
    staged = _staged(reduction, hosts)
    options = _options(c10d.AllreduceOptions, communicator, begin(communicator, hosts), reduceOp=reduction.op)
    return _start(
        communicator,
        tensors[0],
        what,
        lambda: [communicator.gloo.allreduce([one], options) for one in staged if one.numel()],
        [(tensor, _reduced(reduction, one)) for tensor, one in zip(tensors, staged, strict=True)],
    )


def reduce(communicator: Communicator, tensors: Handles, reduce_op: Any, root: int) -> Launched:
    """The tensor of rank ``root`` becomes the reduction of those of all ranks; the others' stay."""
    reduction = reduction_of(reduce_op, tensors[0].dtype, communicator.size)
    hosts = _values(communicator, "reduce", tensors, private=True)
    what = f"reduce({reduction.name}) to rank {communicator.ranks[root]} of {describe(tensors)}"
    communicator.agree(what)
    staged = _staged(reduction, hosts)
    options = _options(
        c10d.ReduceOptions, communicator, begin(communicator, hosts), reduceOp=reduction.op, rootRank=root
    )
    mine = communicator.rank == root
    return _start(
        communicator,
        tensors[0],
        what,
        lambda: [communicator.gloo.reduce([one], options) for one in staged if one.numel()],
        [(tensor, _reduced(reduction, one)) if mine else None for tensor, one in zip(tensors, staged, strict=True)],
    )


def reduce_scatter(
    communicator: Communicator,
    outputs: Handles,
    inputs: Sequence[Handles],
    reduce_op: Any,
    name: str = "reduce_scatter",
) -> Launched:
    """Each output becomes its rank's share of the reduction of its inputs: one tensor, or one per rank."""
    size = communicator.size
    reduction = reduction_of(reduce_op, outputs[0].dtype, size)
    flat = [_flat(_values(communicator, name, parts, private=len(parts) == 1)) for parts in inputs]
    for output, parts, whole in zip(outputs, inputs, flat, strict=True):
        if len(parts) > 1:
            _of_one_size(name, parts, output)
        if whole.numel() != output.numel() * size or whole.dtype != output.dtype:
            raise ValueError(
                f"{name} over {size} ranks gives {whole.numel() / size:g} elements of {whole.dtype}, but the output is "
                f"{describe([output])}"
            )
    what = f"{name}({reduction.name}) to {describe(outputs)}"
    communicator.agree(what)
    staged = _staged(reduction, flat)
    shares = [torch.empty(one.numel() // size, dtype=one.dtype, device=communicator.memory) for one in staged]
    options = _options(c10d.ReduceScatterOptions, communicator, begin(communicator, flat), reduceOp=reduction.op)
    if size == 1:
        shares = [one.reshape(-1) for one in staged]

    def share(output: torch.Tensor, one: torch.Tensor, whole: torch.Tensor) -> Callable[[], torch.Tensor]:
        return lambda: reduction.restore(one.reshape(-1, *whole.shape[1:])).reshape(output.shape)

    return _start(
        communicator,
        outputs[0],
        what,
        lambda: [
            communicator.gloo._reduce_scatter_base(share, one.reshape(-1), options)
            for share, one in zip(shares, staged, strict=True)
            if one.numel()
        ],
        [(o, share(o, one, whole)) for o, one, whole in zip(outputs, shares, staged, strict=True)],
    )


def _flat(hosts: Sequence[torch.Tensor]) -> torch.Tensor:
    return hosts[0].reshape(-1) if len(hosts) == 1 else torch.cat([host.reshape(-1) for host in hosts])


def _of_one_size(name: str, parts: Handles, one: torch.Tensor) -> None:
    """Raise :class:`ValueError` where one tensor per rank is not as large as what this rank gives, or gets."""
    if any(part.numel() != one.numel() or part.dtype != one.dtype for part in parts):
        raise ValueError(
            f"{name} has a tensor for each rank, and all of one size: here it is {describe([one])}, but they are "
            f"{describe(parts)}; pad them to one size, or use all_to_all, which takes parts of several sizes"
        )


# -- what only moves -------------------------------------------------------------------------------------------------
def broadcast(communicator: Communicator, tensors: Handles, root: int) -> Launched:
    """Every tensor becomes that of rank ``root``."""
    mine = communicator.rank == root
    hosts = (
        _values(communicator, "broadcast", tensors) if mine else [_empty(communicator, tensor) for tensor in tensors]
    )
    what = f"broadcast from rank {communicator.ranks[root]} of {describe(tensors)}"
    communicator.agree(what)
    options = _options(c10d.BroadcastOptions, communicator, begin(communicator, hosts), rootRank=root)
    return _start(
        communicator,
        tensors[0],
        what,
        lambda: [communicator.gloo.broadcast([as_bytes(one)], options) for one in hosts if one.numel()],
        [None if mine else (tensor, _as_is(host)) for tensor, host in zip(tensors, hosts, strict=True)],
    )


def all_gather(
    communicator: Communicator, outputs: Sequence[Handles], inputs: Handles, name: str = "all_gather"
) -> Launched:
    """Each output, one tensor or one per rank, becomes the inputs of all ranks one behind the other."""
    size = communicator.size
    for parts, given in zip(outputs, inputs, strict=True):
        if len(parts) > 1:
            _of_one_size(name, parts, given)
        if sum(part.numel() for part in parts) != given.numel() * size or parts[0].dtype != given.dtype:
            raise ValueError(
                f"{name} of {describe([given])} over {size} ranks gives {given.numel() * size} elements, but the "
                f"output is {describe(parts)}"
            )
    hosts = _values(communicator, name, inputs)
    what = f"{name} of {describe(inputs)}"
    communicator.agree(what)
    options = _options(c10d.AllgatherOptions, communicator, begin(communicator, hosts) * size)
    wholes = [torch.empty(size, host.numel(), dtype=host.dtype, device=communicator.memory) for host in hosts]
    if size == 1:
        wholes = [host.reshape(1, -1).clone() for host in hosts]
    results = [
        (part, _part(whole, part, n if len(parts) > 1 else None))
        for parts, whole in zip(outputs, wholes, strict=True)
        for n, part in enumerate(parts)
    ]
    return _start(
        communicator,
        inputs[0],
        what,
        lambda: [
            communicator.gloo._allgather_base(as_bytes(whole), as_bytes(host), options)
            for whole, host in zip(wholes, hosts, strict=True)
            if host.numel()
        ],
        results,
    )


def _part(whole: torch.Tensor, like: torch.Tensor, at: int | None) -> Callable[[], torch.Tensor]:
    shape = like.shape
    return lambda: whole.reshape(shape) if at is None else whole[at].reshape(shape).clone()


def gather(communicator: Communicator, outputs: Handles, given: LazyTensor, root: int) -> Launched:
    """Output *n* of rank ``root`` becomes the input of rank *n*; other ranks have no outputs."""
    mine = communicator.rank == root
    _of_one_size("gather", outputs, given)
    (host,) = _values(communicator, "gather", [given])
    what = f"gather to rank {communicator.ranks[root]} of {describe([given])}"
    communicator.agree(what)
    options = _options(c10d.GatherOptions, communicator, begin(communicator, [host]), rootRank=root)
    parts = [_empty(communicator, output) for output in outputs]
    if communicator.size == 1:
        parts = [host.clone()]

    def works() -> list[Any]:
        targets = [[as_bytes(part) for part in parts]] if mine else []
        return [communicator.gloo.gather(targets, [as_bytes(host)], options)] if host.numel() else []

    results = [(output, _as_is(part)) for output, part in zip(outputs, parts, strict=True)]
    return _start(communicator, given, what, works, results)


def scatter(communicator: Communicator, output: LazyTensor, given: Handles, root: int) -> Launched:
    """The output becomes the input that rank ``root`` has for this one; other ranks have no inputs."""
    mine = communicator.rank == root
    _of_one_size("scatter", given if mine else (), output)
    hosts = _values(communicator, "scatter", given) if mine else []
    what = f"scatter from rank {communicator.ranks[root]} of {describe([output])}"
    communicator.agree(what)
    part = _empty(communicator, output) if communicator.size > 1 else hosts[0].clone()
    options = _options(c10d.ScatterOptions, communicator, begin(communicator, [part]), rootRank=root)

    def works() -> list[Any]:
        sources = [[as_bytes(host) for host in hosts]] if mine else []
        return [communicator.gloo.scatter([as_bytes(part)], sources, options)] if part.numel() else []

    return _start(communicator, output, what, works, [(output, _as_is(part))])


def all_to_all(
    communicator: Communicator,
    outputs: Handles,
    inputs: Handles,
    received: Sequence[int],
    sent: Sequence[int],
    name: str = "all_to_all",
) -> Launched:
    """Element *n* of what each rank sends goes to rank *n*.

    ``inputs`` and ``outputs`` are one tensor, or one per rank; ``sent`` and ``received`` say how many elements of the
    whole, in order, go to each rank and come from it.
    """
    kind = (outputs or inputs)[0]
    flat = _flat(_values(communicator, name, inputs))
    what = f"{name} of {str(kind.dtype).removeprefix('torch.')}"
    communicator.agree(what, sent, received)
    whole = (
        torch.empty(sum(received), dtype=kind.dtype, device=communicator.memory)
        if communicator.size > 1
        else flat.clone()
    )
    width = kind.element_size()
    options = _options(c10d.AllToAllOptions, communicator, begin(communicator, [flat]))

    def works() -> list[Any]:
        counts = [n * width for n in received], [n * width for n in sent]
        return [communicator.gloo.alltoall_base(as_bytes(whole), as_bytes(flat), *counts, options)]

    sizes = [math.prod(output.shape) for output in outputs]
    parts = [whole] if len(outputs) == 1 else list(whole.split(sizes))
    results = [(output, _part(part, output, None)) for output, part in zip(outputs, parts, strict=True)]
    return _start(communicator, kind, what, works, results)


def counts(name: str, tensor: LazyTensor, rows: Sequence[int], size: int) -> list[int]:
    """How many elements each rank has of a tensor that is split along its first dimension: evenly, if nobody says."""
    whole = tensor.shape[0] if tensor.dim() else 1
    if not rows:
        if whole % size:
            raise ValueError(f"{name} without split sizes needs a first dimension that {size} divides, got {whole}")
        rows = [whole // size] * size
    if len(rows) != size or sum(rows) != whole:
        raise ValueError(f"{name}: {list(rows)} does not split {whole} rows over {size} ranks")
    width = math.prod(tensor.shape[1:])
    return [count * width for count in rows]


def barrier(communicator: Communicator, runtime: DeviceRuntime) -> Transfer:
    """No rank goes on before all have come: to agree is all it takes."""
    communicator.agree("barrier")
    begin(communicator, ())
    return launch(communicator, runtime, (), "barrier")
