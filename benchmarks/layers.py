"""Layers that repeat: what compiling a deep transformer takes, in pieces and as a whole, and what a step takes after.

    python -m benchmarks.layers [--backends inductor,xla] [--rows depth,odd,edit,step,turn] [--width 128] [--rounds 1]

A GPT-2 with small layers, one thread, ``tiers`` off and an empty disk cache, one process per figure. *compiling* is the
processor time of a process and its children from the first step's start to the second step's end, less two steps:
tracing and writing the graphs included. Training compiles two computations, as the first step differs from the others.
``edit`` fills the cache with one process and compiles in a second one, whose layer in the middle is another; *engine*
is what the backend's ``preprocess`` takes of it. *Whole* is a cold compile without pieces: equal layers count once each
in a compile in pieces, so that a cold one is a few layers' work itself. ``turn`` is training with tiers on, until the
whole graph was compiled beside its pieces and both have run in turn, by the clock: as every program does that runs for
long enough.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from statistics import median
from typing import Any

from .common import table

__all__ = ["main"]

ROWS = ("depth", "odd", "edit", "step", "turn")

_PROGRAM = """
import json, resource, sys, time
import torch
torch.set_num_threads(1)
import torchport
from torchport.backend import kept
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
layers, train, odd, steps, width = {layers}, {train}, {odd}, {steps}, {width}
torchport.config.tiers = {tiers!r}
torchport.use({backend!r})
torch.manual_seed(0)

class Odd(GPT2Block):
    def forward(self, hidden_states, *args, **kwargs):
        made = super().forward(hidden_states + hidden_states.sin(), *args, **kwargs)
        return made

config = GPT2Config(n_layer=layers, n_embd=width, n_head=4, vocab_size=512, n_positions=64, resid_pdrop=0.0,
                    embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, bos_token_id=1, eos_token_id=2)
