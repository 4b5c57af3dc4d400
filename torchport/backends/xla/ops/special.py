"""Special functions: Bessel and Airy functions, orthogonal polynomials, zeta, polygamma, the normal distribution.

Approximations and where each begins are those of PyTorch's CPU kernels (``aten/src/ATen/native/Math.h``), which take
most of them from Cephes; the coefficients are in :mod:`.cephes`. All are element by element.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jax.scipy import special

from . import cephes
from .pointwise import digamma
from .support import (
    Any,
    Array,
    Call,
    Sequence,
    Unary,
    cast,
    compute_dtype,
    jnp,
    lax,
    literal,
    lowers,
    math,
    np,
    operands,
)

aten = torch.ops.aten

_FLOAT64 = np.dtype(np.float64)
_INT64 = np.dtype(np.int64)
_2_OVER_PI = 2 / math.pi
_SQRT_2_OVER_PI = math.sqrt(2 / math.pi)
_1_OVER_SQRT_PI = 1 / math.sqrt(math.pi)


# -- polynomials and series ------------------------------------------------------------------------
def _horner(x: Array, coefficients: Sequence[float]) -> Array:
    """The polynomial with these coefficients, highest power first."""
    total = lax.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        total = total * x + literal(coefficient, x.dtype)
    return total


def _ratio(x: Array, above: Sequence[float], below: Sequence[float]) -> Array:
    return _horner(x, above) / _horner(x, below)


def _chebyshev_series(x: Array, coefficients: Sequence[float]) -> Array:
    """A sum of Chebyshev polynomials of ``x / 2`` by Clenshaw's recurrence, the last term halved."""
    last, before = lax.full_like(x, 0), lax.full_like(x, 0)
    total = lax.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        last, before = total, last
        total = x * last - before + literal(coefficient, x.dtype)
    return (total - before) * literal(0.5, x.dtype)


def _enter(op: Any, fn: Unary) -> None:
    @lowers(op, topic="special")
    def lower(call: Call, x: Array) -> Array:
        return fn(cast(x, compute_dtype(call)))


# -- Bessel functions --------------------------------------------------------------------------------
def _far(x: Array, order: int) -> tuple[Array, Array, Array, Array]:
    """What J and Y of order 0 or 1 share right of 5: two amplitudes, the phase, and the common factor (Hankel)."""
    z = 25 / (x * x)
    pp, pq, qp, qq = (
        (cephes.J1_PP, cephes.J1_PQ, cephes.J1_QP, cephes.J1_QQ)
        if order
        else (cephes.J0_PP, cephes.J0_PQ, cephes.J0_QP, cephes.J0_QQ)
    )
    return _ratio(z, pp, pq), 5 / x * _ratio(z, qp, qq), x - (0.75 if order else 0.25) * math.pi, lax.rsqrt(x)


def _bessel_j0(x: Array) -> Array:
    x = lax.abs(x)
    square = x * x
    near = (square - 5.78318596294678452118) * (square - 30.4712623436620863991)
    near = near * _ratio(square, cephes.J0_RP, cephes.J0_RQ)
    first, second, phase, factor = _far(x, 0)
    far = (first * lax.cos(phase) - second * lax.sin(phase)) * _SQRT_2_OVER_PI * factor
    return jnp.where(x < 1e-5, 1 - square / 4, jnp.where(x <= 5, near, far))


def _bessel_j1(x: Array) -> Array:
    distance = lax.abs(x)
    square = distance * distance
    near = _ratio(square, cephes.J1_RP, cephes.J1_RQ) * distance
    near = near * (square - 14.6819706421238932572) * (square - 49.2184563216946036703)
    first, second, phase, factor = _far(distance, 1)
    far = (first * lax.cos(phase) - second * lax.sin(phase)) * _SQRT_2_OVER_PI * factor
    found = jnp.where(distance <= 5, near, far)
    return jnp.where(x < 0, -found, found)


def _defined_right_of_zero(x: Array, found: Array, at_zero: float) -> Array:
    return jnp.where(x > 0, found, jnp.where(x == 0, literal(at_zero, x.dtype), literal(math.nan, x.dtype)))


def _bessel_y0(x: Array) -> Array:
    near = _ratio(x * x, cephes.Y0_YP, cephes.Y0_YQ) + _2_OVER_PI * lax.log(x) * _bessel_j0(x)
    first, second, phase, factor = _far(x, 0)
    far = (first * lax.sin(phase) + second * lax.cos(phase)) * _SQRT_2_OVER_PI * factor
    return _defined_right_of_zero(x, jnp.where(x <= 5, near, far), -math.inf)


