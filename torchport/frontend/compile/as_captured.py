"""What Dynamo captured run as it is, operator by operator: where a compiled graph would be wrong, or there is none.

A graph that writes to inputs is compiled for those that overlap at the first call: a write to one is seen in the
others. Dynamo guards on that only where sizes are symbols, and not on offsets that it took for constants. So later
calls may come with inputs that overlap in other places, or that share memory where the first call's did not. Those
calls run what Dynamo captured as it is, operator by operator.

AOTAutograd refuses some graphs: most of them write to inputs that share memory in ways that it does not follow. Of
others it loses writes: those to an input whose shape is changed in place, too. Both run as they were captured.

A write to a detached alias of an input, of something that requires a gradient, gives the alias a history of its own.
AOTAutograd and Dynamo take a result that is such an alias of the input again, without that history. So what was
captured is no help: the function that Dynamo traces runs uncompiled.
"""

from __future__ import annotations

import operator
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any, Final, TypeAlias

import torch
from torch import fx

from ...backend.normal_form import is_view
from ...core import metrics
from ...core.config import config
from ...core.errors import UnsupportedOp
from ...core.frames import user_frames, warn_user
from ...trace.handle import DEVICE_TYPE
from ..device.fake import offset_in_base
from ..device.inplace import may_share_memory, storage_name

__all__ = [
    "as_captured",
    "as_captured_where_shared_otherwise",
    "refuse_conjugate_results",
    "skip_where_detached_gain_history",
    "why_refused",
    "why_reshaped",
    "why_views_not_followed",
    "why_written_with_history",
]

Sharing: TypeAlias = tuple[Any, ...]
_NONE: Final[Sharing] = ()
_WITHOUT_BASE: Final[Sharing] = ("without a base",)
"""Some of the device's tensors share memory, and none knows the tensor that they are views of: AOTAutograd would make
a tensor of their storage, which the device has not."""


_DETACHING: Final = ("detach", torch.detach, torch.Tensor.detach, torch._C._autograd._get_data_attr)
"""What Dynamo captures for a tensor that shares the memory of another and has no history: methods by their names."""

_RESHAPING: Final = frozenset(
    ("t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_", "as_strided_", "resize_", "resize_as_")
)
"""What changes a tensor's shape in place, as Dynamo captures it: methods by their names."""


def _aliases_of_inputs(graph: fx.GraphModule) -> Iterator[tuple[fx.Node, torch.Tensor]]:
    """The nodes that share the memory of an input, each with its fake tensor as it is at the end of the graph."""
    memory: set[int] = set()
    for node in graph.graph.nodes:
        value = node.meta.get("example_value")
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            continue
        if node.op == "placeholder":
            memory.add(value.untyped_storage()._cdata)
        elif value.untyped_storage()._cdata in memory:
            yield node, value


def _place_in_program(node: fx.Node) -> str | None:
    frames = user_frames(node.meta.get("stack_trace"))
    return frames[-1].place if frames else None


def skip_where_detached_gain_history(graph: fx.GraphModule) -> None:
    """Make Dynamo run the traced function uncompiled, with a warning, where a detached alias of an input gains history.

    Raises what tells Dynamo so, and :class:`UnsupportedOp` where ``config.fallback`` is ``"error"``.
    """
    gains = (node for node, value in _aliases_of_inputs(graph) if node.target in _DETACHING and value.requires_grad)
    node = next(gains, None)
    if node is None:
        return
    place = _place_in_program(node)
    said = (
        f"{place + ': ' if place else ''}a detached tensor shares the memory of an input and is written with something "
        "that requires a gradient; torch.compile would lose the gradient of that write"
    )
    if config.fallback == "error":
        raise UnsupportedOp(f"{said}: write to a clone, or under torch.no_grad()")
    metrics.count("SkippedByDynamo")
    warn_user(f"{said}, so the function runs uncompiled: write to a clone, or under torch.no_grad()")
    from torch._dynamo.exc import SkipFrame

    raise SkipFrame(said)


def why_reshaped(graph: fx.GraphModule) -> str | None:
    """What to say of a graph that changes the shape of an input, or of an alias of one, in place; ``None`` for others.

    Raises :class:`UnsupportedOp` where ``config.fallback`` is ``"error"``.
    """
    node = next((node for node, _ in _aliases_of_inputs(graph) if node.target in _RESHAPING), None)
    if node is None:
        return None
    place = _place_in_program(node)
    said = (
        f"{node.target}() changes the shape of an input in place{' at ' + place if place else ''}, and PyTorch's part "
        "of torch.compile loses writes to such an input"
    )
    if config.fallback == "error":
        raise UnsupportedOp(f"{said}: give another tensor that shape, by a view")
    metrics.count("ReshapedInput")
    return said


def _has_history(value: torch.Tensor) -> bool:
    """Whether a fake tensor was computed from something that requires a gradient."""
    try:
        return value.requires_grad and not value.is_leaf
    except RuntimeError:  # autograd would refuse the write on real tensors, or does not know this fake one's views
        return True


