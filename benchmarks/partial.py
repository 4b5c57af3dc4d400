"""A backend that takes only part of a program: segments per forward, and time against the CPU and the same model whole.

    python -m benchmarks.partial [--quick] [--models gpt2,bert,…] [--backends openvino,five] [--rounds 15]

Processor time of the whole process, one thread, in turn; medians. ``five`` is the reference backend that takes five
operators and the views; its peer is ``reference``, which takes all. ``openvino``'s peer is the same model lowered ahead
of time. *Segments* are executions per forward, *host* are operators that the backend refused. *Recording* is the
lazy forward without the engine's executions (the program's own Python, tracing it, and what the host runs).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from statistics import median
from time import process_time
from typing import Any, ClassVar

import torch
from torch import fx

import torchport
from torchport import Support, aot
from torchport.backends.reference import ReferenceBackend

from .common import table
from .models import MODELS, Example, inference

__all__ = ["main"]

Step = Callable[[], object]
WARMUP = 40
"""Steps before the clock starts: ``openvino`` makes constants of weights once that has paid."""


class FiveOperators(ReferenceBackend):
    """Matrix products, sums, products and ReLU, and views."""

    name: ClassVar[str] = "five"
    TAKES: ClassVar = frozenset(
        f"aten.{name}" for name in ("addmm.default", "mm.default", "add.Tensor", "mul.Tensor", "relu.default")
    )
    VIEWS: ClassVar = frozenset(
        f"aten.{name}"
        for name in ("view.default", "t.default", "transpose.int", "permute.default", "expand.default",
                     "slice.Tensor", "select.int", "unsqueeze.default")
    )  # fmt: skip

    def supports(self, node: fx.Node) -> Support:
        if str(node.target) in self.TAKES | self.VIEWS:
            return Support.yes()
        return Support.no("it is none of the five")


torchport.register(FiveOperators)


def _compiled(example: Example, backend: str) -> Example:
    run = torch.compile(example.model, backend="torchport", options={"backend": backend})
    return Example(example.model, example.batch, lambda _, batch: example.forward(run, batch), None)  # type: ignore[arg-type]


def _steps(model: str, backend: str) -> dict[str, Step]:
    """The forward by each way, each with a model of its own."""
    make = MODELS[model]
    device = torchport.device(backend)
    found: dict[str, Step] = {
        "CPU eager": inference(make()),
        f"{backend}, lazy": _read(inference(make().to(device))),
        f"{backend}, torch.compile": inference(_compiled(make(), backend)),
    }
    if backend == "openvino":
        found["openvino, ahead of time"] = _ahead_of_time(make(), backend)
    else:
        found["reference, lazy"] = _read(inference(make().to(torchport.device("reference"))))
    return found


def _read(step: Callable[[], torch.Tensor]) -> Step:
    def run() -> None:
        kept = step()
        torchport.sync()
        del kept

    return run


def _ahead_of_time(example: Example, backend: str) -> Step:
    class Forward(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = example.model.eval()

        def forward(self, **batch: torch.Tensor) -> torch.Tensor:
            return example.forward(self.model, batch)

    with torch.no_grad():
        program = aot.lower(Forward(), kwargs=example.batch, backend=backend)

    def run() -> object:
        with torch.no_grad():
            return program(**example.batch)

    return run


class _Engine:
    """Processor time that a backend's ``execute`` takes, all threads of it."""

    def __init__(self, backend: str) -> None:
        self.seconds = 0.0
        one: Any = torchport.get_backend(backend)
        execute = one.execute

        def timed(*args: Any) -> Any:
            start = process_time()
            results = execute(*args)
            self.seconds += process_time() - start
            return results

        one.execute = timed


def _counted(step: Step) -> tuple[int, int]:
    """Segments of a forward, and operators that the host runs in it."""
    torchport.sync()
    before = dict(torchport.metrics.snapshot()["counters"])
    step()
    after = torchport.metrics.snapshot()["counters"]
    return tuple(int(after.get(name, 0) - before.get(name, 0)) for name in ("Execute", "Fallback"))  # type: ignore[return-value]


def measure(model: str, backend: str, rounds: int) -> None:
    """Print the table of one model."""
    engine = _Engine(backend)
    steps = _steps(model, backend)
    for step in steps.values():
        for _ in range(WARMUP):
            step()
    counts = {name: _counted(step) for name, step in steps.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    recording: dict[str, list[float]] = {name: [] for name in steps if name.endswith("lazy")}
    for _ in range(rounds):
        for name, step in steps.items():
            before, start = engine.seconds, process_time()
            step()
            seconds[name].append(process_time() - start)
            if name in recording:
                recording[name].append(seconds[name][-1] - (engine.seconds - before))
    eager, peer = (median(times) for times in (seconds["CPU eager"], list(seconds.values())[-1]))
    rows = [
        [name, f"{median(times) * 1e3:.1f}", f"{median(times) / eager:.2f}", f"{median(times) / peer:.2f}",
         f"{median(recording[name]) * 1e3:.1f}" if name in recording else "—",
         *(str(count) if name != "CPU eager" else "—" for count in counts[name])]
        for name, times in seconds.items()
    ]  # fmt: skip
    header = ("how", "ms", "÷ CPU eager", f"÷ {list(steps)[-1]}", "recording", "segments", "host")
    table(f"{model}, inference", header, rows)


def main(argv: list[str] | None = None) -> None:
    """Measure each model with each backend."""
    parser = argparse.ArgumentParser(description="segments and time of backends that take part of a program")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--models", default="gpt2,bert,resnet18,vit,whisper")
    parser.add_argument("--backends", default="openvino,five")
    parser.add_argument("--rounds", type=int, default=0)
    options = parser.parse_args(argv)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):  # OpenVINO starts a thread for each processor that it may use
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    available = {row.name for row in torchport.list_backends() if row.available}
    for model in options.models.split(","):
        for backend in options.backends.split(","):
            if backend in available:
                measure(model, backend, options.rounds or (5 if options.quick else 15))


if __name__ == "__main__":
    main()
