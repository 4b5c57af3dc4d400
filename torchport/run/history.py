"""What a program did, for its reader: why graphs were compiled, which lines wait for values, how often operators ran.

Written when a trace is flushed or something rare happens; nothing here is touched per traced op. Everything is bounded.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import Any, Final

from ..core import metrics
from ..trace.trace import lock
from ..trace.trie import Node
from .reasons import CompileReason
from .tier_record import TierRecord

__all__ = ["History", "history"]


class History:
    """Compile reasons, flush sites and op counts of this process.

    ``reasons`` are the newest compilations, oldest first. ``sites`` counts flushes that the program waits for, by cause
    (``read``, ``host aten.nonzero.default``, …) and the user's line, and what the host ran between segments of the
    backend's (``segment aten.sin.default``). ``tiers`` are the newest computations that began interpreted.
    """

    REASONS: Final = 256
    SITES: Final = 4_096
    NODES: Final = 512

    def __init__(self) -> None:
        self.reasons: deque[CompileReason] = deque(maxlen=self.REASONS)
        self.sites: Counter[tuple[str, str]] = Counter()
        self.tiers: deque[TierRecord] = deque(maxlen=self.REASONS)
        self._flushed: Counter[Node] = Counter()

    def flushed(self, node: Node) -> None:
        """A trace that ends in this node was computed."""
        self._flushed[node] += 1
        if len(self._flushed) > self.NODES:
            self.count_ops()

    def waited(self, cause: str, line: str | None) -> None:
        """The program waits for values, because of this line."""
        if len(self.sites) < self.SITES or (cause, line) in self.sites:
            self.sites[cause, line or "line unknown"] += 1

    def hosted(self, op: object, line: str | None) -> None:
        """The host runs an operator of this line between segments of the backend's."""
        self.waited(f"segment {op}", line)

    def count_ops(self) -> None:
        """Bring the counters of single operators (``lazy::add.Tensor``) up to date."""
        with lock:
            flushed, self._flushed = self._flushed, Counter()
        totals: Counter[Any] = Counter()
        for node, times in flushed.items():
            at = node
            while at.parent is not None:
                totals[at.op] += times
                at = at.parent
        for op, times in totals.items():
            metrics.count("lazy::" + op.name().removeprefix("aten::"), times)

    def forget(self) -> None:
        """Start afresh."""
        self.reasons.clear()
        self.tiers.clear()
        self.sites.clear()
        self._flushed.clear()


history: Final = History()


def _notes() -> list[str]:
    """What the report says besides the figures: the newest compilations after the first."""
    shown = [str(reason) for reason in list(history.reasons)[-5:] if reason.kind != "first"]
    tiers = list(history.tiers)
    told: list[str] = []
    if tiers:
        counts = Counter(record.tier for record in tiers)
        summary = ", ".join(f"{count} {tier}" for tier, count in sorted(counts.items()))
        told = [f"computations that began interpreted, the newest {len(tiers)}: {summary}", *map(str, tiers[-5:])]
    return [*told, *(["the newest compilations:", *shown] if shown else [])]


metrics.metrics.before_reading.append(history.count_ops)
metrics.metrics.on_reset.append(history.forget)
metrics.metrics.notes.append(_notes)
