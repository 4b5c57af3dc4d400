"""Special functions of one argument: Chebyshev series, fitted to PyTorch's float64 functions, and what is made of them.

OpenVINO's opset has none of them. A formula is written once, on a :class:`_Maths`, and read twice: by NumPy, where a
series is fitted, and by the writer, where it becomes nodes of the graph, which the engine compiles to one loop.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Final

import numpy
import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes  # type: ignore[attr-defined]

from .writer import Writer, float_result, rule

aten = torch.ops.aten

_ROOT_OF_2: Final = math.sqrt(2.0)
_EULER_MACLAURIN: Final = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66)
"""Bernoulli's numbers of index 2, 4, …: the terms of the expansions for large arguments."""
_SHIFT: Final = 8
"""How far the gamma function's kin move an argument up, to where their expansions for large ones hold."""


class Made:
    """An output of the graph that is being written, with Python's operators."""

    def __init__(self, w: Writer, made: Any) -> None:
        self.w, self.made = w, made

    def _with(self, name: str, other: Any, swapped: bool = False) -> Made:
        pair = [self.made, other.made if isinstance(other, Made) else self.w.value(float(other))]
        return Made(self.w, getattr(self.w.ops, name)(*(pair[::-1] if swapped else pair)).output(0))

    def __add__(self, other: Any) -> Made:
        return self._with("add", other)

    def __sub__(self, other: Any) -> Made:
        return self._with("subtract", other)

    def __mul__(self, other: Any) -> Made:
        return self._with("multiply", other)

    def __truediv__(self, other: Any) -> Made:
        return self._with("divide", other)

    def __rsub__(self, other: Any) -> Made:
        return self._with("subtract", other, swapped=True)

    def __rtruediv__(self, other: Any) -> Made:
        return self._with("divide", other, swapped=True)

    __radd__, __rmul__ = __add__, __mul__

    def __neg__(self) -> Made:
        return self._one("negative")

    def __lt__(self, other: Any) -> Made:
        return self._with("less", other)

    def __gt__(self, other: Any) -> Made:
        return self._with("greater", other)

    def same(self, other: Any) -> Made:
        """Where both are equal, as bools."""
        return self._with("equal", other)

    def _one(self, name: str) -> Made:
        return Made(self.w, getattr(self.w.ops, name)(self.made).output(0))

    def exp(self) -> Made:
        return self._one("exp")

    def log(self) -> Made:
        return self._one("log")

    def sqrt(self) -> Made:
        return self._one("sqrt")

    def sin(self) -> Made:
        return self._one("sin")

    def cos(self) -> Made:
        return self._one("cos")

    def tan(self) -> Made:
        return self._one("tan")

    def floor(self) -> Made:
        return self._one("floor")

    def size(self) -> Made:
        """The absolute value."""
        return self._one("abs")

    def at_least(self, bound: float) -> Made:
        """The larger of the value and a number."""
        return self._with("maximum", bound)

    def at_most(self, bound: float) -> Made:
        """The smaller of the value and a number."""
        return self._with("minimum", bound)

    def choose(self, yes: Any, no: Any) -> Made:
        """``yes`` where this bool holds, else ``no``."""
        pair = [one.made if isinstance(one, Made) else self.w.value(float(one)) for one in (yes, no)]
        return Made(self.w, self.w.ops.select(self.made, *pair).output(0))


def _nodes(degree: int) -> Any:
    """Chebyshev's points of a series: float64, [degree + 1]."""
    return numpy.cos(numpy.pi * (numpy.arange(degree + 1) + 0.5) / (degree + 1))


@functools.cache
def _series(function: Callable[[Any], Any], low: float, high: float, degree: int) -> tuple[float, ...]:
    """The Chebyshev coefficients of a function of NumPy's on [low, high]."""
    points = _nodes(degree)
    with _disable_current_modes():
        values = function((points + 1) * (high - low) / 2 + low)
    return tuple(float(c) for c in numpy.polynomial.chebyshev.chebfit(points, values, degree))


