"""Operators that read places: rows of a table, elements along an axis."""

from __future__ import annotations

import math
from typing import Any

import numpy
import torch
from torch import fx

from .front_end import converted, why_not
from .writer import WORDS, Writer, rule, val

aten = torch.ops.aten


def _gather_check(node: fx.Node) -> str:
    return "" if val(node.args[0]).dim() and val(node.args[2]).dim() else "of a 0-dim tensor"


@rule(aten.index_select.default, moves=True)
def _index_select(w: Writer, node: fx.Node) -> Any:
    source, index = val(node.args[0]), val(node.args[2])
    value, places = w.value(node.args[0]), w.index(node.args[2])  # type: ignore[arg-type]
    if source.dim() == 0:
        return value if index.dim() == 0 else w.reshape(value, list(val(node).shape))
    if index.dim() == 0:
        places = w.reshape(places, [1])
    return w.ops.gather(value, places, w.ints(int(node.args[1]) % source.dim()))  # type: ignore[call-overload]


@rule(
    aten.gather.default,
    check=_gather_check,
    moves=True,
)
def _gather(w: Writer, node: fx.Node) -> Any:
    rank = val(node.args[0]).dim()
    value, places = w.value(node.args[0]), w.index(node.args[2])  # type: ignore[arg-type]
    axis = int(node.args[1]) % rank  # type: ignore[call-overload]
    value = _cut(w, node, value, axis)
    if val(node).dtype in WORDS:
        words = [w.ops.gather_elements(w.word(value, at), places, axis).output(0) for at in range(2)]
        return w.ops.concat([w.ops.unsqueeze(one, w.ints(-1)).output(0) for one in words], -1)
    return w.ops.gather_elements(value, places, axis)


def _cut(w: Writer, node: fx.Node, value: Any, axis: int) -> Any:
    """PyTorch lets the places be fewer in the other dimensions; OpenVINO wants as many.

    By a split: OpenVINO 2026.4 takes a slice away again before it gathers, and then refuses the shapes.
    """
    for at, (size, wanted) in enumerate(zip(val(node.args[0]).shape, val(node.args[2]).shape, strict=True)):
        if at != axis and size != wanted:
            value = w.ops.variadic_split(value, w.ints(at), w.ints([wanted, size - wanted])).output(0)
    return value


@rule(aten.bucketize.Tensor, aten.searchsorted.Tensor, check=why_not, gives=[0])
def _place_among(w: Writer, node: fx.Node) -> Any:
    """The front end's, but for NaN, which comes after everything."""
    values, bounds = node.args[:2] if node.target is aten.bucketize.Tensor else node.args[1::-1]
    after = w.ops.is_nan(w.value(values))
    wide = val(node).dtype in WORDS
    made = w.word(converted(w, node), 0) if wide else converted(w, node)
    found = w.ops.select(after, w.word_of(val(bounds).shape[-1]), made).output(0)
    return w.wide(found) if wide else found


@rule(aten.max_unpool2d.default, aten.max_unpool3d.default, reads=[1])
def _max_unpool(w: Writer, node: fx.Node) -> Any:
    """Values to their places within an image. Of two at one place, PyTorch too keeps any."""
    rank = 2 if node.target is aten.max_unpool2d.default else 3
    source, shape = val(node.args[0]), list(val(node).shape)
    rows, inside, outside = (
        source.numel() // math.prod(source.shape[-rank:]),
        math.prod(source.shape[-rank:]),
        math.prod(shape[-rank:]),
    )
    into = w.filled([rows, outside], numpy.array(0, numpy.float32))
    places = w.reshape(w.index(node.args[1]), [rows, inside])  # type: ignore[arg-type]
    values = w.reshape(w.value(node.args[0]), [rows, inside])
    return w.reshape(w.ops.scatter_elements_update(into, places, values, w.ints(1)).output(0), shape)


def _scatter_sum(w: Writer, node: fx.Node, places: Any, rows: int, inside: int) -> Any:
    """Values added at their places: of two at one place, both."""
    outside = val(node).numel() // rows
    into = w.filled([rows, outside], numpy.array(0, numpy.float32))
    where, values = w.reshape(places, [rows, inside]), w.reshape(w.value(node.args[0]), [rows, inside])
    made = w.ops.scatter_elements_update(into, where, values, w.ints(1), "sum").output(0)
    return w.reshape(made, list(val(node).shape))


@rule(
    aten.max_pool2d_with_indices_backward.default, aten.max_pool3d_with_indices_backward.default,
    aten.adaptive_max_pool2d_backward.default, aten.adaptive_max_pool3d_backward.default, reads=[2, 7],
)  # fmt: skip
def _max_pool_backward(w: Writer, node: fx.Node) -> Any:
    flat = node.target in (
        aten.max_pool2d_with_indices_backward.default,
        aten.adaptive_max_pool2d_backward.default,
    )
    shape: Any = val(node.args[0]).shape
    inside = math.prod(shape[-2:] if flat else shape[-3:])
    places: Any = node.args[-1]
    return _scatter_sum(w, node, w.index(places), math.prod(shape) // inside, inside)
