"""What tracing costs: microseconds per op in the steady state, against PyTorch's C++ lazy core and CPU eager.

    python -m benchmarks.tracing [--quick] [--batches N] [--only steps|chains]

Protocol: 100 ops per step on 4×4 float32; the trace is reset (``port``) or marked and waited for (``lazy``) outside the
timed region; the engines run in turn, a few steps each, as a program repeats its step with its own data in the caches;
times are the tracing thread's processor time. ``port`` is bound to a backend that computes nothing. Eager computes, so
its column is for scale.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from time import thread_time
from typing import Any

import torch

import torchport

from .common import LazyCore, Samples, Timed, interleave, ratio, ratio_cell, restart, table, timed, use_null
from .models import MODELS, training

__all__ = ["CHAINS", "WRITES", "main"]

OPS = 100
IN_A_ROW = 5
"""Steps of one engine before the next one's turn."""
Chain = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def add_chain(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """100 additions."""
    for _ in range(OPS):
        x = x + y
    return x


def mixed(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """25 times mm, mul, add, relu."""
    for _ in range(OPS // 4):
        x = torch.relu(torch.mm(x, y) * y + y)
    return x


def scalar_mul(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """100 multiplications by a Python number."""
    for _ in range(OPS):
        x = x * 1.01
    return x


def views(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """100 transpositions, each a view of the one before."""
    for _ in range(OPS):
        x = x.t()
    return x


def view_add(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """50 times a transposition and an addition, as models use views."""
    for _ in range(OPS // 2):
        x = x.t() + y
    return x


def layer_norm(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """100 layer norms: three results each."""
    for _ in range(OPS):
        x = torch.nn.functional.layer_norm(x, (4,), w, w)
    return x


def split_cat(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """50 times split (two views) and cat."""
    for _ in range(OPS // 2):
        upper, lower = x.split(2)
        x = torch.cat((lower, upper))
    return x


CHAINS: dict[str, Chain] = {
    "add": add_chain,
    "mm/mul/add/relu": mixed,
    "scalar mul": scalar_mul,
    "t() of t()": views,
    "t() and add": view_add,
    "layer_norm": layer_norm,
    "split/cat": split_cat,
}


def write_rows(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """100 assignments to a row."""
    x = x.clone()
    for at in range(OPS):
        x[at & 3] = w
    return x


def add_to_rows(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """100 additions in place to a row."""
    x = x.clone()
    for at in range(OPS):
        x[at & 3].add_(w)
    return x


def copies(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """50 times an addition that is copied to another tensor."""
    x = x.clone()
    for _ in range(OPS // 2):
        x.copy_(x + y)
    return x


def out(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """100 additions with ``out=``."""
    x = x.clone()
    for _ in range(OPS):
        torch.add(x, y, out=x)
    return x


WRITES: dict[str, Chain] = {"x[i] = w": write_rows, "x[i].add_(w)": add_to_rows, "add, copy_": copies, "out=": out}
"""Chains that write; without gradients, since ``out=`` has none."""


def _program(chain: Chain, device: str, autograd: bool) -> Callable[[], object]:
    """The chain on one device, without gradients, or with a backward pass to its first input."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(4, 4, generator=generator).to(device) for _ in range(2))
    w = torch.ones(4).to(device)

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return chain(x, y, w)

    def both() -> object:
        leaf = x.detach().requires_grad_()
        chain(leaf, y, w).sum().backward()
        return leaf.grad

    return both if autograd else forward


def _engines(program: Callable[[str], Callable[[], object]], core: LazyCore) -> dict[str, Timed]:
    return {
        "port": restart(program("port")),
        "lazy": core.timed(program("lazy")),
        "lazy, reuse": core.timed(program("lazy"), reuse=True),
        "eager": timed(program("cpu"), clock=thread_time),
    }


def _row(name: str, found: dict[str, Samples], per: float) -> list[str]:
    times = [found[engine].cell(per) for engine in ("port", "lazy", "lazy, reuse", "eager")]
    ratios = [ratio_cell(found["port"], found[peer]) for peer in ("lazy", "lazy, reuse", "eager")]
    return [name, *times, *ratios]


_HEADER = (
    "port", "lazy", "lazy, reuse", "eager", "port ÷ lazy", "port ÷ reuse", "port ÷ eager",
)  # fmt: skip


def chains(core: LazyCore, batches: int, only: list[str] | None = None) -> dict[str, float]:
    """Print microseconds per op of every chain; returns each one's best-to-best ratio to the C++ core."""
    worst: dict[str, float] = {}
    for autograd in (False, True):
        rows = []
        for name, chain in (CHAINS if autograd else CHAINS | WRITES).items():
            if only and name not in only:
                continue

            def program(device: str, chain: Chain = chain, autograd: bool = autograd) -> Callable[[], object]:
                return _program(chain, device, autograd)

            found = interleave(_engines(program, core), batches, in_a_row=IN_A_ROW)
            rows.append(_row(name, found, 1e6 / OPS))
            worst[f"{name}{', autograd' if autograd else ''}"] = ratio(found["port"], found["lazy"])[0]
        what = "forward and backward, µs per forward op" if autograd else "forward, µs per op"
        table(f"Tracing, {what} (best / median)", ("chain", *_HEADER), rows)
    return worst


# -- whole training steps ----------------------------------------------------------------------------------------
def _port_step(step: Callable[[], object]) -> Timed:
    """A training step without the flush that ends ``Optimizer.step``; that follows outside of the timed region."""
    from torchport.frontend.device import shims

    flush = shims.flush_mine

    def batch() -> float:
        shims.flush_mine = lambda cause: None
        try:
            seconds = timed(step, clock=thread_time)()
        finally:
            shims.flush_mine = flush
        torchport.sync()
        return seconds

    return batch


def _flush_after(step: Callable[[], object]) -> Timed:
    """The step with its flush, which computes nothing here: what the device itself costs."""
    return timed(step, torchport.sync, thread_time)


_OPTIMIZERS: tuple[tuple[Any, dict[str, Any]], ...] = ((torch.optim.SGD, {"momentum": 0.9}), (torch.optim.AdamW, {}))


def _ops_of(batch: Timed) -> int:
    before = torchport.metrics.snapshot()["counters"].get("TracedOps", 0)
    batch()
    return int(torchport.metrics.snapshot()["counters"].get("TracedOps", 0) - before)


def steps(core: LazyCore, batches: int, models: tuple[str, ...] = ("mlp", "resnet18")) -> None:
    """Print milliseconds of whole training steps, traced only."""
    for model in models:
        rows = []
        for (make, more), foreach in itertools.product(_OPTIMIZERS, (False, True)):

            def program(
                device: str, model: str = model, foreach: bool = foreach, make: Any = make, more: Any = more
            ) -> Callable[[], object]:
                return training(MODELS[model]().to(device), make, foreach=foreach, **more)

            engines = {
                "port": _port_step(program("port")),
                "with flush": _flush_after(program("port")),
                "lazy": core.timed(program("lazy")),
                "lazy, reuse": core.timed(program("lazy"), reuse=True),
                "eager": timed(program("cpu"), clock=thread_time),
            }
            found = interleave(engines, batches, seconds=30)
            ops = _ops_of(engines["port"])
            row = _row(f"{model}, {make.__name__}, {'foreach' if foreach else 'for loop'}", found, 1e3)
            flushed = found["with flush"].cell(1e3)
            per_op = f"{found['port'].best / ops * 1e6:.2f}"
            rows.append([row[0], str(ops), per_op, row[1], flushed, *row[2:]])
        header = ("step", "ops", "µs per op", "port", "port with flush", *_HEADER[1:])
        table("Training steps traced only, ms (best / median); eager computes", header, rows)


def main(argv: list[str] | None = None) -> None:
    """Print every table."""
    parser = argparse.ArgumentParser(description="µs of tracing per op against PyTorch's C++ lazy core")
    parser.add_argument("--quick", action="store_true", help="fewer batches, the MLP's step only")
    parser.add_argument("--batches", type=int, help="batches per chain (default 60, quick 15)")
    parser.add_argument("--only", choices=("chains", "steps"), help="one of the parts")
    options = parser.parse_args(argv)
    batches = options.batches or (15 if options.quick else 60)
    torch.set_num_threads(1)  # eager computes: on this thread
    use_null()
    core = LazyCore()
    if options.only in (None, "chains"):
        worst = chains(core, batches)
        slower = [f"{name} {value:.2f}" for name, value in worst.items() if value > 1.0]
        print(f"\nSlower than the C++ core's default mode: {', '.join(slower) or 'none'}")
    if options.only in (None, "steps"):
        steps(core, max(5, batches // 3), ("mlp",) if options.quick else ("mlp", "resnet18"))


if __name__ == "__main__":
    main()
