"""Whole steps of models: ``port`` on each backend against CPU eager, the C++ lazy core and ``torch.compile``.

    python -m benchmarks.steps [--quick] [--models mlp,bert] [--modes inference,training] [--threads 1]

The engines run in turn in one process per model. "Alone": a step ends when its result is there. "In a row": five steps,
and the wait for the last one's result, divided by five; so runs a loop that does not look at every loss. Training is
AdamW (PyTorch's defaults). ``--processor-time`` counts the calling thread's processor time, with everything on that
thread: what holds on a machine that does other things, too. The tables also say what the first two steps took:
compiling a training step with Inductor takes up to minutes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from time import perf_counter, thread_time

import torch

import torchport

from .common import LazyCore, Samples, Timed, interleave, ratio, ratio_cell, table
from .models import MODELS, Example, inference, training

__all__ = ["main"]

Make = Callable[[Example], Callable[[], torch.Tensor]]
MAKE: dict[str, Make] = {"inference": inference, "training": training}
WARMUP = 2
IN_A_ROW = 5
SECONDS = 30.0
Step = Callable[[bool], torch.Tensor]
"""A step, told whether it is the last one before the wait: then it ends with everything computed."""
PEERS = ("eager", "lazy", "torch.compile")


def _port(model: str, make: Make, backend: str) -> Step:
    # Each backend has an index of its own but for the first, which is bound to port:0, the fast path.
    example = MODELS[model]().to(torchport.device(backend))
    step = make(example)

    def whole(last: bool) -> torch.Tensor:
        kept = step()
        torchport.sync(wait=last)
        return kept

    return whole


def _eager(model: str, make: Make) -> Step:
    step = make(MODELS[model]())
    return lambda last: step()


def _lazy(model: str, make: Make, core: LazyCore) -> Step:
    step = make(MODELS[model]().to("lazy"))

    def whole(last: bool) -> torch.Tensor:
        kept = step()
        core.mark(wait=last)
        return kept

    return whole


def _compiled(model: str, make: Make) -> Step:
    step = compiled(MODELS[model](), make)
    return lambda last: step()


def _batch(step: Step, steps: int, clock: Callable[[], float] = perf_counter) -> Timed:
    """Seconds of one of several steps. What they return dies after the clock has stopped."""

    def batch() -> float:
        start = clock()
        for _ in range(steps - 1):
            step(False)
        kept = step(True)
        seconds = clock() - start
        del kept
        return seconds / steps

    return batch


def compiled(example: Example, make: Make) -> Callable[[], torch.Tensor]:
    """A step of the model under ``torch.compile``."""
    module = torch.compile(example.model)
    example.model.train(make is training)

    def forward(found: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda _, batch: found(module, batch)

    loss = None if example.loss is None else forward(example.loss)
    return make(Example(example.model, example.batch, forward(example.forward), loss))


def step_of(engine: str, model: str, mode: str) -> Callable[[], object]:
    """A step of a fresh model with ``eager``, ``torch.compile`` or the backend that ``port`` stands for."""
    example = MODELS[model]()
    if engine == "torch.compile":
        return compiled(example, MAKE[mode])
    return MAKE[mode](example if engine == "eager" else example.to("port"))


def _engines(model: str, make: Make, backends: list[str]) -> dict[str, Step]:
    core = LazyCore()
    engines: dict[str, Callable[[], Step]] = {}
    for backend in backends:
        engines[f"port-{backend}"] = lambda backend=backend: _port(model, make, backend)
    engines["eager"] = lambda: _eager(model, make)
    engines["lazy"] = lambda: _lazy(model, make, core)
    engines["torch.compile"] = lambda: _compiled(model, make)
    made: dict[str, Step] = {}
    for name, build in engines.items():
        try:
            made[name] = build()
        except Exception as error:
            print(f"{name} fails: {type(error).__name__}: {error}".splitlines()[0], flush=True)
    return made


def _first(steps: dict[str, Step]) -> dict[str, float]:
    """Seconds of each engine's first steps, with the compiling in them; one that fails takes no further part."""
    firsts: dict[str, float] = {}
    for name, step in list(steps.items()):
        start = perf_counter()
        try:
            for _ in range(WARMUP):
                step(True)
        except Exception as error:
            print(f"{name} fails: {type(error).__name__}: {error}".splitlines()[0], flush=True)
            del steps[name]
        else:
            firsts[name] = perf_counter() - start
    return firsts


