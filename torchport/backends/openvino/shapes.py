"""Operators that move elements and do not look at them. Most take values of any width."""

from __future__ import annotations

from typing import Any

import numpy
import torch
from torch import fx

from .writer import WORDS, Writer, arg_of, held_shape, rule, val

aten = torch.ops.aten


@rule(
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim,
    aten.squeeze.dims, aten.squeeze.default, aten.flatten.using_ints, aten._reshape_alias.default, moves=True,
    empty=True,
)  # fmt: skip
def _reshape(w: Writer, node: fx.Node) -> Any:
    return w.reshape(w.value(node.args[0]), held_shape(val(node)))


@rule(aten.expand.default, moves=True, empty=True)
def _expand(w: Writer, node: fx.Node) -> Any:
    if val(node).shape == val(node.args[0]).shape:
        return w.value(node.args[0])  # OpenVINO ends the process over two such broadcasts of a scalar
    return w.ops.broadcast(w.value(node.args[0]), w.ints(held_shape(val(node))))


@rule(aten.permute.default, moves=True, empty=True)
def _permute(w: Writer, node: fx.Node) -> Any:
    rank = len(val(node).shape)
    order: Any = node.args[1]
    return _transposed(w, node, [axis % rank for axis in order])


@rule(aten.transpose.int, aten.t.default, moves=True, empty=True)
def _transpose(w: Writer, node: fx.Node) -> Any:
    order: list[int] = list(range(val(node).dim()))
    args: Any = node.args
    first, second = (args[1], args[2]) if len(args) > 2 else (0, len(order) - 1)
    if order:
        order[first], order[second] = order[second], order[first]
    return _transposed(w, node, order)


def _transposed(w: Writer, node: fx.Node, order: list[int]) -> Any:
    """The words of an element stay together."""
    words = [len(order)] if val(node).dtype in WORDS else []
    return w.ops.transpose(w.value(node.args[0]), w.ints([*order, *words]))


@rule(aten.slice.Tensor, moves=True)
def _slice(w: Writer, node: fx.Node) -> Any:
    axis, start = int(arg_of(node, 1, "dim", 0)), arg_of(node, 2, "start") or 0
    stop, step = arg_of(node, 3, "end"), arg_of(node, 4, "step", 1)
    size = val(node.args[0]).shape[axis]
    begin, end, _ = slice(start, stop, step).indices(size)
    end = max(begin, end)
    value = w.value(node.args[0])
    return w.ops.slice(value, *(w.ints([number]) for number in (begin, end, step, axis % val(node).dim())))


@rule(aten.narrow.default, aten.narrow_copy.default, moves=True)
def _narrow(w: Writer, node: fx.Node) -> Any:
    axis, start, count = (int(number) for number in node.args[1:4])  # type: ignore[call-overload]
    axis, begin = axis % val(node).dim(), start % max(val(node.args[0]).shape[axis], 1)
    numbers = (begin, begin + count, 1, axis)
    return w.ops.slice(w.value(node.args[0]), *(w.ints([number]) for number in numbers))


@rule(aten.select.int, moves=True)
def _select(w: Writer, node: fx.Node) -> Any:
    axis, index = int(node.args[1]), int(node.args[2])  # type: ignore[arg-type]
    source = val(node.args[0])
    return w.ops.gather(w.value(node.args[0]), w.ints(index % source.shape[axis]), w.ints(axis % source.dim()))


def _parts(node: fx.Node) -> list[fx.Node]:
    """The operands of ``cat`` and ``stack`` that have elements."""
    given: Any = node.args[0]
    return [part for part in given if val(part).numel()]


@rule(
    aten.cat.default,
    check=lambda n: "of mixed dtypes" if len({val(x).dtype for x in n.all_input_nodes}) > 1 else "",
    moves=True,
    empty=True,
)
def _cat(w: Writer, node: fx.Node) -> Any:
    parts, rank = _parts(node), val(node).dim()
    values, axis = [w.value(part) for part in parts], int(arg_of(node, 1, "dim", 0)) % rank
    if len(values) == 1:
        return values[0]
    if rank > 1 or val(node).dtype in WORDS:
        return w.ops.concat(values, axis)
    # In rows: OpenVINO 2026.4 gives abs(c) for both where c, joined from vectors, and abs(c) are results.
    rows = [w.reshape(value, (1, *val(part).shape)) for value, part in zip(values, parts, strict=True)]
    return w.reshape(w.ops.concat(rows, 1), val(node).shape)


@rule(
    aten.stack.default,
    check=lambda n: "of mixed dtypes" if len({val(x).dtype for x in n.all_input_nodes}) > 1 else "",
    moves=True,
)
def _stack(w: Writer, node: fx.Node) -> Any:
    parts, axis = _parts(node), int(arg_of(node, 1, "dim", 0)) % val(node).dim()
    rows = [w.ops.unsqueeze(w.value(part), w.ints(axis)).output(0) for part in parts]
    if val(node).dim() > 1 or val(node).dtype in WORDS:
        return w.ops.concat(rows, axis)
    return w.reshape(w.ops.concat([w.reshape(row, (1, 1)) for row in rows], 1), val(node).shape)


@rule(aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default, moves=True)
def _split(w: Writer, node: fx.Node) -> Any:
    values: Any = node.meta["val"]
    axis = int(arg_of(node, 2, "dim", 0)) % values[0].dim()
    sizes = [value.shape[axis] for value in values]
    return list(w.ops.variadic_split(w.value(node.args[0]), w.ints(axis), w.ints(sizes)).outputs())


