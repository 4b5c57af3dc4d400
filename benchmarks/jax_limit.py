"""``port`` on ``xla`` against the limit: the same training step written by hand in JAX, in one ``jax.jit``.

    python -m benchmarks.jax_limit [--quick] [--batches 60] [--only mlp,gpt2,conv]

Both engines train the same model on the same batch with SGD, in turn, in one process; a batch is five steps, after
which the loss is read: both engines compute while Python goes on.
Targets: 1.05 for a steady step, 1.30 for compiling it.
"""

from __future__ import annotations

import argparse
import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter, process_time
from typing import Any

import torch
from torch import nn

import torchport
from torchport.backend.compiler import computations

from .common import Samples, Timed, interleave, ratio, ratio_cell, table, timed

__all__ = ["main"]

RATE = 1e-3
STEPS = 5
Arrays = Any


@dataclass
class Job:
    """A model in PyTorch, its forward in JAX as a function of the parameters by name, and a batch."""

    model: nn.Module
    forward: Callable[[dict[str, Arrays], Arrays], Arrays]
    batch: torch.Tensor
    target: torch.Tensor


# -- the models, twice ------------------------------------------------------------------------------
def _mlp(rows: int) -> Job:
    import jax

    model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 256))

    def forward(p: dict[str, Arrays], x: Arrays) -> Arrays:
        x = jax.nn.gelu(x @ p["0.weight"].T + p["0.bias"], approximate=False)
        x = jax.nn.gelu(x @ p["2.weight"].T + p["2.bias"], approximate=False)
        return x @ p["4.weight"].T + p["4.bias"]

    return Job(model, forward, torch.randn(rows, 256), torch.randn(rows, 256))


class _Block(nn.Module):
    """One block of GPT-2."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.grow, self.shrink = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        q, k, v = (
            part.view(b, t, self.heads, c // self.heads).transpose(1, 2)
            for part in self.attend(self.norm1(x)).split(c, dim=2)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(y.transpose(1, 2).reshape(b, t, c))
        return x + self.shrink(nn.functional.gelu(self.grow(self.norm2(x)), approximate="tanh"))


def _gpt2(width: int, heads: int) -> Job:
    import jax
    import jax.numpy as jnp

    def norm(p: dict[str, Arrays], name: str, x: Arrays) -> Arrays:
        mean = x.mean(-1, keepdims=True)
        var = ((x - mean) ** 2).mean(-1, keepdims=True)
        return (x - mean) * jax.lax.rsqrt(var + 1e-5) * p[f"{name}.weight"] + p[f"{name}.bias"]

    def linear(p: dict[str, Arrays], name: str, x: Arrays) -> Arrays:
        return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]

    def forward(p: dict[str, Arrays], x: Arrays) -> Arrays:
        b, t, c = x.shape
        parts = jnp.split(linear(p, "attend", norm(p, "norm1", x)), 3, axis=2)
        q, k, v = (part.reshape(b, t, heads, c // heads).transpose(0, 2, 1, 3) for part in parts)
        scores = q @ k.transpose(0, 1, 3, 2) / math.sqrt(c // heads)
        scores = jnp.where(jnp.tril(jnp.ones((t, t), bool)), scores, -jnp.inf)
        y = (jax.nn.softmax(scores, axis=-1) @ v).transpose(0, 2, 1, 3).reshape(b, t, c)
        x = x + linear(p, "project", y)
        return x + linear(p, "shrink", jax.nn.gelu(linear(p, "grow", norm(p, "norm2", x)), approximate=True))

    return Job(_Block(width, heads), forward, torch.randn(4, 128, width), torch.randn(4, 128, width))


def _conv(images: int) -> Job:
    import jax

    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * 8 * 8, 10),
    )  # fmt: skip

    def conv(p: dict[str, Arrays], name: str, x: Arrays) -> Arrays:
        y = jax.lax.conv_general_dilated(
            x, p[f"{name}.weight"], (1, 1), "SAME", dimension_numbers=("NCHW", "OIHW", "NCHW")
        )
        return y + p[f"{name}.bias"][:, None, None]

    def pool(x: Arrays) -> Arrays:
        return jax.lax.reduce_window(x, -math.inf, jax.lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")

    def forward(p: dict[str, Arrays], x: Arrays) -> Arrays:
        x = pool(jax.nn.relu(conv(p, "0", x)))
        x = pool(jax.nn.relu(conv(p, "3", x)))
        return x.reshape(x.shape[0], -1) @ p["7.weight"].T + p["7.bias"]

    return Job(model, forward, torch.randn(images, 3, 32, 32), torch.randn(images, 10))


JOBS: dict[str, Callable[[], Job]] = {
    "mlp": lambda: _mlp(512),
    "gpt2": lambda: _gpt2(768, 12),
    "conv": lambda: _conv(32),
    "mlp-small": lambda: _mlp(128),
    "gpt2-small": lambda: _gpt2(256, 8),
    "conv-small": lambda: _conv(16),
}
"""``gpt2`` is a block of the released model. The small ones show what a step costs in Python."""


# -- the engines --------------------------------------------------------------------------------------
def _limit(job: Job) -> tuple[Callable[[], float], Callable[[], float]]:
    """Steps of the hand-written program, and a function that traces and compiles it again and gives the seconds."""
    import jax
    import jax.numpy as jnp

    def loss(p: dict[str, Arrays], x: Arrays, y: Arrays) -> Arrays:
        return ((job.forward(p, x) - y) ** 2).mean()

    def update(p: dict[str, Arrays], x: Arrays, y: Arrays) -> tuple[Arrays, dict[str, Arrays]]:
        value, grads = jax.value_and_grad(loss)(p, x, y)
        return value, {name: p[name] - RATE * grads[name] for name in p}

    params = {name: jnp.asarray(value.detach().numpy().copy()) for name, value in job.model.named_parameters()}
    x, y = jnp.asarray(job.batch.numpy().copy()), jnp.asarray(job.target.numpy().copy())
    compiled: Any = None

    def compiling() -> float:
        nonlocal compiled
        jax.clear_caches()
        start = perf_counter()
        with jax.default_matmul_precision("highest"):
            compiled = jax.jit(lambda *args: update(*args)).lower(params, x, y).compile()
        return perf_counter() - start

    compiling()
    state = [compiled(params, x, y)[1]]  # one step, as ours has done one when it is compiled

    def steps() -> float:
        value: Arrays = None
        for _ in range(STEPS):
            value, state[0] = compiled(state[0], x, y)
        return float(value)

    return steps, compiling


def _ours(job: Job) -> tuple[Callable[[], float], Callable[[], float]]:
    """The same steps as people write them, and what building the graph of one and compiling it takes, again."""
    device = torchport.device("xla")
    model = copy.deepcopy(job.model).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    x, y = job.batch.to(device), job.target.to(device)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    def steps() -> float:
        losses = [step() for _ in range(STEPS)]
        return losses[-1].item()

    step()
    torchport.sync()

    def compiling() -> float:
        import jax

        jax.clear_caches()
        torchport.use("reference")
        computations.clear()
        torchport.use("xla")  # with an empty trie
        again = copy.deepcopy(job.model).to(device)
        before = dict(torchport.metrics.snapshot()["seconds"])
        nn.functional.mse_loss(again(job.batch.to(device)), job.target.to(device)).backward()
        torch.optim.SGD(again.parameters(), lr=RATE).step()
        torchport.sync()
        after = torchport.metrics.snapshot()["seconds"]
        return sum(after.get(name, 0.0) - before.get(name, 0.0) for name in ("CompileTime", "GraphTime"))

    return steps, compiling


def _warm_up() -> None:
    """What the first compilation of a process pays for, paid by nobody's account."""
    import jax

    jax.jit(lambda x: x + 1)(1.0)
    (torch.ones(64, device=torchport.device("xla")) + 1).cpu()


