"""What the forward keeps for the backward: never a view, but what it is a view of, and the backward takes the view.

AOTAutograd's partitioner likes to keep ``weight.t()``. A backend returns values, so a view among its results would be a
copy of the weight on every step.
"""

from __future__ import annotations

import operator
from typing import Any, Final

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from ...backend.normal_form import is_view

__all__ = ["partition_fn"]

_getitem: Any = operator.getitem
_RECOMPUTED: Final = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def partition_fn(joint: fx.GraphModule, inputs: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    """AOTAutograd's ``partition_fn``: the min-cut partitioner, with what else is kept for the backward or is not."""
    from functorch.compile import min_cut_rematerialization_partition

    draw_once(joint)
    keep_overwritten(joint)
    forward, backward = min_cut_rematerialization_partition(joint, inputs, **kwargs)
    keep_no_views(forward, backward, kwargs["num_fwd_outputs"])
    copy_overwritten(forward, kwargs["num_fwd_outputs"])
    return forward, backward


def draw_once(joint: fx.GraphModule) -> None:
    """Mark random operators in checkpointed code to be kept, in place: the backward gets the numbers themselves.

    Otherwise the partitioner puts operators into both graphs that save and restore the state of PyTorch's generator.
    """
    for node in joint.graph.nodes:
        if node.meta.get("recompute") in _RECOMPUTED and torch.Tag.nondeterministic_seeded in getattr(
            node.target, "tags", ()
        ):
            for kept in (node, *(user for user in node.users if user.target is _getitem)):
                kept.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def keep_overwritten(joint: fx.GraphModule) -> None:
    """Mark copies that AOTAutograd made of inputs which the program writes to, in place: the backward gets the copy.

    Otherwise the partitioner may keep the input, which has been written to by then, and take the copy in the backward.
    """
    for node in joint.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default):
        source = node.all_input_nodes[0]
        if source.op == "placeholder" and len(source.users) == 1:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _chain(node: fx.Node) -> list[fx.Node]:
    """The view operators from where the memory comes from to ``node``, as far as they take no other node."""
    chain: list[fx.Node] = []
    while node.op == "call_function" and len(node.all_input_nodes) == 1:
        before = node.all_input_nodes[0]
        if node.target is _getitem:
            if not is_view(before.target):
                break
        elif not is_view(node.target):
            break
        chain.append(node)
        node = before
    chain.reverse()
    while chain and chain[0].target is _getitem:
        del chain[0]
    return chain


def keep_no_views(forward: fx.GraphModule, backward: fx.GraphModule, results: int) -> None:
    """Change both graphs in place; the forward's first ``results`` outputs are the user's and stay."""
    output = forward.graph.output_node()
    kept: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    places = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
    changed = False
    for position, node in enumerate(kept):
        place = places.get(node.name) if isinstance(node, fx.Node) else None
        if position < results or place is None or not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        chain = _chain(node)
        if not chain:
            continue
        base = chain[0].all_input_nodes[0]
        _take_views(backward, place, base, chain)
        kept[position] = base
        changed = True
    if changed:
        output.args = (tuple(kept),)
        for graph in (forward, backward):
            graph.graph.eliminate_dead_code()
            graph.recompile()


def copy_overwritten(forward: fx.GraphModule, results: int) -> None:
    """Keep a copy of each input that the forward itself writes to, in place of the input; changes the graph in place.

    Such writes are those that autograd must not see, as under ``no_grad``.
    """
    output = forward.graph.output_node()
    written = {write.args[0] for write in forward.graph.find_nodes(op="call_function", target=_copy)}
    kept: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    copies: dict[fx.Node, fx.Node] = {}
    for position, node in enumerate(kept):
        if position < results or not isinstance(node, fx.Node) or node.op != "placeholder" or node not in written:
            continue
        if node not in copies:
            with forward.graph.inserting_after(forward.graph.find_nodes(op="placeholder")[-1]):
                copies[node] = forward.graph.call_function(torch.ops.aten.clone.default, (node,))
            copies[node].meta.update(node.meta)
        kept[position] = copies[node]
    if copies:
        output.args = (tuple(kept),)
        forward.recompile()


_copy: Final = torch.ops.aten.copy_.default


def _take_views(backward: fx.GraphModule, place: fx.Node, base: fx.Node, chain: list[fx.Node]) -> None:
    """The placeholder stands for ``base`` from now on, and its users get the views of it."""
    users = list(place.users)
    place.meta["val"] = base.meta["val"]
    last = backward.graph.find_nodes(op="placeholder")[-1]
    values: dict[fx.Node, fx.Node] = {base: place}
    for view in chain:
        with backward.graph.inserting_after(last):
            last = values[view] = backward.graph.node_copy(view, lambda n: values[n])
    for user in users:
        user.replace_input_with(place, last)
