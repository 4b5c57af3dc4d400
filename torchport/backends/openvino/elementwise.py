"""Operators on each element: arithmetic, comparisons, functions and choices."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy
import torch
from torch import fx

from .sizes import is_symbolic, known
from .writer import WORDS, Writer, arg_of, both, float_result, rule, val

aten = torch.ops.aten


for _targets, _name in (
    ((aten.add.Tensor, aten.add.Scalar), "add"),
    ((aten.sub.Tensor, aten.sub.Scalar), "subtract"),
    ((aten.mul.Tensor, aten.mul.Scalar), "multiply"),
    ((aten.div.Tensor, aten.div.Scalar), "divide"),
    ((aten.maximum.default,), "maximum"),
    ((aten.minimum.default,), "minimum"),
    ((aten.pow.Tensor_Scalar, aten.pow.Tensor_Tensor), "power"),
):

    @rule(*_targets, check=float_result, numbers=True)
    def _binary(w: Writer, node: fx.Node, name: str = _name) -> Any:
        return getattr(w.ops, name)(w.numeric(node.args[0]), _times(w, w.numeric(node.args[1]), node, "alpha"))


@rule(aten.fmax.default, aten.fmin.default, check=float_result, numbers=True)
def _extreme_number(w: Writer, node: fx.Node) -> Any:
    """The other one for NaN."""
    left, right = w.numeric(node.args[0]), w.numeric(node.args[1])
    made = (w.ops.maximum if node.target is aten.fmax.default else w.ops.minimum)(left, right)
    return w.ops.select(w.ops.is_nan(left), right, w.ops.select(w.ops.is_nan(right), left, made))


@rule(aten.hypot.default, check=float_result)
def _hypot(w: Writer, node: fx.Node) -> Any:
    """The larger one, times the length of what the smaller one is of it: squares alone would overflow."""
    sides = [w.ops.abs(w.numeric(arg)).output(0) for arg in node.args[:2]]
    most, least = w.ops.maximum(*sides), w.ops.minimum(*sides)
    share = w.ops.divide(least, most)
    made = w.ops.multiply(most, w.ops.sqrt(w.ops.add(w.ops.multiply(share, share), w.value(1.0))))
    made = w.ops.select(w.ops.equal(most, w.value(0.0)), w.value(0.0), made)
    nan = w.ops.logical_or(*(w.ops.is_nan(side) for side in sides))
    endless = w.ops.logical_or(*(w.ops.equal(side, w.value(math.inf)) for side in sides))
    return w.ops.select(endless, w.value(math.inf), w.ops.select(nan, w.value(math.nan), made))


@rule(aten.heaviside.default, check=float_result)
def _heaviside(w: Writer, node: fx.Node) -> Any:
    value, at_zero = w.numeric(node.args[0]), w.numeric(node.args[1])
    step = w.ops.convert(w.ops.less(w.value(0.0), value), "f32")  # 0 for NaN
    return w.ops.select(w.ops.equal(value, w.value(0.0)), at_zero, step)


def _below_zero(w: Writer, value: Any) -> Any:
    """Whether the sign is negative, of -0 too: its reciprocal is below 0."""
    zero = w.value(0.0)
    return w.ops.logical_or(w.ops.less(value, zero), w.ops.less(w.ops.divide(w.value(1.0), value), zero)).output(0)


@rule(aten.atan2.default, check=float_result)
def _atan2(w: Writer, node: fx.Node) -> Any:
    """By the arc tangent of the smaller of both sides over the larger one."""
    y, x = w.numeric(node.args[0]), w.numeric(node.args[1])
    rise, run = w.ops.abs(y), w.ops.abs(x)
    steep = w.ops.greater(rise, run)
    most, least = w.ops.maximum(rise, run), w.ops.minimum(rise, run)
    same = w.ops.equal(most, least)
    share = w.ops.select(same, w.value(1.0), w.ops.divide(least, most))
    share = w.ops.select(w.ops.equal(most, w.value(0.0)), w.value(0.0), share)
    angle = w.ops.atan(share)
    angle = w.ops.select(steep, w.ops.subtract(w.value(math.pi / 2), angle), angle)
    angle = w.ops.select(_below_zero(w, x), w.ops.subtract(w.value(math.pi), angle), angle)
    angle = w.ops.select(_below_zero(w, y), w.ops.negative(angle), angle)
    nan = w.ops.logical_or(w.ops.is_nan(x), w.ops.is_nan(y))
    return w.ops.select(nan, w.value(math.nan), angle)


@rule(aten.ldexp.Tensor, check=float_result, numbers=True)
def _ldexp(w: Writer, node: fx.Node) -> Any:
    return w.ops.multiply(w.numeric(node.args[0]), w.ops.power(w.value(2.0), w.numeric(node.args[1])))


@rule(aten.signbit.default, check=lambda n: _of_floats(n))
def _signbit(w: Writer, node: fx.Node) -> Any:
    """The sign of NaN is lost in comparisons: such a one counts as positive, as PyTorch's own are."""
    return _below_zero(w, w.value(node.args[0]))


