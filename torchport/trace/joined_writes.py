"""Writes into several parts of one tensor, such as DDP's into a bucket, become one value that is made of the parts.

Each write alone is an operator that gives the whole tensor anew: for a bucket of a hundred gradients, a hundred times
the bucket. A program that keeps a view of each part, as DDP does, reads it after the write: that is what was written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from ..core.specs import TensorSpec, contiguous_strides
from .trie import Node, Value

if TYPE_CHECKING:
    from torch import fx

    from ..backend.builder import GraphBuilder

__all__ = ["JoinedWrites", "join", "joined_writes"]

aten = torch.ops.aten
_WRITE: Final = aten.as_strided_scatter.default
_READ: Final = aten.as_strided_copy.default


@dataclass(frozen=True, slots=True)
class JoinedWrites:
    """Writes in a row: the operators, the tensor that the first one writes to, and ``(start, count, what)`` in order.

    ``reads``: operators that read what one of the writes has written, and that.
    """

    nodes: tuple[Node, ...]
    base: Any
    parts: tuple[tuple[int, int, Any], ...]
    reads: tuple[tuple[Node, Any], ...]


def joined_writes(
    nodes: Sequence[Node],
    outputs: Collection[int],
    spec_of: Callable[[Any], TensorSpec | None],
    used: Mapping[int, int],
) -> dict[Node, JoinedWrites]:
    """The writes that can be joined, by the last of each row; nobody uses the whole that another one gives.

    ``spec_of`` is of a template; ``used``: how often the nodes use each value.
    """
    makers = {node.first_id: node for node in nodes if node.op is _WRITE and not node.kwargs}
    reads: dict[int, list[tuple[Node, Any]]] = {first: [] for first in makers}
    for node in nodes:
        base = node.args[0] if node.op is _READ and not node.kwargs else None
        write = makers.get(base.value_id) if isinstance(base, Value) else None
        if write is not None and _place(write.args[2:]) == _place(node.args[1:]):
            reads[write.first_id].append((node, write.args[1]))
    kept = set(outputs)
    found: dict[Node, JoinedWrites] = {}
    followed: set[Node] = set()
    for last in reversed(makers.values()):
        if last in followed:
            continue
        row = [last]
        while True:
            base = row[-1].args[0]
            before = makers.get(base.value_id) if isinstance(base, Value) else None
            if before is None or before.first_id in kept or used[before.first_id] != 1 + len(reads[before.first_id]):
                break
            row.append(before)
        row.reverse()
        parts = _parts(row, spec_of) if len(row) > 1 else None
        if parts is not None:
            read = tuple(one for write in row for one in reads[write.first_id])
            found[last] = JoinedWrites(tuple(row), row[0].args[0], parts, read)
            followed.update(row)
    return found


def _place(args: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(tuple(one) if isinstance(one, list) else one for one in args)


def _parts(row: Sequence[Node], spec_of: Callable[[Any], TensorSpec | None]) -> tuple[tuple[int, int, Any], ...] | None:
    """What the writes put where; ``None`` where they overlap, or one of them is not in one piece."""
    (whole,) = row[-1].specs
    base = spec_of(row[0].args[0])
    if whole is None or base is None or not base.is_contiguous or base.shape != whole.shape:
        return None
    parts: list[tuple[int, int, Any]] = []
    for node in row:
        if len(node.args) != 5:
            return None
        _, given, size, stride, start = node.args
        spec = spec_of(given)
        if not isinstance(start, int) or spec is None or spec.dtype is not whole.dtype or spec.shape != tuple(size):
            return None
        if tuple(stride) != contiguous_strides(tuple(size)):
            return None
        parts.append((start, math.prod(size), given))
    parts.sort(key=lambda part: part[0])
    end = 0
    for start, count, _ in parts:
        if start < end:
            return None
        end = start + count
    return tuple(parts) if end <= math.prod(whole.shape) else None


def join(b: GraphBuilder, writes: JoinedWrites, value: Callable[[Any], fx.Node]) -> fx.Node:
    """The value after all the writes. ``value`` gives the node of a template."""
    (whole,) = writes.nodes[-1].specs
    assert whole is not None
    pieces: list[fx.Node] = []
    end = 0

    def keep(start: int, stop: int) -> None:
        if start < stop:
            flat = b(aten.view.default, value(writes.base), [-1])
            pieces.append(b(aten.slice.Tensor, flat, 0, start, stop))

    for start, count, given in writes.parts:
        keep(end, start)
        pieces.append(b(aten.view.default, value(given), [-1]))
        end = start + count
    keep(end, math.prod(whole.shape))
    made = b(aten.cat.default, pieces)
    return made if len(whole.shape) == 1 else b(aten.view.default, made, list(whole.shape))
