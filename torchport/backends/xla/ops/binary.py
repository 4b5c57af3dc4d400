"""Operators of two or more arguments, element by element, with PyTorch's type promotion."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jax.scipy import special

from .support import (
    Any,
    Array,
    Call,
    cast,
    compute_dtype,
    jnp,
    lax,
    literal,
    lowers,
    np,
    operands,
    out_dtype,
    promoted,
    wide_dtype,
)

aten = torch.ops.aten

_BOOL = np.dtype(np.bool_)


# -- arithmetic ------------------------------------------------------------------------------------
def _scaled(dtype: np.dtype[Any], y: Any, alpha: Any) -> Any:
    if not isinstance(alpha, bool) and alpha == 1:
        return y
    if isinstance(y, (bool, int, float, complex)):
        return y * alpha
    return lax.mul(*operands(dtype, y, alpha)) if dtype != _BOOL else (y if alpha else lax.full_like(y, False))


@lowers(aten.add.Tensor, aten.add.Scalar)
def add(call: Call, x: Any, y: Any, alpha: Any = 1) -> Array:
    dtype = compute_dtype(call)
    if dtype == _BOOL:
        return lax.bitwise_or(*operands(dtype, x, _scaled(dtype, y, alpha)))
    return lax.add(*operands(dtype, x, _scaled(dtype, y, alpha)))


@lowers(aten.sub.Tensor, aten.sub.Scalar)
def sub(call: Call, x: Any, y: Any, alpha: Any = 1) -> Array:
    dtype = compute_dtype(call)
    return lax.sub(*operands(dtype, x, _scaled(dtype, y, alpha)))


@lowers(aten.rsub.Tensor, aten.rsub.Scalar)
def rsub(call: Call, x: Any, y: Any, alpha: Any = 1) -> Array:
    dtype = compute_dtype(call)
    return lax.sub(*operands(dtype, y, _scaled(dtype, x, alpha)))


@lowers(aten.mul.Tensor, aten.mul.Scalar)
def mul(call: Call, x: Any, y: Any) -> Array:
    dtype = compute_dtype(call)
    return (lax.bitwise_and if dtype == _BOOL else lax.mul)(*operands(dtype, x, y))


@lowers(aten.div.Tensor, aten.div.Scalar, aten.true_divide.Tensor)
def div(call: Call, x: Any, y: Any) -> Array:
    return lax.div(*operands(compute_dtype(call), x, y))


@lowers(aten.div.Tensor_mode, aten.div.Scalar_mode)
def div_mode(call: Call, x: Any, y: Any, *, rounding_mode: str | None = None) -> Array:
    a, b = operands(compute_dtype(call), x, y)
    if rounding_mode is None:
        return lax.div(a, b)
    if rounding_mode == "floor":
        return _floor_divide(a, b)
    # The CPU rounds the quotient of half precision before it is cut.
    quotient = cast(cast(lax.div(a, b), out_dtype(call)), a.dtype)
    return quotient if a.dtype.kind in "iu" else lax.select(quotient < 0, lax.ceil(quotient), lax.floor(quotient))


def _floor_divide(a: Array, b: Array) -> Array:
    if a.dtype.kind in "iu":
        return jnp.floor_divide(a, b)
    # c10/util/generic_math.h (div_floor_floating): exact remainder first, then one rounding.
    remainder = lax.rem(a, b)
    quotient = (a - remainder) / b
    quotient = jnp.where((remainder != 0) & ((b < 0) != (remainder < 0)), quotient - 1, quotient)
    floored = lax.floor(quotient)
    floored = jnp.where(quotient - floored > 0.5, floored + 1, floored)
    floored = jnp.where(quotient == 0, lax.mul(jnp.zeros((), a.dtype), a / b), floored)
    return jnp.where(b == 0, a / b, floored)


@lowers(aten.floor_divide.default, aten.floor_divide.Scalar)
def floor_divide(call: Call, x: Any, y: Any) -> Array:
    return _floor_divide(*operands(compute_dtype(call), x, y))


@lowers(aten.remainder.Tensor, aten.remainder.Scalar, aten.remainder.Scalar_Tensor)
def remainder(call: Call, x: Any, y: Any) -> Array:
    a, b = operands(compute_dtype(call), x, y)
    rest = lax.rem(a, b)
    if a.dtype.kind == "u":
        return rest
    zero = lax.full_like(rest, 0)
    return lax.select((rest != zero) & ((rest < zero) != (b < zero)), lax.add(rest, b), rest)


@lowers(aten.fmod.Tensor, aten.fmod.Scalar)
def fmod(call: Call, x: Any, y: Any) -> Array:
    return lax.rem(*operands(compute_dtype(call), x, y))


@lowers(aten.pow.Tensor_Tensor, aten.pow.Scalar)
def power(call: Call, x: Any, y: Any) -> Array:
    dtype = compute_dtype(call)
    a, b = operands(dtype, x, y)
    return _integer_power(a, b) if dtype.kind in "iu" else lax.pow(a, b)


def _integer_power(a: Array, b: Array) -> Array:
    if b.dtype.kind == "u":
        return jnp.power(a, b)
    # PyTorch: a negative exponent gives 0, except for bases 1 and -1.
    result = jnp.power(a, lax.max(b, lax.full_like(b, 0)))
    odd = lax.bitwise_and(b, lax.full_like(b, 1)) == 1
    inverse = jnp.where(a == 1, 1, jnp.where(a == -1, jnp.where(odd, -1, 1), 0)).astype(a.dtype)
    return lax.select(b < 0, inverse, result)


@lowers(aten.pow.Tensor_Scalar)
def power_scalar(call: Call, x: Array, exponent: Any) -> Array:
    dtype = compute_dtype(call)
    value = cast(x, dtype)
    if isinstance(exponent, float) and exponent.is_integer() and abs(exponent) <= 3:
        exponent = int(exponent)
    if isinstance(exponent, int) and (abs(exponent) <= 3 if dtype.kind not in "iu" else exponent >= 0):
        return lax.integer_pow(value, exponent)
    if exponent == 0.5 and dtype.kind != "c":
        return lax.sqrt(value)
    if exponent == -0.5 and dtype.kind != "c":
        return lax.rsqrt(value)
    return power(call, value, exponent)


# -- one function of jax.lax each, computed in the result's type -----------------------------------
def _plain(fn: Callable[[Any, Any], Any], *ops: Any) -> None:
    @lowers(*ops, topic="binary")
    def lower(call: Call, x: Any, y: Any) -> Array:
        return fn(*operands(compute_dtype(call), x, y))


def _maximum_number(a: Array, b: Array) -> Array:
    return jnp.where(a != a, b, jnp.where(b != b, a, lax.max(a, b)))


def _minimum_number(a: Array, b: Array) -> Array:
    return jnp.where(a != a, b, jnp.where(b != b, a, lax.min(a, b)))


def _xlogy(x: Array, y: Array) -> Array:
    return jnp.where(y != y, y, jnp.where(x == 0, jnp.zeros((), x.dtype), x * lax.log(y)))


def _logaddexp2(a: Array, b: Array) -> Array:
    return jnp.logaddexp2(a, b)


@lowers(aten.xlogy.Scalar_Self, aten.xlogy.Scalar_Other, topic="binary")
def xlogy_scalar(call: Call, x: Any, y: Any) -> Array:
    """A number is first one of the result's dtype, as PyTorch has it: 70,000 in float16 is infinite."""
    dtype = out_dtype(call)
    return _xlogy(*operands(compute_dtype(call), *(cast(one, dtype) for one in (x, y))))


