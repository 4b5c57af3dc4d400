"""What repeats in a graph: runs of operators that come several times in a row, such as the layers of a model.

Operators are compared by what they are (target, numbers among their arguments, specs), not by names and not by
where their inputs come from. Whether two repetitions are the same computation is for whoever cuts: :mod:`.pieces`.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import fx

__all__ = ["Run", "find_runs", "live_bytes", "specs_of", "tokens_of"]

SHORTEST: Final = 10
"""Operators that a repetition has at least."""
CANDIDATES: Final = 24
"""Periods that are tried at most per search: those that most operators come back after."""
Tokens = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Run:
    """``count`` repetitions of ``period`` operators, from the operator at ``start`` on."""

    start: int
    period: int
    count: int

    @property
    def end(self) -> int:
        """Where the last repetition ends."""
        return self.start + self.period * self.count

    @property
    def saved(self) -> int:
        """Operators that need no compiling where one repetition serves for all."""
        return self.period * (self.count - 1)


# -- operators as numbers ----------------------------------------------------------------------------------------------
def specs_of(value: Any) -> Any:
    """What tells a value, or several, from others: shape, dtype and strides."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype, value.stride()
    if isinstance(value, (list, tuple)):
        return tuple(map(specs_of, value))
    return None


def _described(value: Any) -> Any:
    if isinstance(value, fx.Node):
        return specs_of(value.meta.get("val"))
    if isinstance(value, (list, tuple)):
        return tuple(map(_described, value))
    return value.__class__, repr(value) if value.__class__ is float else value


def tokens_of(calls: Sequence[fx.Node]) -> Tokens:
    """A number per operator, equal for equal ones, in every graph and process."""
    known: dict[Any, int] = {}
    found: list[int] = []
    for node in calls:
        kwargs = tuple((name, _described(value)) for name, value in node.kwargs.items())
        described = str(node.target), tuple(map(_described, node.args)), kwargs, specs_of(node.meta.get("val"))
        number = known.get(described)
        if number is None:
            digest = hashlib.blake2b(repr(described).encode(), digest_size=8).digest()
            number = known[described] = int.from_bytes(digest, "little") >> 1
        found.append(number)
    return np.asarray(found, dtype=np.int64)


# -- runs --------------------------------------------------------------------------------------------------------------
def _periods(tokens: Tokens) -> list[int]:
    """Distances at which most operators come back, those that come back soonest first."""
    last: dict[int, int] = {}
    gaps: Counter[int] = Counter()
    for at, token in enumerate(tokens.tolist()):
        if token >= 0:
            if token in last:
                gaps[at - last[token]] += 1
            last[token] = at
    likely = [gap for gap, _ in gaps.most_common(4 * CANDIDATES) if gap >= SHORTEST]
    return likely[:CANDIDATES]


def _longest(tokens: Tokens, period: int) -> Run | None:
    """The run with this period that saves most."""
    same = (tokens[:-period] == tokens[period:]) & (tokens[period:] >= 0)
    edges = np.flatnonzero(np.diff(np.concatenate(([0], same.astype(np.int8), [0]))))
    if not len(edges):
        return None
    starts, ends = edges[::2], edges[1::2]
    at = int(np.argmax(ends - starts))
    length = int(ends[at] - starts[at])
    count = length // period + 1
    return Run(int(starts[at]), period, count) if count > 1 else None


def find_runs(tokens: Tokens, least: int) -> list[tuple[Run, int]]:
    """Runs that do not overlap and save ``least`` operators each, those that save most first.

    With each comes how far it may be moved to the right: the repetitions may begin with another operator.
    """
    left = tokens.copy()
    found: list[tuple[Run, int]] = []
    while True:
        runs = [run for period in _periods(left) if period < len(left) and (run := _longest(left, period)) is not None]
        best = max(runs, key=lambda run: (run.saved, -run.period), default=None)
        if best is None or best.saved < least:
            return found
        same = (left[: -best.period] == left[best.period :]) & (left[best.period :] >= 0)
        after = best.start + best.period * (best.count - 1)
        slack = 0
        while after + slack < len(same) and same[after + slack] and slack < best.period - 1:
            slack += 1
        found.append((best, slack))
        left[best.start : best.end + slack] = -1


# -- where to cut ------------------------------------------------------------------------------------------------------
def live_bytes(calls: Sequence[fx.Node], roots: dict[fx.Node, fx.Node]) -> NDArray[np.int64]:
    """Bytes that cross each place: element ``i`` is what operators before the one at ``i`` make and later ones use.

    ``roots``: for values that cost nothing to make again, such as views, whose memory they show.
    """
    place = {node: at for at, node in enumerate(calls)}
    change = np.zeros(len(calls) + 2, dtype=np.int64)
    last: dict[fx.Node, int] = {}
    for at, node in enumerate(calls):
        for used in node.all_input_nodes:
            last[roots.get(used, used)] = at
    for node in (*calls, *roots):
        if any(user.op == "output" for user in node.users):
            last[roots.get(node, node)] = len(calls)
    for node, until in last.items():
        made = place.get(node)
        value = node.meta.get("val")
        if made is not None and isinstance(value, torch.Tensor) and until > made:
            size = value.numel() * value.element_size()
            change[made + 1] += size
            change[until + 1] -= size
    return np.cumsum(change)[: len(calls) + 1]
