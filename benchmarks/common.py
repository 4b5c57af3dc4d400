"""What every benchmark shares: interleaved timing, the peer, a backend that computes nothing, plain tables."""

from __future__ import annotations

import math
import os
import shutil
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter, thread_time
from typing import Any

import torch

import torchport
from torchport import native
from torchport.backend.interface import (
    Backend,
    BackendData,
    ExecutionContext,
    FreeableBuffer,
    InitContext,
    Processed,
    TensorData,
)
from torchport.core.specs import CompileSpecs, TensorSpec

__all__ = [
    "LazyCore",
    "NullBackend",
    "Samples",
    "Timed",
    "interleave",
    "new_trace",
    "ratio",
    "ratio_cell",
    "restart",
    "table",
    "timed",
    "use_null",
]

torchport.config.tiers = "off"  # what is compiled is measured; benchmarks.novelty is about what is not

Timed = Callable[[], float]
"""Runs one batch and returns the seconds of what is measured; what has to be done around it is not counted."""


@dataclass
class Samples:
    """Seconds of the batches of one engine; ``error`` says why there are none."""

    seconds: list[float] = field(default_factory=list)
    error: str = ""

    @property
    def best(self) -> float:
        """The fastest batch: what it costs when nothing else runs."""
        return min(self.seconds, default=math.nan)

    @property
    def median(self) -> float:
        """The middle batch."""
        return statistics.median(self.seconds) if self.seconds else math.nan

    def cell(self, per: float) -> str:
        """``best / median`` times a factor; a dash where the engine failed."""
        return f"{self.best * per:.2f} / {self.median * per:.2f}" if self.seconds else "—"


def timed(
    run: Callable[[], object],
    before: Callable[[], object] | None = None,
    clock: Callable[[], float] = perf_counter,
) -> Timed:
    """A batch that measures ``run``, after ``before``. What ``run`` returns dies after the clock has stopped.

    Tracing is one thread's work, so there the clock is ``thread_time``: it stands still while other processes have the
    processor.
    """

    def batch() -> float:
        if before is not None:
            before()
        start = clock()
        kept = run()
        seconds = clock() - start
        del kept
        return seconds

    return batch


def interleave(
    engines: dict[str, Timed], batches: int, warmup: int = 4, seconds: float = 60.0, in_a_row: int = 1
) -> dict[str, Samples]:
    """Run the engines in turn, ``in_a_row`` batches each, so that whatever else the machine does hits them all alike.

    Ends after ``batches`` rounds, or at least three when ``seconds`` have passed. An engine that raises while it warms
    up takes no part; the reason is printed.
    """
    found = {name: Samples() for name in engines}
    running = dict(engines)
    for name, batch in engines.items():
        try:
            for _ in range(warmup):
                batch()
        except Exception as error:
            found[name].error = f"{type(error).__name__}: {error}".splitlines()[0]
            print(f"{name} fails: {found[name].error}", flush=True)
            del running[name]
    end = perf_counter() + seconds
    for done in range(batches):
        if done >= 3 and perf_counter() > end:
            break
        for name, batch in running.items():
            found[name].seconds += [batch() for _ in range(in_a_row)]
    return found


def ratio(ours: Samples, peer: Samples) -> tuple[float, float]:
    """``(best to best, median to median)``."""
    return ours.best / peer.best, ours.median / peer.median


def ratio_cell(ours: Samples, peer: Samples) -> str:
    """Both ratios as text; a dash where one of the two failed."""
    return "{:.2f} / {:.2f}".format(*ratio(ours, peer)) if ours.seconds and peer.seconds else "—"


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a Markdown table, which also reads well as text."""
    lines = [list(header), *[list(row) for row in rows]]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]

    def text(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if at == 0 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "| " + " | ".join(padded) + " |"

    rule = ["-" * width if at == 0 else "-" * (width - 1) + ":" for at, width in enumerate(widths)]
    print(f"\n{title}\n")
    for line in (text(lines[0]), "| " + " | ".join(rule) + " |", *map(text, lines[1:])):
        print(line, flush=True)


# -- our side ----------------------------------------------------------------------------------------------------
class NullBackend(Backend):
    """Compiles to nothing and returns the same empty results each time: what is left to measure is ours."""

    name = "benchmark_null"
    version = "1"

    def preprocess(self, graph: torch.fx.GraphModule, specs: CompileSpecs) -> Processed:
        return Processed(b"")

    def init(
        self, processed: FreeableBuffer, specs: CompileSpecs, context: InitContext
    ) -> list[tuple[TensorSpec, torch.Tensor]]:
        return [(spec, torch.zeros(()).to(spec.dtype).expand(spec.shape)) for spec in context.outputs]

    def execute(
        self, handle: list[tuple[TensorSpec, torch.Tensor]], args: Sequence[BackendData], context: ExecutionContext
    ) -> Sequence[BackendData]:
        return [TensorData(context.device, spec, tensor) for spec, tensor in handle]


def use_null() -> None:
    """Bind ``port:0`` to the backend that computes nothing."""
    if NullBackend.name not in {info.name for info in torchport.list_backends()}:
        torchport.register(NullBackend)
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is not None:
        native.build_all([compiler])
    built = all(library.load() is not None for library in (native.guard, native.flush, native.follow))
    print(f"torchport's C++ libraries: {'in use' if built else 'not there, Python does their work'}", flush=True)
    torchport.use(NullBackend.name)


def new_trace() -> None:
    """Begin an empty trace on ``port:0``; values that are pending are given up."""
    from torchport.trace.threads import threads

    threads.trace.restart()


def restart(run: Callable[[], object]) -> Timed:
    """A batch of tracing on ``port:0``, from an empty trace."""
    return timed(run, new_trace, thread_time)


# -- the peer ----------------------------------------------------------------------------------------------------
class LazyCore:
    """PyTorch's C++ lazy core (``torch/csrc/lazy``) with its TorchScript backend: the device ``lazy``."""

    def __init__(self) -> None:
        import torch._lazy
        import torch._lazy.ts_backend

        torch._lazy.ts_backend.init()
        self._mark_step: Any = torch._lazy.mark_step

    def mark(self, reuse: bool = False, wait: bool = True) -> None:
        """Compute what is pending, wait for it, and begin an empty trace with IR reuse on or off."""
        self._mark_step(wait=wait)
        torch._C._lazy._set_reuse_ir(reuse)  # type: ignore[attr-defined]

    def timed(self, run: Callable[[], object], reuse: bool = False) -> Timed:
        """A batch of tracing: marked before and after, outside of what is measured."""
        measured = timed(run, lambda: self.mark(reuse), thread_time)

        def batch() -> float:
            seconds = measured()
            self._mark_step(wait=True)
            return seconds

        return batch
