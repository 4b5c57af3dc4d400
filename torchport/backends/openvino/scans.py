"""Running products, extremes and logarithms of sums: each element with those before it, in log2(n) steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from .writer import Writer, float_result, rule, val

aten = torch.ops.aten

Pair = tuple[Any, ...]


def _scan(w: Writer, values: Pair, shape: list[int], axis: int, join: Callable[[Pair, Pair], Pair]) -> Pair:
    """``join`` of all up to each element: of neighbours first, then of what those have, twice as far apart each time.

    ``values``: one or more tensors of one shape; ``join`` takes the earlier and the later, and is associative.
    """
    where, apart = w.ints([axis]), 1
    while apart < shape[axis]:

        def cut(value: Any, start: int, stop: int) -> Any:
            return w.ops.slice(value, w.ints([start]), w.ints([stop]), w.ints([1]), where).output(0)

        earlier = tuple(cut(value, 0, shape[axis] - apart) for value in values)
        later = tuple(cut(value, apart, shape[axis]) for value in values)
        joined = join(earlier, later)
        values = tuple(
            w.ops.concat([cut(value, 0, apart), new], axis).output(0) for value, new in zip(values, joined, strict=True)
        )
        apart *= 2
    return values


def _of_one(node: fx.Node) -> str:
    dtype = val(node.args[0]).dtype
    return "" if dtype is torch.float32 else f"of {dtype}"


@rule(aten.cumprod.default, check=lambda n: _of_one(n) or float_result(n))
def _cumprod(w: Writer, node: fx.Node) -> Any:
    value, shape = w.value(node.args[0]), list(val(node).shape)
    if not shape:
        return value
    axis = int(node.args[1]) % len(shape)  # type: ignore[call-overload]
    return _scan(w, (value,), shape, axis, lambda a, b: (w.ops.multiply(a[0], b[0]).output(0),))[0]


@rule(aten.logcumsumexp.default, check=_of_one)
def _logcumsumexp(w: Writer, node: fx.Node) -> Any:
    """The engine's exponential gives infinity for NaN, so that NaN is put in again."""
    value, shape = w.value(node.args[0]), list(val(node).shape)
    if not shape:
        return value
    axis = int(node.args[1]) % len(shape)  # type: ignore[call-overload]

    def join(a: Pair, b: Pair) -> Pair:
        most, apart = w.ops.maximum(a[0], b[0]), w.ops.negative(w.ops.abs(w.ops.subtract(a[0], b[0])))
        sum_of = w.ops.add(most, w.ops.log(w.ops.add(w.ops.exp(apart), w.value(1.0))))
        same = w.ops.add(most, w.value(math.log(2.0)))
        made = w.ops.select(w.ops.equal(a[0], b[0]), same, sum_of)
        nan = w.ops.logical_or(w.ops.is_nan(a[0]), w.ops.is_nan(b[0]))
        return (w.ops.select(nan, w.value(math.nan), made).output(0),)

    return _scan(w, (value,), shape, axis, join)[0]


for _target, _name in ((aten.cummax.default, "greater_equal"), (aten.cummin.default, "less_equal")):

    @rule(_target, check=_of_one, gives=[1])
    def _running_extreme(w: Writer, node: fx.Node, name: str = _name) -> Any:
        """Values and places; of equal ones the last, and NaN once there is one."""
        value, shape = w.value(node.args[0]), list(val(node.args[0]).shape)
        if not shape:
            return [value, w.wide(w.value(0.0))]
        axis = int(node.args[1]) % len(shape)  # type: ignore[call-overload]
        line = w.reshape(w.counted(shape[axis]), [size if at == axis else 1 for at, size in enumerate(shape)])
        places = w.ops.broadcast(line, w.ints(shape)).output(0)

        def join(a: Pair, b: Pair) -> Pair:
            later = w.ops.logical_or(getattr(w.ops, name)(b[0], a[0]), w.ops.is_nan(b[0]))
            later = w.ops.logical_and(
                later, w.ops.logical_or(w.ops.is_nan(b[0]), w.ops.logical_not(w.ops.is_nan(a[0])))
            )
            return tuple(w.ops.select(later, y, x).output(0) for x, y in zip(a, b, strict=True))

        found, where = _scan(w, (value, places), shape, axis, join)
        return [found, w.wide(where)]
