"""Counters and timers that say what happened: compiles, executions, transfers, fallbacks.

Nothing here is touched per traced op in the steady state; counters change when something rare happens.
Names follow PyTorch/XLA's where they mean the same thing (``UncachedCompile``, ``CachedCompile``, ``ExecuteTime``, …).
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

__all__ = ["Metrics", "Timer", "count", "counter", "metrics", "report", "reset", "snapshot", "timer"]

KEEP: Final = 1_024
"""Durations that a timer keeps for percentiles."""
PERCENTILES: Final = (1, 5, 10, 20, 50, 80, 90, 95, 99)


@dataclass
class Timer:
    """A sum of durations in seconds with the newest samples kept for percentiles."""

    count: int = 0
    total: float = 0.0
    samples: deque[float] = field(default_factory=lambda: deque[float](maxlen=KEEP))
    since: float = field(default_factory=time.monotonic)

    def add(self, seconds: float) -> None:
        """Record one duration in seconds."""
        self.samples.append(seconds)
        self.count += 1
        self.total += seconds

    def percentile(self, percent: float) -> float:
        """The given percentile (0 to 100) of the kept samples, in seconds; 0.0 without samples."""
        if not self.samples:
            return 0.0
        ordered = sorted(self.samples)
        return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]

    @property
    def rate(self) -> float:
        """Samples per second since the first."""
        return self.count / max(time.monotonic() - self.since, 1e-9)


class Metrics:
    """A set of named counters and timers; safe to use from several threads."""

    def __init__(self) -> None:
        # Reentrant: garbage collection inside a locked section may run a finalizer that counts something.
        self._lock = threading.RLock()
        self.counters: Counter[str] = Counter()
        self.timers: dict[str, Timer] = {}
        self.sources: list[Callable[[], Mapping[str, float]]] = []
        """Functions whose figures the report shows too, such as a backend's own counters."""
        self.notes: list[Callable[[], Sequence[str]]] = []
        """Functions whose lines the report ends with."""
        self.before_reading: list[Callable[[], None]] = []
        """Called before a report or snapshot: what is counted in bulk is brought up to date."""
        self.on_reset: list[Callable[[], None]] = []
        """Called by :meth:`reset`."""

    def count(self, name: str, amount: int = 1) -> None:
        """Add ``amount`` to a counter."""
        with self._lock:
            self.counters[name] += amount

    def counter(self, name: str) -> int:
        """The value of a counter; 0 if nothing was counted."""
        if name.startswith("lazy::"):
            self._update()
        return self.counters.get(name, 0)

    def add_time(self, name: str, seconds: float) -> None:
        """Record one duration in seconds under a timer."""
        with self._lock:
            timer = self.timers.get(name)
            if timer is None:
                timer = self.timers[name] = Timer()
            timer.add(seconds)

    def count_time(self, counter: str, timer: str, seconds: float) -> None:
        """Add one to a counter and record a duration: both at once, since a short computation notices the time."""
        with self._lock:
            counters, found = self.counters, self.timers.get(timer)
            counters[counter] = counters.get(counter, 0) + 1
            if found is None:
                found = self.timers[timer] = Timer()
            found.add(seconds)

    @contextmanager
    def timer(self, name: str) -> Generator[None]:
        """Record how long the ``with`` block took, also when it raises."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add_time(name, time.perf_counter() - start)

    def _update(self) -> None:
        for update in self.before_reading:
            update()

    def reset(self) -> None:
        """Forget everything counted so far."""
        for forget in self.on_reset:
            forget()
        with self._lock:
            self.counters.clear()
            self.timers.clear()

    def snapshot(self) -> dict[str, dict[str, float]]:
        """``{"counters": {name: value}, "seconds": {name: total}, "samples": {name: count}}`` as plain numbers."""
        self._update()
        with self._lock:
            return {
                "counters": dict(self.counters),
                "seconds": {name: t.total for name, t in self.timers.items()},
                "samples": {name: t.count for name, t in self.timers.items()},
            }

    def report(self) -> str:
        """A readable table of every counter and timer, then the newest compilations and why they were necessary.

        A timer's line: samples, their sum, how many per second since the first, and percentiles in milliseconds.
        """
        self._update()
        with self._lock:
            lines = [f"{name:<40} {value:>12,}" for name, value in sorted(self.counters.items())]
            for source in self.sources:
                lines += [f"{name:<40} {value:>12,}" for name, value in sorted(source().items())]
            for name, t in sorted(self.timers.items()):
                spread = "  ".join(f"p{p}={t.percentile(p) * 1e3:.3f}" for p in PERCENTILES)
                lines.append(f"{name:<40} {t.count:>12,}  total={t.total:.3f}s  {spread} ms  rate={t.rate:.3g}/s")
        for notes in self.notes:
            lines += notes()
        return "\n".join(lines) if lines else "nothing counted yet"

    def after_fork_in_child(self) -> None:
        """Another thread may have held the lock when the process was forked."""
        self._lock = threading.RLock()


metrics: Final = Metrics()
os.register_at_fork(after_in_child=metrics.after_fork_in_child)
count = metrics.count
counter = metrics.counter
report = metrics.report
reset = metrics.reset
snapshot = metrics.snapshot
timer = metrics.timer
