"""Losses whose decompositions would be long, forward and backward."""

from __future__ import annotations

import torch

from .support import Array, Call, jnp, lax, literal, lowers, math, np, wide

aten = torch.ops.aten

_NONE, _MEAN, _SUM = range(3)


def _reduced(values: Array, reduction: int) -> Array:
    if reduction == _NONE:
        return values
    total = jnp.sum(values)
    if reduction == _SUM:
        return total
    return total / literal(values.size, values.dtype) if values.size else lax.full((), literal(math.nan, values.dtype))


@lowers(aten.mse_loss.default)
def mse_loss(call: Call, x: Array, target: Array, reduction: int = _MEAN) -> Array:
    difference = wide(x) - wide(target)
    return _reduced(difference * difference, reduction)


@lowers(aten.mse_loss_backward.default)
def mse_loss_backward(call: Call, grad: Array, x: Array, target: Array, reduction: int) -> Array:
    difference = wide(x) - wide(target)
    factor = 2.0 / difference.size if reduction == _MEAN and difference.size else 2.0
    return literal(factor, difference.dtype) * difference * wide(grad)


def _classes(x: Array, target: Array) -> tuple[int, Array, Array]:
    """The class dimension, the targets with that dimension of size 1, and whether an element of it is the target."""
    axis = 1 if x.ndim > 1 else 0
    wanted = lax.expand_dims(target, (axis,)) if x.ndim else target
    chosen = lax.broadcasted_iota(np.dtype(target.dtype), x.shape, axis) == wanted
    return axis, wanted, chosen


def _weights(x: Array, weight: Array | None, axis: int) -> Array | None:
    if weight is None:
        return None
    return lax.reshape(wide(weight), [x.shape[axis] if d == axis else 1 for d in range(x.ndim)])


@lowers(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def nll_loss(
    call: Call, x: Array, target: Array, weight: Array | None, reduction: int, ignore_index: int
) -> tuple[Array, Array]:
    axis, wanted, chosen = _classes(x, target)
    value = wide(x)
    counted = wanted != literal(ignore_index, wanted.dtype)
    of_class = _weights(x, weight, axis)
    # The chosen element by masking: out-of-range classes contribute NaN only where they are not ignored.
    known = jnp.any(chosen, axis=axis, keepdims=True)
    picked = jnp.sum(jnp.where(chosen, value, 0), axis=axis, keepdims=True)
    one = lax.full((), literal(1, value.dtype))
    scale = one if of_class is None else jnp.sum(jnp.where(chosen, of_class, 0), axis=axis, keepdims=True)
    scale = jnp.where(counted, scale, jnp.zeros((), value.dtype))
    losses = jnp.where(counted, -picked * scale, jnp.zeros((), value.dtype))
    losses = jnp.where(counted & ~known, literal(math.nan, value.dtype), losses)
    losses = lax.squeeze(losses, (axis,)) if x.ndim else losses
    if reduction == _NONE:
        return losses, jnp.zeros((), value.dtype)
    total_weight = jnp.sum(jnp.broadcast_to(scale, counted.shape))
    total = jnp.sum(losses)
    return (total / total_weight if reduction == _MEAN else total), total_weight


@lowers(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
def nll_loss_backward(
    call: Call,
    grad: Array,
    x: Array,
    target: Array,
    weight: Array | None,
    reduction: int,
    ignore_index: int,
    total_weight: Array,
) -> Array:
    axis, wanted, chosen = _classes(x, target)
    g = wide(grad)
    if reduction == _MEAN:
        g = g / wide(total_weight)
    if reduction == _NONE and x.ndim:
        g = lax.expand_dims(g, (axis,))
    of_class = _weights(x, weight, axis)
    scale = -g if of_class is None else -g * of_class
    return jnp.where(chosen & (wanted != literal(ignore_index, wanted.dtype)), scale, jnp.zeros((), g.dtype))


@lowers(aten.binary_cross_entropy.default)
def binary_cross_entropy(
    call: Call, x: Array, target: Array, weight: Array | None = None, reduction: int = _MEAN
) -> Array:
    value, wanted = wide(x), wide(target)
    floor = literal(-100.0, value.dtype)
    low = jnp.maximum(lax.log1p(-value), floor)
    high = jnp.maximum(lax.log(value), floor)
    losses = (wanted - 1) * low - wanted * high
    return _reduced(losses if weight is None else losses * wide(weight), reduction)