@rule(aten.unbind.int, moves=True)
def _unbind(w: Writer, node: fx.Node) -> Any:
    source = val(node.args[0])
    axis = int(arg_of(node, 1, "dim", 0)) % source.dim()
    value = w.value(node.args[0])
    return [w.ops.gather(value, w.ints(at), w.ints(axis)).output(0) for at in range(source.shape[axis])]


@rule(aten.flip.default, moves=True)
def _flip(w: Writer, node: fx.Node) -> Any:
    value, axes = w.value(node.args[0]), w.axes(node.args[1], val(node).dim()) if node.args[1] else []
    for axis in axes:
        order = list(range(val(node).shape[axis]))[::-1]
        value = w.ops.gather(value, w.ints(order), w.ints(axis)).output(0)
    return value


@rule(aten.repeat.default, moves=True)
def _repeat(w: Writer, node: fx.Node) -> Any:
    words = [1] if val(node).dtype in WORDS else []
    times: Any = node.args[1]
    return w.ops.tile(w.value(node.args[0]), w.ints([*times, *words]))


def _places_check(node: fx.Node) -> str:
    if node.target in (aten.as_strided.default, aten.as_strided_scatter.default):
        source = val(node.args[0])
        if not source.is_contiguous():
            return "by strides of a tensor that is not contiguous"
    return "of so many elements: their places would be stored" if val(node).numel() > 1 << 20 else ""


@rule(
    aten.diagonal.default, aten.as_strided.default, aten.unfold.default, aten.roll.default, aten.rot90.default,
    aten.pixel_shuffle.default, aten.pixel_unshuffle.default, aten.channel_shuffle.default,
    aten.native_channel_shuffle.default, check=_places_check, moves=True,
)  # fmt: skip
@rule(
    aten.upsample_nearest1d.default, aten.upsample_nearest2d.default, aten.upsample_nearest3d.default,
    aten.upsample_nearest1d.vec, aten.upsample_nearest2d.vec, aten.upsample_nearest3d.vec,
    aten._upsample_nearest_exact1d.default, aten._upsample_nearest_exact2d.default,
    aten._upsample_nearest_exact3d.default, aten.reflection_pad1d.default, aten.reflection_pad2d.default,
    aten.reflection_pad3d.default, aten.replication_pad1d.default, aten.replication_pad2d.default,
    aten.replication_pad3d.default, check=_places_check,
)  # fmt: skip
def _picked(w: Writer, node: fx.Node) -> Any:
    """What picks elements by place: PyTorch says which, on a tensor of places, when the graph is compiled."""
    source, target = val(node.args[0]), node.target
    numbers = torch.arange(source.numel(), dtype=torch.float64).view(source.shape)  # upsampling takes no integers
    places = target(numbers, *node.args[1:], **node.kwargs).long()  # type: ignore[operator]
    words = [2] if val(node).dtype in WORDS else []
    flat = w.reshape(w.value(node.args[0]), [source.numel(), *words])
    return w.ops.gather(flat, w.ints(places.tolist()), w.ints(0))


def _zeros_check(node: fx.Node) -> str:
    return _places_check(node) or (
        "" if val(node).dtype in WORDS | {torch.float32, torch.bool} else f"of {val(node).dtype}"
    )


@rule(aten.im2col.default, aten.diag_embed.default, check=_zeros_check, moves=True)
def _picked_or_zero(w: Writer, node: fx.Node) -> Any:
    """The same, where some elements of the result are of no place: those are 0."""
    source, target = val(node.args[0]), node.target
    numbers = torch.arange(1, source.numel() + 1, dtype=torch.float64).view(source.shape)
    places = target(numbers, *node.args[1:], **node.kwargs).long()  # type: ignore[operator]
    words = [2] if val(node).dtype in WORDS else []
    flat = w.reshape(w.value(node.args[0]), [1, source.numel(), *words])  # rows, as in ``cat``
    kind = numpy.int32 if words else numpy.bool_ if val(node).dtype is torch.bool else numpy.float32
    nothing = w.ops.constant(numpy.zeros([1, 1, *words], kind)).output(0)
    joined = w.ops.concat([nothing, flat], 1).output(0)
    return w.reshape(w.ops.gather(joined, w.ints(places.tolist()), w.ints(1)).output(0), held_shape(val(node)))


def _scattered_check(node: fx.Node) -> str:
    if val(node.args[1]).dtype is not val(node).dtype:
        return "of mixed dtypes"
    return _places_check(node)


@rule(
    aten.slice_scatter.default, aten.select_scatter.default, aten.diagonal_scatter.default,
    aten.as_strided_scatter.default, check=_scattered_check, moves=True,
)  # fmt: skip
def _scattered(w: Writer, node: fx.Node) -> Any:
    """What replaces elements by place: each result is an element of the one or of the other."""
    into, source, target = val(node.args[0]), val(node.args[1]), node.target
    count = into.numel()
    numbers = torch.arange(count).view(into.shape)
    others = torch.arange(count, count + source.numel()).view(source.shape)
    places = target(numbers, others, *node.args[2:], **node.kwargs)  # type: ignore[operator]
    words = [2] if val(node).dtype in WORDS else []
    parts = [w.reshape(w.value(arg), [1, val(arg).numel(), *words]) for arg in node.args[:2]]  # rows, as in ``cat``
    joined = w.ops.concat(parts, 1).output(0)
    picked = w.ops.gather(joined, w.ints(places.tolist()), w.ints(1)).output(0)
    return w.reshape(picked, held_shape(val(node)))
