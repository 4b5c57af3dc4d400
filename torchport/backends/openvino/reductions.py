"""Sums, extremes, softmaxes and what normalises by them."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy
import torch
from torch import fx

from .sizes import is_symbolic, known
from .writer import Writer, arg_of, float_result, rule, val

aten = torch.ops.aten


_WORST: Final = {"reduce_max": -math.inf, "reduce_min": math.inf}
_OF_ALL: Final = {aten.mean.default, aten.sum.default, aten.max.default, aten.min.default}
"""Operators without axes: what stands second is a dtype."""


def _sum_check(node: fx.Node) -> str:
    """A sum of bools is a count; others are float32."""
    if val(node).dtype is torch.int64:
        return "" if val(node.args[0]).dtype is torch.bool else "of integers"
    return float_result(node)


def _where_to(w: Writer, node: fx.Node) -> tuple[Any, bool]:
    """The axes of a reduction, as OpenVINO takes them, and whether they stay."""
    if node.target in _OF_ALL:
        return w.ints(list(range(val(node.args[0]).dim()))), False
    return w.ints(w.axes(arg_of(node, 1, "dim"), val(node.args[0]).dim())), bool(arg_of(node, 2, "keepdim", False))


for _targets, _name in (
    ((aten.mean.dim, aten.mean.default), "reduce_mean"),
    ((aten.sum.dim_IntList, aten.sum.default), "reduce_sum"),
):

    @rule(*_targets, check=_sum_check, gives=[0])
    def _sum(w: Writer, node: fx.Node, name: str = _name) -> Any:
        value = w.numeric(node.args[0])
        made = value if val(node.args[0]).dim() == 0 else getattr(w.ops, name)(value, *_where_to(w, node)).output(0)
        return w.wide(made) if val(node).dtype is torch.int64 else made


for _targets, _name in (
    ((aten.amax.default, aten.max.default), "reduce_max"),
    ((aten.amin.default, aten.min.default), "reduce_min"),
):

    @rule(*_targets, check=float_result)
    def _extreme(w: Writer, node: fx.Node, name: str = _name) -> Any:
        if val(node.args[0]).dim() == 0:
            return w.numeric(node.args[0])
        return _extreme_of(w, w.numeric(node.args[0]), *_where_to(w, node), name)


def _extreme_of(w: Writer, value: Any, where: Any, keep: bool, name: str) -> Any:
    """OpenVINO starts from the largest finite number and passes over NaN."""
    made = getattr(w.ops, name)(value, where, keep)
    worst = w.value(_WORST[name])
    nothing_else = w.ops.reduce_logical_and(w.ops.equal(value, worst), where, keep)
    any_nan = w.ops.reduce_logical_or(w.ops.is_nan(value), where, keep)
    return w.ops.select(any_nan, w.value(math.nan), w.ops.select(nothing_else, worst, made)).output(0)


def _few(node: fx.Node) -> str:
    return float_result(node.args[0]) or ("of so many elements" if val(node.args[0]).numel() >= 1 << 24 else "")  # type: ignore[arg-type]


def _of_float(node: fx.Node) -> str:
    return float_result(node.args[0])  # type: ignore[arg-type]


def _first(w: Writer, value: Any, shape: list[int], axis: int, name: str) -> tuple[Any, Any]:
    """The extreme along an axis, and the place of the first element that is it; both keep the axis."""
    where = w.ints([axis])
    most = _extreme_of(w, value, where, True, name)
    places = w.reshape(w.counted(shape[axis]), [shape[axis], *([1] * (len(shape) - 1 - axis))])
    is_it = w.ops.select(w.ops.is_nan(most), w.ops.is_nan(value), w.ops.equal(value, most))
    place = w.ops.reduce_min(w.ops.select(is_it, places, w.value(known(shape[axis]))), where, True)
    return most, place.output(0)


for _target, _name in ((aten.max.dim, "reduce_max"), (aten.min.dim, "reduce_min")):

    @rule(_target, check=_few, gives=[1])
    def _extreme_and_place(w: Writer, node: fx.Node, name: str = _name) -> Any:
        shape = list(val(node.args[0]).shape)
        value = w.value(node.args[0])
        if not shape:
            return [value, w.wide(w.value(0.0))]
        most, place = _first(w, value, shape, int(node.args[1]) % len(shape), name)  # type: ignore[call-overload]
        wanted = list(node.meta["val"][0].shape)
        return [w.reshape(most, wanted), w.wide(w.reshape(place, wanted))]


for _target, _name in ((aten.argmax.default, "reduce_max"), (aten.argmin.default, "reduce_min")):

    @rule(_target, check=_few, gives=[0])
    def _place(w: Writer, node: fx.Node, name: str = _name) -> Any:
        source, axis = val(node.args[0]), arg_of(node, 1, "dim")
        if source.dim() == 0:
            return w.wide(w.value(0.0))
        shape = list(source.shape) if axis is not None else [source.numel()]
        value = w.value(node.args[0]) if axis is not None else w.reshape(w.value(node.args[0]), shape)
        _, place = _first(w, value, shape, (axis or 0) % len(shape), name)
        return w.wide(w.reshape(place, list(val(node).shape)))


@rule(
    aten.var.correction, aten.std.correction, aten.var_mean.correction, aten.std_mean.correction,
    check=lambda n: "" if val(n.args[0]).dtype is torch.float32 else f"of {val(n.args[0]).dtype}", empty=True,
)  # fmt: skip
def _variance(w: Writer, node: fx.Node) -> Any:
    """By hand: the front end's divides by at least one. Of no elements, all is NaN."""
    source, found = val(node.args[0]), node.meta["val"]
    if not source.numel():
        several = isinstance(found, (list, tuple))
        nothing = [numpy.full(tuple(one.shape), math.nan, numpy.float32) for one in (found if several else [found])]
        made = [w.array(one) for one in nothing]
        return made if several else made[0]
    axes = w.axes(arg_of(node, 1, "dim"), source.dim())
    value = w.value(node.args[0])
    if not axes:  # of a 0-dim tensor
        value, axes = w.reshape(value, [1]), [0]
        counted = 1
    else:
        counted = math.prod(source.shape[axis] for axis in axes)
    correction: Any = node.kwargs.get("correction", 1)
    where = w.ints(axes)
    mean = w.ops.reduce_mean(value, where, True)
    total = w.ops.reduce_sum(w.ops.squared_difference(value, mean), where, True)
    spread = w.ops.divide(total, _left_of(w, counted, 1 if correction is None else correction)).output(0)
    if node.target in (aten.std.correction, aten.std_mean.correction):
        spread = w.ops.sqrt(spread).output(0)
    values = node.meta["val"]
    if not isinstance(values, (list, tuple)):
        return w.reshape(spread, list(values.shape))
    return [w.reshape(spread, list(values[0].shape)), w.reshape(mean.output(0), list(values[1].shape))]