def _bessel_y1(x: Array) -> Array:
    near = x * _ratio(x * x, cephes.Y1_YP, cephes.Y1_YQ) + _2_OVER_PI * (_bessel_j1(x) * lax.log(x) - 1 / x)
    first, second, phase, factor = _far(x, 1)
    far = (first * lax.sin(phase) + second * lax.cos(phase)) * _SQRT_2_OVER_PI * factor
    return _defined_right_of_zero(x, jnp.where(x <= 5, near, far), -math.inf)


def _scaled_i0(distance: Array) -> Array:
    """``exp(-x) I0(x)`` for ``x >= 0``."""
    near = _chebyshev_series(distance / 2 - 2, cephes.I0_A)
    return jnp.where(distance <= 8, near, _chebyshev_series(32 / distance - 2, cephes.I0_B) * lax.rsqrt(distance))


def _scaled_i1(distance: Array) -> Array:
    """``exp(-x) I1(x)`` for ``x >= 0``."""
    near = _chebyshev_series(distance / 2 - 2, cephes.I1_A) * distance
    return jnp.where(distance <= 8, near, _chebyshev_series(32 / distance - 2, cephes.I1_B) * lax.rsqrt(distance))


def _modified_bessel_i0(x: Array) -> Array:
    distance = lax.abs(x)
    return lax.exp(distance) * _scaled_i0(distance)


def _modified_bessel_i1(x: Array) -> Array:
    distance = lax.abs(x)
    found = lax.exp(distance) * _scaled_i1(distance)
    return jnp.where(x < 0, -found, found)


def _modified_bessel_k(order: int, scaled: bool) -> Unary:
    """K of order 0 or 1, or that times ``exp(x)``."""

    def lower(x: Array) -> Array:
        if order:
            near = lax.log(x / 2) * _modified_bessel_i1(x) + _chebyshev_series(x * x - 2, cephes.K1_A) / x
            far = _chebyshev_series(8 / x - 2, cephes.K1_B) * lax.rsqrt(x)
        else:
            near = _chebyshev_series(x * x - 2, cephes.K0_A) - lax.log(x / 2) * _modified_bessel_i0(x)
            far = _chebyshev_series(8 / x - 2, cephes.K0_B) * lax.rsqrt(x)
        found = jnp.where(x <= 2, near * lax.exp(x) if scaled else near, far if scaled else far * lax.exp(-x))
        return _defined_right_of_zero(x, found, math.inf)

    return lower


def _spherical_bessel_j0(x: Array) -> Array:
    terms = [(-1) ** k / math.factorial(2 * k + 1) for k in range(6, -1, -1)]
    near = _horner(x * x, terms)
    return jnp.where(lax.abs(x) < 0.5, near, jnp.where(jnp.isinf(x), 0, lax.sin(x) / x))


def _airy_ai(x: Array) -> Array:
    """Asymptotic forms left of -2.09 and right of 2.09, the power series between (Abramowitz and Stegun 10.4.2)."""
    distance = lax.abs(x)
    root = lax.sqrt(distance)
    zeta = 2 * distance * root / 3
    square = 1 / (zeta * zeta)
    wave = zeta + math.pi / 4
    in_phase = lax.sin(wave) * (1 + square * _ratio(square, cephes.AIRY_AFN, cephes.AIRY_AFD))
    shifted = lax.cos(wave) * _ratio(square, cephes.AIRY_AGN, cephes.AIRY_AGD) / zeta
    left = _1_OVER_SQRT_PI * lax.rsqrt(root) * (in_phase - shifted)
    right = _1_OVER_SQRT_PI * _ratio(1 / zeta, cephes.AIRY_AN, cephes.AIRY_AD) / (2 * lax.sqrt(root) * lax.exp(zeta))
    cube = x * x * x
    even, odd = lax.full_like(x, 1), x
    f, g = even, odd
    for k in range(3, 3 * 20, 3):  # at 2.09 the 20th term is 1e-30 of the sum
        even, odd = even * cube / ((k - 1) * k), odd * cube / (k * (k + 1))
        f, g = f + even, g + odd
    between = 0.355028053887817239260 * f - 0.258819403792806798405 * g
    found = jnp.where(x < -2.09, left, jnp.where(x >= 2.09, right, between))
    return jnp.where(jnp.isinf(x), literal(math.nan, x.dtype), jnp.where(x > 103.892, 0, found))


