"""Run a job on one engine and count what happened: time per step, until the first, and until full speed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter

from .. import metrics
from .job import DemoJob, Outcome

__all__ = ["Measured", "measure"]

WAITING = (
    "ExecuteTime", "CompileTime", "GraphTime", "TransferToDeviceTime", "TransferFromDeviceTime", "DeviceWaitTime",
    "QueueWaitTime",
)  # fmt: skip
"""Timers of what the program's thread does besides tracing; none of them runs inside another."""


INTERPRETED = ("InterpretedOps", "InterpretedPlan", "InterpretedRun")
"""Counters that stand still in a step that runs compiled."""


@dataclass(frozen=True)
class _Step:
    seconds: float
    ops: float
    compiles: float
    interpreted: float
    waiting: float


@dataclass
class Measured:
    """One job on one engine. ``error`` is set, and ``outcome`` is not, when it failed."""

    job: str
    engine: str
    outcome: Outcome | None = None
    error: str = ""
    compiles: int = 0
    compile_seconds: float = 0.0
    total_seconds: float = 0.0
    steps: list[_Step] = field(default_factory=list[_Step])

    @property
    def _steady(self) -> list[_Step]:
        # The second half of the steps that compiled nothing and, at full speed, interpreted nothing: before it is there
        # such a step is one in which compiled code was tried. The very first also loads data and makes the model.
        without = [step for step in self.steps[1:] if not step.compiles]
        if self.full_speed is not None:
            without = [step for step in without if not step.interpreted] or without
        return without[len(without) // 2 :]

    @property
    def first_result(self) -> float | None:
        """Seconds to the end of the first step, which also loads data and makes the model."""
        return self.steps[0].seconds if self.steps else None

    @property
    def full_speed(self) -> float | None:
        """Seconds until everything that a step computes ran compiled; ``None`` where that did not come to be."""
        warming = [at for at, step in enumerate(self.steps) if step.compiles or step.interpreted]
        last = warming[-1] if warming else 0
        return sum(step.seconds for step in self.steps[: last + 1]) if last + 1 < len(self.steps) else None

    @property
    def ms_per_step(self) -> float | None:
        """Median of the steady steps, in milliseconds."""
        return median(step.seconds for step in self._steady) * 1e3 if self._steady else None

    @property
    def ops_per_step(self) -> float | None:
        """Median number of traced ops of the steady steps; ``None`` where nothing was traced."""
        ops = median(step.ops for step in self._steady) if self._steady else 0
        return ops or None

    @property
    def trace_us_per_op(self) -> float | None:
        """Median microseconds per op that a steady step spends outside the engine: tracing and the program's Python."""
        costs = [(step.seconds - step.waiting) / step.ops for step in self._steady if step.ops]
        return median(costs) * 1e6 if costs else None


class _Meter:
    """Differences of the device's counters from one call to the next."""

    def __init__(self) -> None:
        self._before = self._read()

    @staticmethod
    def _read() -> tuple[float, ...]:
        now = metrics.snapshot()
        waiting = sum(now["seconds"].get(name, 0.0) for name in WAITING)
        waiting -= now["seconds"].get("AsyncExecuteTime", 0.0)  # on the device's own thread
        counters = now["counters"]
        interpreted = sum(counters.get(name, 0) for name in INTERPRETED)
        return counters.get("TracedOps", 0), counters.get("UncachedCompile", 0), interpreted, waiting

    def lap(self, seconds: float) -> _Step:
        now = self._read()
        ops, compiles, interpreted, waiting = (new - old for new, old in zip(now, self._before, strict=True))
        self._before = now
        return _Step(seconds, ops, compiles, interpreted, waiting)


def measure(name: str, job: DemoJob, engine: str, device: str, steps: int, on_step: Callable[[str], None]) -> Measured:
    """Run ``job`` on ``device``; ``on_step`` is told after every step what may be shown. Never raises ``Exception``."""
    measured = Measured(name, engine)
    before = metrics.snapshot()
    meter = _Meter()
    began = start = perf_counter()
    running = job.run(device, steps)
    try:
        while True:
            said = next(running)
            measured.steps.append(meter.lap(perf_counter() - start))
            on_step(said)
            start = perf_counter()
    except StopIteration as stop:
        measured.outcome = stop.value
    except Exception as error:
        # A backend that fails here must not keep the others from being shown.
        measured.error = f"{type(error).__name__}: {error}".splitlines()[0]
    after = metrics.snapshot()
    measured.total_seconds = perf_counter() - began
    measured.compiles = int(after["counters"].get("UncachedCompile", 0) - before["counters"].get("UncachedCompile", 0))
    measured.compile_seconds = after["seconds"].get("CompileTime", 0.0) - before["seconds"].get("CompileTime", 0.0)
    return measured
