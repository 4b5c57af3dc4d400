"""What does not depend on a method's inputs is computed when it is lowered: positions, causal masks, ranges.

Views that show what they are of, and indexing by constants that picks every element in order, are taken out, too:
Hugging Face's models are full of both, and each would keep integers or masks from engines that have none.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

import torch
from torch import fx
from torch.fx.node import map_arg

from ..backend.fx_normalise import has_symbols
from ..backend.infer import fake_tensor
from ..core.specs import TensorSpec

__all__ = ["fold_constants"]

_MOST_BYTES: Final = 1 << 20
"""A folded value is stored with the program; a larger one is computed anew at each call."""
_MOST_INDEXED: Final = 1 << 17
"""Indexing of more elements than this is not looked through."""

aten = torch.ops.aten
_RESHAPES: Final = frozenset(
    {aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default, aten.slice.Tensor}
)
_INDEX_AT: Final[Mapping[Any, int]] = {aten.embedding.default: 1, aten.index_select.default: 2, aten.gather.default: 2}
"""Operators that read an argument as indices: how these lie in memory does not matter to the result."""


def fold_constants(module: fx.GraphModule, constants: Collection[fx.Node] = ()) -> None:
    """Replace PyTorch's operators on constants by their results, in place.

    ``constants``: placeholders with a tensor in ``meta["constant"]`` that may be folded away. What draws random
    numbers, fails, or gives more than 1 MiB stays, and so do operators of other libraries, which may have a state.
    """
    known: dict[fx.Node, torch.Tensor] = {node: node.meta["constant"] for node in constants}
    for node in list(module.graph.nodes):
        if node.target in _RESHAPES and _shows_all(node):
            _forget(node, node.args[0])
            continue
        if node.op == "call_function" and all(value in known for value in node.all_input_nodes) and _can_fold(node):
            result = _result(node, known)
            if result is not None:
                known[node] = result
        elif node.target is aten.index.Tensor and (indices := _constant_indices(node, known)) is not None:
            _view_instead(node, indices)
    _replace(module, {node: value for node, value in known.items() if node.op == "call_function"})


def _shows_all(node: fx.Node) -> bool:
    """Whether a view is the tensor it is of. One that is a result stays: results are told from inputs."""
    source = node.args[0]
    if not isinstance(source, fx.Node) or any(user.op == "output" for user in node.users):
        return False
    made, given = node.meta.get("val"), source.meta.get("val")
    return (
        isinstance(made, torch.Tensor)
        and isinstance(given, torch.Tensor)
        and not has_symbols(made)
        and not has_symbols(given)
        and made.shape == given.shape
        and _lies_alike(made, given)
    )


def _lies_alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one shape have the same strides, where these mean anything."""
    return all(n == 1 or first == second for n, first, second in zip(a.shape, a.stride(), b.stride(), strict=True))


def _forget(node: fx.Node, instead: Any) -> None:
    node.replace_all_uses_with(instead)
    node.graph.erase_node(node)


def _constant_indices(node: fx.Node, known: Mapping[fx.Node, torch.Tensor]) -> list[torch.Tensor | None] | None:
    """The indices of ``x[…]``, if all are constants and ``x`` is not."""
    source, indices = node.args[0], node.args[1]
    assert isinstance(indices, (list, tuple))
    if source in known or not all(one is None or one in known for one in indices):
        return None
    return [None if one is None else known[one] for one in indices]  # type: ignore[index]


def _view_instead(node: fx.Node, indices: list[torch.Tensor | None]) -> None:
    """Replace indexing that picks every element once, in order, by a view."""
    source: Any = node.args[0]
    given, made = source.meta["val"], node.meta["val"]
    if has_symbols(given) or has_symbols(made) or given.numel() != made.numel() or given.numel() > _MOST_INDEXED:
        return
    if not given.is_contiguous() or not made.is_contiguous() or any(user.op == "output" for user in node.users):
        return
    order = torch.arange(given.numel())
    try:
        picked = torch.ops.aten.index.Tensor(order.reshape(given.shape), indices)
    except Exception:
        return  # it fails when the program runs, if it is run
    if picked.shape == made.shape and torch.equal(picked.flatten(), order):
        with node.graph.inserting_before(node):
            view = node.graph.call_function(aten.view.default, (source, list(made.shape)))
        view.meta = dict(node.meta)
        _forget(node, view)


def _reads_as_indices(user: fx.Node, node: fx.Node) -> bool:
    at = _INDEX_AT.get(user.target)
    return at is not None and [i for i, arg in enumerate(user.args) if arg is node] == [at]


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
        held, told = value.clone(memory_format=torch.contiguous_format), node.meta["val"]
        if not _lies_alike(held, told):
            if not all(_reads_as_indices(user, node) for user in users):
                continue  # a value spread over other memory than its own is made where it is used
            told = fake_tensor(TensorSpec.of(held))
        name = f"folded_{node.name}"
        setattr(module, name, torch.nn.Buffer(held, persistent=False))
        with graph.inserting_before(node):
            constant = graph.get_attr(name)
        constant.meta = {"val": told}
        for user in users:
            user.replace_input_with(node, constant)
    graph.eliminate_dead_code()
    module.recompile()
