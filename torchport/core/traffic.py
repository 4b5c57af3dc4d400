"""What a process has said to others: a record per collective, and the table of them by step."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

__all__ = [
    "Collective",
    "collective_report",
    "collectives",
    "is_own_rank",
    "is_rehearsal",
    "journal",
    "notes",
    "rehearsals",
    "step_ended",
    "table",
]

KEPT: Final = 10_000
"""So many of the newest records are kept."""
_ROWS: Final = 10
_FEW: Final = 100_000
"""Where no step has so many bytes, the table counts in KB."""


@dataclass(slots=True)
class Collective:
    """One collective, or one message, as this rank saw it.

    ``nbytes``: bytes of the tensors that this rank gave, or gets where it gives none. ``sent``: bytes that it has to
    send at least, by the count of textbooks (:func:`least_sent`). Seconds: ``agreeing`` with the others, ``in_flight``
    from the start until the program had the values, and ``waited``, the part of it in which it stood still.
    ``line`` is the user's, and ``step`` how many steps had ended.
    """

    name: str
    what: str
    group: str
    ranks: int
    line: str
    step: int
    nbytes: int = 0
    agreeing: float = 0.0
    in_flight: float = 0.0
    waited: float = 0.0
    arrived: bool = False
    started: float = field(default=0.0, repr=False)

    @property
    def sent(self) -> int:
        """Bytes that a rank sends at least."""
        return least_sent(self.name, self.nbytes, self.ranks)

    def start(self, nbytes: int) -> None:
        """Note that bytes are in flight."""
        self.nbytes, self.started = nbytes, time.perf_counter()

    def arrive(self, waiting_since: float) -> None:
        """Note that the program has the values."""
        now = time.perf_counter()
        self.in_flight, self.waited, self.arrived = now - self.started, now - waiting_since, True

    def __str__(self) -> str:
        flight = f"{self.waited * 1e3:.2f} of {self.in_flight * 1e3:.2f} ms waited" if self.arrived else "in flight"
        return (
            f"{self.nbytes:>12,} bytes  {self.what}, {self.ranks} ranks of {self.group!r}, {flight}\n    at {self.line}"
        )


def least_sent(name: str, nbytes: int, ranks: int) -> int:
    """Bytes that each of so many ranks sends at least, on a ring, for a collective of ``nbytes`` given by each.

    An all-reduce is a reduce-scatter and an all-gather: ``2 (n - 1) / n`` of the bytes. Of a rooted collective: what
    its root, or each other rank, hands on once.
    """
    if ranks < 2:
        return 0
    if name.startswith("all_reduce"):
        return 2 * nbytes * (ranks - 1) // ranks
    if name.startswith("all_gather"):
        return nbytes * (ranks - 1)
    if name.startswith(("reduce_scatter", "all_to_all")):
        return nbytes * (ranks - 1) // ranks
    return 0 if name in ("barrier", "receive") else nbytes


class _Journal:
    """The records, oldest first."""

    def __init__(self) -> None:
        self.records: deque[Collective] = deque(maxlen=KEPT)
        self.steps = 0
        self.rank: int | None = None

    def new(self, name: str, what: str, group: str, ranks: int, line: str) -> Collective:
        """A record of what is about to be done."""
        record = Collective(name, what, group, ranks, line, self.steps)
        self.records.append(record)
        return record


journal: Final = _Journal()


def step_ended() -> None:
    """What comes belongs to the next step."""
    journal.steps += 1


def collectives(step: int | None = None) -> list[Collective]:
    """What this process has exchanged with other ranks, oldest first: of every step, or of one; -1 is the newest.

    A step ends at ``Optimizer.step`` or :func:`torchport.sync`. The newest 10,000 records are kept.
    """
    records = list(journal.records)
    if step is None or not records:
        return records
    if step < 0:
        numbers = sorted({one.step for one in records})
        if -step > len(numbers):
            return []
        step = numbers[step]
    return [one for one in records if one.step == step]


def table(records: Iterable[Collective]) -> str:
    """A row per step: how many collectives, their bytes, the times, and how much of the flight was not waited for."""
    steps: dict[int, list[Collective]] = {}
    for one in records:
        steps.setdefault(one.step, []).append(one)
    most = max((sum(one.nbytes for one in found) for found in steps.values()), default=0)
    unit, size = ("MB", 1e6) if most >= _FEW else ("KB", 1e3)
    rows = [
        f"{'step':>6} {'collectives':>12} {unit + ' given':>10} {unit + ' sent':>10} {'agreeing':>10} "
        f"{'in flight':>10} {'waited':>10} {'overlap':>8}"
    ]
    for step, found in steps.items():
        flight, waited = sum(one.in_flight for one in found), sum(one.waited for one in found)
        overlap = f"{1 - waited / flight:.0%}" if flight else "-"
        rows.append(
            f"{step:>6} {len(found):>12,} {sum(one.nbytes for one in found) / size:>10.3f} "
            f"{sum(one.sent for one in found) / size:>10.3f} {sum(one.agreeing for one in found) * 1e3:>7.1f} ms "
            f"{flight * 1e3:>7.1f} ms {waited * 1e3:>7.1f} ms {overlap:>8}"
        )
    return "\n".join(rows)


def collective_report(step: int = -1) -> str:
    """This rank's table of communication by step, and the collectives of one step by line; -1 is the newest.

    "sent" is what a rank has to send at least (see :class:`Collective`); "overlap" is the part of the flight in which
    the program did not wait.
    """
    if not journal.records:
        return "no collective yet"
    lines = [f"rank {journal.rank}", table(list(journal.records)), ""]
    groups: dict[tuple[str, str, str], list[Collective]] = {}
    chosen = collectives(step)
    for one in chosen:
        groups.setdefault((one.what, one.line, one.group), []).append(one)
    if chosen:
        lines.append(f"step {chosen[0].step}")
    for (what, line, group), found in groups.items():
        total = sum(one.nbytes for one in found)
        lines += [f"{total:>14,} bytes in {len(found)} x {what}, {found[0].ranks} ranks of {group!r}", f"    at {line}"]
    return "\n".join(lines)


def notes() -> list[str]:
    """The newest steps' rows, for the report of metrics."""
    if not journal.records:
        return []
    newest = sorted({one.step for one in journal.records})[-_ROWS:]
    rows = table(one for one in list(journal.records) if one.step >= newest[0])
    return ["", f"collectives of rank {journal.rank}, by step:", *rows.split("\n")]


def is_own_rank(index: int) -> bool:
    """Whether a device index is the number of this process among those of a distributed program."""
    return str(index) == os.environ.get("LOCAL_RANK") or index == journal.rank


rehearsals: Final[list[Callable[[], bool]]] = []
"""Whether the program's process group is PyTorch's fake one: empty until one has been made."""


def is_rehearsal() -> bool:
    """Whether the program only rehearses one of many ranks: it traces, and what is traced is not to be computed."""
    return any(ask() for ask in rehearsals)
