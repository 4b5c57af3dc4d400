"""Operators of one argument, element by element."""

from __future__ import annotations

import torch
from jax.scipy import special

from .support import (
    Any,
    Array,
    Call,
    Unary,
    cast,
    compute_dtype,
    jnp,
    lax,
    literal,
    lowers,
    math,
    np,
    out_dtype,
    out_shape,
    wide,
)

aten = torch.ops.aten


# -- functions whose result is floating-point, integers included -----------------------------------
def _float(op: Any, fn: Unary) -> None:
    @lowers(op, topic="pointwise")
    def lower(call: Call, x: Array) -> Array:
        return fn(cast(x, compute_dtype(call)))


def _reciprocal(x: Array) -> Array:
    return lax.div(lax.full_like(x, 1), x)


def _log_base(base: float) -> Unary:
    def log(x: Array) -> Array:
        made = lax.log(x)
        if x.dtype.kind == "c":  # each part by itself: of 0 one is infinite, and the other 0
            scale = 1 / math.log(base)
            real, imaginary = lax.real(made), lax.imag(made)
            return lax.complex(real * literal(scale, real.dtype), imaginary * literal(scale, real.dtype))
        return lax.mul(made, literal(1 / math.log(base), x.dtype))

    return log


def _sinc(x: Array) -> Array:
    zero = lax.eq(x, lax.full_like(x, 0))
    angle = lax.mul(lax.select(zero, lax.full_like(x, 1), x), literal(math.pi, x.dtype))
    return lax.select(zero, lax.full_like(x, 1), lax.div(lax.sin(angle), angle))


for _op, _fn in {
    aten.acos.default: lax.acos,
    aten.acosh.default: lax.acosh,
    aten.asin.default: lax.asin,
    aten.asinh.default: lax.asinh,
    aten.atan.default: lax.atan,
    aten.atanh.default: lax.atanh,
    aten.cos.default: lax.cos,
    aten.cosh.default: lax.cosh,
    aten.sin.default: lax.sin,
    aten.sinh.default: lax.sinh,
    aten.tan.default: lax.tan,
    aten.tanh.default: lax.tanh,
    aten.exp.default: lax.exp,
    aten.exp2.default: lax.exp2,
    aten.expm1.default: lax.expm1,
    aten.log.default: lax.log,
    aten.log10.default: _log_base(10),
    aten.log1p.default: lax.log1p,
    aten.log2.default: _log_base(2),
    aten.sqrt.default: lax.sqrt,
    aten.rsqrt.default: lax.rsqrt,
    aten.reciprocal.default: _reciprocal,
    aten.sigmoid.default: lax.logistic,
    aten.erf.default: lax.erf,
    aten.erfc.default: lax.erfc,
    aten.erfinv.default: lax.erf_inv,
    aten.lgamma.default: lax.lgamma,
    aten.sinc.default: _sinc,
    aten.i0.default: special.i0,
    aten.special_i0e.default: special.i0e,
    aten.special_i1.default: special.i1,
    aten.special_i1e.default: special.i1e,
}.items():
    _float(_op, _fn)


# -- functions that keep the dtype -----------------------------------------------------------------
def _rounding(op: Any, fn: Unary) -> None:
    @lowers(op, topic="pointwise")
    def lower(call: Call, x: Array) -> Array:
        return x if x.dtype.kind in "iub" else fn(x)


def _round_even(x: Array) -> Array:
    return lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)


def _trunc(x: Array) -> Array:
    # The sign of zero stays: -0.5 becomes -0.0.
    return lax.select(lax.lt(x, lax.full_like(x, 0)), lax.ceil(x), lax.floor(x))


for _op, _fn in {
    aten.ceil.default: lax.ceil,
    aten.floor.default: lax.floor,
    aten.round.default: _round_even,
    aten.trunc.default: _trunc,
}.items():
    _rounding(_op, _fn)