# -- the normal distribution -------------------------------------------------------------------------
def _erfcx(x: Array) -> Array:
    """``exp(x²) erfc(x)``; left of 0 by reflection."""
    distance = lax.abs(x)
    square = distance * distance
    near = lax.exp(square) * lax.erfc(distance)
    middle = jnp.where(
        distance < 8,
        _ratio(distance, cephes.ERFCX_P, cephes.ERFCX_Q),
        _ratio(distance, cephes.ERFCX_R, cephes.ERFCX_S),
    )
    far = _1_OVER_SQRT_PI * (square * (square + 4.5) + 2) / (distance * (square * (square + 5) + 3.75))
    farthest = _1_OVER_SQRT_PI / distance
    found = jnp.where(distance < 1, near, jnp.where(distance <= 50, middle, jnp.where(distance <= 5e7, far, farthest)))
    return jnp.where(x < 0, 2 * lax.exp(square) - found, found)


def _log_ndtr(x: Array) -> Array:
    t = x * math.sqrt(0.5)
    return jnp.where(x < -1, lax.log(_erfcx(-t) / 2) - t * t, lax.log1p(-lax.erfc(t) / 2))


for _op, _fn in {
    aten.special_airy_ai.default: _airy_ai,
    aten.special_bessel_j0.default: _bessel_j0,
    aten.special_bessel_j1.default: _bessel_j1,
    aten.special_bessel_y0.default: _bessel_y0,
    aten.special_bessel_y1.default: _bessel_y1,
    aten.special_modified_bessel_i0.default: _modified_bessel_i0,
    aten.special_modified_bessel_i1.default: _modified_bessel_i1,
    aten.special_modified_bessel_k0.default: _modified_bessel_k(0, False),
    aten.special_modified_bessel_k1.default: _modified_bessel_k(1, False),
    aten.special_scaled_modified_bessel_k0.default: _modified_bessel_k(0, True),
    aten.special_scaled_modified_bessel_k1.default: _modified_bessel_k(1, True),
    aten.special_spherical_bessel_j0.default: _spherical_bessel_j0,
    aten.special_erfcx.default: _erfcx,
    aten.special_log_ndtr.default: _log_ndtr,
    aten.special_ndtri.default: special.ndtri,
}.items():
    _enter(_op, _fn)


# -- zeta and polygamma ------------------------------------------------------------------------------
_EULER_MACLAURIN = [math.factorial(2 * k) for k in range(1, 13)]
_BERNOULLI = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6, -3617 / 510, 43867 / 798, -174611 / 330,
              854513 / 138, -236364091 / 2730)  # fmt: skip


def _zeta(s: Array, q: Array) -> Array:
    """Hurwitz's zeta function in float64: terms until 9 is passed, then Euler and Maclaurin's remainder.

    XLA's own is wrong left of 0.
    """
    tiny = 2.0**-53

    def more(state: tuple[Array, ...]) -> Array:
        count, a, _, _, done = state
        return jnp.any(~done & ((count < 9) | (a <= 9)))

    def add(state: tuple[Array, ...]) -> tuple[Array, ...]:
        count, a, term, total, done = state
        going = ~done & ((count < 9) | (a <= 9))
        a = jnp.where(going, a + 1, a)
        term = jnp.where(going, lax.pow(a, -s), term)
        total = jnp.where(going, total + term, total)
        return count + 1, a, term, total, done | (going & (lax.abs(term) < tiny * lax.abs(total)))

    pole = (q <= 0) & (q == lax.floor(q))
    undefined = (s < 1) | ((q <= 0) & (s != lax.floor(s)))
    outside = pole | undefined | (s == 1) | (s != s) | (q != q)
    start = lax.pow(q, -s)
    _, a, term, total, done = lax.while_loop(more, add, (jnp.zeros((), _INT64), q, lax.full_like(q, 0), start, outside))
    rest = term * a / (s - 1) - term / 2
    rising = lax.full_like(s, 1)
    for k in range(12):
        rising = rising * (s + 2 * k)
        term = term / a
        rest = rest + rising * term * (_BERNOULLI[k] / _EULER_MACLAURIN[k])
        rising, term = rising * (s + 2 * k + 1), term / a
    found = jnp.where(done, total, total + rest)
    found = jnp.where(undefined | (s != s) | (q != q), math.nan, found)
    return jnp.where((s == 1) | (pole & ~(s < 1)), math.inf, found)


