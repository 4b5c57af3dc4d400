"""Captured graphs that PyTorch's part of torch.compile refuses, or computes otherwise than eager mode does.

Functionalization and AOTAutograd follow views and writes, with gaps: what they get wrong is told here by what Dynamo
captured, whose fake tensors share memory and have a history as eager's would. Such graphs run as they were captured
(:mod:`.as_captured`).

A write to a detached alias of an input, of something that requires a gradient, gives the alias a history of its own.
AOTAutograd and Dynamo take a result that is such an alias of the input again, without that history. So what was
captured is no help: the function that Dynamo traces runs uncompiled.

Private torch APIs used here: ``torch._C._functorch.is_functorch_wrapped_tensor`` (a transform's tensor, which cannot be
asked for its memory).
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import fx
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ...backend.normal_form import is_view
from ...core import metrics
from ...core.config import config
from ...core.errors import UnsupportedOp
from ...core.frames import user_frames, warn_user
from ...trace.handle import DEVICE_TYPE
from ..device.inplace import storage_name

__all__ = [
    "refuse_conjugate_results",
    "refuse_writes_to_repeated_memory",
    "skip_where_detached_gain_history",
    "why_not_followed",
]


def why_not_followed(graph: fx.GraphModule) -> str | None:
    """What to say of a captured graph that PyTorch's part of torch.compile computes otherwise; ``None`` for others.

    Raises :class:`UnsupportedOp` where ``config.fallback`` is ``"error"``.
    """
    said = (
        _reshaped(graph)
        or _shared_by_dtypes(graph)
        or _written_with_history(graph)
        or _written_uncounted(graph)
        or _copy_and_write(graph)
        or _view_of_reordered(graph)
        or _other_views(graph)
    )
    if said is not None and config.fallback == "error":
        raise UnsupportedOp(f"{said}; give the function clones, return clones, or write under torch.no_grad()")
    if said is not None:
        metrics.count("NotFollowedByAOTAutograd")
    return said


_RESHAPING: Final = frozenset(
    ("t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_", "as_strided_", "resize_", "resize_as_")
)
"""What changes a tensor's shape in place, as Dynamo captures it: methods by their names."""


def _aliases_of_inputs(graph: fx.GraphModule) -> Iterator[tuple[fx.Node, torch.Tensor]]:
    """The nodes that share the memory of an input, each with its fake tensor as it is at the end of the graph."""
    memory: set[int] = set()
    for node in graph.graph.nodes:
        value, name = _seen(node)
        if value is None or name is None:
            continue
        if node.op == "placeholder":
            memory.add(name)
        elif name in memory:
            yield node, value


def _seen(node: fx.Node) -> tuple[torch.Tensor | None, int | None]:
    """The fake tensor of a captured node, and its memory's name; ``None`` for what has none of its own."""
    value = node.meta.get("example_value")
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or is_traceable_wrapper_subclass(value):
        return None, None
    if is_functorch_wrapped_tensor(value):  # inside of a transform of ``torch.func``
        return None, None
    return value, storage_name(value)


def _at(node: fx.Node) -> str:
    """Where in the program a node was captured, as part of a sentence; empty where that is not known."""
    frames = user_frames(node.meta.get("stack_trace"))
    return f" at {frames[-1].place}" if frames else ""


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


def skip_where_detached_gain_history(graph: fx.GraphModule) -> None:
    """Make Dynamo run the traced function uncompiled, with a warning, where a detached alias of an input gains history.

    Raises what tells Dynamo so, and :class:`UnsupportedOp` where ``config.fallback`` is ``"error"``.
    """
    # ``x.detach()``, ``x.data`` and ``x.view(dtype)`` are no views to autograd; what gives its argument is the input.
    inputs = {id(_seen(node)[0]) for node in graph.graph.find_nodes(op="placeholder")}
    node = next(
        (
            node
            for node, value in _aliases_of_inputs(graph)
            if id(value) not in inputs and not value._is_view() and _has_history(value)
        ),
        None,
    )
    if node is None:
        return
    said = (
        f"a detached tensor{_at(node)} shares the memory of an input and is written with something that requires a "
        "gradient; torch.compile would lose the gradient of that write"
    )
    if config.fallback == "error":
        raise UnsupportedOp(f"{said}: write to a clone, or under torch.no_grad()")
    metrics.count("SkippedByDynamo")
    warn_user(f"{said}, so the function runs uncompiled: write to a clone, or under torch.no_grad()")
    from torch._dynamo.exc import SkipFrame

    raise SkipFrame(said)