@rule(aten.angle.default, check=float_result)
def _angle(w: Writer, node: fx.Node) -> Any:
    value = w.numeric(node.args[0])
    made = w.ops.select(w.ops.less(value, w.value(0.0)), w.value(math.pi), w.value(0.0))
    return w.ops.select(w.ops.is_nan(value), value, made)


@rule(aten.round.decimals, check=float_result)
def _round_decimals(w: Writer, node: fx.Node) -> Any:
    value, decimals = w.numeric(node.args[0]), int(node.kwargs.get("decimals", 0))  # type: ignore[arg-type]
    if decimals == 0:
        return w.ops.round(value, "half_to_even")
    scale = w.value(10.0 ** abs(decimals))
    up, down = (w.ops.multiply, w.ops.divide) if decimals > 0 else (w.ops.divide, w.ops.multiply)
    return down(w.ops.round(up(value, scale), "half_to_even"), scale)


@rule(aten.lerp.Tensor, aten.lerp.Scalar, check=float_result)
def _lerp(w: Writer, node: fx.Node) -> Any:
    """From the nearer end, as PyTorch does it."""
    start, end, weight = (w.numeric(arg) for arg in node.args[:3])
    apart = w.ops.subtract(end, start)
    near = w.ops.add(start, w.ops.multiply(weight, apart))
    far = w.ops.subtract(end, w.ops.multiply(apart, w.ops.subtract(w.value(1.0), weight)))
    return w.ops.select(w.ops.less(w.ops.abs(weight), w.value(0.5)), near, far)


def _times(w: Writer, value: Any, node: fx.Node, name: str) -> Any:
    """A value times a number that an operator takes by name."""
    factor: Any = node.kwargs.get(name, 1)
    return value if factor == 1 else w.ops.multiply(value, w.value(factor))


@rule(aten.rsub.Scalar, aten.rsub.Tensor, check=float_result, numbers=True)
def _rsub(w: Writer, node: fx.Node) -> Any:
    return w.ops.subtract(w.numeric(node.args[1]), _times(w, w.numeric(node.args[0]), node, "alpha"))


@rule(aten.addcmul.default, aten.addcdiv.default, check=float_result)
def _add_of_two(w: Writer, node: fx.Node) -> Any:
    op = w.ops.multiply if node.target is aten.addcmul.default else w.ops.divide
    made = op(w.numeric(node.args[1]), w.numeric(node.args[2]))
    return w.ops.add(w.numeric(node.args[0]), _times(w, made, node, "value"))


@rule(aten.pow.Scalar, check=float_result)
def _power_of_number(w: Writer, node: fx.Node) -> Any:
    return w.ops.power(w.numeric(node.args[0]), w.numeric(node.args[1]))


def _only_equality(node: fx.Node) -> str:
    """int64 are compared word by word, with int64."""
    wide = [arg for arg in node.args[:2] if isinstance(arg, fx.Node) and val(arg).dtype in WORDS]
    if not wide:
        return ""
    if node.target not in (aten.eq.Tensor, aten.eq.Scalar, aten.ne.Tensor, aten.ne.Scalar):
        return "of an order of int64"
    others = [arg for arg in node.args[:2] if arg not in wide]
    return "" if all(isinstance(arg, (int, torch.SymInt)) for arg in others) else "of int64 and another dtype"


_TURNED: Final = {aten.gt.Tensor, aten.gt.Scalar, aten.ge.Tensor, aten.ge.Scalar}
"""Comparisons by the opposite one of the operands turned round: the engine's own hold for NaN."""


def _as_words(w: Writer, node: fx.Node) -> list[Any]:
    made: list[Any] = []
    for arg in node.args[:2]:
        if is_symbolic(arg):
            made.append(w.wide(w.word_of(arg)))
        else:
            made.append(w.value(arg) if isinstance(arg, fx.Node) else w.array(numpy.array(known(arg), numpy.int64)))
    return made


