"""Traces of real programs, and what they are compiled to."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import torchport
from torchport.backend.builder import capture_of
from torchport.backend.compiler import finish
from torchport.backend.execution import execute_on_host
from torchport.backend.interface import Backend
from torchport.core.specs import CompileSpecs, TensorSpec
from torchport.run import plans
from torchport.trace.graph import TraceGraph
from torchport.trace.trie import Node
from torchport.worker.request import Request, path_request


@dataclass
class Traced:
    """What a plan was made from, and the graph that was built in this process."""

    path: Sequence[Node]
    outputs: tuple[int, ...]
    leaf_specs: Sequence[TensorSpec]
    donated: frozenset[int]
    made: TraceGraph

    def request(self, key: object, backend: Backend, **specs: str) -> Request:
        given = CompileSpecs(specs)
        return path_request(key, backend, given, self.path, self.outputs, self.leaf_specs, self.donated)


@contextmanager
def tracing() -> Iterator[list[Traced]]:
    """Collect every path that a plan is made of inside of the block."""
    found: list[Traced] = []
    original = plans.write_graph

    def noted(path: Any, outputs: Any, leaf_specs: Any, capture: Any, donated: Any = frozenset()) -> TraceGraph:
        made = original(path, outputs, leaf_specs, capture, donated)
        found.append(Traced(path, outputs, leaf_specs, frozenset(donated), made))
        return made

    plans.write_graph = noted
    try:
        yield found
    finally:
        plans.write_graph = original


def traces_of(program: Callable[[torch.device], Any]) -> list[Traced]:
    """The paths that a program's flushes compile on the reference backend."""
    device = torchport.device("reference")
    with tracing() as found:
        kept = program(device)
        torchport.sync()
        del kept
    return found


def a_trace() -> Traced:
    """A path of two operators that was not seen before."""

    def program(device: torch.device) -> Any:
        # The size is a new one each time, so that there is something to compile.
        return torch.ones(3, 1000 + time.monotonic_ns() % 1_000_003, device=device)[:, :2].sin() + 1

    return traces_of(program)[-1]


def run(backend: Backend, prepared: Any, seed: int = 0) -> list[torch.Tensor]:
    """What a computation gives for inputs drawn from a seed."""
    computation = finish(backend, backend.devices()[0], CompileSpecs(), prepared)
    generator = torch.Generator().manual_seed(seed)

    def drawn(spec: TensorSpec) -> torch.Tensor:
        made = torch.empty_strided(spec.shape, spec.strides, dtype=spec.dtype)
        if spec.dtype.is_floating_point:
            return made.normal_(generator=generator)
        return made.random_(0, 2, generator=generator)

    return list(execute_on_host(computation, [drawn(spec) for spec in computation.parameters]))


def gone(pids: Sequence[int], seconds: float = 20.0) -> list[int]:
    """The processes that are still there after so long; a zombie is not."""
    end = time.monotonic() + seconds
    while True:
        left = [pid for pid in pids if _lives(pid)]
        if not left or time.monotonic() > end:
            return left
        time.sleep(0.02)


def _lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def family(pid: int) -> list[int]:
    """A process and everything below it."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                parent = int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found


def wait_until(condition: Callable[[], Any], seconds: float = 120.0) -> Any:
    """What the condition gives once it is true. Raises ``TimeoutError``."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(0.01)
    return found


__all__ = ["Traced", "a_trace", "capture_of", "family", "gone", "run", "traces_of", "tracing", "wait_until"]
