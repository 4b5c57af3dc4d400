"""What Dynamo captured run as it is, operator by operator: where a compiled graph would be wrong, or there is none.

A graph that writes to inputs is compiled for those that overlap at the first call: a write to one is seen in the
others. Dynamo guards on that only where sizes are symbols, not on offsets that it took for constants, and not at all
on this device (:mod:`.guards`). So later calls may come with inputs that overlap in other places, or that share memory
where the first call's did not. Those calls run what Dynamo captured as it is, operator by operator.

AOTAutograd refuses some graphs, most of which write to inputs that share memory in ways that it does not follow. Others
it takes and computes otherwise than eager mode (:mod:`.not_followed`). Both run as they were captured.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence, Set
from typing import Any, Final, TypeAlias

import torch
from torch import fx
from torch._C._dynamo.guards import compute_overlapping_tensors

from ...core import metrics
from ...core.errors import UnsupportedOp
from ...trace.handle import DEVICE_TYPE
from ..device.fake import offset_in_base
from ..device.inplace import may_share_memory, storage_name

__all__ = ["as_captured", "as_captured_where_shared_otherwise", "why_refused"]

Sharing: TypeAlias = tuple[Any, ...]
_NONE: Final[Sharing] = ()
_WITHOUT_BASE: Final[Sharing] = ("without a base",)
"""Some of the device's tensors share memory, and none knows the tensor that they are views of: AOTAutograd would make
a tensor of their storage, which the device has not."""


def why_refused(error: Exception) -> str:
    """What is said of a graph that is refused while it is compiled, in a line; counts it."""
    metrics.count("RefusedByAOTAutograd")
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    if isinstance(error, UnsupportedOp):
        return said
    return f"AOTAutograd, PyTorch's part of torch.compile, does not take it ({said})"


def as_captured(graph: fx.GraphModule, why: str) -> Callable[..., Any]:
    """A function that runs a captured graph operator by operator, because of ``why``; warns of that now."""
    warnings.warn(
        f"a function given to torch.compile runs operator by operator, as in eager mode: {why}; where its inputs share "
        'memory and it writes to them, give it clones; torchport.config.fallback = "error" raises instead, with the '
        "place",
        stacklevel=2,
    )

    def call(*args: Any) -> Any:
        return graph(*args)

    return call


def as_captured_where_shared_otherwise(compiled: Callable[..., Any], graph: fx.GraphModule) -> Callable[..., Any]:
    """A compiled graph that writes to inputs.

    ``graph``, which it was compiled from, is run where they share memory otherwise than at the first call.
    """
    places = [node.meta.get("example_value") for node in graph.graph.find_nodes(op="placeholder")]
    symbolic = any(isinstance(node.meta.get("example_value"), torch.SymInt) for node in graph.graph.nodes)
    fixed = {at for at, value in enumerate(places) if not symbolic or _has_fixed_offset(value)}
    first: list[Sharing] = []

    def call(*args: Any) -> Any:
        sharing = _sharing(args, symbolic, fixed)
        if not first:
            first.append(sharing)
        if sharing == first[0] and sharing is not _WITHOUT_BASE:
            return compiled(*args)
        metrics.count("SharedOtherwise")
        warnings.warn(
            "inputs of a compiled function share memory otherwise than at its first call, and it writes to some: it "
            "runs operator by operator; call it with inputs that overlap alike, or with clones",
            stacklevel=2,
        )
        return graph(*args)

    return call


def _has_fixed_offset(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and isinstance(value.storage_offset(), int)


def _sharing(args: Sequence[Any], symbolic: bool, fixed: Set[int]) -> Sharing:
    """Which inputs share memory, and where they lie in it, as far as the compiled graph takes that for granted.

    ``symbolic``: it does not take sizes and strides for granted. ``fixed``: the inputs whose offsets it does.
    """
    tensors = [
        (at, arg) for at, arg in enumerate(args) if isinstance(arg, torch.Tensor) and arg.layout is torch.strided
    ]
    if not may_share_memory([tensor for _, tensor in tensors]):
        return _NONE
    groups: dict[int, list[tuple[int, torch.Tensor]]] = defaultdict(list)
    for at, tensor in tensors:
        groups[storage_name(tensor)].append((at, tensor))
    for group in groups.values():
        if len(group) > 1 and all(t._base is None and t.device.type == DEVICE_TYPE for _, t in group):
            return _WITHOUT_BASE
    return tuple(
        (
            tuple([(at, _place(tensor, symbolic) if at in fixed else None) for at, tensor in group]),
            _overlaps(group, fixed),
        )
        for group in groups.values()
        if len(group) > 1
    )


def _overlaps(group: Sequence[tuple[int, torch.Tensor]], fixed: Set[int]) -> Set[int]:
    """Which of some tensors in one memory overlap others; none where the place of each is compared already."""
    if all(at in fixed for at, _ in group):
        return frozenset()
    memory = torch.empty(0, dtype=group[0][1].dtype, device="meta")
    like = [memory.as_strided(t.shape, t.stride(), _place(t, True)) for _, t in group]
    return frozenset(group[at][0] for at in compute_overlapping_tensors(like, symbolic=False))


def _place(tensor: torch.Tensor, symbolic: bool) -> Any:
    """Where a tensor lies; its size and strides are guarded."""
    base = tensor._base
    if base is None:
        return tensor.storage_offset()
    offset = offset_in_base(tensor) if tensor.device.type == DEVICE_TYPE else tensor.storage_offset()
    return offset if symbolic else (offset, base.dtype, base.shape, base.stride())