for _targets, _name in (
    ((aten.eq.Tensor, aten.eq.Scalar), "equal"),
    ((aten.ne.Tensor, aten.ne.Scalar), "not_equal"),
    ((aten.lt.Tensor, aten.lt.Scalar), "less"),
    ((aten.le.Tensor, aten.le.Scalar), "less_equal"),
    ((aten.gt.Tensor, aten.gt.Scalar), "less"),
    ((aten.ge.Tensor, aten.ge.Scalar), "less_equal"),
):

    @rule(*_targets, check=_only_equality, numbers=True)
    def _compare(w: Writer, node: fx.Node, name: str = _name) -> Any:
        if any(val(arg).dtype in WORDS for arg in node.all_input_nodes):
            same = w.ops.reduce_logical_and(w.ops.equal(*_as_words(w, node)), w.ints([-1]), False)
            return same if name == "equal" else w.ops.logical_not(same)
        pair = [w.numeric(node.args[0]), w.numeric(node.args[1])]
        return getattr(w.ops, name)(*(pair[::-1] if node.target in _TURNED else pair))


for _target, _name in (
    (aten.neg.default, "negative"), (aten.exp.default, "exp"), (aten.log.default, "log"), (aten.sqrt.default, "sqrt"),
    (aten.tanh.default, "tanh"), (aten.sigmoid.default, "sigmoid"), (aten.relu.default, "relu"),
    (aten.erf.default, "erf"), (aten.abs.default, "abs"), (aten.sin.default, "sin"), (aten.cos.default, "cos"),
    (aten.floor.default, "floor"), (aten.ceil.default, "ceiling"), (aten.absolute.default, "abs"),
):  # fmt: skip

    @rule(_target, check=float_result)
    def _unary(w: Writer, node: fx.Node, name: str = _name) -> Any:
        return getattr(w.ops, name)(w.numeric(node.args[0]))


def _truth(w: Writer, arg: Any) -> Any:
    """Whether elements are other than 0."""
    value = w.value(arg)
    return value if val(arg).dtype is torch.bool else w.ops.not_equal(value, w.value(0.0)).output(0)


for _target, _name in (
    (aten.logical_and.default, "logical_and"),
    (aten.logical_or.default, "logical_or"),
    (aten.logical_xor.default, "logical_xor"),
):

    @rule(_target)
    def _logic_of_numbers(w: Writer, node: fx.Node, name: str = _name) -> Any:
        return getattr(w.ops, name)(_truth(w, node.args[0]), _truth(w, node.args[1]))


@rule(aten.logical_not.default)
@rule(aten.bitwise_not.default, check=lambda n: "" if val(n).dtype is torch.bool else "of numbers")
def _not(w: Writer, node: fx.Node) -> Any:
    value = w.value(node.args[0])
    return w.ops.logical_not(value) if val(node.args[0]).dtype is torch.bool else w.ops.equal(value, w.value(0.0))


for _targets, _name in (
    ((aten.bitwise_and.Tensor, aten.__and__.Tensor), "logical_and"),
    ((aten.bitwise_or.Tensor, aten.__or__.Tensor), "logical_or"),
    ((aten.bitwise_xor.Tensor, aten.__xor__.Tensor), "logical_xor"),
):

    @rule(*_targets, check=lambda n: "" if all(val(a).dtype is torch.bool for a in n.args) else "of numbers")
    def _logic(w: Writer, node: fx.Node, name: str = _name) -> Any:
        return getattr(w.ops, name)(w.value(node.args[0]), w.value(node.args[1]))


def _of_floats(node: fx.Node) -> str:
    return next((f"of {val(arg).dtype}" for arg in node.all_input_nodes if val(arg).dtype is not torch.float32), "")


def _bounded(w: Writer, value: Any, low: Any, high: Any) -> Any:
    """``value`` within bounds; NaN stays, and is what a bound of NaN gives. OpenVINO passes over NaN."""
    made = value if low is None else w.ops.maximum(value, low)
    made = made if high is None else w.ops.minimum(made, high)
    for one in (value, low, high):
        if one is not None:
            made = w.ops.select(w.ops.is_nan(one), one, made)
    return made