_plain(lax.atan2, aten.atan2.default)
_plain(lax.max, aten.maximum.default, aten.clamp_min.default, aten.clamp_min.Tensor)
_plain(lax.min, aten.minimum.default, aten.clamp_max.default, aten.clamp_max.Tensor)
_plain(_maximum_number, aten.fmax.default)
_plain(_minimum_number, aten.fmin.default)
_plain(jnp.hypot, aten.hypot.default)
_plain(jnp.copysign, aten.copysign.Tensor, aten.copysign.Scalar)
_plain(jnp.logaddexp, aten.logaddexp.default)
_plain(_logaddexp2, aten.logaddexp2.default)
_plain(_xlogy, aten.xlogy.Tensor)
_plain(jnp.gcd, aten.gcd.default)
_plain(jnp.lcm, aten.lcm.default)
_plain(special.gammainc, aten.igamma.default)
_plain(special.gammaincc, aten.igammac.default)


@lowers(aten.nextafter.default)
def nextafter(call: Call, x: Array, y: Array) -> Array:
    return lax.nextafter(*operands(out_dtype(call), x, y))


@lowers(aten.heaviside.default)
def heaviside(call: Call, x: Array, values: Array) -> Array:
    a, b = operands(out_dtype(call), x, values)
    return jnp.where(a == 0, b, (a > 0).astype(a.dtype))


