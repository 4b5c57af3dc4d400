"""Parts of a trace that have nothing to do with each other, so that a reader need not wait for all of it.

A value is read while the device is at another computation. What is pending may fall into operators that the value
depends on, with whatever else they lead to, and others. If the others wait for what is running and the value does not,
they become a computation of their own: the value is there at once, and the program traces on. So it is where a model
looks at its mask or its positions in each forward, and the optimizer's step before is still running.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, cast

from ..trace.graph import inputs_of, needed, templates_of
from ..trace.trace import Trace
from ..trace.trie import Node, RandomKey
from .future import Future

if TYPE_CHECKING:
    from .device_runtime import DeviceRuntime

__all__ = ["parts_to_compute"]

ValueIds = tuple[int, ...]
SMALL: Final = 1 << 16
"""Elements up to which integers may be computed once for each part, from no more than that."""


def parts_to_compute(trace: Trace, value_ids: ValueIds, read: int | None) -> tuple[ValueIds, ...]:
    """The pending values in the groups to compute them in, that of the value ``read`` first; mostly one group of all.

    Where a trace was taken apart once it always is, so that what is compiled does not go on to depend on timing.
    """
    node, runtime = trace.cursor, cast("DeviceRuntime", trace.runtime)
    if read is None or not runtime.backend.capabilities.concurrent or len(value_ids) == 1:
        return (value_ids,)
    known = None if node.apart is None else node.apart.get((value_ids, read))
    if known is not None:
        return known
    if not runtime.queue.poll() or read not in value_ids:
        return (value_ids,)
    parts = _Parts(trace, value_ids)
    mine = parts.with_(read, value_ids)
    others = tuple(value_id for value_id in value_ids if value_id not in mine)
    found = (mine, others) if others else (value_ids,)
    if others and (_waits(trace, parts.leaves(mine)) or not _waits(trace, parts.leaves(others))):
        return (value_ids,)
    if node.apart is None:
        node.apart = {}
    node.apart[value_ids, read] = found
    return found


def _waits(trace: Trace, leaves: set[int]) -> bool:
    """Whether a value that others are computed from is in flight itself."""
    values: list[Any] = [trace.leaves[position].value for position in leaves]
    return any(value.__class__ is Future and not value.has_value for value in values)


class _Parts:
    """Which of some values are connected: by operators, unless those are cheap and exact enough to run in both parts.

    Sharing a leaf does not connect.
    """

    def __init__(self, trace: Trace, value_ids: Sequence[int]) -> None:
        self.path = needed(trace.cursor.path(), value_ids)
        large = {position for position, leaf in enumerate(trace.leaves) if leaf.numel() > SMALL}
        self.parent: dict[int, int] = {}
        repeatable: dict[int, bool] = {}
        for node in self.path:
            used = inputs_of(node)
            values = [value_id for kind, value_id in used if kind == "value"]
            small = large.isdisjoint(position for kind, position in used if kind == "leaf")
            again = _is_exact(node) and small and all(repeatable[value] for value in values)
            repeatable.update(dict.fromkeys(range(node.first_id, node.end_id), again))
            for value_id in (
                *range(node.first_id + 1, node.end_id),
                *(value for value in values if not repeatable[value]),
            ):
                self._join(node.first_id, value_id)

    def _root(self, value_id: int) -> int:
        at = self.parent.setdefault(value_id, value_id)
        while (above := self.parent[at]) != at:
            self.parent[at] = at = self.parent[above]
        return at

    def _join(self, one: int, other: int) -> None:
        self.parent[self._root(one)] = self._root(other)

    def with_(self, read: int, value_ids: Sequence[int]) -> ValueIds:
        """The values that ``read`` is computed from or connected with, and itself."""
        used = {value_id for node in needed(self.path, [read]) for value_id in range(node.first_id, node.end_id)}
        return tuple(n for n in value_ids if n in used or self._root(n) == self._root(read))

    def leaves(self, value_ids: Sequence[int]) -> set[int]:
        """The positions of all leaves that these values are computed from."""
        used = (one for node in needed(self.path, value_ids) for one in inputs_of(node))
        return {position for kind, position in used if kind == "leaf"}


def _is_exact(node: Node) -> bool:
    """Whether an operator makes few integers or booleans, and no random ones: made again they are the same."""
    return not any(template.__class__ is RandomKey for template in templates_of(node)) and all(
        spec is None or not (spec.dtype.is_floating_point or spec.dtype.is_complex or math.prod(spec.shape) > SMALL)
        for spec in node.specs
    )
