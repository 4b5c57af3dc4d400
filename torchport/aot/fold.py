"""What does not depend on a method's inputs is computed when it is lowered: positions, causal masks, ranges."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

import torch
from torch import fx
from torch.fx.node import map_arg

__all__ = ["fold_constants"]

_MOST_BYTES: Final = 1 << 20
"""A folded value is stored with the program; a larger one is computed anew at each call."""


def fold_constants(module: fx.GraphModule, constants: Collection[fx.Node] = ()) -> None:
    """Replace operators on constants by their results, in place.

    ``constants``: placeholders with a tensor in ``meta["constant"]`` that may be folded away. Random operators, and
    results of more than 1 MiB, stay.
    """
    known: dict[fx.Node, torch.Tensor] = {node: node.meta["constant"] for node in constants}
    for node in module.graph.nodes:
        if node.op == "call_function" and _can_fold(node, known):
            with torch.no_grad():
                result = node.target(*map_arg(node.args, known.__getitem__), **map_arg(node.kwargs, known.__getitem__))
            if isinstance(result, torch.Tensor) and result.numel() * result.element_size() <= _MOST_BYTES:
                known[node] = result
    _replace(module, {node: value for node, value in known.items() if node.op == "call_function"})


def _can_fold(node: fx.Node, known: Collection[fx.Node]) -> bool:
    op, made = node.target, node.meta.get("val")
    return (
        isinstance(op, torch._ops.OpOverload)
        and isinstance(made, torch.Tensor)
        and made.device.type == "cpu"
        and not op._schema.is_mutable
        and torch.Tag.nondeterministic_seeded not in op.tags
        and made.numel() * made.element_size() <= _MOST_BYTES
        and all(value in known for value in node.all_input_nodes)
    )


def _replace(module: fx.GraphModule, found: dict[fx.Node, torch.Tensor]) -> None:
    graph = module.graph
    for node, value in found.items():
        users: list[Any] = [user for user in node.users if user not in found]
        if not users or tuple(value.stride()) != tuple(node.meta["val"].stride()) or 0 in value.stride():
            continue  # a value that is spread over more than its memory is made where it is used
        name = f"folded_{node.name}"
        setattr(module, name, torch.nn.Buffer(value.clone(), persistent=False))
        with graph.inserting_before(node):
            constant = graph.get_attr(name)
        constant.meta = {"val": node.meta["val"]}
        for user in users:
            user.replace_input_with(node, constant)
    graph.eliminate_dead_code()
    module.recompile()
