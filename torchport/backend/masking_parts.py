"""Rules of :mod:`.masking` for parts of tensors: slices, single places, what is joined, and what is put around.

A slice that leaves out places at a fixed distance from an end (``x[:, :-1]``, ``x[:, 1:]``), or what is joined at one
(a column more), has a size that is a symbol and a constant (:attr:`.Masked.sums`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from .masker import Dim, Inexact, Layout, Masker, arguments, broadcast, dim_of, is_padded, rule_for, size_of

__all__: list[str] = []

aten = torch.ops.aten


def _is_plain(dim: Dim) -> bool:
    """Whether a dimension has its true part at its beginning."""
    return len(dim) < 2


def _begins_at_fixed_place(start: Any, step: Any) -> bool:
    return step == 1 and (start is None or (start.__class__ is int and start >= 0))


@rule_for(aten.select.int)
def _select(m: Masker, node: fx.Node, variants: Sequence[fx.Node]) -> Any:
    source, dim, index = arguments(node, "self", "dim", "index")
    before = m.layout(source)
    m.same_constants(node, variants)
    after = tuple(one for d, one in enumerate(before) if d != dim % len(before))
    if not is_padded(before[dim]) or m.is_there(index + 1):
        return m.copy(node), after
    if index >= 0 or not m.is_there(-index) or not _is_plain(before[dim]):
        raise Inexact("one place of the padded dimension is taken, which need not be there")
    b = m.builder
    place = b(aten.view.default, b.cast(_from_end(m, before[dim], index), torch.int64), [1])
    taken = b(aten.index_select.default, m.values[source], dim, place)
    return b(aten.squeeze.dim, taken, dim), after


def _from_end(m: Masker, dim: Dim, index: int) -> fx.Node:
    """The place of a negative index along a dimension, by its true size."""
    symbol = dim[0][1]
    assert symbol is not None
    return m.builder(aten.add.Tensor, m.true[symbol], index)


@rule_for(aten.select_backward.default)
def _select_backward(m: Masker, node: fx.Node, variants: Sequence[fx.Node]) -> Any:
    grad, dim, index = arguments(node, "grad_output", "dim", "index")
    _same(node, variants, "dim", "index")
    rank = node.meta["val"].dim()
    dim %= rank
    layout = _with(m, node, variants, m.layout(grad), dim)
    if not is_padded(layout[dim]) or m.is_there(index + 1):
        return m.copy(node), layout
    if index >= 0 or not m.is_there(-index) or not _is_plain(layout[dim]):
        raise Inexact("one place of the padded dimension is taken, which need not be there")
    b, size = m.builder, size_of(layout[dim])
    places = b(aten.arange.start_step, 0, size, 1, dtype=torch.int64, device=torch.device("cpu"))
    there = b(aten.eq.Tensor, b.cast(places, m.number), _from_end(m, layout[dim], index))
    there = b(aten.view.default, there, [size if d == dim else 1 for d in range(rank)])
    zero = b(aten.full.default, [], 0, dtype=node.meta["val"].dtype, device=torch.device("cpu"))
    return b(aten.where.self, there, b(aten.unsqueeze.default, m.values[grad], dim), zero), layout


def _same(node: fx.Node, variants: Sequence[fx.Node], *names: str) -> None:
    if any(arguments(one, *names) != arguments(node, *names) for one in variants):
        raise Inexact("a number is computed from a size that changes")


def _with(m: Masker, node: fx.Node, variants: Sequence[fx.Node], others: Layout, dim: int) -> Layout:
    """The layout of a result that has these dimensions, and one more (``dim``) of a size of its own."""
    own = m.symbol(node.meta["val"].shape[dim], [one.meta["val"].shape[dim] for one in variants])
    return (*others[:dim], own, *others[dim:])


@rule_for(aten.slice.Tensor)
def _slice(m: Masker, node: fx.Node, variants: Sequence[fx.Node]) -> Any:
    source, dim, start, step = arguments(node, "self", "dim", "start", "step")
    made = list(m.layout(source))
    dim %= len(made)
    length = node.meta["val"].shape[dim]
    before = made[dim]
    if is_padded(before) and length == size_of(before):
        return m.copy(node), tuple(made)
    made[dim] = m.symbol(length, [one.meta["val"].shape[dim] for one in variants])
    if is_padded(before):
        # Both have the size of one symbol and constants, so what is left out at the end is left out at the true end.
        there = is_padded(made[dim]) or m.is_there((start or 0) + length)
        if not (there and _is_plain(before) and _begins_at_fixed_place(start, step)):
            raise Inexact("a part of the padded dimension is taken")
        _same(node, variants, "start")
    elif not is_padded(made[dim]):
        m.same_constants(node, variants)  # it may begin elsewhere, and be as long
    elif start not in (None, 0) or step != 1:
        raise Inexact("a slice of a size that changes does not begin at 0")
    return m.copy(node), tuple(made)


@rule_for(aten.slice_backward.default)
def _slice_backward(m: Masker, node: fx.Node, variants: Sequence[fx.Node]) -> Any:
    """The gradient stands among zeros; what it has beyond its true size may stand where a zero has to be."""
    grad, dim, start, step = arguments(node, "grad_output", "dim", "start", "step")
    before = m.layout(grad)
    dim %= len(before)
    layout = _with(m, node, variants, (*before[:dim], *before[dim + 1 :]), dim)
    if not is_padded(before[dim]) and not is_padded(layout[dim]):
        _same(node, variants, "start", "end", "step")
        return m.copy(node), layout
    if not (_begins_at_fixed_place(start, step) and _is_plain(before[dim]) and _is_plain(layout[dim])):
        raise Inexact("a part of the padded dimension is taken")
    _same(node, variants, "start")
    if is_padded(before[dim]) != is_padded(layout[dim]) and start not in (None, 0):
        raise Inexact("a part of the padded dimension is taken")
    return m.copy(node, {grad: m.masked(grad, 0, [dim])}), layout


@rule_for(aten.select_scatter.default)
def _one_written(m: Masker, node: fx.Node, variants: Sequence[fx.Node]) -> Any:
    source, written, dim, index = arguments(node, "self", "src", "dim", "index")
    layout, of_written = m.layout(source), m.layout(written)
    dim %= len(layout)
    m.same_constants(node, variants)
    if is_padded(layout[dim]) and not m.is_there(index + 1):
        raise Inexact("one place of the padded dimension is written, which need not be there")
    broadcast([(*of_written[:dim], (), *of_written[dim:]), (*layout[:dim], (), *layout[dim + 1 :])])
    return m.copy(node), layout


@rule_for(aten.slice_scatter.default)
def _part_written(m: Masker, node: fx.Node, variants: Sequence[fx.Node]) -> Any:
    """What is written has garbage beyond its true size, and that may not come where the tensor keeps what it has."""
    source, written, dim, start, step = arguments(node, "self", "src", "dim", "start", "step")
    layout, of_written = m.layout(source), m.layout(written)
    dim %= len(layout)
    broadcast([(*of_written[:dim], (), *of_written[dim + 1 :]), (*layout[:dim], (), *layout[dim + 1 :])])
    if not is_padded(layout[dim]) and not is_padded(of_written[dim]):
        m.same_constants(node, variants)
        return m.copy(node), layout
    if not (_begins_at_fixed_place(start, step) and _is_plain(layout[dim]) and _is_plain(of_written[dim])):
        raise Inexact("a part of the padded dimension is written")
    _same(node, variants, "start")
    made, b = m.copy(node), m.builder
    size, end = size_of(layout[dim]), (start or 0) + size_of(of_written[dim])
    if not is_padded(of_written[dim]) or (is_padded(layout[dim]) and end == size):
        return made, layout
    made.meta.update(node.meta)
    places = b(aten.arange.start_step, 0, size, 1, dtype=torch.int64, device=torch.device("cpu"))
    symbol = of_written[dim][0][1]
    assert symbol is not None
    last = b(aten.add.Tensor, m.true[symbol], start or 0)
    there = b(aten.lt.Tensor, b.cast(places, m.number), last)
    there = b(aten.view.default, there, [size if d == dim else 1 for d in range(len(layout))])
    return b(aten.where.self, there, made, m.values[source]), layout


@rule_for(aten.constant_pad_nd.default)
def _put_around(m: Masker, node: fx.Node, variants: Sequence[fx.Node]) -> Any:
    source, pads, value = arguments(node, "self", "pad", "value")
    m.same_constants(node, variants)
    layout = list(m.layout(source))
    filled: list[int] = []
    for at in range(len(pads) // 2):
        before, after, dim = pads[2 * at], pads[2 * at + 1], len(layout) - 1 - at
        if before == after == 0:
            continue
        size = node.meta["val"].shape[dim]
        if not is_padded(layout[dim]):
            layout[dim] = dim_of([(size, None)])
            continue
        if not _is_plain(layout[dim]):
            raise Inexact("the padded dimension is joined to another")
        layout[dim] = m.symbol(size, [one.meta["val"].shape[dim] for one in variants])
        if after > 0:
            filled.append(dim)
    if filled and not source.meta["val"].dtype.is_floating_point:
        value = bool(value) if source.meta["val"].dtype is torch.bool else int(value)
    return m.copy(node, {source: m.masked(source, value, filled)} if filled else {}), tuple(layout)


@rule_for(aten.cat.default)
def _cat(m: Masker, node: fx.Node, variants: Sequence[fx.Node]) -> Any:
    tensors, dim = arguments(node, "tensors", "dim")
    rank, shape = node.meta["val"].dim(), node.meta["val"].shape
    dim %= rank
    # What is empty adds nothing, also where it has another number of dimensions.
    parts = [n for n in tensors if n.meta["val"].dim() == rank and (n.meta["val"].shape[dim] or len(tensors) == 1)]
    layouts = [m.layout(n) for n in parts]
    if len(layouts) == 1:
        return m.copy(node), layouts[0]
    made = list(broadcast([(*layout[:dim], (), *layout[dim + 1 :]) for layout in layouts]))
    padded = [at for at, layout in enumerate(layouts) if is_padded(layout[dim])]
    if not padded:
        made[dim] = dim_of([(shape[dim], None)])
        return m.copy(node), tuple(made)
    same = {layout[dim] for layout in layouts}
    if len(same) == 1:
        made[dim] = dim_of([(len(layouts), None), *same.pop()])
        return m.copy(node), tuple(made)
    if len(padded) > 1 or not _is_plain(layouts[padded[0]][dim]):
        raise Inexact("the padded dimension is joined to another")
    made[dim] = m.symbol(shape[dim], [one.meta["val"].shape[dim] for one in variants])
    joined, (at,) = m.copy(node), padded
    if at < len(parts) - 1:
        joined = _moved_up(m, node, joined, dim, layouts[at][dim], sum(size_of(one[dim]) for one in layouts[: at + 1]))
    return joined, tuple(made)


@rule_for(aten.stack.default)
def _stack(m: Masker, node: fx.Node, variants: Sequence[fx.Node]) -> Any:
    tensors, dim = arguments(node, "tensors", "dim")
    m.same_constants(node, variants)
    made = list(broadcast([m.layout(one) for one in tensors]))
    made.insert(dim % (len(made) + 1), dim_of([(len(tensors), None)]))
    return m.copy(node), tuple(made)


def _moved_up(m: Masker, node: fx.Node, joined: fx.Node, dim: int, padded: Dim, end: int) -> fx.Node:
    """What was joined after a padded part, which ends at place ``end``, moved to the part's true end."""
    b, where = m.builder, {"dtype": torch.int64, "device": torch.device("cpu")}
    ((size, symbol),) = padded
    assert symbol is not None
    joined.meta.update(node.meta)
    total = node.meta["val"].shape[dim]
    places = b(aten.arange.start_step, 0, total, 1, **where)
    beyond = b(aten.sub.Tensor, b(aten.full.default, [], size, **where), b.cast(m.true[symbol], torch.int64))
    true_end = b(aten.sub.Tensor, b(aten.full.default, [], end, **where), beyond)
    later = b(aten.clamp.default, b(aten.add.Tensor, places, beyond), 0, total - 1)
    return b(
        aten.index_select.default, joined, dim,
        b(aten.where.self, b(aten.lt.Tensor, places, true_end), places, later),
    )  # fmt: skip
