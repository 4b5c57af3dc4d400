"""Elementwise operators that write their result over an argument which nobody reads any more."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from torchport.backend.in_place_forms import gives_new_memory, in_place_form
from torchport.backend.normal_form import alias_roots
from torchport.core.errors import GraphError
from torchport.core.specs import TensorSpec

from .order import is_sure, last_uses

__all__ = ["check_writes", "write_over"]


def _is_fresh(node: fx.Node) -> bool:
    return node.op == "call_function" and gives_new_memory(node.target)


def _fits(node: fx.Node, first: fx.Node) -> bool:
    """Whether the result has the form of the first argument."""
    value, result = first.meta["val"], node.meta["val"]
    if not isinstance(value, torch.Tensor) or value.is_complex():  # conjugated or not is not part of a spec
        return False
    return TensorSpec.of(value) == TensorSpec.of(result) and 0 not in value.stride()


def write_over(graph: fx.GraphModule) -> None:
    """Replace operators, in place, by those that write over their first argument where that is its last use."""
    nodes = list(graph.graph.nodes)
    roots = alias_roots(nodes)
    last = last_uses(nodes, roots)
    fresh = {node for node in nodes if roots[node] is node and _is_fresh(node)}
    # Operators of which the schema does not tell whether they give out the memory of what they read.
    unsure = [node for node in nodes if roots[node] is node and node not in fresh]
    free = fresh - {roots[used] for node in unsure for used in node.all_input_nodes}
    made: list[tuple[fx.Node, Any]] = []
    for at, node in enumerate(nodes):
        target = in_place_form(node.target) if node.op == "call_function" and is_sure(node) and node.args else None
        first = node.args[0] if node.args else None
        if target is None or not isinstance(first, fx.Node) or first not in free:
            continue
        alone = all(used is first or roots[used] is not first for used in node.all_input_nodes)
        if alone and last[first] == at and _fits(node, first):
            made.append((node, target))
    for node, target in made:
        node.target = target


def _functional(target: Any) -> Any:
    """The operator of which another one is the in-place form."""
    name = target._schema.name.removeprefix("aten::")
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None)
    return getattr(packet, target._overloadname, None)


def check_writes(graph: fx.GraphModule) -> None:
    """Raise :class:`GraphError` for a graph that writes to anything but what :func:`write_over` would have it write to.

    An argument's memory is the caller's, and that of a program's weights is every method's.
    """
    nodes = list(graph.graph.nodes)
    roots = alias_roots(nodes)
    own: set[fx.Node] = set()
    for node in nodes:
        if node.op not in ("placeholder", "call_function", "output"):
            raise GraphError(f"its node {node.name} is no operator; reference runs operators, one after the other")
        target: Any = node.target
        if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
            if _is_fresh(node):
                own.add(node)
            continue
        first = node.args[0] if node.args else None
        if (
            in_place_form(_functional(target)) is not target
            or not isinstance(first, fx.Node)
            or roots[first] not in own
        ):
            raise GraphError(f"{target} writes to memory that is not the graph's own")
        own.add(node)
