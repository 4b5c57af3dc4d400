"""Counters and timers that say what happened: compiles, executions, transfers, fallbacks.

Nothing here is touched per traced op in the steady state; counters change when something rare happens.
Names follow PyTorch/XLA's where they mean the same thing (``UncachedCompile``, ``CachedCompile``, ``ExecuteTime``, …).
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

__all__ = ["Metrics", "Timer", "count", "counter", "metrics", "report", "reset", "snapshot", "timer"]


@dataclass
class Timer:
    """A sum of durations in seconds with the newest samples kept for percentiles."""

    count: int = 0
    total: float = 0.0
    samples: list[float] = field(default_factory=list[float])

    KEEP: Final = 1_024

    def add(self, seconds: float) -> None:
        """Record one duration in seconds."""
        if len(self.samples) < self.KEEP:
            self.samples.append(seconds)
        else:
            self.samples[self.count % self.KEEP] = seconds
        self.count += 1
        self.total += seconds

    def percentile(self, percent: float) -> float:
        """The given percentile (0 to 100) of the kept samples, in seconds; 0.0 without samples."""
        if not self.samples:
            return 0.0
        ordered = sorted(self.samples)
        return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


class Metrics:
    """A set of named counters and timers; safe to use from several threads."""

    def __init__(self) -> None:
        # Reentrant: garbage collection inside a locked section may run a finalizer that counts something.
        self._lock = threading.RLock()
        self.counters: Counter[str] = Counter()
        self.timers: dict[str, Timer] = {}
        self.sources: list[Callable[[], Mapping[str, float]]] = []
        """Functions whose figures the report shows too, such as a backend's own counters."""

    def count(self, name: str, amount: int = 1) -> None:
        """Add ``amount`` to a counter."""
        with self._lock:
            self.counters[name] += amount

    def counter(self, name: str) -> int:
        """The value of a counter; 0 if nothing was counted."""
        return self.counters.get(name, 0)

    def add_time(self, name: str, seconds: float) -> None:
        """Record one duration in seconds under a timer."""
        with self._lock:
            self.timers.setdefault(name, Timer()).add(seconds)

    @contextmanager
    def timer(self, name: str) -> Generator[None]:
        """Record how long the ``with`` block took, also when it raises."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add_time(name, time.perf_counter() - start)

    def reset(self) -> None:
        """Forget everything counted so far."""
        with self._lock:
            self.counters.clear()
            self.timers.clear()

    def snapshot(self) -> dict[str, dict[str, float]]:
        """``{"counters": {name: value}, "seconds": {name: total}, "samples": {name: count}}`` as plain numbers."""
        with self._lock:
            return {
                "counters": dict(self.counters),
                "seconds": {name: t.total for name, t in self.timers.items()},
                "samples": {name: t.count for name, t in self.timers.items()},
            }

    def report(self) -> str:
        """A readable table of every counter and timer."""
        with self._lock:
            lines = [f"{name:<40} {value:>12,}" for name, value in sorted(self.counters.items())]
            for source in self.sources:
                lines += [f"{name:<40} {value:>12,}" for name, value in sorted(source().items())]
            for name, t in sorted(self.timers.items()):
                spread = "  ".join(f"p{p}={t.percentile(p) * 1e3:.3f}" for p in (1, 50, 99))
                lines.append(f"{name:<40} {t.count:>12,}  total={t.total:.3f}s  {spread} ms")
        return "\n".join(lines) if lines else "nothing counted yet"


metrics: Final = Metrics()
count = metrics.count
counter = metrics.counter
report = metrics.report
reset = metrics.reset
snapshot = metrics.snapshot
timer = metrics.timer