@rule(aten.clamp_min.default, aten.clamp_max.default, check=float_result)
def _clamp_one(w: Writer, node: fx.Node) -> Any:
    value = w.numeric(node.args[0])
    bound, low = w.value(float(node.args[1])), node.target is aten.clamp_min.default  # type: ignore[arg-type]
    made = w.ops.maximum(value, bound) if low else w.ops.minimum(value, bound)
    return w.ops.select(w.ops.is_nan(value), value, made)


@rule(aten.clamp.Tensor, aten.clamp_min.Tensor, aten.clamp_max.Tensor, check=float_result)
def _clamp_by_tensors(w: Writer, node: fx.Node) -> Any:
    if node.target is aten.clamp_max.Tensor:
        bounds: tuple[Any, Any] = (None, node.args[1])
    else:
        bounds = (arg_of(node, 1, "min"), arg_of(node, 2, "max"))
    low, high = (None if one is None else w.numeric(one) for one in bounds)
    return _bounded(w, w.numeric(node.args[0]), low, high)


@rule(aten.sign.default, aten.sgn.default, check=float_result)
def _sign(w: Writer, node: fx.Node) -> Any:
    """By hand: the front end's gives a number for NaN, where PyTorch's gives 0."""
    value, zero = w.numeric(node.args[0]), w.value(0.0)
    below = w.ops.select(w.ops.less(value, zero), w.value(-1.0), zero)
    made = w.ops.select(w.ops.greater(value, zero), w.value(1.0), below)
    return w.ops.select(w.ops.is_nan(value), zero, made)


@rule(aten.trunc.default, aten.fix.default, check=float_result)
def _trunc(w: Writer, node: fx.Node) -> Any:
    value = w.numeric(node.args[0])
    return w.ops.select(w.ops.less(value, w.value(0.0)), w.ops.ceiling(value), w.ops.floor(value))


@rule(aten.expm1.default, check=float_result)
def _expm1(w: Writer, node: fx.Node) -> Any:
    """2 tanh(x/2) / (1 - tanh(x/2)): exact near 0, where the exponential less one is not; the rest by that."""
    value = w.numeric(node.args[0])
    half = w.ops.tanh(w.ops.multiply(value, w.value(0.5)))
    near = w.ops.divide(w.ops.multiply(half, w.value(2.0)), w.ops.subtract(w.value(1.0), half))
    far = w.ops.subtract(w.ops.exp(value), w.value(1.0))
    made = w.ops.select(w.ops.less(w.ops.abs(value), w.value(0.5)), near, far)
    return w.ops.select(w.ops.is_nan(value), value, made)


@rule(aten.square.default, check=float_result)
def _square(w: Writer, node: fx.Node) -> Any:
    value = w.numeric(node.args[0])
    return w.ops.multiply(value, value)


@rule(aten.exp2.default, check=float_result)
def _exp2(w: Writer, node: fx.Node) -> Any:
    return w.ops.power(w.value(2.0), w.numeric(node.args[0]))


@rule(aten.softplus.default, check=float_result)
def _softplus(w: Writer, node: fx.Node) -> Any:
    beta, threshold = float(arg_of(node, 1, "beta", 1)), float(arg_of(node, 2, "threshold", 20))
    value = w.value(node.args[0])
    scaled = value if beta == 1 else w.ops.multiply(value, w.value(beta))
    soft = w.ops.divide(w.ops.softplus(scaled), w.value(beta))
    return w.ops.select(w.ops.greater(scaled, w.value(threshold)), value, soft)


@rule(aten.softshrink.default, check=float_result)
def _softshrink(w: Writer, node: fx.Node) -> Any:
    value, bound = w.value(node.args[0]), float(arg_of(node, 1, "lambd", 0.5))
    above = w.ops.subtract(value, w.value(bound))
    below = w.ops.select(w.ops.less(value, w.value(-bound)), w.ops.add(value, w.value(bound)), w.value(0.0))
    made = w.ops.select(w.ops.greater(value, w.value(bound)), above, below)
    return w.ops.select(w.ops.is_nan(value), value, made)


@rule(aten.hardsigmoid.default, check=float_result)
def _hardsigmoid(w: Writer, node: fx.Node) -> Any:
    value = w.value(node.args[0])
    moved = w.ops.minimum(w.ops.maximum(w.ops.add(value, w.value(3.0)), w.value(0.0)), w.value(6.0))
    return w.ops.select(w.ops.is_nan(value), value, w.ops.divide(moved, w.value(6.0)))


