"""Rules of :mod:`.masking` for what training steps hold besides: losses of classes and backward operators.

What a backward operator sums over rows gets zeros beyond the true size, for what it multiplies by the gradient, too:
what was computed of zeros there may be no number, and nothing times that is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from .masker import Dim, Inexact, Masker, arguments, broadcast, is_padded, rule_for, whole

__all__: list[str] = []

aten = torch.ops.aten


def _alike(*layouts: Sequence[Dim]) -> None:
    """Raises :class:`Inexact` where rows do not stand at the same places: ``[B, T]`` and ``[T, B]``, both flattened."""
    if any(tuple(one) != tuple(layouts[0]) for one in layouts):
        raise Inexact("an operator puts dimensions together that are padded in different ways")


def _zeros_beyond(m: Masker, *nodes: fx.Node | None) -> dict[fx.Node, fx.Node]:
    return {node: m.masked(node, 0) for node in nodes if node is not None and m.any_padded(node)}


@rule_for(aten.nll_loss_forward.default, aten.nll_loss_backward.default)
def _picked_losses(m: Masker, node: fx.Node, variants: Sequence[fx.Node]) -> Any:
    """A loss of classes: rows beyond the true size are of the class that does not count."""
    source, target, weight, reduction, ignored = arguments(
        node, "self", "target", "weight", "reduction", "ignore_index"
    )
    layout = m.layout(source)
    m.same_constants(node, variants)
    if is_padded(layout[-1]) or (weight is not None and m.any_padded(weight)):
        raise Inexact("the number of classes is padded")
    _alike(layout[:-1], m.layout(target))
    made = m.copy(node, {target: m.masked(target, ignored)} if m.any_padded(target) else {})
    if node.target is aten.nll_loss_backward.default:
        return made, layout
    return made, [layout[:-1] if reduction == 0 else (), ()]


_ROUNDED: Final = {
    getattr(aten, name).Scalar: getattr(aten, name).Tensor for name in ("eq", "ne", "lt", "le", "gt", "ge")
} | {aten.add.Tensor: aten.add.Tensor, aten.sub.Tensor: aten.sub.Tensor}
"""Operators for which PyTorch brings a number into the tensor's dtype first; others compute with the number itself."""
_BY_TENSOR: Final = _ROUNDED | {
    aten.div.Tensor: aten.div.Tensor,
    aten.div.Scalar: aten.div.Tensor,
    aten.mul.Tensor: aten.mul.Tensor,
    aten.mul.Scalar: aten.mul.Tensor,
}
"""Operators of a tensor and a number, and the same of two tensors."""


@rule_for(*_BY_TENSOR)
def _with_number(m: Masker, node: fx.Node, variants: Sequence[fx.Node]) -> Any:
    """Elementwise; a number that is a multiple of sizes, as in a mean's gradient or ``x.sum() == x.shape[1]``, becomes
    that of the true ones."""
    op: Any = node.target
    source: Any = node.args[0]
    number, others = node.args[1], [one.args[1] for one in variants]
    after = broadcast([m.layout(one) for one in node.all_input_nodes])
    if isinstance(number, fx.Node) or all(other == number for other in others):
        m.same_constants(node, variants)
        return m.copy(node), after
    dtype = source.meta["val"].dtype if op in _ROUNDED else node.meta["val"].dtype
    scaled = op in (aten.add.Tensor, aten.sub.Tensor) and arguments(node, "alpha") != [1]
    if scaled or not (dtype.is_floating_point or dtype is torch.int64):
        raise Inexact(f"a number is computed from a size that changes, for {op}")
    b = m.builder
    # A number is as exact as what is computed with it: more than 16 bits have where they are a program's own.
    wide = dtype if dtype in (torch.float64, torch.int64) else torch.float32
    other = m.true_number(number, others, wide)
    if op in _ROUNDED:
        return b(_BY_TENSOR[op], m.values[source], b.cast(other, dtype)), after
    return b.cast(b(_BY_TENSOR[op], b.cast(m.values[source], wide), other), dtype), after


@rule_for(aten.native_layer_norm_backward.default)
def _layer_norm_backward(m: Masker, node: fx.Node, variants: Sequence[fx.Node]) -> Any:
    grad, source, shape, mean, rstd = arguments(node, "grad_out", "input", "normalized_shape", "mean", "rstd")
    layout, count = m.layout(source), len(tree_leaves(shape))
    if any(map(is_padded, layout[len(layout) - count :])):
        raise Inexact("a normalisation over the padded dimension")
    _alike(layout, m.layout(grad))
    m.same_constants(node, variants)
    few = whole(node.meta["val"][1]) if node.meta["val"][1] is not None else ()
    return m.copy(node, _zeros_beyond(m, grad, source, mean, rstd)), [layout, few, few]


@rule_for(aten.embedding_dense_backward.default)
def _embedding_backward(m: Masker, node: fx.Node, variants: Sequence[fx.Node]) -> Any:
    grad, indices = arguments(node, "grad_output", "indices")
    if is_padded(m.layout(grad)[-1]):
        raise Inexact("the width of an embedding is padded")
    _alike(m.layout(grad)[:-1], m.layout(indices))
    m.same_constants(node, variants)
    return m.copy(node, _zeros_beyond(m, grad, indices)), whole(node.meta["val"])


@rule_for(aten.convolution_backward.default)
def _convolution_backward(m: Masker, node: fx.Node, variants: Sequence[fx.Node]) -> Any:
    """Each image by itself, and weights' gradients summed over the images."""
    grad, source, weight = arguments(node, "grad_output", "input", "weight")
    layout = m.layout(source)
    if any(map(is_padded, (*layout[1:], *m.layout(grad)[1:], *m.layout(weight)))):
        raise Inexact("a convolution of padded images")
    _alike(layout[:1], m.layout(grad)[:1])
    m.same_constants(node, variants)
    results = [layout, *(whole(value) if value is not None else () for value in node.meta["val"][1:])]
    return m.copy(node, _zeros_beyond(m, grad, source)), results


@rule_for(
    aten.max_pool2d_with_indices_backward.default,
    aten._adaptive_avg_pool2d_backward.default,
    aten.avg_pool2d_backward.default,
)
def _pool_backward(m: Masker, node: fx.Node, variants: Sequence[fx.Node]) -> Any:
    """Each image by itself."""
    layout = m.layout(arguments(node, "self")[0])
    inputs = node.all_input_nodes
    if len(layout) != 4 or any(is_padded(dim) for one in inputs for dim in m.layout(one)[1:]):
        raise Inexact(f"{node.target} with padded images")
    _alike(*(m.layout(one)[:1] for one in inputs))
    m.same_constants(node, variants)
    return m.copy(node), layout


@rule_for(aten.scatter.value, aten.scatter.src)
def _scattered(m: Masker, node: fx.Node, variants: Sequence[fx.Node]) -> Any:
    """Rows by themselves: what is written to a row comes from the same row of the index."""
    source, dim, index = arguments(node, "self", "dim", "index")
    layout, rows = m.layout(source), m.layout(index)
    dim %= len(layout)
    others = [m.layout(one) for one in node.all_input_nodes if one not in (source, index)]
    if any(is_padded(one[dim]) for one in (layout, rows, *others)):
        raise Inexact("places along the padded dimension are written by number")
    for dims in zip(layout, rows, *others, strict=True):
        if any(map(is_padded, dims)) and any(one != dims[0] for one in dims):
            raise Inexact("rows are written that are padded in different ways")
    m.same_constants(node, variants)
    return m.copy(node, _zeros_beyond(m, index)), layout
