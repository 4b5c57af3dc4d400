"""Compiling: ``init(preprocess(graph))``, and the computations that are kept in memory.

Every door that compiles in this process comes through :meth:`Computations.get`, so equal graphs for one device share a
computation whichever door they came by.
"""

from __future__ import annotations

from collections import OrderedDict
from time import perf_counter
from typing import Final

from torch import fx

from ..core import metrics
from ..core.config import config
from ..core.errors import CompileError
from ..core.forks import guarded_rlock
from ..core.specs import CompileSpecs
from .execution import Computation
from .interface import (
    Backend,
    BackendDevice,
    ExecutionContext,
    FreeableBuffer,
    InitContext,
)
from .normal_form import input_specs, output_specs, verify_graph
from .serialize import fingerprint

__all__ = ["Computations", "compile_graph", "computations"]


class Computations:
    """Compiled computations in memory, least recently used first, by what they compute and for whom."""

    def __init__(self) -> None:
        self._lock = guarded_rlock()
        self._cache: OrderedDict[tuple[str, ...], Computation] = OrderedDict()

    def get(
        self, backend: Backend, device: BackendDevice, specs: CompileSpecs, graph: fx.GraphModule, source: str | None
    ) -> Computation:
        """The computation of a graph in normal form, compiled if need be. Raises :class:`CompileError`.

        ``source`` is the user's line to name in an error where the graph knows none.
        """
        mark = fingerprint(graph)
        key = (backend.name, str(device), specs.fingerprint(), f"{backend.version} {mark}")
        with self._lock:
            found = self._cache.get(key)
            if found is not None and found.backend is backend:
                self._cache.move_to_end(key)
                metrics.count("CachedCompile")
                return found
        computation = compile_graph(backend, device, specs, graph, mark, source)
        computation.key = key
        with self._lock:
            self._cache[key] = computation
            dropped = [self._cache.popitem(last=False)[1] for _ in range(len(self._cache) - config.max_computations)]
        for old in dropped:
            metrics.count("DroppedComputation")
            for user in list(old.users):
                user.computation = None
        return computation

    def touch(self, computation: Computation) -> None:
        """Note that a computation is used by somebody who holds it and so does not come by :meth:`get`."""
        with self._lock:
            if computation.key in self._cache:
                self._cache.move_to_end(computation.key)

    def __len__(self) -> int:
        return len(self._cache)

    def clear(self) -> None:
        """Forget everything; who holds a computation keeps it."""
        with self._lock:
            self._cache.clear()


computations: Final = Computations()


def compile_graph(
    backend: Backend,
    device: BackendDevice,
    specs: CompileSpecs,
    graph: fx.GraphModule,
    mark: str = "",
    source: str | None = None,
) -> Computation:
    """``init(preprocess(graph))``. Raises :class:`CompileError` with the backend's own exception chained."""
    if config.verify_graphs:
        verify_graph(graph)
    inputs, outputs = input_specs(graph), output_specs(graph)
    calls = [node for node in graph.graph.nodes if node.op == "call_function"]
    names = tuple(node.name for node in graph.graph.nodes if node.op == "placeholder")
    start = perf_counter()
    try:
        processed = backend.preprocess(graph, specs)
        context = InitContext(device, inputs, outputs)
        handle = backend.init(FreeableBuffer(processed.data), specs, context)
    except Exception as error:
        op = str(calls[-1].target) if len(calls) == 1 else f"a graph of {len(calls)} operators"
        raise CompileError(
            f"backend {backend.name!r} failed to compile: {type(error).__name__}: {error}",
            op=op,
            source=(calls[-1].meta.get("source") if calls else None) or source,
        ) from error
    seconds = perf_counter() - start
    metrics.count("UncachedCompile")
    metrics.metrics.add_time("CompileTime", seconds)
    context = ExecutionContext(device, outputs)
    return Computation(backend, device, inputs, names, outputs, handle, context, mark, len(calls), seconds)
