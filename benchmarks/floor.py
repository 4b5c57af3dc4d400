"""How fast a step of a small model could be on ``port``: with kernels that do nothing, and the compiled code alone.

    python -m benchmarks.floor [--quick] [--models mlp] [--modes inference,training]

"Replayed" is the same program with the body of every kernel it calls replaced by one that returns what it returned in
the step before, and without the flush: PyTorch's Python, argument parsing, dispatch, functionalization, autograd and
the call into Python are left, which every lazy device written in Python has. "Code" are the calls of compiled code,
by the backend's ``execute``. Their sum is the floor: nothing of it is torchport's tracing or flushing.
"Cold" is the same with the processor's caches swept before each step, as the code of a larger model leaves them. For
models that read no value and make no tensors. One thread, processor time.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from time import thread_time
from typing import Any

import torch

import torchport
from torchport.backend.interface import ExecutionContext, TensorData

from .common import Samples, interleave, ratio_cell, table, timed
from .models import MODELS
from .steps import MAKE, compiled

__all__ = ["main"]

BACKEND = "inductor"
Step = Callable[[], object]


def _code(backend: Any, step: Step) -> Step:
    """The calls of compiled code that a step makes, alone."""
    calls: list[tuple[Any, list[Any], ExecutionContext]] = []
    execute = backend.execute

    def noted(handle: Any, args: Any, context: ExecutionContext) -> Any:
        kept = [TensorData(arg.device, arg.spec, arg.tensor) for arg in args]
        calls.append((handle, kept, ExecutionContext(context.device, context.outputs)))
        return execute(handle, args, context)

    backend.execute = noted
    try:
        step()
    finally:
        del backend.execute
    return lambda: [execute(*call) for call in calls]


def _replayed(step: Step, whole: Step) -> Step:
    """The step with kernels that return what they returned before. Nothing on the device works after this."""
    from torchport.frontend.device import install, shims
    from torchport.lazy.runtime import threads
    from torchport.lazy.trace import Trace

    path: list[Any] = []
    restart = Trace.restart

    def noted(trace: Trace) -> None:
        path.extend(trace.cursor.path())
        restart(trace)

    Trace.restart = noted  # type: ignore[method-assign]
    whole()
    Trace.restart = restart  # type: ignore[method-assign]
    nodes = itertools.cycle(path)
    scope: dict[str, Any] = {}
    exec("def kernel(*args, **kwargs): node = _next(); _at.cursor = node; return node.ready", scope)
    for op in {node.op for node in path}:
        kernel = install.kernels[op]
        kernel.fast.__globals__.update(_next=nodes.__next__, _at=threads.trace)
        kernel.fast.__code__ = scope["kernel"].__code__
    for node in path:
        node.fits = True
    shims.flush_mine = lambda cause: None
    return step


def measure(model: str, mode: str, batches: int) -> list[str]:
    """One row: the step on ``port`` and its floor, eager's and torch.compile's, in milliseconds."""
    make = MAKE[mode]
    torchport.use(BACKEND)
    step = make(MODELS[model]().to("port"))

    def whole() -> object:
        kept = step()
        torchport.sync()
        return kept

    peers = {"eager": make(MODELS[model]()), "torch.compile": compiled(MODELS[model](), make)}
    for _ in range(4):
        whole()
    engines = {"port": whole, "code": _code(torchport.get_backend(BACKEND), whole), **peers}
    found = interleave({name: timed(run, clock=thread_time) for name, run in engines.items()}, batches, in_a_row=5)
    again, swept = _replayed(step, whole), torch.zeros(1 << 24)
    left = interleave({"replayed": timed(again, clock=thread_time)}, batches, in_a_row=5)["replayed"]
    cold = interleave({"replayed": timed(again, lambda: swept.add_(1), thread_time)}, batches)["replayed"]
    floor = Samples([one + found["code"].best for one in left.seconds])
    cold_floor = Samples([one + found["code"].best for one in cold.seconds])
    best_peer = min((found[name] for name in peers), key=lambda samples: samples.best)
    cells = [
        samples.cell(1e3)
        for samples in (found["port"], left, cold, found["code"], found["eager"], found["torch.compile"])
    ]
    ratios = [ratio_cell(samples, best_peer) for samples in (found["port"], floor, cold_floor)]
    return [f"{model}, {mode}", *cells, *ratios]


def main(argv: list[str] | None = None) -> None:
    """Print the table. Each row needs a process of its own."""
    parser = argparse.ArgumentParser(description="what a step takes without torchport's own part of it")
    parser.add_argument("--quick", action="store_true", help="fewer batches")
    parser.add_argument("--models", default="mlp", help="mlp, wide or bert")
    parser.add_argument("--modes", default="inference,training")
    options = parser.parse_args(argv)
    pairs = list(itertools.product(options.models.split(","), options.modes.split(",")))
    if len(pairs) > 1:
        import subprocess
        import sys

        for model, mode in pairs:
            quick = ["--quick"] * options.quick
            command = [sys.executable, "-m", "benchmarks.floor", "--models", model, "--modes", mode, *quick]
            subprocess.run(command, check=True)
        return
    torch.set_num_threads(1)
    ((model, mode),) = pairs
    with torchport.config.override(execution="inline"):
        row = measure(model, mode, 20 if options.quick else 100)
    header = (
        "step, ms", "port", "replayed", "replayed, cold", "code", "eager", "torch.compile",
        "port ÷ best peer", "floor ÷ best peer", "cold floor ÷ best peer",
    )  # fmt: skip
    table("A step and its floor (best / median)", header, [row])


if __name__ == "__main__":
    main()
