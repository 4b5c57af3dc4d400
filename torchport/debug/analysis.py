"""What to change in a program so that it runs faster on the device, from what was counted while it ran."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ..core import metrics
from ..core.config import config
from ..run.history import history
from ..run.reasons import ADVICE

if TYPE_CHECKING:
    from ..run.reasons import CompileReason
    from ..run.tier_record import TierRecord

__all__ = ["Finding", "analyze", "compile_reasons", "tiers"]

OFTEN: Final = 3
"""How often something has to happen to be a habit of the program, rather than its warming up."""

LONG_COMPILE: Final = 60.0
"""Seconds of compiling that are worth a word."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing to change: ``kind`` (``compiles``, ``reads``, ``fallback``, ``failures``, ``bound``, ``memory`` or
    ``slow compile``), what was seen, what to do, how often, and the user's line where there is one."""

    kind: str
    seen: str
    advice: str
    times: int
    line: str | None = None

    def __str__(self) -> str:
        return f"{self.seen}\n  {self.advice}"


def compile_reasons() -> list[CompileReason]:
    """Why things were compiled, oldest first: one :class:`CompileReason` per compilation.

    The newest 256 are kept. Each is also logged, as it happens, to the logger ``torchport.compile`` at INFO.
    """
    return list(history.reasons)


def tiers() -> list[TierRecord]:
    """The computations that began interpreted (``config.tiers``), oldest first, and in which tier each is by now.

    The newest 256 are kept. ``print(*torchport.tiers(), sep="\\n")`` shows them.
    """
    return list(history.tiers)


def analyze() -> list[Finding]:
    """What makes the program slower than it has to be, most frequent first; empty if nothing was found."""
    found = [*_compiles(), *_waiting(), *_counted()]
    return sorted(found, key=lambda finding: -finding.times)


def _compiles() -> list[Finding]:
    lines = Counter((reason.kind, reason.line) for reason in history.reasons if reason.kind in ADVICE)
    found: list[Finding] = []
    for (kind, line), times in lines.items():
        if times >= OFTEN:
            last = next(r for r in reversed(history.reasons) if (r.kind, r.line) == (kind, line))
            seen = f"{times} compilations because of {line}, the last one: {last.changed}"
            found.append(Finding("compiles", seen, last.advice, times, line))
    return found


def _waiting() -> list[Finding]:
    steps = metrics.counter("Flush: step") + metrics.counter("Flush: copy")
    found: list[Finding] = []
    for (cause, line), times in list(history.sites.items()):
        if times < OFTEN:
            continue
        kind, _, op = cause.partition(" ")
        if kind == "read" and times >= 0.5 * steps:
            every = f"in {times} of {steps} steps" if steps else f"{times} times"
            seen = f"a value is read {every} at {line}: the program waits there for the device"
            advice = "keep it as a tensor and read it every n-th step, or hand it to torchport.step_closure"
            found.append(Finding("reads", seen, advice, times, line))
        elif kind in ("host", "segment"):
            how = ": values go to the host and back" if kind == "segment" else ": what is pending is computed before it"
            seen = f"{op} ran on the host {times} times at {line}{how}"
            advice = (
                "use operators the backend takes (torchport.explain says why), or give it a kernel or decomposition"
            )
            found.append(Finding("fallback", seen, advice, times, line))
        elif kind == "kernel":
            seen = f"{op} ran by itself {times} times at {line}: what is pending is computed before it"
            advice = "its result's shape depends on values; masks with torch.where keep shapes fixed"
            found.append(Finding("fallback", seen, advice, times, line))
    return found


def _counted() -> list[Finding]:
    found: list[Finding] = []

    def rule(name: str, kind: str, seen: str, advice: str, least: int = 1) -> None:
        times = metrics.counter(name)
        if times >= least:
            found.append(Finding(kind, seen.format(times), advice, times))

    rule(
        "Isolate",
        "failures",
        "{} computations failed as a whole and were run op by op",
        "the warnings and errors say which operator; a backend that fails often is better bound elsewhere",
    )
    rule(
        "Flush: op",
        "bound",
        f"{{}} traces reached the bound of {config.max_trace_ops} operators",
        "call torchport.sync() where a step ends, or raise config.max_trace_ops",
        OFTEN,
    )
    rule(
        "DroppedComputation",
        "memory",
        f"{{}} computations were dropped from memory, which keeps {config.max_computations}",
        "raise config.max_computations, or settle on fewer shapes",
    )
    compiling = metrics.metrics.timers.get("CompileTime")
    if compiling is not None and compiling.samples and max(compiling.samples) > LONG_COMPILE:
        seen = f"a compilation took {max(compiling.samples):.0f} s"
        found.append(Finding("slow compile", seen, "cut the step with torchport.sync() into parts that repeat", 1))
    return found
