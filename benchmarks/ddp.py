"""What DDP costs on ``port``, against DDP on the CPU with gloo and ``torch.compile``, in one run.

    python -m benchmarks.ddp [--quick] [--batches 20] [--models gpt2,mlp] [--ranks 2]

Each rank is a process of one thread. All of them train the same models by both engines in turn, so that whatever else
the machine does hits both alike; a batch takes as long as its slowest rank. "alone" is a step without DDP on every rank
at once, and what DDP adds to it is the exchange of gradients. Target: 1.05.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from time import perf_counter

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torchport

from .common import Samples, ratio, table
from .models import MODELS, Example, training
from .steps import compiled

__all__ = ["main"]

Step = Callable[[], object]
WARMUP = 6
IN_A_ROW = 3
LIMIT = 1800
"""Seconds after which the ranks are given up."""


def _in_parallel(example: Example) -> Example:
    return Example(DistributedDataParallel(example.model), example.batch, example.forward, example.loss)


def _synced(step: Step) -> Step:
    def whole() -> None:
        kept = step()
        torchport.sync()
        del kept

    return whole


def _engines(model: str) -> dict[str, Step]:
    def on_cpu() -> Example:
        return MODELS[model]()

    def on_port() -> Example:
        return MODELS[model]().to("port")

    return {
        "port": _synced(training(_in_parallel(on_port()))),
        "cpu": compiled(_in_parallel(on_cpu()), training),
        "port, alone": _synced(training(on_port())),
        "cpu, alone": compiled(on_cpu(), training),
    }


def _measure(model: str, batches: int) -> dict[str, Samples]:
    """Seconds per step of each engine; a batch's are those of the slowest rank."""
    engines = _engines(model)
    for step in engines.values():
        for _ in range(WARMUP):
            step()
    found: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(batches):
        for name, step in engines.items():
            dist.barrier()
            start = perf_counter()
            for _ in range(IN_A_ROW):
                step()
            found[name].append((perf_counter() - start) / IN_A_ROW)
    slowest = torch.tensor(list(found.values()), dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return {name: Samples(row) for name, row in zip(found, slowest.tolist(), strict=True)}


def _rank(models: list[str], batches: int) -> None:
    torch.set_num_threads(1)
    torchport.use("inductor")
    dist.init_process_group()
    rows: list[list[str]] = []
    for model in models:
        found = _measure(model, batches)
        cells = [f"{found[name].median * 1e3:.2f}" for name in found]
        both = [f"{ratio(found['port' + more], found['cpu' + more])[1]:.3f}" for more in ("", ", alone")]
        rows.append([model, *cells[:2], both[0], *cells[2:], both[1]])
    if dist.get_rank() == 0:
        header = ("model", "port", "CPU, gloo", "ratio", "port, alone", "CPU, alone", "ratio, alone")
        table(f"a training step over {dist.get_world_size()} ranks, ms (medians)", header, rows)
        if os.environ.get("TORCHPORT_BENCHMARK_REPORT"):
            print(torchport.metrics.report())
    dist.destroy_process_group()


def _free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def _launch(ranks: int, arguments: list[str]) -> int:
    """Run the ranks as processes of their own; returns how many failed. Ends all of them when one does."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _free_port(), "GLOO_SOCKET_IFNAME": "lo"}
    common |= {"OMP_NUM_THREADS": "1", "WORLD_SIZE": str(ranks), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.ddp", *arguments]
    started = [
        subprocess.Popen(command, env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(ranks)
    ]
    try:
        return sum(process.wait(LIMIT) != 0 for process in started)
    finally:
        for process in started:
            process.kill()
            process.wait()


def main(argv: list[str] | None = None) -> int:
    """Print a table; returns how many ranks failed."""
    parser = argparse.ArgumentParser(description="DDP on port against DDP on the CPU with torch.compile")
    parser.add_argument("--batches", type=int, help="batches per engine (default 20, quick 6)")
    parser.add_argument("--quick", action="store_true", help="fewer batches")
    parser.add_argument("--models", default="gpt2", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args(argv)
    if "RANK" not in os.environ:
        return _launch(options.ranks, sys.argv[1:] if argv is None else argv)
    _rank(options.models.split(","), options.batches or (6 if options.quick else 20))
    return 0


if __name__ == "__main__":
    sys.exit(main())