@rule(aten.celu.default, check=float_result)
def _celu(w: Writer, node: fx.Node) -> Any:
    value, alpha = w.value(node.args[0]), float(arg_of(node, 1, "alpha", 1.0))
    below = w.ops.multiply(w.ops.subtract(w.ops.exp(w.ops.divide(value, w.value(alpha))), w.value(1.0)), w.value(alpha))
    made = w.ops.select(w.ops.greater(value, w.value(0.0)), value, below)
    return w.ops.select(w.ops.is_nan(value), value, made)


@rule(aten.logaddexp.default, check=_of_floats)
def _logaddexp(w: Writer, node: fx.Node) -> Any:
    left, right = (w.value(arg) for arg in node.args[:2])
    most = w.ops.maximum(left, right)
    apart = w.ops.negative(w.ops.abs(w.ops.subtract(left, right)))
    made = w.ops.add(most, w.ops.log(w.ops.add(w.ops.exp(apart), w.value(1.0))))
    made = w.ops.select(w.ops.equal(left, right), w.ops.add(most, w.value(math.log(2.0))), made)
    return w.ops.select(w.ops.logical_or(w.ops.is_nan(left), w.ops.is_nan(right)), w.value(math.nan), made)


@rule(aten.copysign.Tensor, aten.copysign.Scalar, check=_of_floats)
def _copysign(w: Writer, node: fx.Node) -> Any:
    size = w.ops.abs(w.numeric(node.args[0]))
    return w.ops.select(_below_zero(w, w.numeric(node.args[1])), w.ops.negative(size), size)


def _not_down(node: fx.Node) -> str:
    if node.target is aten.floor_divide.default or node.kwargs.get("rounding_mode") == "floor":
        return "rounding down needs the exact remainder, and OpenVINO's is not (7.5 by 0.1 is 75)"
    return ""


@rule(aten.div.Tensor_mode, check=both(float_result, _not_down))
def _rounded_quotient(w: Writer, node: fx.Node) -> Any:
    plain = w.ops.divide(w.numeric(node.args[0]), w.numeric(node.args[1]))
    if node.kwargs.get("rounding_mode") is None:
        return plain
    return w.ops.select(w.ops.less(plain, w.value(0.0)), w.ops.ceiling(plain), w.ops.floor(plain))


@rule(aten.rsqrt.default, check=float_result)
def _rsqrt(w: Writer, node: fx.Node) -> Any:
    return w.ops.divide(w.value(1.0), w.ops.sqrt(w.numeric(node.args[0])))


@rule(aten.reciprocal.default, check=float_result)
def _reciprocal(w: Writer, node: fx.Node) -> Any:
    return w.ops.divide(w.value(1.0), w.numeric(node.args[0]))


@rule(aten.silu.default)
def _silu(w: Writer, node: fx.Node) -> Any:
    return w.ops.swish(w.value(node.args[0]))


@rule(aten.gelu.default)
def _gelu(w: Writer, node: fx.Node) -> Any:
    return w.ops.gelu(w.value(node.args[0]), "TANH" if node.kwargs.get("approximate") == "tanh" else "ERF")


@rule(aten.clamp.default, check=float_result)
def _clamp(w: Writer, node: fx.Node) -> Any:
    low, high = (None if one is None else w.value(one) for one in (arg_of(node, 1, "min"), arg_of(node, 2, "max")))
    value = w.numeric(node.args[0])
    made = value if low is None else w.ops.maximum(value, low)
    made = made if high is None else w.ops.minimum(made, high)
    return w.ops.select(w.ops.is_nan(value), value, made)


@rule(aten.hardtanh.default)
def _hardtanh(w: Writer, node: fx.Node) -> Any:
    return w.ops.clamp(
        w.value(node.args[0]), float(arg_of(node, 1, "min_val", -1.0)), float(arg_of(node, 2, "max_val", 1.0))
    )


def _same_dtypes(node: fx.Node) -> str:
    """float32 may come with int64, which is read as float32."""
    mixed = {val(arg).dtype for arg in node.args[1:]} - {val(node).dtype}
    return "of mixed dtypes" if mixed - ({torch.int64} if val(node).dtype is torch.float32 else set()) else ""


@rule(aten.where.self, check=_same_dtypes, moves=True)
def _where(w: Writer, node: fx.Node) -> Any:
    chosen = w.value(node.args[0])
    if val(node).dtype in WORDS:
        chosen = w.ops.unsqueeze(chosen, w.ints(-1))
        return w.ops.select(chosen, w.value(node.args[1]), w.value(node.args[2]))
    read = w.numeric if val(node).dtype is torch.float32 else w.value
    return w.ops.select(chosen, read(node.args[1]), read(node.args[2]))


