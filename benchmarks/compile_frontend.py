"""``torch.compile`` through torchport against ``torch.compile``'s own Inductor, and against the lazy device.

    python -m benchmarks.compile_frontend [--models mlp,minilm,gpt2] [--modes inference] [--backends inductor]

Every engine runs in turn in one process per model: ``inductor`` is ``torch.compile(model)``, ``compile-NAME`` the same
model on the CPU through torchport, ``compile-port-NAME`` on the device, ``lazy-NAME`` the device without torch.compile.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch

import torchport

from .common import Samples, Timed, interleave, ratio_cell, table, timed
from .models import MODELS, Example, inference, training

__all__ = ["main"]

MAKE: dict[str, Callable[[Example], Callable[[], torch.Tensor]]] = {"inference": inference, "training": training}
CALLS = {"mlp": 50}
"""Steps per batch, where a step is too short for the clock."""
WARMUP = 4


def _compiled(example: Example, **how: Any) -> Example:
    compiled = torch.compile(example.model, **how)

    def through(found: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda _, batch: found(compiled, batch)

    loss = None if example.loss is None else through(example.loss)
    return Example(example.model, example.batch, through(example.forward), loss)


def _batch(model: str, step: Callable[[], torch.Tensor], sync: Callable[[], object] | None) -> Timed:
    def run() -> object:
        kept = None
        for _ in range(CALLS.get(model, 1)):
            kept = step()
        if sync is not None:
            sync()
        return kept

    return timed(run)


def _engines(model: str, mode: str, backends: list[str]) -> dict[str, Timed]:
    def frontend(backend: str, device: Any) -> Example:
        return _compiled(MODELS[model]().to(device), backend="torchport", options={"backend": backend})

    found: dict[str, tuple[Callable[[], Example], bool]] = {"inductor": (lambda: _compiled(MODELS[model]()), False)}
    for backend in backends:
        device = torchport.device(backend)
        found[f"compile-{backend}"] = (lambda backend=backend: frontend(backend, "cpu"), False)
        found[f"compile-port-{backend}"] = (lambda backend=backend, device=device: frontend(backend, device), True)
        found[f"lazy-{backend}"] = (lambda device=device: MODELS[model]().to(device), True)
    make = MAKE[mode]
    return {
        name: _batch(model, make(build()), torchport.sync if on_port else None)
        for name, (build, on_port) in found.items()
    }


def measure(model: str, mode: str, backends: list[str], batches: int) -> None:
    """Print the table of one model in one mode."""
    torchport.use(backends[0])
    samples = interleave(_engines(model, mode, backends), batches, WARMUP)
    peer = samples["inductor"]
    rows: list[list[str]] = []
    for name, found in samples.items():
        lazy = samples.get(f"lazy-{name.rsplit('-', 1)[-1]}", Samples())
        own = ratio_cell(found, lazy) if name.startswith("compile") else "—"
        rows.append([name, found.cell(1e3 / CALLS.get(model, 1)), ratio_cell(found, peer), own])
    header = ("engine", "ms (best / median)", "÷ torch.compile", "÷ lazy, same backend")
    table(f"{model}, {mode}, {torch.get_num_threads()} threads", header, rows)


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def main(argv: list[str] | None = None) -> None:
    """Print one table per model and mode, each measured in a process of its own."""
    parser = argparse.ArgumentParser(description="torch.compile through torchport against its own Inductor")
    parser.add_argument("--quick", action="store_true", help="the MLP only")
    parser.add_argument("--models", type=_words, help=f"of {', '.join(MODELS)} (default: mlp, minilm, gpt2)")
    parser.add_argument("--modes", type=_words, default=["inference"], help="inference,training")
    parser.add_argument("--backends", type=_words, help="backends (default: inductor, and xla where it is)")
    parser.add_argument("--batches", type=int, default=30, help="steps per engine")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # one model and mode, in this process
    options = parser.parse_args(argv)
    there = [info.name for info in torchport.list_backends() if info.available and info.name in ("inductor", "xla")]
    backends = options.backends or there or ["reference"]
    models = options.models or (["mlp"] if options.quick else ["mlp", "minilm", "gpt2"])
    if options.here:
        measure(models[0], options.modes[0], backends, options.batches)
        return
    for model in models:
        for mode in options.modes:
            if mode == "training" and model == "minilm":
                continue
            given = f"--models {model} --modes {mode} --backends {','.join(backends)} --batches {options.batches}"
            command = [sys.executable, "-m", "benchmarks.compile_frontend", "--here", *given.split()]
            if subprocess.run(command, check=False, env=dict(os.environ)).returncode:
                print(f"\n{model}, {mode}: the process failed", flush=True)


if __name__ == "__main__":
    main()