def _reshaped(graph: fx.GraphModule) -> str | None:
    """Writes are lost to an input that changes its shape in place, or of which an alias does."""
    node = next((node for node, _ in _aliases_of_inputs(graph) if node.target in _RESHAPING), None)
    if node is None:
        return None
    return (
        f"{_name(node)}() changes the shape of an input in place{_at(node)}, and PyTorch's part of torch.compile loses "
        "writes to such an input"
    )


def _has_history(value: torch.Tensor) -> bool:
    """Whether a fake tensor was computed from something that requires a gradient."""
    try:
        return value.requires_grad and not value.is_leaf
    except RuntimeError:  # autograd would refuse the write on real tensors, or does not know this fake one's views
        return True


def _shared_by_dtypes(graph: fx.GraphModule) -> str | None:
    """Inputs of different dtypes that share memory, such as ``x`` and ``x.imag``, and of which one is written.

    AOTAutograd counts where an input begins and ends in elements, not in bytes. So it takes some of these inputs for
    separate ones; it refuses the others.
    """
    values: dict[int, list[torch.Tensor]] = defaultdict(list)
    for node in graph.graph.find_nodes(op="placeholder"):
        value, memory = _seen(node)
        if value is not None and memory is not None:
            values[memory].append(value)
    for several in values.values():
        if len({value.dtype for value in several}) > 1 and any(value._version for value in several):
            return "inputs of different dtypes share memory, such as x and x.imag, and one is written"
    return None


def _written_with_history(graph: fx.GraphModule) -> str | None:
    """Writes with gradients on, to inputs that AOTAutograd then loses track of.

    To inputs that share memory: it gives the one that is written a history, and none to what else shows its memory.
    To inputs with gaps between their elements: it computes with copies of written inputs, which have none, so what was
    a copy of the input is a view of the copy.
    """
    seen: dict[int, int] = {}
    written: list[torch.Tensor] = []
    memories: list[int] = []
    for node in graph.graph.find_nodes(op="placeholder"):
        value, memory = _seen(node)
        if value is not None and memory is not None:
            seen[memory] = seen.get(memory, 0) + 1
            if value._version and _has_history(value):
                written.append(value)
                memories.append(memory)
    if any(seen[memory] > 1 for memory in memories):
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
    return said


def _written_uncounted(graph: fx.GraphModule) -> str | None:
    """Writes to ``x.data``, where ``x`` is an input that has a history.

    Eager does not count them as changes of the input. AOTAutograd copies the new value to the input itself, which
    counts, so the backward refuses what was computed from the input or its base before.
    """
    inputs: set[int] = set()
    for node in graph.graph.find_nodes(op="placeholder"):
        value, memory = _seen(node)
        if value is not None and memory is not None and not value._version and _has_history(value):
            inputs.add(memory)
    for node, value in _aliases_of_inputs(graph):
        if value._version and storage_name(value) in inputs:
            return f"the memory of an input is written{_at(node)} by x.data, which autograd is not to count as a change"
    return None


def _copy_and_write(graph: fx.GraphModule) -> str | None:
    """Copies of a written tensor by what gives a view where it can, before the tensor or the copy is written.

    Functionalization keeps no order of memory over a write, so the copy may be a view there. Of a tensor with gaps
    between its elements it certainly may: then the program can write to both later, where they are results or inputs.
    """
    pairs: dict[int, fx.Node] = {}
    gaps: list[tuple[int, int, fx.Node]] = []
    for node in graph.graph.nodes:
        source = next(iter(node.all_input_nodes), None)
        before, memory = (None, None) if source is None else _seen(source)
        if before is None or memory is None:
            continue
        if _writes(node):
            found = pairs.get(memory)
            if found is not None:
                return (
                    f"{_name(found)}(){_at(found)} copies a tensor that was written, because of the order in which it "
                    "lies in memory, and the tensor or the copy is written again"
                )
        if _name(node) not in _VIEW_OR_COPY or not before._version:
            continue
        _, copy = _seen(node)
        if copy is not None and copy != memory and not before.is_contiguous():
            pairs |= {memory: node, copy: node}
            if not torch.ops.aten.is_non_overlapping_and_dense.default(before):
                gaps.append((memory, copy, node))
    outputs = {_seen(node)[1] for node in graph.graph.output_node().all_input_nodes}
    reached = outputs | {_seen(node)[1] for node in graph.graph.find_nodes(op="placeholder")}
    for memory, copy, node in gaps:
        if copy in outputs and memory in reached:
            return f"{_name(node)}(){_at(node)} copies a tensor that was written and has gaps between its elements"
    return None