def _summed(x: Made, function: Callable[[Any], Any], low: float, high: float, degree: int) -> Made:
    """A series of a function at ``x``, by Clenshaw's recurrence. ``x`` is brought within [low, high] first."""
    coefficients = _series(function, low, high, degree)
    t = (x.at_least(low).at_most(high) - low) * (2 / (high - low)) - 1.0
    twice = t * 2.0
    last, now = None, t * 0.0 + coefficients[-1]
    for coefficient in coefficients[-2:0:-1]:
        last, now = now, twice * now + coefficient if last is None else twice * now - last + coefficient
    made = t * now + coefficients[0]
    return made if last is None else made - last


def _torch(function: Callable[..., torch.Tensor]) -> Callable[[Any], Any]:
    """A function of PyTorch's on float64, for arrays."""
    return lambda x: function(torch.from_numpy(numpy.ascontiguousarray(x))).numpy()


# -- Bessel functions ------------------------------------------------------------------------------------------------
_i0e, _i1e = _torch(torch.special.i0e), _torch(torch.special.i1e)
_j0, _j1 = _torch(torch.special.bessel_j0), _torch(torch.special.bessel_j1)
_y0, _y1 = _torch(torch.special.bessel_y0), _torch(torch.special.bessel_y1)
_k0, _k1 = _torch(torch.special.modified_bessel_k0), _torch(torch.special.modified_bessel_k1)
_k0e, _k1e = _torch(torch.special.scaled_modified_bessel_k0), _torch(torch.special.scaled_modified_bessel_k1)
_i0, _i1 = _torch(torch.special.i0), _torch(torch.special.i1)


def _i0e_far(u: Any) -> Any:
    return _i0e(1 / u) / numpy.sqrt(u)


def _i1e_near(x: Any) -> Any:
    return _i1e(x) / x


def _i1e_far(u: Any) -> Any:
    return _i1e(1 / u) / numpy.sqrt(u)


def _scaled_i(x: Made, order: int) -> Made:
    """``exp(-|x|)`` times the modified function of the first kind."""
    size = x.size()
    inverse = 1.0 / size.at_least(8.0)
    root = inverse.sqrt()
    if order == 0:
        far = _summed(inverse, _i0e_far, 1e-12, 0.125, 8) * root
        return (size > 8.0).choose(far, _summed(size, _i0e, 0.0, 8.0, 20))
    far = _summed(inverse, _i1e_far, 1e-12, 0.125, 8) * root
    far = (x < 0.0).choose(-far, far)
    return (size > 8.0).choose(far, _summed(size, _i1e_near, 1e-9, 8.0, 20) * x)


def _plain_i(x: Made, order: int) -> Made:
    """Without the factor. In two halves: the exponential alone is infinite sooner than the function."""
    half = (x.size() * 0.5).exp()
    return _scaled_i(x, order) * half * half


def _k0_near(square: Any) -> Any:
    x = numpy.sqrt(square)
    return _k0(x) + numpy.log(x / 2) * _i0(x)


def _k1_near(square: Any) -> Any:
    x = numpy.sqrt(square)
    return x * (_k1(x) - numpy.log(x / 2) * _i1(x))


def _k0_far(u: Any) -> Any:
    return _k0e(1 / u) / numpy.sqrt(u)


def _k1_far(u: Any) -> Any:
    return _k1e(1 / u) / numpy.sqrt(u)


def _modified_k(x: Made, order: int, scaled: bool) -> Made:
    """The modified function of the second kind; infinite at 0 and NaN below."""
    near_x, far_x = x.at_most(2.0), x.at_least(2.0)
    square, log = near_x * near_x, (near_x * 0.5).log()
    if order == 0:
        near = _summed(square, _k0_near, 1e-12, 4.0, 8) - log * _plain_i(near_x, 0)
        tail = _summed(1.0 / far_x, _k0_far, 1e-4, 0.5, 12)
    else:
        near = _summed(square, _k1_near, 1e-12, 4.0, 8) / near_x + log * _plain_i(near_x, 1)
        tail = _summed(1.0 / far_x, _k1_far, 1e-4, 0.5, 12)
    tail = tail / far_x.sqrt()
    near, far = (near * near_x.exp(), tail) if scaled else (near, tail * (-far_x).exp())
    made = (x > 2.0).choose(far, near)
    return (x < 0.0).choose(math.nan, x.same(0.0).choose(math.inf, made))


