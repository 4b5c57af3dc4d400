"""Tensors made of numbers: filled ones, sequences, and triangles of matrices."""

from __future__ import annotations

from typing import Any

import numpy
import torch
from torch import fx

from torchport.backend.sizes.guards import NotSymbolic

from .sizes import is_symbolic, known
from .writer import KINDS, Writer, arg_of, held_shape, rule, val

aten = torch.ops.aten


def _filled(w: Writer, node: fx.Node, number: Any) -> Any:
    """A tensor of one number, made when the graph is compiled, if it has always as many elements."""
    if is_symbolic(number):
        one = _of_size(w, node, number)
        return w.ops.broadcast(one, w.ints(held_shape(val(node)))) if val(node).dim() else one
    return w.filled(val(node).shape, numpy.array(known(number), KINDS[val(node).dtype]))


def _of_size(w: Writer, node: fx.Node, number: Any) -> Any:
    """A size as a tensor of as many dimensions as a result has, each of one, and of its dtype."""
    shape, dtype = [1] * val(node).dim(), val(node).dtype
    if dtype is torch.int64:
        return w.reshape(w.wide(w.word_of(number)), [*shape, 2])
    if dtype is not torch.float32:
        raise NotSymbolic(f"a size is a number of {dtype}")
    return w.reshape(w.value(number), shape)


def _small(node: fx.Node) -> str:
    count = known(val(node).numel())
    return "" if is_symbolic(count) or count <= 1 << 20 else "of so many elements: the constant would be stored"


@rule(
    aten.full.default,
    aten.full_like.default,
    aten.new_full.default,
    aten.fill.Scalar,
    check=_small,
    moves=True,
    empty=True,
)
def _full(w: Writer, node: fx.Node) -> Any:
    at = 2 if node.target is aten.new_full.default else 1
    return _filled(w, node, node.args[at])


@rule(aten.scalar_tensor.default, moves=True, empty=True)
def _scalar_tensor(w: Writer, node: fx.Node) -> Any:
    return _filled(w, node, node.args[0])


@rule(
    aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default, aten.empty.memory_format,
    aten.empty_like.default, aten.new_empty.default, aten.zero.default, aten._efficientzerotensor.default,
    aten.empty_strided.default, aten.new_empty_strided.default, check=_small, moves=True, empty=True,
)  # fmt: skip
def _zeros(w: Writer, node: fx.Node) -> Any:
    return _filled(w, node, 0)


@rule(aten.ones.default, aten.ones_like.default, aten.new_ones.default, check=_small, moves=True, empty=True)
def _ones(w: Writer, node: fx.Node) -> Any:
    return _filled(w, node, 1)


def _range_check(node: fx.Node) -> str:
    return _small(node) if val(node).dtype in KINDS else f"to {val(node).dtype}"


@rule(
    aten.arange.default, aten.arange.start, aten.arange.start_step, aten.linspace.default, aten.logspace.default,
    aten.eye.default, aten.eye.m, aten.tril_indices.default, aten.triu_indices.default,
    check=_range_check, moves=True, empty=True,
)  # fmt: skip
def _sequence(w: Writer, node: fx.Node) -> Any:
    """Made by PyTorch when the graph is compiled, if sizes are known."""
    target: Any = node.target
    if is_symbolic(list(node.args)):
        return _range_of_sizes(w, node)
    return w.array(target(*map(known, node.args), **{**node.kwargs, "device": "cpu"}).numpy())


def _range_of_sizes(w: Writer, node: fx.Node) -> Any:
    """Numbers from one size to another, or a unit matrix."""
    count, dtype = val(node).shape[0], val(node).dtype
    if node.target in (aten.eye.default, aten.eye.m):
        down, across = w.counted(count), w.counted(val(node).shape[1])
        ones = w.ops.equal(w.ops.unsqueeze(down, w.ints(1)), w.ops.unsqueeze(across, w.ints(0)))
        return _counted_as(w, ones.output(0), dtype)
    if node.target not in (aten.arange.default, aten.arange.start, aten.arange.start_step):
        raise NotSymbolic("its elements are made when the graph is compiled")
    args: list[Any] = list(node.args)
    start, step = (0 if len(args) == 1 else args[0]), (args[2] if len(args) == 3 else 1)
    if not all(isinstance(known(one), (int, torch.SymInt)) for one in (start, step)) or is_symbolic(step):
        raise NotSymbolic("its elements are no whole numbers")
    return _counted_as(w, w.counted(count, "i32", start, known(step)), dtype)


def _counted_as(w: Writer, value: Any, dtype: Any) -> Any:
    """Small whole numbers, or bools, as a dtype."""
    if dtype is torch.int64:
        return w.wide(value)
    if dtype not in (torch.float32, torch.int32, torch.bool):
        raise NotSymbolic(f"numbers of {dtype} are made when the graph is compiled")
    kinds = {torch.float32: "f32", torch.int32: "i32", torch.bool: "boolean"}
    return w.ops.convert(value, kinds[dtype])


@rule(aten.tril.default, aten.triu.default)
def _triangle(w: Writer, node: fx.Node) -> Any:
    diagonal = int(arg_of(node, 1, "diagonal", 0))
    value, sides = w.value(node.args[0]), val(node).shape[-2:]
    if is_symbolic(sides):
        down, across = w.ops.unsqueeze(w.counted(sides[0]), w.ints(1)), w.counted(sides[1])
        reach = w.ops.add(down, w.value(float(diagonal)))
        mask = (w.ops.less_equal if node.target is aten.tril.default else w.ops.greater_equal)(across, reach)
    else:
        kept = numpy.tril if node.target is aten.tril.default else numpy.triu
        mask = w.ops.constant(kept(numpy.ones(tuple(map(known, sides)), bool), diagonal))
    return w.ops.logical_and(value, mask) if val(node).dtype is torch.bool else w.ops.select(mask, value, w.value(0.0))
