"""Activations and their gradients, computed in float32 at least and in PyTorch's order of operations."""

from __future__ import annotations

import torch

from .support import Any, Array, Call, cast, compute_dtype, jnp, lax, lowers, math, operands

aten = torch.ops.aten

_SQRT_HALF = math.sqrt(0.5)


def _value(call: Call, x: Any) -> Array:
    return cast(x, compute_dtype(call))


@lowers(aten.relu.default)
def relu(call: Call, x: Array) -> Array:
    return lax.max(x, lax.full_like(x, 0))


@lowers(aten.threshold.default)
def threshold(call: Call, x: Array, threshold: float, value: float) -> Array:
    limit, filler = operands(x.dtype, threshold, value)
    # NaN passes: the comparison is written so that it fails for NaN.
    return jnp.where(x <= limit, filler, x)


@lowers(aten.threshold_backward.default)
def threshold_backward(call: Call, grad: Array, x: Array, threshold: float) -> Array:
    return jnp.where(x <= operands(x.dtype, threshold)[0], jnp.zeros((), grad.dtype), grad)


@lowers(aten.gelu.default)
def gelu(call: Call, x: Array, *, approximate: str = "none") -> Array:
    value = _value(call, x)
    if approximate == "tanh":
        inner = math.sqrt(2 / math.pi) * (value + 0.044715 * (value * value * value))
        return 0.5 * value * (1 + lax.tanh(inner))
    return value * 0.5 * (1 + lax.erf(value * _SQRT_HALF))


@lowers(aten.gelu_backward.default)
def gelu_backward(call: Call, grad: Array, x: Array, *, approximate: str = "none") -> Array:
    g, value = _value(call, grad), _value(call, x)
    if approximate == "tanh":
        beta, kappa = math.sqrt(2 / math.pi), 0.044715
        square = value * value
        tanh = lax.tanh(beta * (value + kappa * (square * value)))
        left, right = 0.5 * value, 1 + tanh
        slope = left * (1 - tanh * tanh) * (beta * (1 + 3 * kappa * square))
        return g * (0.5 * right + slope)
    cdf = 0.5 * (1 + lax.erf(value * _SQRT_HALF))
    pdf = lax.exp(value * value * -0.5) * (1 / math.sqrt(2 * math.pi))
    return g * (cdf + value * pdf)


@lowers(aten.silu.default)
def silu(call: Call, x: Array) -> Array:
    value = _value(call, x)
    return value * lax.logistic(value)


@lowers(aten.silu_backward.default)
def silu_backward(call: Call, grad: Array, x: Array) -> Array:
    g, value = _value(call, grad), _value(call, x)
    gate = lax.logistic(value)
    return g * gate * (1 + value * (1 - gate))


@lowers(aten.sigmoid_backward.default)
def sigmoid_backward(call: Call, grad: Array, y: Array) -> Array:
    g, value = _value(call, grad), _value(call, y)
    return (
        g
        * (1 - lax.conj(value) if value.dtype.kind == "c" else 1 - value)
        * (lax.conj(value) if value.dtype.kind == "c" else value)
    )


@lowers(aten.tanh_backward.default)
def tanh_backward(call: Call, grad: Array, y: Array) -> Array:
    g, value = _value(call, grad), _value(call, y)
    square = value * value
    return g * (1 - (lax.conj(square) if value.dtype.kind == "c" else square))


@lowers(aten.elu.default)
def elu(call: Call, x: Array, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Array:
    value = _value(call, x)
    return jnp.where(value > 0, value * scale, lax.expm1(value * input_scale) * (alpha * scale))


@lowers(aten.elu_backward.default)
def elu_backward(
    call: Call, grad: Array, alpha: float, scale: float, input_scale: float, is_result: bool, x: Array
) -> Array:
    g, value = _value(call, grad), _value(call, x)
    negative = alpha * scale
    if is_result:
        slope = g * input_scale * (value + negative)
    else:
        slope = g * input_scale * negative * lax.exp(value * input_scale)
    return jnp.where(value <= 0, slope, g * scale)


@lowers(aten.leaky_relu.default)
def leaky_relu(call: Call, x: Array, negative_slope: float = 0.01) -> Array:
    value = _value(call, x)
    return jnp.where(value > 0, value, value * negative_slope)


@lowers(aten.leaky_relu_backward.default)
def leaky_relu_backward(call: Call, grad: Array, x: Array, negative_slope: float, is_result: bool) -> Array:
    g, value = _value(call, grad), _value(call, x)
    return jnp.where(value > 0, g, g * negative_slope)


@lowers(aten.hardtanh.default)
def hardtanh(call: Call, x: Array, low: float = -1, high: float = 1) -> Array:
    lower, upper = operands(x.dtype, low, high)
    return lax.clamp(lower, x, upper)


@lowers(aten.hardtanh_backward.default)
def hardtanh_backward(call: Call, grad: Array, x: Array, low: float, high: float) -> Array:
    lower, upper = operands(x.dtype, low, high)
    return jnp.where((x <= lower) | (x >= upper), jnp.zeros((), grad.dtype), grad)


@lowers(aten.hardsigmoid.default)
def hardsigmoid(call: Call, x: Array) -> Array:
    value = _value(call, x) + 3
    return lax.clamp(lax.full((), 0, value.dtype), value, lax.full((), 6, value.dtype)) / 6


@lowers(aten.hardsigmoid_backward.default)
def hardsigmoid_backward(call: Call, grad: Array, x: Array) -> Array:
    g, value = _value(call, grad), _value(call, x)
    return jnp.where((value > -3) & (value < 3), g * (1 / 6), jnp.zeros((), g.dtype))


@lowers(aten.hardswish.default)
def hardswish(call: Call, x: Array) -> Array:
    value = _value(call, x)
    return value * lax.clamp(jnp.zeros((), value.dtype), value + 3, jnp.full((), 6, value.dtype)) / 6


@lowers(aten.hardswish_backward.default)
def hardswish_backward(call: Call, grad: Array, x: Array) -> Array:
    g, value = _value(call, grad), _value(call, x)
    inner = jnp.where(value <= 3, g * (value / 3 + 0.5), g)
    return jnp.where(value <= -3, jnp.zeros((), g.dtype), inner)


@lowers(aten.softplus.default)
def softplus(call: Call, x: Array, beta: float = 1, threshold: float = 20) -> Array:
    value = _value(call, x)
    return jnp.where(value * beta > threshold, value, lax.log1p(lax.exp(value * beta)) / beta)


@lowers(aten.softplus_backward.default)
def softplus_backward(call: Call, grad: Array, x: Array, beta: float, threshold: float) -> Array:
    g, value = _value(call, grad), _value(call, x)
    return jnp.where(value * beta > threshold, g, g * lax.logistic(value * beta))


@lowers(aten.mish.default)
def mish(call: Call, x: Array) -> Array:
    value = _value(call, x)
    return value * lax.tanh(jnp.logaddexp(value, jnp.zeros((), value.dtype)))


@lowers(aten.log_sigmoid_forward.default)
def log_sigmoid_forward(call: Call, x: Array) -> tuple[Array, Array]:
    value = cast(x, compute_dtype(call, 0))
    low = lax.min(value, lax.full_like(value, 0))
    small = lax.exp(lax.neg(lax.abs(value)))
    # The CPU keeps exp(-|x|) for the backward pass; other devices keep nothing.
    buffer = small if tuple(call.val[1].shape) == x.shape else jnp.zeros(call.val[1].shape, x.dtype)
    return low - lax.log1p(small), buffer