def _phase(x: Any, order: int) -> Any:
    return x - (math.pi / 4 if order == 0 else 3 * math.pi / 4)


def _amplitude(order: int, first: bool) -> Callable[[Any], Any]:
    """What multiplies the cosine (or the sine) of the phase for large arguments, of 25 / x²."""
    one, two = (_j0, _y0) if order == 0 else (_j1, _y1)

    def function(u: Any) -> Any:
        x = 5 / numpy.sqrt(u)
        phase, size = _phase(x, order), numpy.sqrt(math.pi * x / 2)
        cosine, sine = numpy.cos(phase), numpy.sin(phase)
        return size * (one(x) * cosine + two(x) * sine) if first else size * x * (two(x) * cosine - one(x) * sine)

    return function


_AMPLITUDES: Final = {(order, first): _amplitude(order, first) for order in (0, 1) for first in (True, False)}


def _y0_near(x: Any) -> Any:
    return _y0(x) - 2 / math.pi * numpy.log(x) * _j0(x)


def _y1_near(x: Any) -> Any:
    return x * (_y1(x) - 2 / math.pi * numpy.log(x) * _j1(x))


def _bessel(x: Made, order: int, second: bool) -> Made:
    """The functions of the first kind, which are even or odd, and of the second, which are for positive arguments."""
    size = x.size()
    far_x, near_x = size.at_least(5.0), size.at_most(5.0)
    u, phase = 25.0 / (far_x * far_x), _phase(far_x, order)
    one = _summed(u, _AMPLITUDES[order, True], 1e-6, 1.0, 10)
    two = _summed(u, _AMPLITUDES[order, False], 1e-6, 1.0, 10) / far_x
    cosine, sine = phase.cos(), phase.sin()
    far = (one * sine + two * cosine if second else one * cosine - two * sine) * (2 / math.pi / far_x).sqrt()
    first = _summed(near_x, _j0 if order == 0 else _j1, 0.0, 5.0, 16)
    if not second:
        made = (size > 5.0).choose(far, first)
        return made if order == 0 else (x < 0.0).choose(-made, made)
    log = near_x.log() * (2 / math.pi) * first
    near = log + _summed(near_x, _y0_near, 1e-9, 5.0, 16)
    if order == 1:
        near = log + _summed(near_x, _y1_near, 1e-9, 5.0, 16) / near_x
    made = (size > 5.0).choose(far, near)
    return (x < 0.0).choose(math.nan, x.same(0.0).choose(-math.inf, made))


# -- the normal distribution -----------------------------------------------------------------------------------------
def _erfcx_of(u: Any) -> Any:
    x = 4 / u - 4
    return _torch(torch.special.erfcx)(x) / u


def _erfcx(x: Made) -> Made:
    size = x.size()
    u = 4.0 / (size + 4.0)
    right = _summed(u, _erfcx_of, 1e-12, 1.0, 18) * u
    return (x < 0.0).choose((x * x).exp() * 2.0 - right, right)


def _log_ndtr(x: Made) -> Made:
    """Left of -1 by ``erfcx``, where the distribution itself would vanish."""
    down = x.at_most(-1.0) * (1 / _ROOT_OF_2)
    left = (_erfcx(-down) * 0.5).log() - down * down
    up = x.at_least(-1.0) * (1 / _ROOT_OF_2)
    beyond = Made(x.w, x.w.ops.subtract(x.w.value(1.0), x.w.ops.erf(up.made)).output(0)) * 0.5
    # Far right the complement of the error function is lost in 1: by ``erfcx`` there, too.
    tail = _erfcx(up.at_least(1.0)) * (-(up * up)).exp() * 0.5
    beyond = (up > 1.0).choose(tail, beyond)
    # log(1 - b) for b down to 0: the series' first terms where 1 - b is 1.
    small = -beyond * (1.0 + beyond * 0.5)
    right = (beyond < 1e-3).choose(small, (1.0 - beyond).log())
    return (x < -1.0).choose(left, right)


def _erfinv_near(log: Any) -> Any:
    x = numpy.sqrt(-numpy.expm1(-log))
    return _torch(torch.special.erfinv)(x) / x


