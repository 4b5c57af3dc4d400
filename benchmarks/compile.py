"""The disk cache: from a process's start to its first compiled step, in a second process, against CPU eager's.

    python -m benchmarks.compile [--backends inductor,xla,openvino] [--models gpt2,bert,resnet18,minilm] [--rounds 3]

Each figure is one process from its start to the end of its first forward pass, imports of PyTorch and of the models'
library included, in seconds of processor time of that process and of its children, one thread, tiers off; ``wall`` is
by the clock. Importing the libraries and building the model is the same code in all of them, takes seconds, and differs
from process to process by as much as what is asked for: ``more`` is of what comes after it, ``whole`` of all. Processes of eager and of each backend take turns; the medians are shown. The cache is filled by a process
before, whose time is the column ``cold``, and is in a folder that is removed at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from statistics import median
from typing import Any

from .common import table

__all__ = ["main"]

MODELS = ("gpt2", "bert", "resnet18", "minilm")
BACKENDS = ("inductor", "xla", "openvino")
COUNTED = ("DiskCacheHit", "DiskCacheMiss", "DiskCacheRefused", "UncachedCompile")

_PROGRAM = """
import json, resource, sys, time
import torch
torch.set_num_threads(1)
from benchmarks import models
example = models.MODELS[{model!r}]()
model = example.model.eval()
loaded = time.process_time()
if {backend!r}:
    import torchport
    torchport.use({backend!r})
    model = model.to("port")
batch = example.batch if not {backend!r} else torch.utils._pytree.tree_map(
    lambda value: value.to("port") if isinstance(value, torch.Tensor) else value, example.batch)
with torch.no_grad():
    example.forward(model, batch).cpu()
ended = time.time()
mine = resource.getrusage(resource.RUSAGE_SELF)
below = resource.getrusage(resource.RUSAGE_CHILDREN)
counts = {{}}
if {backend!r}:
    counts = torchport.metrics.snapshot()["counters"]
print(json.dumps({{
    "cpu": mine.ru_utime + mine.ru_stime + below.ru_utime + below.ru_stime,
    "loading": loaded,
    "ended": ended,
    "counts": {{name: int(counts.get(name, 0)) for name in {counted!r}}},
    "inductor": any(name.startswith("torch._inductor") for name in sys.modules),
}}))
"""


def _process(model: str, backend: str, folder: str) -> dict[str, Any]:
    """One process, from start to first step."""
    environ = {
        **os.environ, "TORCHPORT_CACHE": "on", "TORCHPORT_CACHE_DIR": folder, "OMP_NUM_THREADS": "1",
        "TORCHPORT_TIERS": "off",  # the first compiled step, and not an interpreted one
        "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1",
    }  # fmt: skip
    begun = time.time()
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM.format(model=model, backend=backend, counted=COUNTED)],
        env=environ, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{model} on {backend or 'cpu'} failed:\n{done.stderr}")
    found = json.loads(done.stdout.splitlines()[-1])
    return {**found, "wall": found["ended"] - begun}


def second_process(models: list[str], backends: list[str], rounds: int) -> list[list[str]]:
    """A row per model and backend; ``compiles`` is what the second processes compiled, at most."""
    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory(prefix="torchport-cache-") as folder:
        for model in models:
            cold = {backend: _process(model, backend, folder) for backend in backends}
            seen: dict[str, list[dict[str, Any]]] = defaultdict(list)
            for _ in range(rounds):
                for backend in ("", *backends):
                    seen[backend].append(_process(model, backend, folder))
            eager = median(one["cpu"] for one in seen[""])
            for backend in backends:
                ours = median(one["cpu"] for one in seen[backend])
                after = [median(one["cpu"] - one["loading"] for one in seen[name]) for name in (backend, "")]
                compiles = max(one["counts"]["UncachedCompile"] for one in seen[backend])
                hits = min(one["counts"]["DiskCacheHit"] for one in seen[backend])
                wall = [median(one["wall"] for one in seen[name]) for name in (backend, "")]
                rows.append([
                    model, backend, f"{eager:.2f}", f"{ours:.2f}", f"{after[0] - after[1]:+.2f}", f"{ours - eager:+.2f}", f"{wall[0] - wall[1]:+.2f}",
                    f"{cold[backend]['cpu']:.1f}", str(hits), str(compiles),
                    "yes" if any(one["inductor"] for one in seen[backend]) else "no",
                ])  # fmt: skip
                print(*rows[-1], flush=True)
    return rows


def main(argv: list[str] | None = None) -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", default=",".join(BACKENDS))
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one model, one round")
    options = parser.parse_args(argv)
    models, rounds = options.models.split(","), options.rounds
    if options.quick:
        models, rounds = models[:1], 1
    table(
        "the second process: from its start to its first step, seconds of processor time",
        ("model", "backend", "eager", "ours", "more", "whole", "wall", "cold", "hits", "compiles", "torch._inductor"),
        second_process(models, options.backends.split(","), rounds),
    )


if __name__ == "__main__":
    main()