# -- bits ------------------------------------------------------------------------------------------
def _bitwise(fn: Callable[[Any, Any], Any], name: str) -> None:
    packet = getattr(aten, name)
    ops = [getattr(packet, overload) for overload in ("Tensor", "Scalar", "Scalar_Tensor") if overload in dir(packet)]
    short = getattr(aten, f"__{name.removeprefix('bitwise_')}__")

    @lowers(*ops, short.Tensor, short.Scalar, topic="binary")
    def lower(call: Call, x: Any, y: Any) -> Array:
        return fn(*operands(out_dtype(call), x, y))


_bitwise(lax.bitwise_and, "bitwise_and")
_bitwise(lax.bitwise_or, "bitwise_or")
_bitwise(lax.bitwise_xor, "bitwise_xor")


def _in_range(y: Array) -> Array:
    bits = 8 * y.dtype.itemsize
    inside = y < literal(bits, y.dtype)
    return inside & (y >= literal(0, y.dtype)) if y.dtype.kind == "i" else inside


@lowers(
    aten.__lshift__.Scalar, aten.__lshift__.Tensor,
    aten.bitwise_left_shift.Tensor, aten.bitwise_left_shift.Tensor_Scalar, aten.bitwise_left_shift.Scalar_Tensor,
)  # fmt: skip
def left_shift(call: Call, x: Any, y: Any) -> Array:
    dtype = out_dtype(call)
    if dtype.kind not in "iu":
        return lax.mul(*operands(dtype, x, jnp.exp2(cast(y, dtype))))
    a, b = operands(dtype, x, y)
    return lax.select(jnp.broadcast_to(_in_range(b), a.shape), lax.shift_left(a, b), lax.full_like(a, 0))


@lowers(
    aten.__rshift__.Scalar, aten.__rshift__.Tensor,
    aten.bitwise_right_shift.Tensor, aten.bitwise_right_shift.Tensor_Scalar, aten.bitwise_right_shift.Scalar_Tensor,
)  # fmt: skip
def right_shift(call: Call, x: Any, y: Any) -> Array:
    dtype = out_dtype(call)
    if dtype.kind not in "iu":
        return lax.div(*operands(dtype, x, jnp.exp2(cast(y, dtype))))
    a, b = operands(dtype, x, y)
    if dtype.kind == "u":
        return lax.select(jnp.broadcast_to(_in_range(b), a.shape), lax.shift_right_logical(a, b), lax.full_like(a, 0))
    if isinstance(y, int) and 0 <= y < 8 * dtype.itemsize:
        return lax.shift_right_arithmetic(a, b)
    # A shift by all bits or more leaves the sign.
    most = lax.full_like(b, 8 * dtype.itemsize - 1)
    return lax.shift_right_arithmetic(a, lax.select(jnp.broadcast_to(_in_range(b), b.shape), b, most))


