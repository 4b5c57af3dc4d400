"""What dispatching costs: a call through the dispatcher over the bare function, and lookups with 16 and 200 backends.

    python benchmarks/dispatch_call.py

Prints medians of five repeats. Ratios are against a peer measured in the same process: PyTorch's C++ dispatcher calling
the same Python kernel, and a registry of c10's 16 backends.
"""

from __future__ import annotations

import statistics
import timeit
from collections.abc import Callable
from typing import Any

import torch

from torchport import dispatch
from torchport.dispatch import Dispatcher, DispatchKeySet

REPEATS = 5
BACKENDS = 200


class Thing:
    """An argument that carries keys and costs nothing to look at."""

    __slots__ = ("dispatch_keys",)

    def __init__(self, *keys: str) -> None:
        self.dispatch_keys = DispatchKeySet(*keys)


def microseconds(run: Callable[[], object], number: int = 100_000) -> float:
    """Median time of one run."""
    return statistics.median(timeit.repeat(run, number=number, repeat=REPEATS)) / number * 1e6


def kernel(x: Any, y: Any, *, alpha: int = 1) -> Any:
    """What is dispatched to: nothing."""
    return x


def calls() -> None:
    """A call over the bare function; the same through PyTorch's dispatcher."""
    ours = Dispatcher()
    op = ours.define("bench::op(Tensor x, Tensor y, *, int alpha=1) -> Tensor")
    ours.impl(op, "CPU", kernel)
    library = torch.library.Library("bench", "DEF")
    library.define("op(Tensor x, Tensor y, *, int alpha=1) -> Tensor")
    library.impl("op", kernel, "CPU")
    theirs = torch.ops.bench.op.default
    thing, tensor = Thing("CPU", "ADInplaceOrView"), torch.ones(1)
    with torch.no_grad():
        bare = microseconds(lambda: kernel(thing, thing))
        peer = microseconds(lambda: theirs(tensor, tensor)) - bare
        print(f"bare function                            {bare:6.2f} µs")
        print(f"PyTorch's dispatcher, over the function  {peer:6.2f} µs")
        runs: dict[str, Callable[[], object]] = {
            "handle, own arguments": lambda: op(thing, thing),
            "call by name, own arguments": lambda: ours.call("bench::op", thing, thing),
            "handle, one keyword": lambda: op(thing, thing, alpha=2),
            "handle, two torch tensors": lambda: op(tensor, tensor),
        }
        for what, run in runs.items():
            extra = microseconds(run) - bare
            print(f"{what + ', over the function':<40} {extra:6.2f} µs  {extra / peer:5.2f} × PyTorch's")


def lookups() -> None:
    """Remembered and first lookups, with c10's backends and with 200."""
    few = Dispatcher()
    for component in dispatch.backends:
        few.impl("bench::look", component.name, kernel)
    before = _lookups(few, "Meta")
    made = [dispatch.backends.register(f"bench{at}") for at in range(BACKENDS - len(dispatch.backends))]
    many = Dispatcher()
    for component in dispatch.backends:
        many.impl("bench::look", component.name, kernel)
    for name, where in (("the lowest backend", "CPU"), ("the highest backend", made[-1].name)):
        after = _lookups(many, where)
        for what in before:
            line = f"{what}, {len(dispatch.backends)} backends, {name}"
            print(f"{line:<55} {after[what]:6.2f} µs  {after[what] / before[what]:5.2f} × with 16")
    for component in made:
        dispatch.backends.unregister(component)


def _lookups(ours: Dispatcher, backend: str) -> dict[str, float]:
    keys = DispatchKeySet(backend, "ADInplaceOrView")
    op = ours.operator("bench::look")

    def first() -> None:
        op.forget()
        ours.lookup(op, keys)

    return {
        "remembered lookup": microseconds(lambda: ours.lookup("bench::look", keys)),
        "first lookup": microseconds(first, 10_000),
    }


def main() -> None:
    """Print both."""
    calls()
    lookups()


if __name__ == "__main__":
    main()
