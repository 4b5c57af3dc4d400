"""LSTM and GRU, three layers of 256, over 60 and 600 steps: inference and training against CPU eager.

    python -m benchmarks.recurrent [--backend reference] [--rounds 6] [--quick]

On ``xla`` also against the same model written by hand in JAX (:mod:`.scan`).

Processor time of the whole process, one thread, CPU eager and the device in turn; ratios are of medians. "first" is
the first call on the device, with all that it compiles.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median
from time import process_time
from typing import Any

import torch
from torch import nn

import torchport

from . import scan
from .common import table

__all__ = ["main"]


class _Classifier(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = getattr(nn, kind)(64, 256, 3, batch_first=True)
        self.head = nn.Linear(256, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states, _ = self.layers(x)
        return self.head(states[:, -1])


def _programs(kind: str, steps: int, device: str) -> dict[str, Callable[[], object]]:
    """Inference and a training step with AdamW, each to a value that is read."""
    torch.manual_seed(0)
    model: Any = _Classifier(kind).to(device)
    x, labels = torch.randn(16, steps, 64).to(device), torch.randint(10, (16,)).to(device)
    optimizer = torch.optim.AdamW(model.parameters())

    def infer() -> object:
        with torch.no_grad():
            return model(x).sum().item()

    def train() -> object:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    return {"inference": infer, "training": train}


def _seconds(run: Callable[[], object]) -> float:
    start = process_time()
    run()
    return process_time() - start


def main(argv: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="reference")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--quick", action="store_true", help="60 steps only")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    torchport.use(options.backend)
    rows: list[list[str]] = []
    for kind in ("LSTM", "GRU"):
        for steps in (60,) if options.quick else (60, 600):
            ours, peers = _programs(kind, steps, "port"), [_programs(kind, steps, "cpu")]
            if options.backend == "xla":
                peers.append(scan.programs(kind, steps))
            for what in ours:
                first = _seconds(ours[what])
                runs = [ours[what], *(peer[what] for peer in peers)]
                for run in runs:
                    run()
                times = [[_seconds(run) for run in runs] for _ in range(options.rounds)]
                port, *others = (median(column) for column in zip(*times, strict=True))
                cells = [cell for other in others for cell in (f"{1e3 * other:.1f}", f"{port / other:.2f}")]
                rows.append([f"{kind}, {steps} steps, {what}", f"{1e3 * port:.1f}", f"{first:.2f}", *cells])
    names = ["CPU eager", *(["jax.lax.scan"] if options.backend == "xla" else [])]
    header = ["", "port, ms", "first, s", *(cell for name in names for cell in (f"{name}, ms", "ratio"))]
    table(f"recurrent layers on {options.backend}", header, rows)


if __name__ == "__main__":
    main()