def why_views_not_followed(graph: fx.GraphModule) -> str | None:
    """What to say of views that PyTorch's part of torch.compile takes wrongly; ``None`` for graphs without them.

    Those are results that share memory, lie in it in another order than a new tensor would, and of which one is
    detached from the history of the other: AOTAutograd takes both by size and strides of one. And views by
    ``as_strided`` of views of the device, which count in memory that no compiled graph sees. Raises
    :class:`UnsupportedOp` where ``config.fallback`` is ``"error"``.
    """
    said = None
    outputs: dict[int, set[bool]] = defaultdict(set)
    reordered: set[int] = set()
    for node in graph.graph.output_node().all_input_nodes:
        value = node.meta.get("example_value")
        if isinstance(value, torch.Tensor) and value.layout is torch.strided and node.op != "placeholder":
            memory = value.untyped_storage()._cdata
            outputs[memory].add(_has_history(value))
            if not value.is_contiguous():
                reordered.add(memory)
    if any(len(outputs[memory]) > 1 for memory in reordered):
        said = "results share memory, and one is detached from the history of another"
    for node, value in _aliases_of_inputs(graph):
        if node.target in _BY_PLACE and value.device.type == DEVICE_TYPE:
            said = f"as_strided() counts in the memory behind an input of {DEVICE_TYPE}"
    if said is not None and config.fallback == "error":
        raise UnsupportedOp(f"{said}: give the function clones, or return clones")
    if said is not None:
        metrics.count("ViewsNotFollowed")
    return said


_BY_PLACE: Final = ("as_strided", torch.as_strided, torch.Tensor.as_strided)


def why_written_with_history(graph: fx.GraphModule) -> str | None:
    """What to say of a graph that writes something with a history to inputs that it would lose track of.

    Those are inputs that share memory: AOTAutograd gives the one that is written a history, and none to what else shows
    its memory. And inputs with gaps between their elements: AOTAutograd computes with copies of written inputs, which
    have none, so what was a copy of the input is a view of the copy. ``None`` for other graphs. Raises
    :class:`UnsupportedOp` where ``config.fallback`` is ``"error"``.
    """
    seen: dict[int, int] = {}
    written: list[torch.Tensor] = []
    for node in graph.graph.find_nodes(op="placeholder"):
        value = node.meta.get("example_value")
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            memory = value.untyped_storage()._cdata
            seen[memory] = seen.get(memory, 0) + 1
            if value._version and _has_history(value):
                written.append(value)
    if any(seen[value.untyped_storage()._cdata] > 1 for value in written):
        said = (
            "inputs share memory, and one is written with gradients on, which gives all of them a history that "
            "PyTorch's part of torch.compile does not follow"
        )
    elif any(not torch.ops.aten.is_non_overlapping_and_dense.default(value) for value in written):
        said = (
            "an input with gaps between its elements, such as x[::2], is written with gradients on; PyTorch's part of "
            "torch.compile takes copies of it for views"
        )
    else:
        return None
    if config.fallback == "error":
        raise UnsupportedOp(f"{said}: write under torch.no_grad(), or to a clone")
    metrics.count("WrittenWithHistory")
    return said


_CONJUGATE: Final = (torch.ops.aten._conj.default, torch.ops.aten._neg_view.default)


def refuse_conjugate_results(graph: fx.GraphModule) -> None:
    """Raise :class:`UnsupportedOp` for a graph of ATen operators with results that are conjugate views of each other.

    Compiled, a conjugate view is a value of its own: a write to one of the two would not reach the other.
    """
    outputs: Any = graph.graph.output_node().args[0]
    roots: dict[fx.Node, list[bool]] = defaultdict(list)
    for output in outputs:
        node, conjugate = output, False
        while isinstance(node, fx.Node) and node.op == "call_function" and node.all_input_nodes:
            if node.target not in _CONJUGATE and not is_view(node.target) and node.target is not operator.getitem:
                break
            conjugate = conjugate or node.target in _CONJUGATE
            node = node.all_input_nodes[0]
        if isinstance(node, fx.Node) and node.op == "call_function":
            roots[node].append(conjugate)
    if any(len(views) > 1 and any(views) for views in roots.values()):
        raise UnsupportedOp("results of the function are conjugate views of one another", op="aten._conj.default")


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
        tuple([(at, _place(tensor, symbolic) if at in fixed else None) for at, tensor in group])
        for group in groups.values()
        if len(group) > 1
    )


def _place(tensor: torch.Tensor, symbolic: bool) -> Any:
    """Where a tensor lies; its size and strides are guarded."""
    base = tensor._base
    if base is None:
        return tensor.storage_offset()
    offset = offset_in_base(tensor) if tensor.device.type == DEVICE_TYPE else tensor.storage_offset()
    return offset if symbolic else (offset, base.dtype, base.shape, base.stride())
