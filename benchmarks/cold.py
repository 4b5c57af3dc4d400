"""A program's first steps, from an empty process and with empty caches: ``port`` against CPU eager and torch.compile.

    python -m benchmarks.cold [--models gpt2,bert,resnet18] [--backends inductor,xla] [--steps 300] [--tiers auto]

Each engine runs in a process of its own, with caches of its own that begin empty. The clock starts when everything is
imported and the model is made on the CPU, so moving it to the device counts; a step ends when its loss is read (for
``--modes inference``: when its result is). "Longest" is the longest of the steps 2 to 200, against CPU eager's median.
"Full speed" is when the last computation took over; of some programs a few operators are never worth compiling.
"Steady" is the median of the last quarter of the steps.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from statistics import median
from time import perf_counter
from typing import Any

import torch

import torchport

from .common import table
from .models import MODELS
from .steps import MAKE, step_of

__all__ = ["main"]

_UNSETTLED = ("UncachedCompile", "TakenOver")
"""Counters that stand still at full speed."""


def _here(engine: str, model: str, mode: str, steps: int, tiers: str) -> dict[str, Any]:
    """Run one engine in this process: seconds of each step, and how many steps came before full speed."""
    MODELS[model]()  # what it imports is not the engine's
    if engine.startswith("port-"):
        torchport.use(engine.removeprefix("port-"))
    torchport.config.tiers = tiers
    begun = perf_counter()
    step = step_of(engine, model, mode)
    seconds: list[float] = []
    last, before = -1, 0
    for at in range(steps):
        value: Any = step()
        value.sum().item()
        now = perf_counter()
        seconds.append(now - begun)
        begun = now
        counters = torchport.metrics.snapshot()["counters"]
        seen = int(sum(counters.get(name, 0) for name in _UNSETTLED))
        if seen != before:
            last, before = at, seen
    return {"seconds": seconds, "settled": last + 1}


def _in_process(engine: str, options: argparse.Namespace, model: str, mode: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.cold", "--here", engine, "--models", model, "--modes", mode]
    command += ["--steps", str(options.steps), "--tiers", options.tiers]
    with tempfile.TemporaryDirectory(prefix="cold-") as folder:
        caches = {name: f"{folder}/{name.lower()}" for name in ("TORCHPORT_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **caches})
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        print(f"{engine} fails on {model}, {mode}: {last}", flush=True)
        return {}
    return json.loads(done.stdout.strip().splitlines()[-1])


def _row(engine: str, found: dict[str, Any], eager: dict[str, Any], totals: list[int]) -> list[str]:
    seconds, usual = found["seconds"], eager["seconds"]
    settled = found["settled"]
    speed = "—"
    if engine.startswith("port-"):
        speed = f"{sum(seconds[:settled]):.1f} s, step {settled}" if 0 < settled < len(seconds) else "not reached"
    steady = median(seconds[-max(len(seconds) // 4, 1) :])
    return [
        engine,
        f"{seconds[0] * 1e3:.0f}",
        f"{seconds[0] / usual[0]:.2f}",
        f"{max(seconds[1:200]) / median(usual):.2f}",
        speed,
        f"{steady * 1e3:.2f}",
        f"{steady / median(usual[-max(len(usual) // 4, 1) :]):.2f}",
        *(f"{sum(seconds[:count]):.2f} ({sum(seconds[:count]) / sum(usual[:count]):.2f})" for count in totals),
    ]


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def main(argv: list[str] | None = None) -> None:
    """Print one table per model and mode."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=_words, default=["gpt2", "bert", "resnet18"], help=f"of {', '.join(MODELS)}")
    parser.add_argument("--modes", type=_words, default=["training"], help=", ".join(MAKE))
    parser.add_argument("--backends", type=_words, default=["inductor", "xla"])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--tiers", default="auto")
    parser.add_argument("--quick", action="store_true", help="50 steps of GPT-2 on the reference backend")
    parser.add_argument("--here", help=argparse.SUPPRESS)  # one engine, in this process
    options = parser.parse_args(argv)
    if options.here:
        print(json.dumps(_here(options.here, options.models[0], options.modes[0], options.steps, options.tiers)))
        return
    if options.quick:
        options.models, options.backends, options.steps = ["gpt2"], ["reference"], 50
    engines = ["eager", *(f"port-{name}" for name in options.backends), "torch.compile"]
    totals = [count for count in (50, 300, 3000) if count <= options.steps]
    for model in options.models:
        for mode in options.modes:
            found = {engine: _in_process(engine, options, model, mode) for engine in engines}
            if not found["eager"]:
                continue
            rows = [_row(engine, one, found["eager"], totals) for engine, one in found.items() if one]
            columns = ["", "first, ms", "÷ eager's", "longest", "full speed", "steady, ms", "÷ eager's"]
            title = f"{model}, {mode}, tiers {options.tiers}, threads: {torch.get_num_threads()}"
            table(title, [*columns, *(f"{count} steps, s (÷ eager's)" for count in totals)], rows)


if __name__ == "__main__":
    main()