@lowers(aten.special_zeta.default)
def zeta(call: Call, s: Any, q: Any) -> Array:
    return _zeta(*operands(_FLOAT64, s, q))


@lowers(aten.polygamma.default)
def polygamma(call: Call, order: int, x: Array) -> Array:
    """Derivatives of digamma: ``(-1)^(n+1) n! zeta(n + 1, x)``, for order 1 by reflection left of 1/2."""
    if order == 0:
        return digamma(call, x)
    value = cast(x, compute_dtype(call))
    if order == 1:
        # As PyTorch's trigamma: psi1(1 - x) + psi1(x) = (pi / sin(pi x))^2.
        left = lax.lt(value, lax.full_like(value, 0.5))
        mirrored = lax.select(left, 1 - value, value)
        found = lax.polygamma(*operands(value.dtype, 1, mirrored))
        found = lax.select(left, lax.integer_pow(math.pi / lax.sin(math.pi * value), 2) - found, found)
        return jnp.where(value == math.inf, 0, found)
    found = _zeta(*operands(_FLOAT64, order + 1, value))
    # PyTorch rounds the sum before it is multiplied, so what overflows there is infinite here, too.
    factor = literal(math.exp(math.lgamma(order + 1)), value.dtype)
    return (factor if order % 2 else -factor) * cast(found, value.dtype)


# -- orthogonal polynomials --------------------------------------------------------------------------
@dataclass(frozen=True)
class _Polynomial:
    """A family with a recurrence of three terms: degree 1, and the next from two before it.

    ``at_ends`` gives the values at 1 and -1, ``closed`` what is used inside for degrees above ``recurred``.
    """

    first: Unary
    step: Callable[[Array, Array, Array, Array], Array]
    """``step(k, x, last, before)``: degree ``k`` from degrees ``k - 1`` and ``k - 2``."""
    at_ends: Callable[[Array, Array], tuple[Array, Array]] | None = None
    closed: Callable[[Array, Array], Array] | None = None
    recurred: int = 0
    largest: bool = False
    """Whether there is a largest degree: 128 in float32, 512 in float64."""
    at_zero: bool = False
    """Whether the value at 0 is 1 for every degree."""


def _chebyshev_step(k: Array, x: Array, last: Array, before: Array) -> Array:
    return (x + x) * last - before


def _cosine(degree: Array, x: Array) -> Array:
    return lax.cos(degree * lax.acos(x))


def _second(degree: Array, x: Array) -> Array:
    angle = lax.acos(x)
    return lax.sin((degree + 1) * angle) / lax.sin(angle)


def _third(degree: Array, x: Array) -> Array:
    angle = lax.acos(x)
    found = lax.cos((degree + 0.5) * angle) / lax.cos(angle / 2)
    # Beside -1 both cosines are zero up to rounding.
    return jnp.where(lax.sin(angle / 2) != 1, found, _alternating(degree) * (2 * degree + 1))


def _fourth(degree: Array, x: Array) -> Array:
    angle = lax.acos(x)
    found = lax.sin((degree + 0.5) * angle) / lax.sin(angle / 2)
    return jnp.where(lax.cos(angle / 2) != 1, found, 2 * degree + 1)


def _alternating(degree: Array) -> Array:
    """1 for even degrees, -1 for odd ones."""
    return 1 - 2 * lax.rem(degree, lax.full_like(degree, 2))


def _ones(degree: Array) -> Array:
    return lax.full_like(degree, 1)


def _chebyshev(limit: Sequence[int]) -> dict[str, _Polynomial]:
    """The four kinds, each with the degree up to which the recurrence is used."""
    t, u, v, w = limit
    return {
        "t": _Polynomial(lambda x: x, _chebyshev_step, lambda n, x: (_ones(n), _alternating(n)), _cosine, t),
        "u": _Polynomial(lambda x: x + x, _chebyshev_step, lambda n, x: (n + 1, _alternating(n) * (n + 1)), _second, u),
        "v": _Polynomial(
            lambda x: x + x - 1, _chebyshev_step, lambda n, x: (_ones(n), _alternating(n) * (2 * n + 1)), _third, v
        ),
        "w": _Polynomial(lambda x: x + x + 1, _chebyshev_step, lambda n, x: (2 * n + 1, _alternating(n)), _fourth, w),
    }


