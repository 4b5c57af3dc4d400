"""Softmax and normalization layers, forward and backward."""

from __future__ import annotations

import torch

from .reductions import variance
from .support import (
    Any,
    Array,
    Call,
    Sequence,
    broadcast,
    cast,
    compute_dtype,
    jnp,
    lax,
    literal,
    lowers,
    math,
    normalise_dim,
    np,
    out_shape,
    wide,
)

aten = torch.ops.aten


# -- softmax ---------------------------------------------------------------------------------------
def _shifted(value: Array, axis: int) -> Array:
    top = lax.stop_gradient(jnp.max(value, axis=axis, keepdims=True))
    return value - top


@lowers(aten._softmax.default, aten._safe_softmax.default)
def softmax(call: Call, x: Array, dim: int, half_to_float: Any = False, **kwargs: Any) -> Array:
    value = cast(x, compute_dtype(call))
    if not value.size or not value.ndim:
        return jnp.ones_like(value)
    axis = normalise_dim(dim, x.ndim)
    weights = lax.exp(_shifted(value, axis))
    result = weights / jnp.sum(weights, axis=axis, keepdims=True)
    if call.node.target is aten._safe_softmax.default:
        empty = jnp.all(value == -math.inf, axis=axis, keepdims=True)
        result = jnp.where(empty, jnp.zeros((), value.dtype), result)
    return result


@lowers(aten._log_softmax.default)
def log_softmax(call: Call, x: Array, dim: int, half_to_float: bool) -> Array:
    value = cast(x, compute_dtype(call))
    if not value.size or not value.ndim:
        return jnp.zeros_like(value)
    axis = normalise_dim(dim, x.ndim)
    shifted = _shifted(value, axis)
    return shifted - lax.log(jnp.sum(lax.exp(shifted), axis=axis, keepdims=True))


@lowers(aten._softmax_backward_data.default)
def softmax_backward(call: Call, grad: Array, output: Array, dim: int, input_dtype: Any) -> Array:
    product = wide(grad) * wide(output)
    return product - wide(output) * jnp.sum(
        product, axis=normalise_dim(dim, grad.ndim) if grad.ndim else None, keepdims=True
    )


@lowers(aten._log_softmax_backward_data.default)
def log_softmax_backward(call: Call, grad: Array, output: Array, dim: int, input_dtype: Any) -> Array:
    g = wide(grad)
    axis = normalise_dim(dim, grad.ndim) if grad.ndim else None
    return g - lax.exp(wide(output)) * jnp.sum(g, axis=axis, keepdims=True)


# -- layer and group normalization -----------------------------------------------------------------
@lowers(aten.native_layer_norm.default)
def layer_norm(
    call: Call, x: Array, shape: Sequence[int], weight: Array | None, bias: Array | None, eps: float
) -> tuple[Array, Array, Array]:
    value = wide(x)
    axes = tuple(range(x.ndim - len(shape), x.ndim))
    spread, average = variance(value, axes, 0)
    inverse = lax.rsqrt(spread + literal(eps, value.dtype))
    result = (value - average) * inverse
    if weight is not None:
        result = result * broadcast(wide(weight), x.shape)
    if bias is not None:
        result = result + broadcast(wide(bias), x.shape)
    return result, average, inverse


@lowers(aten.native_layer_norm_backward.default)
def layer_norm_backward(
    call: Call,
    grad: Array,
    x: Array,
    shape: Sequence[int],
    mean: Array,
    inverse: Array,
    weight: Array | None,
    bias: Array | None,
    mask: Sequence[bool],
) -> tuple[Array | None, Array | None, Array | None]:
    g, value = wide(grad), wide(x)
    inner = tuple(range(x.ndim - len(shape), x.ndim))
    outer = tuple(range(x.ndim - len(shape)))
    normal = (value - wide(mean)) * wide(inverse)
    gx = gw = gb = None
    if mask[0]:
        weighted = g if weight is None else g * broadcast(wide(weight), x.shape)
        gx = _normal_gradient(weighted, normal, wide(inverse), inner)
    if mask[1] and weight is not None:
        gw = jnp.sum(g * normal, axis=outer)
    if mask[2] and (bias is not None or weight is not None):
        gb = jnp.sum(g, axis=outer)
    return gx, gw, gb


