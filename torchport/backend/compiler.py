"""Compiling: ``init(preprocess(graph))``, and the computations that are kept in memory.

Every door that compiles in this process comes through :meth:`Computations.get`, so equal graphs for one device share a
computation whichever door they came by.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, Final

import torch
from torch import fx

from ..core import metrics
from ..core.config import config
from ..core.errors import CompileError, ExecutionError
from ..core.specs import CompileSpecs, TensorSpec
from .interface import Backend, BackendData, BackendDevice, Computation, ExecutionContext, FreeableBuffer, InitContext
from .normal_form import input_specs, output_specs, verify_graph
from .serialize import fingerprint

__all__ = ["Computations", "check_results", "compile_graph", "computations", "run", "run_on_host"]


class Computations:
    """Compiled computations in memory, least recently used first, by what they compute and for whom."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
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


def _timed(computation: Computation, execute: Callable[..., Any], *args: Any) -> Any:
    """``execute(handle, *args)``, counted and timed. Raises :class:`ExecutionError` with the backend's own chained."""
    start = perf_counter()
    try:
        with computation.lock:
            results = execute(computation.handle, *args)
    except Exception as error:
        raise ExecutionError(
            f"backend {computation.backend.name!r} failed to execute: {type(error).__name__}: {error}",
            op=f"a computation of {computation.graph_ops} operators",
        ) from error
    metrics.count("Execute")
    metrics.metrics.add_time("ExecuteTime", perf_counter() - start)
    return results


def run(computation: Computation, args: Sequence[BackendData]) -> Sequence[BackendData]:
    """Run a computation at once. Raises :class:`ExecutionError` with the backend's own exception chained."""

    def execute(*given: Any) -> Sequence[BackendData]:
        results = computation.backend.execute(*given)
        check_results(results, computation.results)
        return results

    if computation.checked:
        return _timed(computation, computation.backend.execute, args, computation.context)
    results = _timed(computation, execute, args, computation.context)
    computation.checked = True
    return results


def run_on_host(computation: Computation, tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Run a computation at once, on CPU tensors lent for the call. Raises :class:`ExecutionError`."""
    backend, specs = computation.backend, computation.parameters
    if computation.checked:
        return _timed(computation, backend.execute_on_host, tensors, specs, computation.context)
    datas = [backend.borrow(t, spec, computation.device) for t, spec in zip(tensors, specs, strict=True)]
    return _apart([backend.from_device(result) for result in run(computation, datas)], tensors)


def _apart(results: Sequence[torch.Tensor], lent: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Results that are the caller's: those that share memory with what was lent, or with each other, as copies."""
    taken = {tensor.data_ptr() for tensor in lent}
    made: list[torch.Tensor] = []
    for result in results:
        mine = result.clone() if result.data_ptr() in taken else result
        taken.add(mine.data_ptr())
        made.append(mine)
    return made


def check_results(results: Sequence[Any], specs: Sequence[TensorSpec]) -> None:
    """Raise ``TypeError`` or ``ValueError`` unless a backend returned what its computation's outputs are."""
    if not isinstance(results, (list, tuple)):
        raise TypeError(f"execute() returned a {type(results).__name__}; return a list of BackendData")
    if len(results) != len(specs):
        raise ValueError(f"execute() returned {len(results)} values for {len(specs)} outputs")
    for position, (result, spec) in enumerate(zip(results, specs, strict=True)):
        if not isinstance(result, BackendData):
            raise TypeError(f"output {position} is a {type(result).__name__}; return BackendData")
        if result.spec.shape != spec.shape or result.spec.dtype != spec.dtype:
            raise ValueError(f"output {position} is {result.spec}, but the graph says {spec}")
