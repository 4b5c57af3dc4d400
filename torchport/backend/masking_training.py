"""Rules of :mod:`.masking` for what training steps hold besides: losses of classes and backward operators.

What a backward operator sums over rows gets zeros for the gradient beyond the true size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from .masker import Inexact, Masker, arguments, broadcast, is_padded, rule_for, whole

__all__: list[str] = []

aten = torch.ops.aten


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
    made = m.copy(node, {target: m.masked(target, ignored)} if m.any_padded(target) else {})
    if node.target is aten.nll_loss_backward.default:
        return made, layout
    return made, [layout[:-1] if reduction == 0 else (), ()]


@rule_for(aten.div.Tensor, aten.div.Scalar, aten.mul.Tensor, aten.mul.Scalar)
def _scaled(m: Masker, node: fx.Node, variants: Sequence[fx.Node]) -> Any:
    """Elementwise; a number that is a multiple of sizes, as in a mean's gradient, becomes that of the true ones."""
    number, others = node.args[1], [one.args[1] for one in variants]
    after = broadcast([m.layout(one) for one in node.all_input_nodes])
    if isinstance(number, fx.Node) or all(other == number for other in others):
        m.same_constants(node, variants)
        return m.copy(node), after
    b, dtype = m.builder, node.meta["val"].dtype
    true = m.true_number(number, others)
    by_tensor = aten.div.Tensor if node.target in (aten.div.Tensor, aten.div.Scalar) else aten.mul.Tensor
    if not dtype.is_floating_point:
        raise Inexact("a number is computed from a size that changes")
    return b(by_tensor, m.values[node.args[0]], b.cast(true, dtype)), after  # type: ignore[index]


@rule_for(aten.native_layer_norm_backward.default)
def _layer_norm_backward(m: Masker, node: fx.Node, variants: Sequence[fx.Node]) -> Any:
    grad, source, shape = arguments(node, "grad_out", "input", "normalized_shape")
    layout, count = m.layout(source), len(tree_leaves(shape))
    if any(map(is_padded, layout[len(layout) - count :])):
        raise Inexact("a normalisation over the padded dimension")
    m.same_constants(node, variants)
    few = whole(node.meta["val"][1]) if node.meta["val"][1] is not None else ()
    return m.copy(node, {grad: m.masked(grad, 0)} if m.any_padded(grad) else {}), [layout, few, few]


@rule_for(aten.embedding_dense_backward.default)
def _embedding_backward(m: Masker, node: fx.Node, variants: Sequence[fx.Node]) -> Any:
    (grad,) = arguments(node, "grad_output")
    if is_padded(m.layout(grad)[-1]):
        raise Inexact("the width of an embedding is padded")
    m.same_constants(node, variants)
    return m.copy(node, {grad: m.masked(grad, 0)} if m.any_padded(grad) else {}), whole(node.meta["val"])


@rule_for(aten.convolution_backward.default)
def _convolution_backward(m: Masker, node: fx.Node, variants: Sequence[fx.Node]) -> Any:
    """Each image by itself, and weights' gradients summed over the images."""
    grad, source, weight = arguments(node, "grad_output", "input", "weight")
    layout = m.layout(source)
    if any(map(is_padded, (*layout[1:], *m.layout(grad)[1:], *m.layout(weight)))):
        raise Inexact("a convolution of padded images")
    m.same_constants(node, variants)
    results = [layout, *(whole(value) if value is not None else () for value in node.meta["val"][1:])]
    return m.copy(node, {grad: m.masked(grad, 0)} if m.any_padded(grad) else {}), results


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
    padded = [tuple(at for at in one if is_padded(at)) for one in (layout, rows, *others)]
    if any(one != padded[0] for one in padded):
        raise Inexact("rows are written that are padded in different ways")
    m.same_constants(node, variants)
    return m.copy(node), layout
