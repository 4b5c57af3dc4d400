"""Where the time of a step on ``port`` goes: tracing, what flushing adds, and the compiled code by itself.

    python -m benchmarks.parts [--quick] [--models mlp,gpt2,bert] [--modes inference,training]

Measured in the steps themselves, one of which is waited for before the next begins, in turn with CPU eager and
torch.compile. "Tracing" is all that is neither flush nor code: the model's own Python, argument parsing, dispatch,
functionalization, autograd and torchport's kernels. A step "without flush" is the least it would take if computing many
values took nothing but the compiled code. One thread, processor time.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from time import thread_time
from typing import Any

import torch

import torchport

from .common import Samples, interleave, ratio_cell, table, timed
from .models import MODELS
from .steps import MAKE, compiled

__all__ = ["main"]

BACKEND = "inductor"


class _Clock:
    """Adds up the seconds of calls, without those of calls inside them."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inside = 0.0

    def around(self, name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose time is added under a name."""

        def measured(*args: Any, **kwargs: Any) -> Any:
            outer, self._inside = self._inside, 0.0
            start = thread_time()
            try:
                return fn(*args, **kwargs)
            finally:
                whole = thread_time() - start
                self.seconds[name] = self.seconds.get(name, 0.0) + whole - self._inside
                self._inside = outer + whole

        return measured


def _watched(clock: _Clock) -> None:
    """Have every flush and every call of compiled code counted from now on."""
    from torchport.run import flush as executor

    backend: Any = torchport.get_backend(BACKEND)
    backend.execute = clock.around("code", backend.execute)
    flush = executor.flush
    counted = clock.around("flush", flush)
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("torchport.") and vars(module).get("flush") is flush:
            vars(module)["flush"] = counted


def measure(model: str, mode: str, batches: int) -> list[str]:
    """One row: the step on ``port`` and its parts, eager's and torch.compile's, in milliseconds."""
    make = MAKE[mode]
    torchport.use(BACKEND)
    step = make(MODELS[model]().to("port"))
    clock = _Clock()
    parts: dict[str, Samples] = {name: Samples() for name in ("tracing", "flush", "code")}

    def whole() -> object:
        clock.seconds.clear()
        start = thread_time()
        kept = step()
        torchport.sync()
        seconds = thread_time() - start
        found = {"flush": 0.0, "code": 0.0, **clock.seconds}
        found["tracing"] = seconds - sum(found.values())
        for name, value in found.items():
            parts[name].seconds.append(value)
        return kept

    peers = {"eager": make(MODELS[model]()), "torch.compile": compiled(MODELS[model](), make)}
    whole()
    _watched(clock)
    for _ in range(4):
        whole()
    for samples in parts.values():
        samples.seconds.clear()
    engines = {"port": whole, **peers}
    found = interleave({name: timed(run, clock=thread_time) for name, run in engines.items()}, batches, in_a_row=5)
    best_peer = min((found[name] for name in peers), key=lambda samples: samples.best)
    left = [one + other for one, other in zip(parts["tracing"].seconds, parts["code"].seconds, strict=True)]
    shown = (found["port"], *parts.values(), found["eager"], found["torch.compile"])
    cells = [samples.cell(1e3) for samples in shown]
    return [f"{model}, {mode}", *cells, ratio_cell(found["port"], best_peer), ratio_cell(Samples(left), best_peer)]


def main(argv: list[str] | None = None) -> None:
    """Print one table. Each row is measured in a process of its own."""
    parser = argparse.ArgumentParser(description="tracing, flush and compiled code in a step")
    parser.add_argument("--quick", action="store_true", help="the MLP only, fewer batches")
    parser.add_argument("--models", help="default: mlp,gpt2,bert")
    parser.add_argument("--modes", default="inference,training")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # one model and mode, in this process
    options = parser.parse_args(argv)
    models = (options.models or ("mlp" if options.quick else "mlp,gpt2,bert")).split(",")
    modes = options.modes.split(",")
    if options.here:
        torch.set_num_threads(1)
        torchport.config.execution = "inline"
        print("row", *measure(models[0], modes[0], 15 if options.quick else 40), sep="\t")
        return
    rows = []
    for model in models:
        for mode in modes:
            command = [sys.executable, "-m", "benchmarks.parts", "--here", "--models", model, "--modes", mode]
            done = subprocess.run(
                [*command, *["--quick"] * options.quick], stdout=subprocess.PIPE, text=True, check=True
            )
            rows += [line.split("\t")[1:] for line in done.stdout.splitlines() if line.startswith("row\t")]
    header = (
        "step, ms", "port", "tracing", "flush", "code", "eager", "torch.compile",
        "port ÷ best peer", "without flush ÷ best peer",
    )  # fmt: skip
    table("A step and its parts (best / median)", header, rows)


if __name__ == "__main__":
    main()
