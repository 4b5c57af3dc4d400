"""Operators that put values at places: sums, products, extremes and means of what meets at one."""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch import fx

from .modules import openvino_module
from .writer import Writer, arg_of, float_result, rule, same_shape, val

aten = torch.ops.aten

_WAYS: Final = {
    "sum": "sum",
    "add": "sum",
    "prod": "prod",
    "multiply": "prod",
    "amax": "max",
    "amin": "min",
    "mean": "mean",
}
"""PyTorch's names of reductions → OpenVINO's."""
_MOST: Final = 1 << 24
"""Elements up to which a place counted in 32 bits, or in float32, is exact."""


def _few(node: fx.Node) -> str:
    """A check: that places can be counted, and that nothing but float32 is put."""
    wrong = float_result(node)
    return wrong or ("of so many elements" if val(node.args[0]).numel() >= _MOST else "")


def _put(w: Writer, into: Any, places: Any, values: Any, axis: int, way: str, with_own: bool) -> Any:
    """``scatter_elements_update``; the engine's extremes pass over NaN, which PyTorch's keep."""
    opset: Any = openvino_module("openvino.opset15")
    if way == "":
        return opset.scatter_elements_update(into, places, values, w.ints(axis)).output(0)
    made = opset.scatter_elements_update(into, places, values, w.ints(axis), way, with_own).output(0)
    if way not in ("max", "min"):
        return made
    flags = [w.ops.convert(w.ops.is_nan(one), "f32").output(0) for one in (into, values)]
    marked = opset.scatter_elements_update(flags[0], places, flags[1], w.ints(axis), "sum", with_own)
    return w.ops.select(w.ops.greater(marked, w.value(0.0)), w.value(math.nan), made).output(0)


def _inside(w: Writer, places: Any, size: int) -> Any:
    """Places that may count from the end, as 32-bit integers from 0 on."""
    low = w.ops.less(places, w.word_of(0))
    return w.ops.select(low, w.ops.add(places, w.word_of(size)), places).output(0)


def _row(w: Writer, value: Any, count: int) -> Any:
    return w.reshape(value, [count])


@rule(
    aten.scatter_reduce.two, aten.scatter.reduce, aten.scatter.value_reduce, aten.scatter_add.default,
    check=_few, reads=[2],
)  # fmt: skip
def _scatter_reduce(w: Writer, node: fx.Node) -> Any:
    into, places, values = node.args[0], w.index(node.args[2]), node.args[3]  # type: ignore[arg-type]
    if node.target is aten.scatter_add.default:
        way, with_own = "sum", True
    else:
        way = _WAYS[str(arg_of(node, 4, "reduce"))]
        with_own = bool(arg_of(node, 5, "include_self", True))
    shape, chosen = list(val(node).shape), list(val(node.args[2]).shape)
    made = w.numeric(values)
    if not isinstance(values, fx.Node):
        made = w.ops.broadcast(made, w.ints(chosen)).output(0)
    elif list(val(values).shape) != chosen:  # PyTorch reads as many as there are places
        start = w.ints([0] * len(chosen))
        made = w.ops.slice(made, start, w.ints(chosen), w.ints([1] * len(chosen))).output(0)
    if not shape:
        return w.reshape(_put(w, _row(w, w.value(into), 1), _row(w, places, 1), _row(w, made, 1), 0, way, with_own), [])
    axis = int(node.args[1]) % len(shape)  # type: ignore[call-overload]
    if not chosen:
        places, made = _row(w, places, 1), _row(w, made, 1)
    return _put(w, w.value(into), places, made, axis, way, with_own)


@rule(aten.index_add.default, aten.index_reduce.default, check=_few, reads=[2])
def _index_reduce(w: Writer, node: fx.Node) -> Any:
    """Whole rows: the places are repeated along them."""
    way, with_own = "sum", True
    values = w.value(node.args[3])
    if node.target is aten.index_reduce.default:
        way, with_own = _WAYS[str(node.args[4])], bool(node.kwargs.get("include_self", True))
    elif node.kwargs.get("alpha", 1) != 1:
        values = w.ops.multiply(values, w.value(node.kwargs["alpha"])).output(0)
    places = w.index(node.args[2])  # type: ignore[arg-type]
    shape, count = list(val(node).shape), val(node.args[2]).numel()
    if not shape:
        made = _put(
            w, _row(w, w.value(node.args[0]), 1), _row(w, places, count), _row(w, values, count), 0, way, with_own
        )
        return w.reshape(made, [])
    axis = int(node.args[1]) % len(shape)  # type: ignore[call-overload]
    wanted = [*shape[:axis], count, *shape[axis + 1 :]]
    places = w.reshape(places, [count if at == axis else 1 for at in range(len(shape))])
    places = w.ops.broadcast(places, w.ints(wanted)).output(0)
    return _put(w, w.value(node.args[0]), places, w.reshape(values, wanted), axis, way, with_own)