@lowers(aten.round.decimals)
def round_decimals(call: Call, x: Array, *, decimals: int) -> Array:
    if x.dtype.kind in "iu":
        return x
    value = wide(x)
    scale = literal(10.0 ** abs(decimals), value.dtype)
    if decimals < 0:
        return lax.mul(_round_even(lax.div(value, scale)), scale)
    return lax.div(_round_even(lax.mul(value, scale)), scale)


@lowers(aten.abs.default)
def absolute(call: Call, x: Array) -> Array:
    return x if x.dtype.kind in "ub" else lax.abs(x)


@lowers(aten.neg.default)
def negative(call: Call, x: Array) -> Array:
    return lax.neg(x)


@lowers(aten.sign.default)
def sign(call: Call, x: Array) -> Array:
    if x.dtype.kind == "b":
        return x
    # PyTorch gives 0 for NaN.
    return lax.select(lax.ne(x, x), lax.full_like(x, 0), lax.sign(x)) if x.dtype.kind not in "iu" else lax.sign(x)


@lowers(aten.sgn.default)
def sgn(call: Call, x: Array) -> Array:
    return lax.sign(x) if x.dtype.kind == "c" else sign(call, x)


@lowers(aten.positive.default, aten.clone.default, aten.alias.default, aten.detach.default, aten.lift_fresh.default)
def same(call: Call, x: Array, **kwargs: Any) -> Array:
    return x


@lowers(
    aten.conj_physical.default,
    aten._conj_physical.default,
    aten._conj.default,
    aten.resolve_conj.default,
    aten.resolve_neg.default,
)
def conjugate(call: Call, x: Array) -> Array:
    resolves = call.node.target in (aten.resolve_conj.default, aten.resolve_neg.default)
    return lax.conj(x) if x.dtype.kind == "c" and not resolves else x


@lowers(aten._to_copy.default)
def to_copy(call: Call, x: Array, **kwargs: Any) -> Array:
    if x.dtype.kind not in "biuc" and out_dtype(call).kind in "iu":
        return _float_to_integer(x, out_dtype(call))
    return x


def _float_to_integer(x: Array, dtype: np.dtype[Any]) -> Array:
    """Truncation; what does not fit wraps around by way of int64, as C's conversions do on x86-64."""
    if dtype.itemsize == 8:
        return cast(x, dtype)
    return cast(cast(x, np.dtype(np.int64)), dtype)


@lowers(aten.angle.default)
def angle(call: Call, x: Array) -> Array:
    if x.dtype.kind == "c":
        return lax.atan2(lax.imag(x), lax.real(x))
    value = cast(x, compute_dtype(call))
    negative = lax.lt(value, lax.full_like(value, 0))
    result = lax.select(negative, lax.full_like(value, math.pi), lax.full_like(value, 0))
    return lax.select(lax.ne(value, value), value, result)


# -- predicates ------------------------------------------------------------------------------------
@lowers(aten.isnan.default)
def isnan(call: Call, x: Array) -> Array:
    return lax.ne(x, x)


@lowers(aten.isinf.default)
def isinf(call: Call, x: Array) -> Array:
    if x.dtype.kind in "iub":
        return lax.full(x.shape, False)
    if x.dtype.kind == "c":
        return jnp.isinf(x)
    return lax.eq(lax.abs(x), lax.full_like(x, np.inf))


@lowers(aten.isfinite.default)
def isfinite(call: Call, x: Array) -> Array:
    return jnp.isfinite(x)


@lowers(aten.isposinf.default)
def isposinf(call: Call, x: Array) -> Array:
    return lax.full(x.shape, False) if x.dtype.kind in "iub" else lax.eq(x, lax.full_like(x, np.inf))


@lowers(aten.isneginf.default)
def isneginf(call: Call, x: Array) -> Array:
    return lax.full(x.shape, False) if x.dtype.kind in "iub" else lax.eq(x, lax.full_like(x, -np.inf))