def _ndtri_of_root(root: Any) -> Any:
    """The inverse error function over its argument, where ``1 - x²`` is ``exp(-root²)``: by the normal's left tail."""
    share = -numpy.expm1(-root * root)
    beyond = numpy.exp(-root * root) / (2 * (1 + numpy.sqrt(share)))
    return -_torch(torch.special.ndtri)(beyond) / _ROOT_OF_2 / numpy.sqrt(share)


def _inverse_error(x: Made, rest: Made) -> Made:
    """The inverse error function of ``x``, where ``rest`` is ``1 - x²``."""
    log = -rest.log()
    near = _summed(log, _erfinv_near, 1e-9, 5.0, 12)
    far = _summed(log.at_least(4.0).sqrt(), _ndtri_of_root, 2.2, 10.2, 14)
    return (log > 5.0).choose(far, near) * x


def _erfinv(x: Made) -> Made:
    made = _inverse_error(x, (1.0 - x) * (1.0 + x))
    made = x.same(1.0).choose(math.inf, x.same(-1.0).choose(-math.inf, made))
    return (x.size() > 1.0).choose(math.nan, made)


def _ndtri(p: Made) -> Made:
    made = _inverse_error(p * 2.0 - 1.0, p * (1.0 - p) * 4.0) * _ROOT_OF_2
    made = p.same(1.0).choose(math.inf, p.same(0.0).choose(-math.inf, made))
    return (p < 0.0).choose(math.nan, (p > 1.0).choose(math.nan, made))


# -- the gamma function ----------------------------------------------------------------------------------------------
def _rest(x: Made) -> Made:
    """What is left of the nearest integer, which is exact: for periodic functions of π x."""
    return x - (x + 0.5).floor()


def _is_pole(x: Made) -> Made:
    """Where 0 or a negative integer is, as bools."""
    return ((x > 0.0).choose(1.0, (x - x.floor()).size())).same(0.0)


def _lgamma(x: Made) -> Made:
    """The logarithm of the gamma function's size; by reflection below a half."""
    left = x < 0.5
    y = left.choose(1.0 - x, x)
    product = y
    for step in range(1, _SHIFT):
        product = product * (y + float(step))
    low = y < float(_SHIFT)
    big = low.choose(y + float(_SHIFT), y)
    inverse = 1.0 / big
    square = inverse * inverse
    tail = inverse * (1 / 12 - square * (1 / 360 - square * (1 / 1260)))
    log = big.log()
    made = (big - 0.5) * log - big + tail + 0.5 * math.log(2 * math.pi)
    made = big.same(math.inf).choose(math.inf, made) - low.choose(product.at_most(1e30).log(), 0.0)
    sine = (_rest(x) * math.pi).sin().size()
    mirrored = math.log(math.pi) - sine.log() - made
    made = left.choose(mirrored, made)
    return _is_pole(x).choose(math.inf, x.same(-math.inf).choose(math.inf, made))


def _poly_digamma(order: int, x: Made) -> Made:
    """The derivative of ``order`` of the digamma function, for positive arguments."""
    sign = -1.0 if order % 2 == 0 else 1.0
    power = order + 1
    terms: Any = None
    for step in range(_SHIFT):
        one = 1.0 / (x + float(step))
        term = one
        for _ in range(power - 1):
            term = term * one
        terms = term if terms is None else terms + term
    big = x + float(_SHIFT)
    inverse = 1.0 / big
    square = inverse * inverse
    rising: Any = None
    for index in range(len(_EULER_MACLAURIN), 0, -1):
        number, even = _EULER_MACLAURIN[index - 1], 2 * index
        factor = number * math.factorial(even + order - 1) / math.factorial(even)
        rising = factor if rising is None else rising * square + factor
    if order == 0:
        return big.log() - inverse * 0.5 - rising * square - terms
    scale = inverse
    for _ in range(order - 1):
        scale = scale * inverse
    tail = scale * (math.factorial(order - 1) + inverse * (math.factorial(order) / 2) + square * rising)
    return (terms * math.factorial(order) + tail) * sign