def _view_of_reordered(graph: fx.GraphModule) -> str | None:
    """Views of an input by what gives a copy where it has to, once the input was written by a view in another order.

    Functionalization makes the input anew from what was written, in that order, so it takes a copy. That matters where
    the view is written in turn, or is a result.
    """
    inputs = {_seen(node)[1] for node in graph.graph.find_nodes(op="placeholder")}
    reordered: set[int] = set()
    views: dict[fx.Node, fx.Node] = {}
    node: fx.Node
    for node in graph.graph.nodes:
        source = next(iter(node.all_input_nodes), None)
        before, memory = (None, None) if source is None else _seen(source)
        if source is None or before is None or memory is None:
            continue
        if _writes(node):
            if source in views:
                return _said_of_view(views[source])
            if memory in inputs and not before.is_contiguous():
                reordered.add(memory)
        elif _seen(node)[1] == memory and memory in reordered and (source in views or _name(node) in _VIEW_OR_COPY):
            views[node] = views.get(source, node)
    found = next((views[node] for node in graph.graph.output_node().all_input_nodes if node in views), None)
    return None if found is None else _said_of_view(found)


def _said_of_view(node: fx.Node) -> str:
    return (
        f"{_name(node)}(){_at(node)} gives a view of an input that was written by a view in another order, of which "
        "PyTorch's part of torch.compile takes a copy"
    )


def _writes(node: fx.Node) -> bool:
    """Whether a captured call writes to its first argument, or to ``out``, by its name."""
    name = _name(node)
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name in _ASSIGNING or "out" in node.kwargs


_ASSIGNING: Final = frozenset(
    ("setitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor", "imatmul")
)
_VIEW_OR_COPY: Final = frozenset(("reshape", "reshape_as", "flatten", "ravel", "contiguous"))
"""What gives a view where the order in memory allows it, and a copy elsewhere."""

_BY_PLACE: Final = ("as_strided", torch.as_strided, torch.Tensor.as_strided)


def _other_views(graph: fx.GraphModule) -> str | None:
    """Results that share memory, and ``as_strided`` of inputs of the device.

    Of results that share memory, lie in it in another order than a new tensor would, and of which one is detached from
    the history of the other, AOTAutograd takes both by size and strides of one. ``as_strided`` of a view counts in
    memory that no compiled graph sees.
    """
    outputs: dict[int, set[bool]] = defaultdict(set)
    reordered: set[int] = set()
    for node in graph.graph.output_node().all_input_nodes:
        value, memory = _seen(node)
        if value is not None and memory is not None and node.op != "placeholder":
            outputs[memory].add(_has_history(value))
            if not value.is_contiguous():
                reordered.add(memory)
    if any(len(outputs[memory]) > 1 for memory in reordered):
        return "results share memory, and one is detached from the history of another"
    views = {
        memory
        for value, memory in map(_seen, graph.graph.find_nodes(op="placeholder"))
        if value is not None and memory is not None and value.device.type == DEVICE_TYPE and value._is_view()
    }
    for node in graph.graph.nodes:
        if node.target in _BY_PLACE and _seen(node)[1] in views:
            return f"as_strided(){_at(node)} counts in the memory that an input of {DEVICE_TYPE} is a view of"
    return None


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


def refuse_writes_to_repeated_memory(graph: fx.GraphModule) -> None:
    """Raise :class:`UnsupportedOp` for a graph of ATen operators that writes an expanded input back as a whole.

    Of inputs that share memory AOTAutograd makes one, and views of it. A write to a row of one that is expanded
    becomes a new value of all of its rows, which are one place in memory: the rows that were not written would count.
    """
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.as_strided_scatter.default):
        sizes: Any = node.args[2]
        strides: Any = node.args[3]
        if any(stride == 0 and size != 1 for size, stride in zip(sizes, strides, strict=True)):
            raise UnsupportedOp(
                "inputs share memory, one of them is expanded, and a part of it is written",
                op="aten.as_strided_scatter.default",
            )