_HERMITE_H = _Polynomial(lambda x: x + x, lambda k, x, q, p: (x + x) * q - 2 * (k - 1) * p, largest=True)
_HERMITE_HE = _Polynomial(lambda x: x, lambda k, x, q, p: x * q - (k - 1) * p, largest=True)
_LAGUERRE = _Polynomial(
    lambda x: 1 - x, lambda k, x, q, p: ((2 * (k - 1) + (1 - x)) * q - (k - 1) * p) / k, at_zero=True
)
_LEGENDRE = _Polynomial(
    lambda x: x,
    lambda k, x, q, p: ((2 * k - 1) * x * q - (k - 1) * p) / k,
    lambda n, x: (_ones(n), _alternating(n)),
)


def _evaluate(family: _Polynomial, x: Array, degree: Array, highest: int | None) -> Array:
    """The polynomial of each degree (int64, none below 0) at each ``x``; ``highest`` is a bound known beforehand."""
    known = lax.full_like(x, 0, np.dtype(np.bool_))
    found = lax.full_like(x, 0)
    number = cast(degree, x.dtype)

    def settle(where: Array, value: Any) -> None:
        nonlocal found, known
        found = jnp.where(where & ~known, value, found)
        known = known | where

    settle(degree < 0, 0)
    if family.at_ends is not None:
        right, left = family.at_ends(number, x)
        settle(x == 1, right)
        settle(x == -1, left)
    if family.at_zero:
        settle(x == 0, 1)
    if family.closed is not None:
        settle((degree > family.recurred) & (lax.abs(x) < 1), family.closed(number, x))
    if family.largest:
        settle(degree > (128 if x.dtype.itemsize < 8 else 512), math.nan)
    settle(degree == 0, 1)
    start = family.first(x)

    def step(k: Any, last: Array, before: Array) -> tuple[Array, Array]:
        going = (degree >= k) & (last == last)
        place = lax.full_like(x, 0) + cast(k, x.dtype)
        return jnp.where(going, family.step(place, x, last, before), last), jnp.where(going, last, before)

    last, before = start, lax.full_like(x, 1)
    if highest is not None and highest <= 16:
        for k in range(2, highest + 1):
            last, before = step(k, last, before)
    else:
        _, last, before = lax.while_loop(
            lambda state: jnp.any((degree >= state[0]) & (state[1] == state[1]) & ~known),
            lambda state: (state[0] + 1, *step(state[0], state[1], state[2])),
            (jnp.full((), 2, _INT64), last, before),
        )
    settle(jnp.ones_like(known), last)
    return found


def _degree(n: Array) -> Array:
    """A degree as int64, as C truncates it; what is no number or too large is below 0, where polynomials are 0."""
    if n.dtype.kind in "iub":
        return cast(n, _INT64)
    fits = lax.abs(n) < 2.0**63
    return jnp.where(fits, cast(jnp.where(fits, n, 0), _INT64), -1)


def _enter_polynomial(name: str, family: _Polynomial, shifted: bool = False) -> None:
    packet = getattr(aten, f"special_{name}")

    @lowers(packet.default, packet.x_scalar, packet.n_scalar, topic="special")
    def lower(call: Call, x: Any, n: Any) -> Array:
        value, degree = operands(compute_dtype(call), x, n)
        highest = int(n) if isinstance(n, (int, float)) and math.isfinite(n) else None
        argument = value + value - 1 if shifted else value
        return _evaluate(family, jnp.asarray(argument), _degree(jnp.asarray(degree)), highest)


for _kind, _family in _chebyshev((6, 8, 8, 8)).items():
    _enter_polynomial(f"chebyshev_polynomial_{_kind}", _family)
for _kind, _family in _chebyshev((6, 6, 6, 4)).items():
    _enter_polynomial(f"shifted_chebyshev_polynomial_{_kind}", _family, shifted=True)
_enter_polynomial("hermite_polynomial_h", _HERMITE_H)
_enter_polynomial("hermite_polynomial_he", _HERMITE_HE)
_enter_polynomial("laguerre_polynomial_l", _LAGUERRE)
_enter_polynomial("legendre_polynomial_p", _LEGENDRE)