def _left_of(w: Writer, counted: Any, correction: float) -> Any:
    """How many elements a variance is over, less a correction, and no less than none."""
    if not is_symbolic(counted):
        return w.value(max(known(counted) - correction, 0.0))
    return w.ops.maximum(w.ops.subtract(w.value(counted), w.value(float(correction))), w.value(0.0)).output(0)


def _nan_where(w: Writer, value: Any, where: Any, keep: bool, made: Any) -> Any:
    """``made``, but NaN where there is one: OpenVINO's Exp gives inf for NaN."""
    any_nan = w.ops.reduce_logical_or(w.ops.is_nan(value), where, keep)
    return w.ops.select(any_nan, w.value(math.nan), made).output(0)


@rule(aten.logsumexp.default, check=float_result)
def _logsumexp(w: Writer, node: fx.Node) -> Any:
    """By hand: the front end's gives NaN for infinities."""
    value, rank = w.numeric(node.args[0]), val(node.args[0]).dim()
    if rank == 0:
        return value
    axes = w.axes(node.args[1], rank)
    where = w.ints(axes)
    most = w.ops.reduce_max(value, where, True)
    shift = w.ops.select(w.ops.equal(w.ops.abs(most), w.value(math.inf)), w.value(0.0), most)
    total = w.ops.reduce_sum(w.ops.exp(w.ops.subtract(value, shift)), where, True)
    made = w.ops.add(w.ops.log(total), shift)
    return w.reshape(_nan_where(w, value, where, True, made), list(val(node).shape))


@rule(aten._log_softmax.default, aten.log_softmax.int, check=float_result)
def _log_softmax(w: Writer, node: fx.Node) -> Any:
    value, rank = w.numeric(node.args[0]), val(node).dim()
    if rank == 0:
        return w.ops.subtract(value, value)
    axis = int(node.args[1]) % rank  # type: ignore[call-overload]
    where = w.ints([axis])
    infinite = w.ops.reduce_logical_or(w.ops.equal(value, w.value(math.inf)), where, True)
    made = w.ops.select(infinite, w.value(math.nan), w.ops.log_softmax(value, axis))
    return _nan_where(w, value, where, True, made)