model = GPT2LMHeadModel(config)
if odd:
    changed = Odd(config, layer_idx=layers // 2)
    changed.load_state_dict(model.transformer.h[layers // 2].state_dict())
    model.transformer.h[layers // 2] = changed
model = model.to("port").train(train)
x = torch.randint(0, 512, (2, 64), generator=torch.Generator().manual_seed(1)).to("port")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

def step():
    if not train:
        with torch.no_grad():
            return model(x).logits.mean()
    optimizer.zero_grad()
    loss = model(x, labels=x).loss
    loss.backward()
    optimizer.step()
    return loss.detach()

def spent():
    both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in both)

engine = [0.0]
preprocess = kept.with_bytes

def timed(*args):
    before = spent()
    try:
        return preprocess(*args)
    finally:
        engine[0] += spent() - before

kept.with_bytes = timed
values, begun = [], spent()
for _ in range(2 if train else 1):
    values.append(float(step()))
compiling = spent() - begun
times, cpu = [], []
for _ in range(steps):
    start, own = time.perf_counter(), time.process_time()
    float(step())
    times.append(time.perf_counter() - start)
    cpu.append(time.process_time() - own)
while {tiers!r} != "off" and not any(map(torchport.metrics.counter, ("WholeTookOver", "PiecesStay"))):
    float(step())
counters = torchport.metrics.snapshot()["counters"]
print(json.dumps({{
    "compiling": compiling, "engine": engine[0], "wall": times, "cpu": cpu, "values": values,
    "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    "tiers": [str(one) for one in torchport.tiers()],
    "pieces": int(counters.get("PiecesCompiled", 0)), "calls": int(counters.get("PiecesCalled", 0)),
}}))
"""


def _process(
    backend: str,
    layers: int,
    train: bool,
    pieces: str,
    folder: str,
    *,
    odd: bool = False,
    steps: int = 8,
    width: int,
    tiers: str = "off",
) -> dict[str, Any]:
    environ = {
        **os.environ, "TORCHPORT_CACHE_DIR": folder, "TORCHPORT_CACHE": "on", "OMP_NUM_THREADS": "1",
        "TORCHPORT_PIECES": pieces, "HF_HUB_OFFLINE": "1", "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
    }  # fmt: skip
    program = _PROGRAM.format(
        backend=backend, layers=layers, train=train, odd=odd, steps=steps, width=width, tiers=tiers
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        env=environ, capture_output=True, text=True, timeout=3_600, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{backend} with {layers} layers failed:\n{done.stderr}")
    found = json.loads(done.stdout.splitlines()[-1])
    found["step"] = median(found["cpu"])
    found["compiling"] = max(0.0, found["compiling"] - (2 if train else 1) * found["step"])
    return found


def _fresh(*args: Any, **kwargs: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="torchport-cache-") as folder:
        return _process(*args, folder, **kwargs)


def depth(backends: list[str], width: int, odd: bool) -> list[list[str]]:
    """48 layers against 6; with ``odd``, the 24th of the 48 is another."""
    rows: list[list[str]] = []
    for backend in backends:
        for train in (False, True):
            few = _fresh(backend, 6, train, "auto", width=width)
            many = _fresh(backend, 48, train, "auto", odd=odd, width=width)
            rows.append([
                backend, "training" if train else "forward", f"{few['compiling']:.1f}", f"{many['compiling']:.1f}",
                f"{many['compiling'] / few['compiling']:.2f}", f"{few['pieces']} / {few['calls']}",
                f"{many['pieces']} / {many['calls']}",
            ])  # fmt: skip
            print(*rows[-1], flush=True)
    return rows


def step(backends: list[str], width: int, layers: int, rounds: int) -> list[list[str]]:
    """A step in pieces against a step of the whole graph."""
    rows: list[list[str]] = []
    for backend in backends:
        for train in (False, True):
            found: dict[str, list[dict[str, Any]]] = {"auto": [], "off": []}
            for _ in range(rounds):
                for pieces in found:
                    found[pieces].append(_fresh(backend, layers, train, pieces, steps=30, width=width))
            own, other = found["auto"], found["off"]
            best = [min(min(one["cpu"]) for one in side) * 1e3 for side in (own, other)]
            rows.append([
                backend, "training" if train else "forward", str(layers), f"{best[0]:.1f}", f"{best[1]:.1f}",
                f"{best[0] / best[1]:.2f}", f"{own[0]['compiling']:.1f}", f"{other[0]['compiling']:.1f}",
                f"{own[0]['peak']:.0f}", f"{other[0]['peak']:.0f}", f"{own[0]['pieces']} / {own[0]['calls']}",
            ])  # fmt: skip
            print(*rows[-1], flush=True)
    return rows


def turn(backends: list[str], width: int, layers: int) -> list[list[str]]:
    """Pieces and the whole graph in turn, in one process, which decides for one of them."""
    rows: list[list[str]] = []
    for backend in backends:
        found = _fresh(backend, layers, True, "auto", width=width, steps=1, tiers="auto")
        said = [text for text in found["tiers"] if "whole" in text]
        rows.append([backend, "training", str(layers), "; ".join(text.partition("): ")[2] for text in said)])
        print(*rows[-1], flush=True)
    return rows


def edit(backends: list[str], width: int) -> list[list[str]]:
    """One layer of 24 is changed: the second process against the first."""
    rows: list[list[str]] = []
    for backend in backends:
        for train in (False, True):
            with tempfile.TemporaryDirectory(prefix="torchport-cache-") as folder:
                cold = _process(backend, 24, train, "auto", folder, width=width)
                changed = _process(backend, 24, train, "auto", folder, odd=True, width=width)
            whole = _fresh(backend, 24, train, "off", width=width)
            rows.append([
                backend, "training" if train else "forward", f"{changed['engine']:.1f}",
                f"{cold['engine']:.1f}", f"{changed['engine'] / cold['engine']:.2f}",
                f"{whole['engine']:.1f}", f"{changed['engine'] / whole['engine']:.2f}", f"{changed['compiling']:.1f}",
                f"{cold['compiling']:.1f}", f"{changed['compiling'] / cold['compiling']:.2f}",
                f"{whole['compiling']:.1f}", f"{changed['compiling'] / whole['compiling']:.2f}",
            ])  # fmt: skip
            print(*rows[-1], flush=True)
    return rows


def main(argv: list[str] | None = None) -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", default="inductor,xla")
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=24, help="of the rows that compare steps")
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args(argv)
    backends, rows = options.backends.split(","), options.rows.split(",")
    head = ("backend", "what", "6 layers, s", "48 layers, s", "ratio", "pieces / calls of 6", "of 48")
    if "depth" in rows:
        table("compiling, seconds of processor time", head, depth(backends, options.width, odd=False))
    if "odd" in rows:
        table("the same, one layer of the 48 is another", head, depth(backends, options.width, odd=True))
    if "edit" in rows:
        head = (
            "backend", "what", "engine, after the edit, s", "cold, s", "ratio", "cold, whole, s", "ratio",
            "all, after the edit, s", "cold, s", "ratio", "cold, whole, s", "ratio",
        )  # fmt: skip
        table("one layer of 24 is changed", head, edit(backends, options.width))
    if "turn" in rows:
        head = ("backend", "what", "layers", "torchport.tiers()")
        table("in pieces or as a whole, by the clock", head, turn(backends, options.width, options.layers))
    if "step" in rows:
        head = (
            "backend", "what", "layers", "in pieces, ms", "whole, ms", "ratio", "compiling, s", "whole, s",
            "peak, MB", "whole, MB", "pieces / calls",
        )  # fmt: skip
        table("a step, milliseconds of processor time, best", head,
              step(backends, options.width, options.layers, options.rounds))  # fmt: skip


if __name__ == "__main__":
    main()
