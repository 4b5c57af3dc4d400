"""In which order a graph's operators run, for the least memory.

A training step that is traced ends with an optimizer's list operators, each of which makes all its results before the
next begins, while old parameters and state wait to be replaced. Elementwise operators that lead to nothing but results
may run last, one result after the other.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import fx

from torchport.backend.normal_form import alias_roots

__all__ = ["is_sure", "last_uses", "peak", "reordered"]

aten = torch.ops.aten
_getitem: Any = operator.getitem
_SURE: Final[frozenset[Any]] = frozenset(
    {
        aten.where.self, aten.clone.default, aten._to_copy.default, aten.full.default, aten.full_like.default,
        aten.select.int, aten.slice.Tensor, aten.expand.default, aten.t.default, aten.transpose.int,
        aten.permute.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims,
        aten.detach.default, aten.alias.default,
    }
)  # fmt: skip
"""Besides elementwise operators. Of the views not those that depend on strides, or on what is conjugated."""
_UNSURE: Final[frozenset[str]] = frozenset(
    f"aten::{name}{tail}" for name in ("remainder", "fmod", "floor_divide", "pow") for tail in ("", "_")
)
"""Of integers these raise where they divide by zero, or for a negative power."""


def is_sure(node: fx.Node) -> bool:
    """Whether an operator is elementwise or a simple view and cannot fail, whatever the values are."""
    target: Any = node.target
    if target is _getitem or target in _SURE:
        return True
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.pointwise not in target.tags:
        return False
    return target._schema.name not in _UNSURE and "rounding_mode" not in node.kwargs


def _bytes(node: fx.Node) -> int:
    """The size of a node's values."""
    values = node.meta.get("val")
    tensors = values if isinstance(values, (list, tuple)) else [values]
    return sum(one.numel() * one.element_size() for one in tensors if isinstance(one, torch.Tensor))


def last_uses(nodes: Sequence[fx.Node], roots: Mapping[fx.Node, fx.Node]) -> dict[fx.Node, int]:
    """Where each value is made or read last, itself or a view of it, by :func:`alias_roots`' nodes."""
    last: dict[fx.Node, int] = {}
    for at, node in enumerate(nodes):
        last[roots[node]] = at
        for used in node.all_input_nodes:
            last[roots[used]] = at
    return last


def peak(nodes: Sequence[fx.Node]) -> int:
    """The most bytes that are there at a time, if every value goes with its last use and inputs may go, too."""
    roots = alias_roots(nodes)
    going: dict[int, int] = {}
    for root, at in last_uses(nodes, roots).items():
        going[at] = going.get(at, 0) + _bytes(root)
    most = here = sum(_bytes(node) for node in nodes if node.op == "placeholder")
    for at, node in enumerate(nodes):
        if node.op == "call_function" and roots[node] is node:
            here += _bytes(node)
        most = max(most, here)
        here -= going.get(at, 0)
    return most


def _put_off(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The operators that lead to results through nothing but elementwise ones. ``nodes`` come last first."""
    found: set[fx.Node] = set()
    for node in nodes:
        if node.op == "call_function" and is_sure(node) and all(u in found or u.op == "output" for u in node.users):
            found.add(node)
    return found


def _one_by_one(output: fx.Node, chosen: set[fx.Node]) -> list[fx.Node]:
    """The chosen nodes, all that an output needs before the next output."""
    made: list[fx.Node] = []
    done: set[fx.Node] = set()
    pending = [(node, False) for node in reversed(output.all_input_nodes)]
    while pending:
        node, entered = pending.pop()
        if node in done or node not in chosen:
            continue
        if entered:
            done.add(node)
            made.append(node)
        else:
            pending.append((node, True))
            pending.extend((used, False) for used in reversed(node.all_input_nodes))
    return made


def reordered(graph: fx.GraphModule) -> fx.GraphModule:
    """A copy with the operators in the order that needs less memory: theirs, or elementwise ones last."""
    nodes = list(graph.graph.nodes)
    output = nodes[-1]
    late = _put_off(reversed(nodes))
    order = [node for node in nodes[:-1] if node not in late] + _one_by_one(output, late) + [output]
    if len(order) != len(nodes) or peak(order) >= peak(nodes):  # a node that no result needs stays where it is
        order = nodes
    made, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in order:
        copies[node] = made.node_copy(node, lambda used: copies[used])
    return fx.GraphModule(graph, made)