@rule(aten._softmax.default, aten.softmax.int, check=float_result)
def _softmax(w: Writer, node: fx.Node) -> Any:
    return w.ops.softmax(w.value(node.args[0]), int(node.args[1]) % max(val(node).dim(), 1))  # type: ignore[arg-type]


@rule(aten._safe_softmax.default, check=float_result)
def _safe_softmax(w: Writer, node: fx.Node) -> Any:
    """Softmax that gives zeros where nothing is to be seen."""
    value, axis = w.value(node.args[0]), int(node.args[1]) % max(val(node).dim(), 1)  # type: ignore[call-overload]
    hidden = w.ops.reduce_logical_and(w.ops.equal(value, w.value(-math.inf)), w.ints([axis]), True)
    return w.ops.select(hidden, w.value(0.0), w.ops.softmax(value, axis))


def _normalised(w: Writer, node: fx.Node, epsilon: float) -> Any:
    shape: Any = node.args[1]
    value = w.value(node.args[0])
    rank = val(node.args[0]).dim()
    axes = w.ints(list(range(rank - len(shape), rank)))
    made = w.ops.mvn(value, axes, True, epsilon, "INSIDE_SQRT")
    for position, name, op in ((2, "weight", "multiply"), (3, "bias", "add")):
        given = arg_of(node, position, name)
        if given is not None:
            made = getattr(w.ops, op)(made, w.value(given))
    return made


@rule(aten.layer_norm.default)
def _layer_norm(w: Writer, node: fx.Node) -> Any:
    return _normalised(w, node, float(arg_of(node, 4, "eps", 1e-5)))


@rule(aten.native_layer_norm.default)
def _native_layer_norm(w: Writer, node: fx.Node) -> Any:
    shape: Any = node.args[1]
    value, rank = w.value(node.args[0]), val(node.args[0]).dim()
    epsilon = float(arg_of(node, 4, "eps"))
    axes = w.ints(list(range(rank - len(shape), rank)))
    mean = w.ops.reduce_mean(value, axes, True)
    squares = w.ops.reduce_mean(w.ops.squared_difference(value, mean), axes, True)
    scale = w.ops.divide(w.value(1.0), w.ops.sqrt(w.ops.add(squares, w.value(epsilon))))
    return [_normalised(w, node, epsilon).output(0), mean.output(0), scale.output(0)]


for _targets, _name in (
    ((aten.any.default, aten.any.dim, aten.any.dims), "reduce_logical_or"),
    ((aten.all.default, aten.all.dim, aten.all.dims), "reduce_logical_and"),
):

    @rule(*_targets)
    def _reduce_logical(w: Writer, node: fx.Node, name: str = _name) -> Any:
        value, rank = w.value(node.args[0]), val(node.args[0]).dim()
        if val(node.args[0]).dtype is not torch.bool:
            value = w.ops.not_equal(value, w.value(0.0)).output(0)
        axes: Any = arg_of(node, 1, "dim")
        if rank == 0 or axes == []:
            return value
        return getattr(w.ops, name)(value, w.ints(w.axes(axes, rank)), bool(arg_of(node, 2, "keepdim", False)))


@rule(aten.count_nonzero.default, aten.count_nonzero.dim_IntList, gives=[0])
def _count_nonzero(w: Writer, node: fx.Node) -> Any:
    value, rank = w.numeric(node.args[0]), val(node.args[0]).dim()
    ones = w.ops.convert(w.ops.not_equal(value, w.value(0.0)), "f32").output(0)
    if rank == 0:
        return w.wide(ones)
    return w.wide(w.ops.reduce_sum(ones, w.ints(w.axes(arg_of(node, 1, "dim"), rank)), False).output(0))