def _indices_check(node: fx.Node) -> str:
    """A check: tensors of integers for the first dimensions."""
    given: Any = node.args[2 if node.target in _MASKED else 1]
    if any(one is None for one in given):
        return "by places that leave a dimension out"
    if any(val(one).dtype not in (torch.int64, torch.int32) for one in given):
        return "by a mask"
    return _few(node) or ("into a 0-dim tensor" if not val(node.args[0]).dim() else "")


_MASKED: Final = {aten._unsafe_masked_index.default, aten._unsafe_masked_index_put_accumulate.default}


def _flat_places(w: Writer, given: Any, sizes: list[int], clamped: bool) -> tuple[Any, list[int]]:
    """Places of the first dimensions as numbers of rows, flat, and the shape of the places."""
    shape = list(torch.broadcast_shapes(*(val(one).shape for one in given)))
    total: Any = None
    for one, size in zip(given, sizes, strict=False):
        place = w.index(one)
        if clamped:
            place = w.ops.minimum(w.ops.maximum(place, w.word_of(0)), w.word_of(size - 1)).output(0)
        else:
            place = _inside(w, place, size)
        total = place if total is None else w.ops.add(w.ops.multiply(total, w.word_of(size)), place).output(0)
    if not all(same_shape(val(one).shape, shape) for one in given):
        total = w.ops.broadcast(total, w.ints(shape)).output(0)
    return w.reshape(total, [math.prod(shape)]), shape


def _put_rows(w: Writer, node: fx.Node, places: Any, many: Any, count: Any, values: Any, way: str) -> Any:
    """Rows of ``values`` [many, ...] put at ``places`` [many] of the first argument, as ``count`` rows."""
    source = val(node.args[0])
    inside = val(node).numel() // count if count else 1
    into = w.reshape(w.value(node.args[0]), [count, inside])
    where = w.ops.unsqueeze(places, w.ints(1)).output(0)
    if inside > 1:
        where = w.ops.broadcast(where, w.ints([many, inside])).output(0)
    return w.reshape(_put(w, into, where, values, 0, way, True), list(source.shape))


@rule(aten.index_put.default, check=_indices_check, reads=[1])
def _index_put(w: Writer, node: fx.Node) -> Any:
    given: Any = node.args[1]
    sizes = list(val(node.args[0]).shape)
    places, shape = _flat_places(w, given, sizes, clamped=False)
    rest = sizes[len(given) :]
    values = w.value(node.args[2])
    wanted = [*shape, *rest]
    if not same_shape(val(node.args[2]).shape, wanted):
        values = w.ops.broadcast(values, w.ints(wanted)).output(0) if wanted else w.reshape(values, [])
    values = w.reshape(values, [math.prod(shape), math.prod(rest)])
    way = "sum" if arg_of(node, 3, "accumulate", False) else ""
    return _put_rows(w, node, places, math.prod(shape), math.prod(sizes[: len(given)]), values, way)


@rule(aten.put.default, check=_few, reads=[1])
def _put_flat(w: Writer, node: fx.Node) -> Any:
    count, places = val(node).numel(), val(node.args[1]).numel()
    where = _inside(w, w.reshape(w.index(node.args[1]), [places]), count)  # type: ignore[arg-type]
    way = "sum" if arg_of(node, 3, "accumulate", False) else ""
    return _put_rows(w, node, where, places, count, w.reshape(w.value(node.args[2]), [places, 1]), way)


@rule(aten._unsafe_masked_index.default, check=_indices_check, reads=[2])
def _masked_index(w: Writer, node: fx.Node) -> Any:
    """Places are brought inside first: those that the mask hides may be anywhere."""
    given: Any = node.args[2]
    sizes = list(val(node.args[0]).shape)
    places, shape = _flat_places(w, given, sizes, clamped=True)
    count, rest = math.prod(sizes[: len(given)]), sizes[len(given) :]
    found = w.ops.gather(w.reshape(w.value(node.args[0]), [count, *rest]), places, w.ints(0)).output(0)
    return w.ops.select(w.value(node.args[1]), w.reshape(found, [*shape, *rest]), w.value(float(node.args[3])))  # type: ignore[arg-type]


@rule(aten._unsafe_masked_index_put_accumulate.default, check=_indices_check, reads=[2])
def _masked_put(w: Writer, node: fx.Node) -> Any:
    given: Any = node.args[2]
    sizes = list(val(node.args[0]).shape)
    places, shape = _flat_places(w, given, sizes, clamped=True)
    rest = sizes[len(given) :]
    values = w.ops.select(w.value(node.args[1]), w.value(node.args[3]), w.value(0.0)).output(0)
    values = w.reshape(values, [math.prod(shape), math.prod(rest)])
    return _put_rows(w, node, places, math.prod(shape), math.prod(sizes[: len(given)]), values, "sum")