def _cotangent_derivative(order: int, cotangent: Made) -> Made:
    """π times the derivative of ``order`` of ``cot(π x)``, as a polynomial of the cotangent."""
    polynomial = numpy.polynomial.Polynomial([0.0, 1.0])
    for _ in range(order):
        polynomial = -polynomial.deriv() * numpy.polynomial.Polynomial([1.0, 0.0, 1.0])
    coefficients = [float(c) * math.pi ** (order + 1) for c in polynomial.coef]
    made: Any = cotangent * 0.0 + coefficients[-1]
    for coefficient in coefficients[-2::-1]:
        made = made * cotangent + coefficient
    return made


def _cotangent(x: Made) -> Made:
    """``cot(π x)``. By the tangent of what is left to a half where that is nearer: there it is 0, exactly."""
    rest = _rest(x)
    size = rest.size()
    far = ((0.5 - size) * math.pi).tan()
    near = 1.0 / (rest * math.pi).tan()
    return (size > 0.25).choose((rest < 0.0).choose(-far, far), near)


def _polygamma(order: int, x: Made) -> Made:
    """By reflection below a half; infinite, or NaN for the digamma function, at 0 and the integers below."""
    left = x < 0.5
    made = _poly_digamma(order, left.choose(1.0 - x, x))
    mirrored = (made if order % 2 == 0 else -made) - _cotangent_derivative(order, _cotangent(x))
    made = left.choose(mirrored, made)
    if order == 0:
        at_zero = (1.0 / x < 0.0).choose(math.inf, -math.inf)
        return _is_pole(x).choose(x.same(0.0).choose(at_zero, math.nan), made)
    made = _is_pole(x).choose(-math.inf if order % 2 == 0 else math.inf, made)
    if order > 1:  # PyTorch's sums do not end well
        made = x.same(math.inf).choose(math.nan, x.same(-math.inf).choose((-1) ** (order + 1) * math.inf, made))
    return made


# -- the rules -------------------------------------------------------------------------------------------------------
_FUNCTIONS: Final[dict[Any, Callable[[Made], Made]]] = {
    aten.i0.default: lambda x: _plain_i(x, 0),
    aten.special_i0e.default: lambda x: _scaled_i(x, 0),
    aten.special_i1.default: lambda x: _plain_i(x, 1),
    aten.special_i1e.default: lambda x: _scaled_i(x, 1),
    aten.special_modified_bessel_i0.default: lambda x: _plain_i(x, 0),
    aten.special_modified_bessel_i1.default: lambda x: _plain_i(x, 1),
    aten.special_modified_bessel_k0.default: lambda x: _modified_k(x, 0, False),
    aten.special_modified_bessel_k1.default: lambda x: _modified_k(x, 1, False),
    aten.special_scaled_modified_bessel_k0.default: lambda x: _modified_k(x, 0, True),
    aten.special_scaled_modified_bessel_k1.default: lambda x: _modified_k(x, 1, True),
    aten.special_bessel_j0.default: lambda x: _bessel(x, 0, False),
    aten.special_bessel_j1.default: lambda x: _bessel(x, 1, False),
    aten.special_bessel_y0.default: lambda x: _bessel(x, 0, True),
    aten.special_bessel_y1.default: lambda x: _bessel(x, 1, True),
    aten.special_erfcx.default: _erfcx,
    aten.special_log_ndtr.default: _log_ndtr,
    aten.special_ndtri.default: _ndtri,
    aten.erfinv.default: _erfinv,
    aten.lgamma.default: _lgamma,
    aten.digamma.default: lambda x: _polygamma(0, x),
}


def _kept(w: Writer, node: Any, function: Callable[[Made], Made]) -> Any:
    """A function of an argument, and NaN for NaN: the engine's exponential gives infinity, and its bounds drop it."""
    value = w.numeric(node)
    made = function(Made(w, value)).made
    return w.ops.select(w.ops.is_nan(value), value, made)


@rule(*_FUNCTIONS, check=float_result)
def _function(w: Writer, node: fx.Node) -> Any:
    return _kept(w, node.args[0], _FUNCTIONS[node.target])


@rule(
    aten.polygamma.default,
    check=lambda n: float_result(n) or ("of so high an order" if int(n.args[0]) > 8 else ""),  # type: ignore[arg-type]
)
def _polygamma_rule(w: Writer, node: fx.Node) -> Any:
    order = int(node.args[0])  # type: ignore[call-overload]
    return _kept(w, node.args[1], lambda x: _polygamma(order, x))
