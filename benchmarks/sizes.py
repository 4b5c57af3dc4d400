"""Sizes that vary: how often is compiled, whether the values are right, and what a step takes.

    python -m benchmarks.sizes [--backends inductor,xla,openvino,reference] [--models gpt2,mlp,conv] [--tiers off,auto]
                               [--sizes 50] [--passes 1]

A process per backend, model and setting, with an empty disk cache and one thread. In it come, in this order, as many
lengths as ``--sizes``, then as many batch sizes, then both at random: each in ``--passes`` passes. Of every phase:
computations that were compiled, as the disk cache has them, and how many of these for several sizes; where that was not
possible; the largest difference from CPU eager; and per pass the time over CPU eager's in the same process, steps that
compiled left out.
``remainder``: 12 batches of 32 and one of 13 per pass; instead of that ratio the longest step of the third pass over
its median. With tiers on, the compiler's process makes the computations: the second and third column count none.
``gpt2`` is a forward, ``mlp`` and ``conv`` train (no lengths: only batch sizes).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from typing import Any

from .common import table

__all__ = ["main"]

_PROGRAM = """
import copy, json, random, sys, time
from statistics import median
import torch
torch.set_num_threads(1)
import torchport
from torchport.cache.current import disk_cache
from torch import nn
model_name, sizes, passes, tiers = {model!r}, {sizes}, {passes}, {tiers!r}
torchport.config.tiers = tiers
torchport.use({backend!r})
torch.manual_seed(0)
random.seed(0)
if model_name == "gpt2":
    from transformers import GPT2Config, GPT2LMHeadModel
    config = GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=256, n_positions=512, resid_pdrop=0.0,
                        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2)
    host = GPT2LMHeadModel(config).eval()
elif model_name == "mlp":
    host = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 10))
else:
    host = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
                         nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                         nn.Linear(16, 10))
device = copy.deepcopy(host).to("port")
trains = model_name != "gpt2"
optimizers = [torch.optim.SGD(m.parameters(), lr=1e-3, momentum=0.9) for m in (host, device)]

def batch(b, t):
    if model_name == "gpt2":
        return torch.randint(0, 256, (b, t)), None
    x = torch.randn(b, 32) if model_name == "mlp" else torch.randn(b, 3, 16, 16)
    return x, torch.randint(0, 10, (b,))

def step(model, optimizer, x, y):
    if not trains:
        with torch.no_grad():
            return model(x).logits.cpu()
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach().cpu()

def made():
    # One per entry of the disk cache, and as many as an entry for several sizes says.
    folder = disk_cache()
    abouts = [entry.about for listed in folder.list() if (entry := folder.read(listed.key)) is not None]
    return sum(int(about.get("computations", 1)) for about in abouts if about.get("backend") == {backend!r})

counters = ("ForSeveralSizes", "OtherSizes", "NotSymbolic")
def counted():
    return [made(), *(torchport.metrics.counter(name) for name in counters)]

def run(shapes):
    ours, theirs, worst, steps = 0.0, 0.0, 0.0, []
    for b, t in shapes:
        x, y = batch(b, t)
        moved = x.to("port"), None if y is None else y.to("port")
        before = torchport.metrics.counter("UncachedCompile")
        begun = time.perf_counter()
        got = step(device, optimizers[1], *moved)
        took = time.perf_counter() - begun
        begun = time.perf_counter()
        want = step(host, optimizers[0], x, y)
        if tiers != "off" or torchport.metrics.counter("UncachedCompile") == before:
            ours += took
            theirs += time.perf_counter() - begun
        steps.append(took)
        worst = max(worst, float((got - want).abs().max() / want.abs().max()))
    return ours / max(theirs, 1e-9), worst, steps

lengths = random.sample(range(30, 330), sizes)
batches = random.sample(range(2, 80), min(sizes, 78))
phases = {{"lengths": [(2, t) for t in lengths]}} if not trains else {{}}
phases["batches"] = [(b, 48) for b in batches]
if not trains:
    phases["both"] = [(random.choice(batches), random.choice(lengths)) for _ in range(sizes)]
for name, shapes in phases.items():
    before = counted()
    worst, ratios = 0.0, []
    for _ in range(passes):
        ratio, difference, _ = run(shapes)
        ratios.append(ratio)
        worst = max(worst, difference)
    torchport.compiled(wait=True)
    compiled = [after - one for after, one in zip(counted(), before)]
    print(json.dumps([name, len(set(shapes)), *compiled, worst, ratios]), flush=True)
if trains:
    before = counted()
    for _ in range(3):
        ratio, worst, steps = run([(32, 0)] * 12 + [(13, 0)])
        torchport.compiled(wait=True)
    compiled = [after - one for after, one in zip(counted(), before)]
    print(json.dumps(["remainder", 2, *compiled, worst, [max(steps) / median(steps)]]), flush=True)
"""


def phases(backend: str, model: str, tiers: str, sizes: int, passes: int) -> list[list[Any]]:
    """The figures of each phase of one process."""
    with tempfile.TemporaryDirectory(prefix="torchport-cache-") as folder:
        environ = {
            **os.environ, "TORCHPORT_CACHE_DIR": folder, "TORCHPORT_CACHE": "on", "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1", "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
        }  # fmt: skip
        program = _PROGRAM.format(backend=backend, model=model, tiers=tiers, sizes=sizes, passes=passes)
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", program],
            env=environ, capture_output=True, text=True, timeout=3_600, check=False,
        )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{backend}, {model}: failed:\n{done.stderr}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]


def main(argv: list[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description="computations for several sizes")
    parser.add_argument("--backends", default="inductor,xla,openvino,reference")
    parser.add_argument("--models", default="gpt2,mlp,conv")
    parser.add_argument("--tiers", default="off,auto")
    parser.add_argument("--sizes", type=int, default=50)
    parser.add_argument("--passes", type=int, default=2)
    options = parser.parse_args(argv)
    rows: list[list[str]] = []
    for model in options.models.split(","):
        for backend in options.backends.split(","):
            for tiers in options.tiers.split(","):
                for name, count, compiled, several, _, exact, worst, ratios in phases(
                    backend, model, tiers, options.sizes, options.passes
                ):
                    rows.append([
                        model, backend, tiers, name, str(count), str(compiled), str(several), str(exact),
                        f"{worst:.0e}", " / ".join(f"{ratio:.2f}" for ratio in ratios),
                    ])  # fmt: skip
                    print(*rows[-1], flush=True)
    heads = ["model", "backend", "tiers", "phase", "sizes", "compiled", "of these for several", "not possible",
             "largest difference", "÷ CPU eager, per pass"]  # fmt: skip
    table("computations for several sizes", heads, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