def _normal_gradient(grad: Array, normal: Array, inverse: Array, axes: tuple[int, ...]) -> Array:
    """Gradient of ``(x - mean) * inverse``, mean and variance taken over ``axes``."""
    count = literal(math.prod(grad.shape[axis] for axis in axes), grad.dtype)
    average = jnp.sum(grad, axis=axes, keepdims=True) / count
    slope = jnp.sum(grad * normal, axis=axes, keepdims=True) / count
    return (grad - average - normal * slope) * inverse


def _per_channel(values: Array, rank: int) -> Array:
    """``[C]`` as ``[1, C, 1, …]``."""
    return lax.reshape(wide(values), (1, values.shape[0], *([1] * (rank - 2))))


@lowers(aten.native_group_norm.default)
def group_norm(
    call: Call, x: Array, weight: Array | None, bias: Array | None, n: int, c: int, inner: int, groups: int, eps: float
) -> tuple[Array, Array, Array]:
    value = lax.reshape(wide(x), (n, groups, (c // groups) * inner if groups else 0))
    spread, average = variance(value, (2,), 0)
    inverse = lax.rsqrt(spread + literal(eps, value.dtype))
    result = lax.reshape((value - average) * inverse, x.shape)
    if weight is not None:
        result = result * _per_channel(weight, x.ndim)
    if bias is not None:
        result = result + _per_channel(bias, x.ndim)
    return result, lax.reshape(average, (n, groups)), lax.reshape(inverse, (n, groups))


@lowers(aten.native_group_norm_backward.default)
def group_norm_backward(
    call: Call,
    grad: Array,
    x: Array,
    mean: Array,
    inverse: Array,
    weight: Array | None,
    n: int,
    c: int,
    inner: int,
    groups: int,
    mask: Sequence[bool],
) -> tuple[Array | None, Array | None, Array | None]:
    grouped = (n, groups, (c // groups) * inner)
    rsigma = lax.reshape(wide(inverse), (n, groups, 1))
    normal = (lax.reshape(wide(x), grouped) - lax.reshape(wide(mean), (n, groups, 1))) * rsigma
    g = wide(grad)
    gx = gw = gb = None
    if mask[0]:
        weighted = g if weight is None else g * _per_channel(weight, x.ndim)
        gx = lax.reshape(_normal_gradient(lax.reshape(weighted, grouped), normal, rsigma, (2,)), x.shape)
    if mask[1]:
        gw = jnp.sum(lax.reshape(g * lax.reshape(normal, x.shape), (n, c, inner)), axis=(0, 2))
    if mask[2]:
        gb = jnp.sum(lax.reshape(g, (n, c, inner)), axis=(0, 2))
    return gx, gw, gb


# -- batch normalization ---------------------------------------------------------------------------
def _batch_axes(x: Array) -> tuple[int, ...]:
    return (0, *range(2, x.ndim))


def _normalised(x: Array, mean: Array, inverse: Array, weight: Array | None, bias: Array | None) -> Array:
    result = (wide(x) - mean) * inverse
    if weight is not None:
        result = result * _per_channel(weight, x.ndim)
    if bias is not None:
        result = result + _per_channel(bias, x.ndim)
    return result


def _train(x: Array, weight: Any, bias: Any, eps: float) -> tuple[Array, Array, Array, Array]:
    """Result, mean, inverse deviation and variance of a batch; the last three ``[C]``."""
    spread, average = variance(wide(x), _batch_axes(x), 0)
    inverse = lax.rsqrt(spread + literal(eps, spread.dtype))
    flat = (x.shape[1],)
    result = _normalised(x, average, inverse, weight, bias)
    return result, lax.reshape(average, flat), lax.reshape(inverse, flat), lax.reshape(spread, flat)


def _updated(running: Array, new: Array, momentum: float) -> Array:
    return cast((1 - momentum) * wide(running) + momentum * new, running.dtype)


def _unbiased(x: Array, spread: Array) -> Array:
    count = x.size // max(x.shape[1], 1)
    return spread * literal(count / (count - 1) if count > 1 else math.nan, spread.dtype)


@lowers(
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_no_training.default,
)
def batch_norm(call: Call, x: Array, weight: Any, bias: Any, *rest: Any) -> tuple[Array, Array, Array]:
    target = call.node.target
    if target is aten._native_batch_norm_legit.no_stats:
        mean, var, training, (_, eps) = None, None, True, rest[1:]
    elif target is aten._native_batch_norm_legit_no_training.default:
        (mean, var, _, eps), training = rest, False
    else:
        mean, var, training, _, eps = rest
    if training:
        return _train(x, weight, bias, eps)[:3]
    return _evaluate(x, weight, bias, mean, var, eps)


def _evaluate(x: Array, weight: Any, bias: Any, mean: Any, var: Any, eps: float) -> tuple[Array, Array, Array]:
    inverse = lax.rsqrt(_per_channel(var, x.ndim) + literal(eps, np.dtype(wide(var).dtype)))
    empty = jnp.zeros((0,), x.dtype)
    return _normalised(x, _per_channel(mean, x.ndim), inverse, weight, bias), empty, empty


@lowers(aten._native_batch_norm_legit_functional.default)
def batch_norm_functional(
    call: Call, x: Array, weight: Any, bias: Any, mean: Array, var: Array, training: bool, momentum: float, eps: float
) -> tuple[Array, ...]:
    if not training:
        return (*_evaluate(x, weight, bias, mean, var, eps), mean, var)
    result, average, inverse, spread = _train(x, weight, bias, eps)
    return result, average, inverse, _updated(mean, average, momentum), _updated(var, _unbiased(x, spread), momentum)


@lowers(aten._batch_norm_with_update_functional.default)
def batch_norm_with_update(
    call: Call, x: Array, weight: Any, bias: Any, mean: Array, var: Array, momentum: float, eps: float
) -> tuple[Array, ...]:
    """Training, with the statistics that follow; what cuDNN would reserve is an empty tensor of bytes."""
    result, average, inverse, spread = _train(x, weight, bias, eps)
    reserve = jnp.zeros(out_shape(call, 3), np.uint8)
    news = _updated(mean, average, momentum), _updated(var, _unbiased(x, spread), momentum)
    return result, average, inverse, reserve, *news


@lowers(aten.batch_norm_backward.default)
def batch_norm_backward_with_reserve(call: Call, *args: Any) -> tuple[Array | None, Array | None, Array | None]:
    return batch_norm_backward(call, *args[:-1])


@lowers(aten.native_batch_norm_backward.default)
def batch_norm_backward(
    call: Call,
    grad: Array,
    x: Array,
    weight: Array | None,
    running_mean: Array | None,
    running_var: Array | None,
    mean: Array | None,
    inverse: Array | None,
    train: bool,
    eps: float,
    mask: Sequence[bool],
) -> tuple[Array | None, Array | None, Array | None]:
    g, axes = wide(grad), _batch_axes(x)
    if train:
        assert mean is not None
        assert inverse is not None
        centre, scale = _per_channel(mean, x.ndim), _per_channel(inverse, x.ndim)
    else:
        assert running_mean is not None
        assert running_var is not None
        centre = _per_channel(running_mean, x.ndim)
        scale = lax.rsqrt(_per_channel(running_var, x.ndim) + eps)
    normal = (wide(x) - centre) * scale
    gx = gw = gb = None
    if mask[0]:
        weighted = g if weight is None else g * _per_channel(weight, x.ndim)
        gx = _normal_gradient(weighted, normal, scale, axes) if train else weighted * scale
    if mask[1]:
        gw = jnp.sum(g * normal, axis=axes)
    if mask[2]:
        gb = jnp.sum(g, axis=axes)
    return gx, gw, gb
