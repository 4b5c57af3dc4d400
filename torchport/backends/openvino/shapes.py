"""Operators that move elements and do not look at them. Most take values of any width."""

from __future__ import annotations

from typing import Any

import numpy
import torch
from torch import fx

from torchport.backend.sizes.guards import NotSymbolic

from .sizes import is_symbolic, known
from .writer import WORDS, Writer, arg_of, held_shape, rule, same_shape, val

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
    if same_shape(val(node).shape, val(node.args[0]).shape):
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
    return _reordered(w, node, w.value(node.args[0]), order)


def _reordered(w: Writer, node: fx.Node, value: Any, order: list[int]) -> Any:
    """The words of an element stay together."""
    words = [len(order)] if val(node).dtype in WORDS else []
    return w.ops.transpose(value, w.ints([*order, *words]))


@rule(aten.slice.Tensor, moves=True)
def _slice(w: Writer, node: fx.Node) -> Any:
    axis, begin, end, step = _cut(node, val(node.args[0]).shape, 1)
    return w.ops.slice(w.value(node.args[0]), *(w.ints([number]) for number in (begin, end, step, axis)))


def _cut(node: fx.Node, shape: Any, first: int) -> tuple[int, Any, Any, int]:
    """Axis, start, end and step of a slice whose arguments come from this position on, within a tensor's shape.

    What has to be known of symbolic sizes for that becomes a condition.
    """
    axis, start = int(arg_of(node, first, "dim", 0)), arg_of(node, first + 1, "start")
    stop, step = arg_of(node, first + 2, "end"), arg_of(node, first + 3, "step", 1)
    size = known(shape[axis])

    def inside(place: Any) -> Any:
        place = place + size if place < 0 else place
        return 0 if place < 0 else size if place > size else place

    begin, end = inside(0 if start is None else known(start)), inside(size if stop is None else known(stop))
    return axis % len(shape), begin, begin if end < begin else end, step


@rule(aten.narrow.default, aten.narrow_copy.default, moves=True)
def _narrow(w: Writer, node: fx.Node) -> Any:
    axis, start, count = (known(number) for number in node.args[1:4])
    size = known(val(node.args[0]).shape[axis])
    axis, begin = axis % val(node).dim(), start + size if start < 0 else start
    numbers = (begin, begin + count, 1, axis)
    return w.ops.slice(w.value(node.args[0]), *(w.ints([number]) for number in numbers))


@rule(aten.select.int, moves=True)
def _select(w: Writer, node: fx.Node) -> Any:
    args: Any = node.args
    axis, index, source = int(args[1]), known(args[2]), val(args[0])
    index = index + source.shape[axis] if index < 0 else index
    return w.ops.gather(w.value(args[0]), w.ints(index), w.ints(axis % source.dim()))


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
        size = val(node).shape[axis]
        value = w.ops.gather(value, w.counted(size, "i64", size - 1, -1), w.ints(axis)).output(0)
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
    count = known(val(node).numel())
    return "" if is_symbolic(count) or count <= 1 << 20 else "of so many elements: their places would be stored"


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
    if is_symbolic([*source.shape, *val(node).shape]):
        return _picked_of_sizes(w, node)
    numbers = torch.arange(source.numel(), dtype=torch.float64).view(source.shape)  # upsampling takes no integers
    places = target(numbers, *node.args[1:], **node.kwargs).long()  # type: ignore[operator]
    words = [2] if val(node).dtype in WORDS else []
    flat = w.reshape(w.value(node.args[0]), [source.numel(), *words])
    return w.ops.gather(flat, w.ints(places.tolist()), w.ints(0))


def _picked_of_sizes(w: Writer, node: fx.Node) -> Any:
    """The same for symbolic sizes, where one dimension is picked from."""
    value, source, args = w.value(node.args[0]), val(node.args[0]), node.args
    if node.target is aten.roll.default:
        return _rolled(w, node)
    if node.target is aten.unfold.default:
        axis, size, step = int(args[1]) % source.dim(), int(args[2]), int(args[3])  # type: ignore[call-overload]
        starts = w.counted(val(node).shape[axis], "i64", 0, step)
        places = w.ops.add(w.ops.unsqueeze(starts, w.ints(1)), w.counted(size, "i64")).output(0)
        found = w.ops.gather(value, places, w.ints(axis)).output(0)
        order = [at for at in range(source.dim() + 1) if at != axis + 1]
        return _reordered(w, node, found, [*order, axis + 1])
    if node.target is aten.diagonal.default and not is_symbolic(arg_of(node, 1, "offset", 0)):
        return _diagonal(w, node)
    raise NotSymbolic("which elements it picks is found out when the graph is compiled")


