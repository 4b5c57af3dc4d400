"""Whether each C++ file earns its place: what torchport's own work costs with all of them, without one, without any.

    python -m benchmarks.native [--quick] [--rounds N] [--models mlp,gpt2]

``port`` is bound to a backend that computes nothing, so a training step is tracing, flushing and autograd alone; its
time is the tracing thread's processor time. A library cannot be taken out of a process, so each set of them has a
process of its own; the processes take turns, and the fastest step of all turns counts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from time import thread_time

import torch

import torchport
from torchport import native

from .common import Samples, table, timed, use_null
from .models import MODELS, inference, training
from .tracing import add_chain

__all__ = ["main"]

FILES = {library.source.name: library for library in (native.guard, native.flush, native.follow)}
SETS = {"all": (), **{f"without {name}": (name,) for name in FILES}, "none": tuple(FILES)}
"""Name → the files that are done without."""


def measure(without: Sequence[str], models: Sequence[str], batches: int) -> dict[str, list[float]]:
    """Seconds of each step in this process, by what it is a step of."""
    for name in without:
        FILES[name].load = lambda: None  # type: ignore[method-assign]
    use_null()
    x = torch.ones(4, 4, device="port")
    programs = {"100 additions": lambda: add_chain(x, x, x)}
    for model in models:
        programs[f"{model}, inference"] = inference(MODELS[model]().to("port"))
        programs[f"{model}, training"] = training(MODELS[model]().to("port"))
    found: dict[str, list[float]] = {}
    for name, program in programs.items():

        def step(program: object = program) -> object:
            kept = program()  # type: ignore[operator]
            torchport.sync()
            return kept

        batch = timed(step, clock=thread_time)
        for _ in range(6):
            batch()
        found[name] = [batch() for _ in range(batches)]
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table: microseconds per step, and how many times those of all files together."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--models", default="mlp,gpt2")
    parser.add_argument("--in-this-process", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    models, batches = options.models.split(","), 20 if options.quick else 60
    if options.in_this_process is not None:
        print(json.dumps(measure(SETS[options.in_this_process], models, batches)))
        return
    found: dict[str, dict[str, Samples]] = {}
    for _ in range(2 if options.quick else options.rounds):
        for name in SETS:
            command = [sys.executable, "-m", "benchmarks.native", "--models", options.models, "--in-this-process", name]
            done = subprocess.run(
                [*command, *(["--quick"] if options.quick else [])], capture_output=True, text=True, check=True
            )
            for program, seconds in json.loads(done.stdout.splitlines()[-1]).items():
                found.setdefault(program, {}).setdefault(name, Samples()).seconds += seconds
    rows = [
        [program, *(f"{of[name].best * 1e6:.0f} ({of[name].best / of['all'].best:.2f})" for name in SETS)]
        for program, of in found.items()
    ]
    table("Microseconds of torchport's own work per step (best; times that of all)", ["program", *SETS], rows)


if __name__ == "__main__":
    main()