def _noting_work(run: Callable[[], float], work: Samples) -> Timed:
    """A batch that also notes the processor time of all threads, which other programs hardly change."""
    batch = timed(run)

    def noted() -> float:
        start = process_time()
        seconds = batch()
        work.seconds.append(process_time() - start)
        return seconds

    return noted


def measure(name: str, batches: int, compiles: int) -> None:
    """Print the table of one model."""
    torch.manual_seed(0)
    torchport.use("xla")
    _warm_up()
    job = JOBS[name]()
    limit, compile_limit = _limit(job)
    ours, compile_ours = _ours(job)
    expected, actual = limit(), ours()
    assert math.isclose(actual, expected, rel_tol=1e-3), "the two programs do not compute the same"
    work: dict[str, Samples] = {}
    engines = {name: _noting_work(run, work.setdefault(name, Samples())) for name, run in
               (("jax.jit", limit), ("port-xla", ours))}  # fmt: skip
    found = interleave(engines, batches)
    rows = [
        [engine, samples.cell(1e3 / STEPS), ratio_cell(samples, found["jax.jit"])] for engine, samples in found.items()
    ]
    table(f"{name}: a training step", ("engine", "ms (best / median)", "÷ jax.jit"), rows)
    best, median = ratio(found["port-xla"], found.get("jax.jit", Samples()))
    print(f"step: {best:.3f} best, {median:.3f} median; the target is 1.05")
    best, median = ratio(work["port-xla"], work["jax.jit"])
    print(f"processor time of a step, all threads: {best:.3f} best, {median:.3f} median")
    seconds = interleave({"jax.jit": compile_limit, "port-xla": compile_ours}, compiles, warmup=1)
    best, median = ratio(seconds["port-xla"], seconds["jax.jit"])
    shown = " ÷ ".join(f"{seconds[engine].median:.2f} s" for engine in ("port-xla", "jax.jit"))
    print(f"compiling: {shown} = {best:.2f} best, {median:.2f} median; the target is 1.30")
    print(f"loss after {STEPS + 1} steps: {actual:.6f}, by hand: {expected:.6f}")


def main(argv: list[str] | None = None) -> None:
    """Print one table per model."""
    parser = argparse.ArgumentParser(description="port on xla against hand-written jax.jit")
    parser.add_argument("--batches", type=int, help="batches of five steps per engine (default 60, quick 15)")
    parser.add_argument("--quick", action="store_true", help="fewer batches and compilations")
    parser.add_argument("--only", default=",".join(JOBS), help=f"of {', '.join(JOBS)}")
    options = parser.parse_args(argv)
    row = next(row for row in torchport.list_backends() if row.name == "xla")
    if not row.available:
        print(row.reason)
        return
    for name in options.only.split(","):
        measure(name, options.batches or (15 if options.quick else 60), 3 if options.quick else 7)


if __name__ == "__main__":
    main()