def _print(title: str, found: dict[str, Samples], firsts: dict[str, float]) -> None:
    rows = []
    for name, samples in found.items():
        peers = [ratio_cell(samples, found.get(peer, Samples())) for peer in PEERS]
        rows.append([name, samples.cell(1e3), f"{firsts[name]:.1f}", *peers])
    header = ("engine", "ms (best / median)", "first two steps, s", *(f"÷ {peer}" for peer in PEERS))
    table(title, header, rows)


def measure(model: str, mode: str, backends: list[str], batches: int, processor_time: bool) -> None:
    """Print the tables of one model in one mode."""
    torchport.use(backends[0])
    steps = _engines(model, MAKE[mode], backends)
    ways = {"alone": 1, f"{IN_A_ROW} in a row": IN_A_ROW}
    clock = perf_counter
    if processor_time:
        steps.pop("lazy", None)  # it computes on a thread of its own
        torchport.config.execution = "inline"
        ways, clock = {"alone, processor time": 1}, thread_time
    firsts = _first(steps)
    for how, in_a_row in ways.items():
        batch = {name: _batch(step, in_a_row, clock) for name, step in steps.items()}
        found = interleave(batch, batches, WARMUP, SECONDS)
        _print(f"{model}, {mode}, {how}", found, firsts)
        inductor, peer = found.get("port-inductor", Samples()), found.get("torch.compile", Samples())
        if model == "minilm" and inductor.seconds and peer.seconds:
            best, median = ratio(inductor, peer)
            print(f"\nMiniLM, port-inductor ÷ torch.compile: {best:.2f} best, {median:.2f} median; the target is 1.10")


def available() -> list[str]:
    """The backends that can run here, the fastest first."""
    names = [info.name for info in torchport.list_backends() if info.available]
    return [name for name in ("inductor", "reference") if name in names] + [
        name for name in names if name not in ("inductor", "reference")
    ]


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def main(argv: list[str] | None = None) -> None:
    """Print one table per model and mode, each measured in a process of its own."""
    parser = argparse.ArgumentParser(description="step times against eager, the C++ lazy core and torch.compile")
    parser.add_argument("--quick", action="store_true", help="the MLP and MiniLM only")
    parser.add_argument("--models", type=_words, help=f"of {', '.join(MODELS)}")
    parser.add_argument("--modes", type=_words, default=list(MAKE), help="inference,training")
    parser.add_argument("--backends", type=_words, help="backends of port (default: each available one)")
    parser.add_argument("--batches", type=int, help="steps per engine (default 40, quick 20)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads of every engine")
    parser.add_argument("--processor-time", action="store_true", help="count that instead of wall time")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # one model and mode, in this process
    options = parser.parse_args(argv)
    models = options.models or (["mlp", "minilm"] if options.quick else [name for name in MODELS if name != "narrow"])
    batches = options.batches or (20 if options.quick else 40)
    backends = options.backends or available()
    if options.here:
        measure(models[0], options.modes[0], backends, batches, options.processor_time)
        return
    for model in models:
        for mode in options.modes:
            if mode == "training" and model == "minilm":
                continue
            arguments = f"--models {model} --modes {mode} --backends {','.join(backends)} --batches {batches}".split()
            command = [sys.executable, "-m", "benchmarks.steps", "--here", *arguments]
            command += ["--processor-time"] * options.processor_time
            # In the environment it also holds for the thread that the C++ lazy core computes on.
            environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads)}
            code = subprocess.run(command, check=False, env=environment).returncode
            if code:
                print(f"\n{model}, {mode}: the process ended with code {code}", flush=True)


if __name__ == "__main__":
    main()