@rule(aten.native_group_norm.default)
def _group_norm(w: Writer, node: fx.Node) -> Any:
    weight, bias, groups, epsilon = node.args[1], node.args[2], node.args[6], node.args[7]
    shape = list(val(node.args[0]).shape)
    rows = [shape[0], int(groups), -1]  # type: ignore[call-overload]
    rows[2] = math.prod(shape) // (rows[0] * rows[1])
    value = w.reshape(w.value(node.args[0]), rows)
    last = w.ints([2])
    mean = w.ops.reduce_mean(value, last, True)
    squares = w.ops.reduce_mean(w.ops.squared_difference(value, mean), last, True)
    scale = w.ops.divide(w.value(1.0), w.ops.sqrt(w.ops.add(squares, w.value(float(epsilon)))))  # type: ignore[arg-type]
    made = w.reshape(w.ops.multiply(w.ops.subtract(value, mean), scale).output(0), shape)
    for given, op in ((weight, "multiply"), (bias, "add")):
        if given is not None:
            per_channel = w.reshape(w.value(given), [1, shape[1], *([1] * (len(shape) - 2))])
            made = getattr(w.ops, op)(made, per_channel).output(0)
    return [made, *(w.reshape(one.output(0), rows[:2]) for one in (mean, scale))]


def _sorted(
    w: Writer, value: Any, count: int, axis: int, descending: bool = False, stable: bool = True
) -> tuple[Any, Any]:
    """The first ``count`` values along an axis in order, NaN as the largest, and their places, of 32 bits.

    By hand: the engine's order is wrong where NaN is among the values. So NaN is taken for infinity, and infinity for
    the largest finite number: the order is kept, but where a row has that number and infinity.
    """
    is_nan = w.ops.is_nan(value)
    keys = w.ops.select(w.ops.equal(value, w.value(math.inf)), w.value(float(numpy.finfo(numpy.float32).max)), value)
    keys = w.ops.select(is_nan, w.value(math.inf), keys)
    mode = "max" if descending else "min"
    places = w.ops.topk(keys, w.ints(count), axis, mode, "value", stable=stable).output(1)
    return w.ops.gather_elements(value, places, axis).output(0), places


@rule(aten.sort.default, aten.sort.stable, aten.topk.default, check=_of_float, gives=[1])
def _in_order(w: Writer, node: fx.Node) -> Any:
    value, shape = w.value(node.args[0]), list(val(node.args[0]).shape)
    if not shape:
        return [value, w.wide(w.value(0.0))]
    if node.target is aten.topk.default:
        axis, descending = int(arg_of(node, 2, "dim", -1)) % len(shape), bool(arg_of(node, 3, "largest", True))
        count = int(node.args[1])  # type: ignore[call-overload]
    else:
        at = 2 if node.target is aten.sort.stable else 1
        axis, descending = (
            int(arg_of(node, at, "dim", -1)) % len(shape),
            bool(arg_of(node, at + 1, "descending", False)),
        )
        count = shape[axis]
    found, places = _sorted(w, value, count, axis, descending, stable=node.target is not aten.topk.default)
    return [found, w.wide(places)]


@rule(aten.kthvalue.default, aten.median.dim, aten.nanmedian.dim, check=_few, gives=[1])
def _ranked(w: Writer, node: fx.Node) -> Any:
    shape, value = list(val(node.args[0]).shape), w.value(node.args[0])
    at = 2 if node.target is aten.kthvalue.default else 1
    axis, rank = int(arg_of(node, at, "dim", -1)) % max(len(shape), 1), 0
    if not shape:
        return [value, w.wide(w.value(0.0))]
    found, places = _sorted(w, value, shape[axis], axis)
    if node.target is aten.kthvalue.default:
        rank = int(node.args[1]) - 1  # type: ignore[call-overload]
        return _picked_rank(w, node, found, places, w.word_of(rank), axis)
    return _picked_rank(w, node, found, places, _middle(w, node, value, shape, axis), axis)


