"""Rules of :mod:`.masking` for what training steps hold besides: losses of classes and backward operators.

What a backward operator sums over rows gets zeros for the gradient beyond the true size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from .masker import Inexact, Masker, arguments, is_padded, rule_for, whole

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
