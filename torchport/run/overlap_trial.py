"""Whether a computation runs beside the program where that takes a core from it: found out by running it both ways.

On two cores a computation can have both while the program waits, or one while the program goes on. Which is quicker
depends on how long the program traces, how well the computation splits, and when its values are read. None of that can
be known beforehand, so the time from one run to the next is measured, and the quicker way is kept.

Sums over several threads have another order, so the last bits may differ between the two ways. In PyTorch's
deterministic mode backends do not ask for a trial (:class:`.SupportsOverlap`).
"""

from __future__ import annotations

from statistics import median
from time import perf_counter
from typing import Final

from ..backend.execution import Computation
from ..core import metrics

__all__ = ["OverlapTrial", "runs_beside"]

LEAST: Final = 0.002
"""Seconds that a computation takes at least where both ways are tried."""
SHARE: Final = 0.2
"""Of the time from run to run: what the program and the computation must each take at least for it to matter."""
GAIN: Final = 0.95
"""Of the time of running in turn: what running beside the program takes at most where it is kept."""
LOSS: Final = 1.15
"""Of the same: what running beside the program takes at least where the trial ends after the first turn."""
AGAIN: Final = 300
"""Runs until both ways are tried again; twice as many each time."""
LATE: Final = 10
"""Runs beside the program that took longer than running in turn did, after which both ways are tried again."""
UNREAD: Final = 6
"""Runs in turn after which nothing was read, where something was in most when it was decided: it is tried again."""


class Reads:
    """How often the host was given a value: whoever waits for each run has nothing to compute beside."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


reads: Final = Reads()


def _runs(beside: bool, skipped: int, counted: int) -> list[tuple[bool, bool]]:
    return [(beside, at >= skipped) for at in range(skipped + counted)]


_WATCHED: Final = _runs(False, 1, 5)
_FIRST: Final = [*_WATCHED, *_runs(True, 3, 6)]  # the program waits for an earlier run only once three were started
_PLAN: Final = [*_FIRST, *_runs(False, 2, 4), *_runs(True, 3, 6)]
"""Of each run of a trial: whether it is beside the program, and whether its time counts."""


class OverlapTrial:
    """One computation's runs, timed from one to the next."""

    __slots__ = (
        "_again",
        "_at",
        "_before",
        "_beside",
        "_in_turn",
        "_late",
        "_left",
        "_periods",
        "_read",
        "_seen",
        "_unread",
    )

    def __init__(self) -> None:
        self._again = AGAIN
        self._before = 0.0
        self._seen = 0
        self._begin()

    def _begin(self) -> None:
        self._at = -1
        self._beside = False
        self._late = self._left = self._read = self._unread = 0
        self._in_turn = 0.0
        self._periods: tuple[list[float], list[float]] = ([], [])
        """Seconds from run to run, in turn with the program and beside it."""

    def beside(self, seconds: float) -> bool:
        """Whether the run that is about to begin goes beside the program. The last one took ``seconds``."""
        now = perf_counter()
        period, self._before = now - self._before, now
        was_read, self._seen = self._seen != reads.count, reads.count
        if self._left:
            return self._settled(period, was_read)
        if self._at >= len(_PLAN):  # an interrupt came in between
            self._begin()
        if self._at >= 0:
            beside, counts = _PLAN[self._at]
            if counts:
                self._periods[beside].append(period)
                self._read += 1 if was_read else -1
        self._at += 1
        if self._is_over(seconds):
            self._left, self._again = self._again, 2 * self._again
            self._in_turn = median(self._periods[0])
            return self._beside
        return _PLAN[self._at][0]

    def _is_over(self, seconds: float) -> bool:
        """Whether it is decided; then ``_beside`` says which way."""
        if self._at < len(_WATCHED):
            return False
        in_turn, beside = map(median, (self._periods[0], self._periods[1] or [0.0]))
        if self._at == len(_WATCHED):
            return seconds < LEAST or min(seconds, in_turn - seconds) < SHARE * in_turn
        if self._at == len(_FIRST):
            return beside > LOSS * in_turn
        if self._at < len(_PLAN):
            return False
        self._beside = beside < GAIN * in_turn
        metrics.count("RunsBeside", self._beside)
        return True

    def _settled(self, period: float, was_read: bool) -> bool:
        self._left -= 1
        self._unread = 0 if was_read else self._unread + 1
        if self._read > 0 and self._unread >= UNREAD and not self._beside:
            self._left, self._again = 0, AGAIN
        if self._beside:
            self._late = self._late + 1 if period > self._in_turn else max(0, self._late - 1)
            if self._late >= LATE:
                self._left, self._again = 0, AGAIN
        if not self._left:
            self._begin()
        return self._beside


def runs_beside(computation: Computation) -> bool:
    """Whether the next run of a computation goes beside the program."""
    trial = computation.overlap
    if trial is None:
        trial = computation.overlap = OverlapTrial()
    return trial.beside(computation.seconds)