# -- comparisons and logic -------------------------------------------------------------------------
def _comparison(fn: Callable[[Any, Any], Any], name: str) -> None:
    packet = getattr(aten, name)

    @lowers(packet.Tensor, packet.Scalar, topic="binary")
    def lower(call: Call, x: Any, y: Any) -> Array:
        return fn(*operands(promoted(call), x, y))


for _name, _fn in {"eq": lax.eq, "ne": lax.ne, "lt": lax.lt, "le": lax.le, "gt": lax.gt, "ge": lax.ge}.items():
    _comparison(_fn, _name)


def _logical(fn: Callable[[Any, Any], Any], op: Any) -> None:
    @lowers(op, topic="binary")
    def lower(call: Call, x: Any, y: Any) -> Array:
        return fn(*operands(_BOOL, x, y))


_logical(lax.bitwise_and, aten.logical_and.default)
_logical(lax.bitwise_or, aten.logical_or.default)
_logical(lax.bitwise_xor, aten.logical_xor.default)


# -- three arguments -------------------------------------------------------------------------------
@lowers(aten.where.self, aten.where.ScalarSelf, aten.where.ScalarOther, aten.where.Scalar)
def where(call: Call, condition: Array, x: Any, y: Any) -> Array:
    shape = tuple(call.val.shape)
    a, b = (jnp.broadcast_to(value, shape) for value in operands(out_dtype(call), x, y))
    return lax.select(jnp.broadcast_to(cast(condition, _BOOL), shape), a, b)


@lowers(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def masked_fill(call: Call, x: Array, mask: Array, value: Any) -> Array:
    return where(call, mask, value, x)


@lowers(aten.clamp.default, aten.clamp.Tensor)
def clamp(call: Call, x: Array, low: Any = None, high: Any = None) -> Array:
    dtype = compute_dtype(call)
    value = cast(x, dtype)
    if low is not None:
        value = lax.max(*operands(dtype, value, low))
    if high is not None:
        value = lax.min(*operands(dtype, value, high))
    return value


@lowers(aten.addcmul.default)
def addcmul(call: Call, x: Array, y: Array, z: Array, *, value: Any = 1) -> Array:
    dtype = compute_dtype(call)
    a, b, c = operands(dtype, x, y, z)
    return a + (b * c if value == 1 else literal(value, dtype) * b * c)


@lowers(aten.addcdiv.default)
def addcdiv(call: Call, x: Array, y: Array, z: Array, *, value: Any = 1) -> Array:
    dtype = compute_dtype(call)
    a, b, c = operands(dtype, x, y, z)
    return a + (b / c if value == 1 else literal(value, dtype) * b / c)


@lowers(aten.lerp.Scalar, aten.lerp.Tensor)
def lerp(call: Call, x: Array, end: Array, weight: Any) -> Array:
    dtype = wide_dtype(out_dtype(call))
    a, b, w = operands(dtype, x, end, weight)
    difference = b - a
    if isinstance(weight, (int, float)):
        return a + w * difference if abs(weight) < 0.5 else b - difference * (1 - w)
    return jnp.where(abs(w) < 0.5, a + w * difference, b - difference * (1 - w))


@lowers(aten.complex.default)
def complex_(call: Call, real: Array, imaginary: Array) -> Array:
    return lax.complex(*operands(np.dtype(real.dtype), real, imaginary))


@lowers(aten.polar.default)
def polar(call: Call, size: Array, angle: Array) -> Array:
    size, angle = operands(np.dtype(size.dtype), size, angle)
    return lax.complex(size * lax.cos(angle), size * lax.sin(angle))


@lowers(aten.ldexp.Tensor)
def ldexp(call: Call, x: Array, exponent: Array) -> Array:
    x, exponent = operands(compute_dtype(call), x, exponent)
    return x * lax.pow(lax.full_like(exponent, 2), exponent)
