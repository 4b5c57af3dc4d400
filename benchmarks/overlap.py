"""What asynchronous execution saves: a step's wall time against its tracing and its executing.

    python -m benchmarks.overlap [--quick] [--models mlp,gpt2] [--backends inductor]

The same training steps, none of which reads a value, run with everything on the program's thread ("apart": what is not
executing is tracing) and with computations beside it. The backend ``waiting`` computes nothing and takes about as long
over it as tracing takes, as a device with a queue of its own does: the most there is to save.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

import torch

import torchport
from torchport.backend.interface import BackendData, Capabilities, ExecutionContext
from torchport.backend.optional import Started
from torchport.core.specs import TensorSpec

from .common import NullBackend, interleave, table, timed
from .models import MODELS, training
from .steps import available

__all__ = ["main"]

STEPS = 30
"""After the last of them nothing is traced while it computes; with ten that would be a tenth of the time."""


class WaitingEngine(NullBackend):
    """Computes nothing and takes its time over it, one computation after the other."""

    name = "benchmark_waiting"
    capabilities = Capabilities(releases_gil=True, concurrent=True)
    seconds = 0.0

    def __init__(self) -> None:
        self._ends = 0.0  # when what was started last will have ended

    def execute(
        self, handle: list[tuple[TensorSpec, torch.Tensor]], args: Sequence[BackendData], context: ExecutionContext
    ) -> Sequence[BackendData]:
        if len(handle) > 1:
            time.sleep(self.seconds)
        return super().execute(handle, args, context)

    def start(
        self, handle: list[tuple[TensorSpec, torch.Tensor]], args: Sequence[BackendData], context: ExecutionContext
    ) -> Started:
        seconds = self.seconds if len(handle) > 1 else 0.0
        ends = self._ends = max(time.perf_counter(), self._ends) + seconds

        def done() -> bool:
            return time.perf_counter() >= ends

        def wait() -> float:
            time.sleep(max(0.0, ends - time.perf_counter()))
            return seconds

        return Started(super().execute(handle, args, context), done, wait)


def _device(name: str) -> torch.device:
    if name not in {info.name for info in torchport.list_backends()}:
        torchport.register({NullBackend.name: NullBackend, WaitingEngine.name: WaitingEngine}[name])
    return torchport.use(name)


def _run(step: Callable[[], object], execution: str) -> Callable[[], None]:
    def steps() -> None:
        with torchport.config.override(execution=execution):
            for _ in range(STEPS):
                step()
            torchport.sync()

    return steps


def measure(model: str, backend: str, batches: int) -> list[str]:
    """One row, in milliseconds per step: trace, execute, one after the other, overlapped, and the ratio."""
    device = _device(NullBackend.name)
    null = _run(training(MODELS[model]().to(device)), "inline")
    traced = interleave({"trace": timed(null)}, batches)["trace"].best / STEPS
    WaitingEngine.seconds = traced
    device = _device(backend)
    step = training(MODELS[model]().to(device))
    inline, overlapped = _run(step, "inline"), _run(step, "auto")
    found = interleave({"inline": timed(inline), "auto": timed(overlapped)}, batches)
    torchport.metrics.reset()
    inline()
    snapshot = torchport.metrics.snapshot()
    execute = snapshot["seconds"]["ExecuteTime"] / STEPS
    apart, together = found["inline"].best / STEPS, found["auto"].best / STEPS
    trace = apart - execute
    cells = [f"{value * 1e3:.2f}" for value in (trace, execute, apart, together)]
    return [f"{model}, {backend.removeprefix('benchmark_')}", *cells, f"{together / max(trace, execute):.2f}"]


def main(argv: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="a step's wall time against its tracing and executing")
    parser.add_argument("--quick", action="store_true", help="the waiting engine only")
    parser.add_argument("--models", default="mlp,gpt2", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--backends", help="default: those whose execute leaves the interpreter alone")
    parser.add_argument("--batches", type=int, default=8)
    options = parser.parse_args(argv)
    if options.backends:
        backends = options.backends.split(",")
    else:
        real = [] if options.quick else [n for n in available() if torchport.get_backend(n).capabilities.releases_gil]
        backends = [WaitingEngine.name, *real]
    rows = [measure(model, name, options.batches) for model in options.models.split(",") for name in backends]
    header = ("training", "trace", "execute", "apart", "overlapped", "overlapped ÷ the longer")
    table("milliseconds per step, best of several runs", header, rows)


if __name__ == "__main__":
    main()