@rule(aten.masked_fill.Scalar, check=float_result)
def _masked_fill(w: Writer, node: fx.Node) -> Any:
    return w.ops.select(w.value(node.args[1]), w.value(float(node.args[2])), w.value(node.args[0]))  # type: ignore[arg-type]


@rule(aten.masked_fill.Tensor, check=float_result)
def _masked_fill_tensor(w: Writer, node: fx.Node) -> Any:
    return w.ops.select(w.value(node.args[1]), w.numeric(node.args[2]), w.value(node.args[0]))


@rule(aten.clone.default, aten.alias.default, aten.detach.default, aten.lift_fresh.default, moves=True, empty=True)
def _identity(w: Writer, node: fx.Node) -> Any:
    return w.value(node.args[0])


@rule(aten.dropout.default, check=lambda n: "in training" if arg_of(n, 2, "train", False) else "")
def _no_dropout(w: Writer, node: fx.Node) -> Any:
    return w.value(node.args[0])


_SMALL_INTEGERS: Final = {torch.int32: "i32", torch.int16: "i16", torch.uint8: "u8", torch.int8: "i8"}


def _cast_check(node: fx.Node) -> str:
    source, wanted = val(node.args[0]).dtype, val(node).dtype
    if source is wanted or wanted is torch.bool:
        return "" if source is not torch.float64 else "from float64"
    if wanted is torch.float32:
        return "" if source in (torch.int64, torch.bool, torch.float16, *_SMALL_INTEGERS) else f"from {source}"
    if wanted is torch.int64:
        return "" if source in (torch.float32, torch.bool, *_SMALL_INTEGERS) else f"from {source}"
    if wanted in _SMALL_INTEGERS or wanted is torch.float16:
        return "" if source in (torch.float32, torch.bool) else f"from {source} to {wanted}"
    return f"from {source} to {wanted}"


@rule(aten._to_copy.default, check=_cast_check, moves=True)
def _to_copy(w: Writer, node: fx.Node) -> Any:
    value, source, wanted = w.value(node.args[0]), val(node.args[0]).dtype, val(node).dtype
    if source is wanted:
        return value
    if wanted is torch.int64:
        return _whole_words(w, value) if source is torch.float32 else w.wide(value)
    if wanted is torch.bool and source in WORDS:
        return w.ops.reduce_logical_or(w.ops.not_equal(value, w.word_of(0)), w.ints([-1]), False)
    if wanted is torch.bool:
        return w.ops.not_equal(w.numeric(node.args[0]), w.value(0.0))
    if wanted in _SMALL_INTEGERS or wanted is torch.float16:
        return w.ops.convert(value, _SMALL_INTEGERS.get(wanted, "f16"))
    return w.numeric(node.args[0])


def _whole_words(w: Writer, value: Any) -> Any:
    """float32 as int64. Beyond 32 bits, both words are parts of the number that float32 holds exactly.

    What is no int64 becomes the smallest one, as it does on processors that PyTorch runs on.
    """
    whole = w.ops.select(w.ops.less(value, w.value(0.0)), w.ops.ceiling(value), w.ops.floor(value))
    high = w.ops.floor(w.ops.multiply(whole, w.value(2.0**-32)))
    low = w.ops.subtract(whole, w.ops.multiply(high, w.value(2.0**32)))
    low = w.ops.select(w.ops.less(low, w.value(2.0**31)), low, w.ops.subtract(low, w.value(2.0**32)))
    near = w.ops.convert(whole, "i32")
    sign = w.ops.select(w.ops.less(near, w.word_of(0)), w.word_of(-1), w.word_of(0))
    is_near = w.ops.less(w.ops.abs(whole), w.value(2.0**31))
    inside = w.ops.less(w.ops.abs(value), w.value(2.0**63))  # not NaN
    low = w.ops.select(is_near, near, w.ops.convert(low, "i32"))
    high = w.ops.select(is_near, sign, w.ops.convert(high, "i32"))
    low = w.ops.select(inside, low, w.word_of(0))
    high = w.ops.select(inside, high, w.word_of(-(1 << 31)))
    return w.ops.concat([w.ops.unsqueeze(one, w.ints(-1)).output(0) for one in (low, high)], -1).output(0)