def _middle(w: Writer, node: fx.Node, value: Any, shape: list[int], axis: int) -> Any:
    """Which rank the lower median has, as 32-bit integers; of a median that keeps NaN, that of the first NaN."""
    marked = w.ops.convert(w.ops.is_nan(value), "f32")
    nans = w.ops.reduce_sum(marked, w.ints([axis]), True)
    left = w.ops.subtract(w.value(known(shape[axis])), nans)
    if node.target in (aten.nanmedian.dim, aten.nanmedian.default):
        middle = w.ops.floor(w.ops.multiply(w.ops.subtract(left, w.value(1.0)), w.value(0.5)))
        middle = w.ops.maximum(middle, w.value(0.0))
    else:
        half = w.value(known((shape[axis] - 1) // 2))
        middle = w.ops.select(w.ops.greater(nans, w.value(0.0)), left, half)
    return w.ops.convert(middle, "i32").output(0)


def _picked_rank(w: Writer, node: fx.Node, found: Any, places: Any, rank: Any, axis: int) -> list[Any]:
    wanted = list(node.meta["val"][0].shape)
    if not len(rank.get_partial_shape()):
        shape = val(node.args[0]).shape
        rank = w.ops.broadcast(rank, w.ints([1 if at == axis else size for at, size in enumerate(shape)])).output(0)
    made = [w.ops.gather_elements(one, rank, axis).output(0) for one in (found, places)]
    return [w.reshape(made[0], wanted), w.wide(w.reshape(made[1], wanted))]


@rule(aten.median.default, aten.nanmedian.default, check=_few)
def _median_of_all(w: Writer, node: fx.Node) -> Any:
    count = val(node.args[0]).numel()
    value = w.reshape(w.value(node.args[0]), [count])
    found, _ = _sorted(w, value, count, 0)
    rank = _middle(w, node, value, [count], 0)
    return w.reshape(w.ops.gather_elements(found, rank, 0).output(0), [])


@rule(aten._pdist_forward.default)
def _pdist(w: Writer, node: fx.Node) -> Any:
    """Distances of the rows above the diagonal; the places are made when the graph is compiled."""
    rows = val(node.args[0]).shape[0]
    first, second = numpy.triu_indices(rows, 1)
    value = w.value(node.args[0])
    one, two = (w.ops.gather(value, w.ints(places.tolist()), w.ints(0)) for places in (first, second))
    apart = w.ops.abs(w.ops.subtract(one, two)).output(0)
    return _norm(w, apart, w.ints([1]), float(arg_of(node, 1, "p", 2.0)))


@rule(aten._cdist_forward.default)
def _cdist(w: Writer, node: fx.Node) -> Any:
    """By hand: the front end's are other norms for 0, 1 and infinity."""
    order = float(node.args[2])  # type: ignore[arg-type]
    rank = val(node.args[0]).dim()
    left = w.ops.unsqueeze(w.value(node.args[0]), w.ints(rank - 1))
    right = w.ops.unsqueeze(w.value(node.args[1]), w.ints(rank - 2))
    apart = w.ops.abs(w.ops.subtract(left, right)).output(0)
    return _norm(w, apart, w.ints([rank]), order)


@rule(
    aten.linalg_vector_norm.default,
    check=lambda n: "" if val(n.args[0]).dtype is val(n).dtype is torch.float32 else f"in {val(n).dtype}",
    empty=True,
)
def _vector_norm(w: Writer, node: fx.Node) -> Any:
    """By hand: the front end takes no list of no axes, and no axes below 0 of a 0-dim tensor. Of nothing it is 0."""
    source = val(node.args[0])
    if not source.numel():
        return w.array(numpy.zeros(tuple(val(node).shape), numpy.float32))
    axes = w.axes(arg_of(node, 2, "dim"), source.dim())
    apart = w.ops.abs(w.value(node.args[0])).output(0)
    if not axes:
        apart, axes = w.reshape(apart, [1]), [0]
    made = _norm(w, apart, w.ints(axes), float(arg_of(node, 1, "ord", 2)))
    return w.reshape(made.output(0) if hasattr(made, "output") else made, list(val(node).shape))


@rule(aten.dist.default, check=float_result)
def _dist(w: Writer, node: fx.Node) -> Any:
    apart = w.ops.abs(w.ops.subtract(w.value(node.args[0]), w.value(node.args[1]))).output(0)
    axes = list(range(len(apart.get_partial_shape())))
    if not axes:
        apart, axes = w.reshape(apart, [1]), [0]
    return _norm(w, apart, w.ints(axes), float(arg_of(node, 2, "p", 2)))


def _norm(w: Writer, apart: Any, where: Any, order: float) -> Any:
    """A norm of absolute values."""
    if order == 0:
        return w.ops.reduce_sum(w.ops.convert(w.ops.not_equal(apart, w.value(0.0)), "f32"), where, False)
    if order in (math.inf, -math.inf):
        return _extreme_of(w, apart, where, False, "reduce_max" if order > 0 else "reduce_min")
    if order == 1:
        return w.ops.reduce_sum(apart, where, False)
    if order == 2:
        return w.ops.sqrt(w.ops.reduce_sum(w.ops.multiply(apart, apart), where, False))
    total = w.ops.reduce_sum(w.ops.power(apart, w.value(order)), where, False)
    return w.ops.power(total, w.value(1 / order))