def _rolled(w: Writer, node: fx.Node) -> Any:
    """Dimension by dimension: its end, and then what is before that."""
    value, given = w.value(node.args[0]), [arg_of(node, 1, "shifts"), arg_of(node, 2, "dims", [])]
    shifts, axes = ([one] if isinstance(one, (int, torch.SymInt)) else list(one) for one in given)
    shape, rank = held_shape(val(node)), val(node).dim()
    flat = not axes
    if flat:
        shape, rank, axes = [val(node).numel(), *shape[rank:]], 1, [0]
        value = w.reshape(value, shape)
    for shift, axis in zip(shifts, axes, strict=True):
        size = shape[axis % rank]
        shift = shift if -size < shift < size else known(shift % size)
        middle = -shift if shift < 0 else size - shift
        if shift == 0:
            continue
        parts = [
            w.ops.slice(value, *(w.ints([number]) for number in (start, stop, 1, axis % rank))).output(0)
            for start, stop in ((middle, size), (0, middle))
        ]
        value = w.ops.concat(parts, axis % rank).output(0)
    return w.reshape(value, held_shape(val(node))) if flat else value


def _diagonal(w: Writer, node: fx.Node) -> Any:
    """Elements of both dimensions as one, at equal distances."""
    source, words = val(node.args[0]), [2] if val(node).dtype in WORDS else []
    rank, offset = source.dim(), int(arg_of(node, 1, "offset", 0))
    first, second = (int(arg_of(node, at, name, at - 2)) % rank for at, name in ((2, "dim1"), (3, "dim2")))
    rest = [at for at in range(rank) if at not in (first, second)]
    moved = w.ops.transpose(w.value(node.args[0]), w.ints([*rest, first, second, *([rank] if words else [])]))
    rows, columns = source.shape[first], source.shape[second]
    flat = w.reshape(moved.output(0), [*(source.shape[at] for at in rest), rows * columns, *words])
    start = offset if offset >= 0 else -offset * columns
    across = w.counted(val(node).shape[-1], "i64")
    apart = w.ops.multiply(across, w.ints(columns + 1))
    return w.ops.gather(flat, w.ops.add(apart, w.ints(start)), w.ints(len(rest)))


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
    if is_symbolic([*into.shape, *source.shape]):
        return _joined_around(w, node)
    count = into.numel()
    numbers = torch.arange(count).view(into.shape)
    others = torch.arange(count, count + source.numel()).view(source.shape)
    places = target(numbers, others, *node.args[2:], **node.kwargs)  # type: ignore[operator]
    words = [2] if val(node).dtype in WORDS else []
    parts = [w.reshape(w.value(arg), [1, val(arg).numel(), *words]) for arg in node.args[:2]]  # rows, as in ``cat``
    joined = w.ops.concat(parts, 1).output(0)
    picked = w.ops.gather(joined, w.ints(places.tolist()), w.ints(1)).output(0)
    return w.reshape(picked, held_shape(val(node)))


def _joined_around(w: Writer, node: fx.Node) -> Any:
    """The same for symbolic sizes: what is before, what is put there, and what is after."""
    shape, other = val(node.args[0]).shape, w.value(node.args[1])
    if node.target is aten.select_scatter.default:
        args: Any = node.args
        axis, begin = int(args[2]) % len(shape), known(args[3])
        begin = begin + shape[axis] if begin < 0 else begin
        end, other = begin + 1, w.ops.unsqueeze(other, w.ints(axis)).output(0)
    else:
        axis, begin, end, step = _cut(node, shape, 2) if node.target is aten.slice_scatter.default else (0, 0, 0, 0)
        if step != 1:
            raise NotSymbolic("which elements it replaces is found out when the graph is compiled")
    into, parts = w.value(node.args[0]), [other]
    for at, (start, stop) in ((0, (0, begin)), (2, (end, shape[axis]))):
        if stop > start:
            part = w.ops.slice(into, *(w.ints([number]) for number in (start, stop, 1, axis))).output(0)
            parts.insert(at, part)
    if len(parts) == 1:
        return other
    if val(node).dim() > 1 or val(node).dtype in WORDS:
        return w.ops.concat(parts, axis)
    rows = [w.ops.unsqueeze(part, w.ints(0)).output(0) for part in parts]  # as in ``cat``
    return w.reshape(w.ops.concat(rows, 1).output(0), val(node).shape)