@lowers(aten.signbit.default)
def signbit(call: Call, x: Array) -> Array:
    if x.dtype.kind in "ub":
        return lax.full(x.shape, False)
    return jnp.signbit(wide(x)) if x.dtype.kind == "f" or x.dtype.kind == "V" else lax.lt(x, lax.full_like(x, 0))


@lowers(aten.logical_not.default)
def logical_not(call: Call, x: Array) -> Array:
    return lax.bitwise_not(cast(x, np.dtype(np.bool_)))


@lowers(aten.bitwise_not.default)
def bitwise_not(call: Call, x: Array) -> Array:
    return lax.bitwise_not(x)


@lowers(aten.nan_to_num.default)
def nan_to_num(
    call: Call, x: Array, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> Array:
    if x.dtype.kind in "iub":
        return x
    return jnp.nan_to_num(x, nan=nan or 0.0, posinf=posinf, neginf=neginf)


@lowers(aten.digamma.default)
def digamma(call: Call, x: Array) -> Array:
    value = cast(x, compute_dtype(call))
    # PyTorch: -inf at +0, +inf at -0, NaN at negative integers.
    zero = lax.eq(value, lax.full_like(value, 0))
    pole = lax.neg(lax.div(lax.full_like(value, 1), value))
    return lax.select(zero, pole, lax.digamma(value))


@lowers(aten.real.default, aten.imag.default)
def real_imag(call: Call, x: Array) -> Array:
    if x.dtype.kind != "c":
        return x
    return lax.real(x) if call.node.target is aten.real.default else lax.imag(x)


@lowers(aten.frexp.Tensor)
def frexp(call: Call, x: Array) -> tuple[Array, Array]:
    """Mantissas from 1/2 to 1 and exponents (int32); what is not finite is its own mantissa, with exponent 0."""
    # By bits: arithmetic takes numbers below the smallest normal one for zero.
    value = wide(x)
    info = np.finfo(value.dtype)
    word = np.dtype(f"uint{info.bits}")
    bits = lax.bitcast_convert_type(value, word)
    fraction_mask, field_mask = word.type((1 << info.nmant) - 1), word.type((1 << info.nexp) - 1)
    fraction, field = bits & fraction_mask, (bits >> word.type(info.nmant)) & field_mask
    small = lax.eq(field, lax.full_like(field, 0))
    shift = lax.sub(lax.clz(fraction), lax.full_like(fraction, info.nexp))  # brings a small number's first bit in place
    exponent = jnp.where(small, 1 - shift.astype(np.int32), field.astype(np.int32)) + np.int32(info.minexp)
    fraction = jnp.where(small, fraction << shift, fraction) & fraction_mask
    half = word.type((-info.minexp) << info.nmant)  # the exponent's field of numbers from 1/2 to 1
    sign = bits & word.type(1 << (info.bits - 1))
    mantissa = lax.bitcast_convert_type(sign | half | fraction, value.dtype)
    plain = lax.bitwise_or(lax.eq(field, lax.full_like(field, field_mask)), lax.eq(bits, sign))
    return jnp.where(plain, value, mantissa), jnp.where(plain, 0, exponent)


@lowers(aten.frac.default)
def frac(call: Call, x: Array) -> Array:
    return lax.sub(x, _trunc(x))


@lowers(aten.logit.default)
def logit(call: Call, x: Array, eps: float | None = None) -> Array:
    value = cast(x, compute_dtype(call))
    if eps is not None:
        low, high = lax.full_like(value, eps), lax.full_like(value, 1 - eps)
        # No clamp: with eps above a half it would choose the other bound than PyTorch.
        value = lax.select(lax.lt(value, low), low, lax.select(lax.gt(value, high), high, value))
    return lax.log(lax.div(value, lax.sub(lax.full(out_shape(call), literal(1, value.dtype)), value)))
