"""What does not depend on a method's inputs is computed when it is lowered: positions, causal masks, ranges."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

import torch
from torch import fx
from torch.fx.node import map_arg

from ..backend.fx_normalise import has_symbols

__all__ = ["fold_constants"]

_MOST_BYTES: Final = 1 << 20
"""A folded value is stored with the program; a larger one is computed anew at each call."""


def fold_constants(module: fx.GraphModule, constants: Collection[fx.Node] = ()) -> None:
    """Replace PyTorch's operators on constants by their results, in place.

    ``constants``: placeholders with a tensor in ``meta["constant"]`` that may be folded away. What draws random
    numbers, fails, or gives more than 1 MiB stays, and so do operators of other libraries, which may have a state.
    """
    known: dict[fx.Node, torch.Tensor] = {node: node.meta["constant"] for node in constants}
    for node in module.graph.nodes:
        if node.op == "call_function" and all(value in known for value in node.all_input_nodes) and _can_fold(node):
            result = _result(node, known)
            if result is not None:
                known[node] = result
    _replace(module, {node: value for node, value in known.items() if node.op == "call_function"})


def _can_fold(node: fx.Node) -> bool:
    op, made = node.target, node.meta.get("val")
    return (
        isinstance(op, torch._ops.OpOverload)
        and op.namespace == "aten"
        and not op._schema.is_mutable
        and torch.Tag.nondeterministic_seeded not in op.tags
        and isinstance(made, torch.Tensor)
        and made.device.type == "cpu"
        and not has_symbols(made)
        and made.numel() * made.element_size() <= _MOST_BYTES
    )


def _result(node: fx.Node, known: Mapping[fx.Node, torch.Tensor]) -> torch.Tensor | None:
    """What an operator gives, if it is what was said when the model was exported."""
    args, kwargs = map_arg((node.args, node.kwargs), known.__getitem__)
    try:
        with torch.no_grad():
            made = node.target(*args, **kwargs)  # type: ignore[operator]
    except Exception:
        return None  # it fails when the program runs, if it is run
    told = node.meta["val"]
    same = isinstance(made, torch.Tensor) and made.dtype is told.dtype and made.shape == told.shape
    return made if same else None


def _replace(module: fx.GraphModule, found: Mapping[fx.Node, torch.Tensor]) -> None:
    graph = module.graph
    for node, value in found.items():
        users: list[Any] = [user for user in node.users if user not in found]
        if not users:
            continue
        held = value.clone()
        if held.stride() != tuple(node.meta["val"].stride()):
            continue  # a value spread over other memory than its own is made where it is used
        name = f"folded_{node.name}"
        setattr(module, name, torch.nn.Buffer(held, persistent=False))
        with graph.inserting_before(node):
            constant = graph.get_attr(name)
        constant.meta = {"val": node.meta["val"]}
        for user in users:
            user.replace_input_with(node, constant)
    graph.eliminate_dead_code()
    module.recompile()
