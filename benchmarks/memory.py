"""Peak memory of whole steps: ``port`` on each backend against CPU eager and ``torch.compile``.

    python -m benchmarks.memory [--quick] [--models mlp,gpt2] [--modes inference,training]

Each engine runs in a process of its own: the model is built, a few steps warm it up (and compile), then the process's
high-water mark is reset (``/proc/self/clear_refs``, Linux only) and more steps run. "Peak" is that mark less what the
process held before the model was built, so weights, optimizer state and what a compiler leaves behind count; "resting"
is what it holds between steps, and "of a step" the difference: what running a step takes.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable

import torch

import torchport

from .common import table
from .models import MODELS
from .steps import available, step_of

__all__ = ["main"]

STEPS = 6
MIB = 2.0**20


def _status(field: str) -> int:
    with open("/proc/self/status", encoding="ascii") as status:
        for line in status:
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")


def _reset_peak() -> None:
    with open("/proc/self/clear_refs", "w", encoding="ascii") as control:
        control.write("5")


def _step(engine: str, model: str, mode: str) -> Callable[[], object]:
    on_port = engine.startswith("port-")
    if on_port:
        torchport.use(engine.removeprefix("port-"))
    step = step_of(engine, model, mode)
    if not on_port:
        return step

    def whole() -> object:
        kept = step()
        torchport.sync()
        return kept

    return whole


def measure(engine: str, model: str, mode: str) -> dict[str, float]:
    """Bytes: ``peak`` and ``resting``, above what the process holds with everything imported and nothing built."""
    MODELS[model]()
    (torch.ones(8, 8) @ torch.ones(8, 8)).sum().item()
    gc.collect()
    before = _status("VmRSS")
    step = _step(engine, model, mode)
    for _ in range(4):
        step()
    gc.collect()
    resting = _status("VmRSS")
    _reset_peak()
    for _ in range(STEPS):
        step()
    return {"peak": _status("VmHWM") - before, "resting": resting - before, "step": _status("VmHWM") - resting}


def _in_process(engine: str, model: str, mode: str) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.memory", "--here", engine, "--models", model, "--modes", mode]
    # Large blocks go back to the system at once, so that the process's size is what is in use.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        print(f"{engine} fails on {model}, {mode}: {last}", flush=True)
        return {}
    return json.loads(done.stdout.strip().splitlines()[-1])


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def main(argv: list[str] | None = None) -> None:
    """Print one table per mode."""
    parser = argparse.ArgumentParser(description="peak memory of a step against eager and torch.compile")
    parser.add_argument("--quick", action="store_true", help="GPT-2 on the reference backend only")
    parser.add_argument("--models", type=_words, default=["mlp", "wide", "resnet18", "bert", "gpt2"])
    parser.add_argument("--modes", type=_words, default=["training"])
    parser.add_argument("--backends", type=_words, help="backends of port (default: each available one)")
    parser.add_argument("--here", help=argparse.SUPPRESS)  # one engine, in this process
    options = parser.parse_args(argv)
    if options.here:
        print(json.dumps(measure(options.here, options.models[0], options.modes[0])))
        return
    backends = options.backends or (["reference"] if options.quick else available())
    models = ["gpt2"] if options.quick else options.models
    engines = ["eager", *(f"port-{name}" for name in backends), *([] if options.quick else ["torch.compile"])]
    for mode in options.modes:
        rows: list[list[str]] = []
        for model in models:
            found = {engine: _in_process(engine, model, mode) for engine in engines}
            eager = found["eager"]
            for engine, seen in found.items():
                if seen and eager:
                    cells = [f"{seen[name] / MIB:.0f}" for name in ("peak", "resting", "step")]
                    rows.append([model, engine, *cells, f"{seen['step'] / max(eager['step'], MIB):.2f}"])
        header = ("model", "engine", "peak, MiB", "resting, MiB", "of a step, MiB", "step ÷ eager's")
        table(f"{mode}: peak memory", header, rows)


if __name__ == "__main__":
    main()
