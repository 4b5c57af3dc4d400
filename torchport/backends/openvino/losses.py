"""Losses that PyTorch has as one operator and that read class numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from .writer import Writer, rule, val

aten = torch.ops.aten

_MEAN = 1


@rule(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default, reads=[1])
def _nll_loss(w: Writer, node: fx.Node) -> Any:
    """Results are the loss and the sum of weights."""
    source, target, weight, reduction, ignored = node.args[:5]
    shape = list(val(source).shape)
    axis = 0 if len(shape) == 1 else 1
    classes = w.index(target)  # type: ignore[arg-type]
    hidden = w.ops.equal(classes, w.word_of(int(ignored)))  # type: ignore[call-overload]
    safe = w.ops.select(hidden, w.word_of(0), classes).output(0)
    places = w.reshape(safe, [*shape[:axis], 1, *shape[axis + 1 :]])
    found = w.ops.gather_elements(w.value(source), places, axis).output(0)
    found = w.reshape(found, list(val(target).shape))
    factor = w.value(1.0) if weight is None else w.ops.gather(w.value(weight), safe, w.ints(0)).output(0)
    factor = w.ops.select(hidden, w.value(0.0), factor).output(0)
    each = w.ops.select(hidden, w.value(0.0), w.ops.negative(w.ops.multiply(found, factor))).output(0)
    axes = w.ints(list(range(val(target).dim())))
    loss, weights = node.meta["val"]
    if list(loss.shape) == list(val(target).shape) and reduction == 0:
        return [each, w.value(0.0)]
    total = each if val(target).dim() == 0 else w.ops.reduce_sum(each, axes, False).output(0)
    of_all = factor if val(target).dim() == 0 else w.ops.reduce_sum(factor, axes, False).output(0)
    made = w.ops.divide(total, of_all).output(0) if reduction == _MEAN else total
    return [w.reshape(made, list(loss.shape)), w.reshape(of_all, list(weights.shape))]
