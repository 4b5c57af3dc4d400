"""Compiling: ``init(preprocess(graph))``, and the computations that are kept in memory.

It has two halves: :func:`prepare` makes bytes of a graph, in whichever process, and :func:`finish` makes a computation
of them. Every door comes through :class:`Computations`, so equal graphs for one device share a computation whichever
door they came by and wherever they were prepared.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from time import perf_counter
from typing import Final

from torch import fx

from ..core import metrics
from ..core.config import config
from ..core.errors import CompileError
from ..core.forks import guarded_rlock
from ..core.specs import CompileSpecs, TensorSpec
from .answers import checked_processed
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

__all__ = ["Computations", "Prepared", "compile_graph", "computations", "finish", "prepare"]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A graph as a backend's bytes, and what is known of the graph: all that a computation is made of.

    ``mark`` is the graph's fingerprint, ``ops`` how many operators it calls, ``label`` and ``source`` what an error
    names, ``seconds`` how long the backend took.
    """

    data: bytes
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    names: tuple[str, ...]
    mark: str
    ops: int
    label: str
    source: str | None
    seconds: float


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
        found = self.find(backend, device, specs, mark)
        return found or self._keep(compile_graph(backend, device, specs, graph, mark, source), specs)

    def find(self, backend: Backend, device: BackendDevice, specs: CompileSpecs, mark: str) -> Computation | None:
        """The computation of the graph with this fingerprint, if it is in memory."""
        key = _key(backend, device, specs, mark)
        with self._lock:
            found = self._cache.get(key)
            if found is None or found.backend is not backend:
                return None
            self._cache.move_to_end(key)
        metrics.count("CachedCompile")
        return found

    def take(self, backend: Backend, device: BackendDevice, specs: CompileSpecs, prepared: Prepared) -> Computation:
        """The computation of a graph that was prepared elsewhere. Raises :class:`CompileError`."""
        found = self.find(backend, device, specs, prepared.mark)
        return found or self._keep(finish(backend, device, specs, prepared), specs)

    def _keep(self, computation: Computation, specs: CompileSpecs) -> Computation:
        key = computation.key = _key(computation.backend, computation.device, specs, computation.fingerprint)
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


def _key(backend: Backend, device: BackendDevice, specs: CompileSpecs, mark: str) -> tuple[str, ...]:
    """What tells one computation from another: backend, version, device, specs, and the graph's fingerprint."""
    return (backend.name, str(device), specs.fingerprint(), f"{backend.version} {mark}")


def compile_graph(
    backend: Backend,
    device: BackendDevice,
    specs: CompileSpecs,
    graph: fx.GraphModule,
    mark: str = "",
    source: str | None = None,
) -> Computation:
    """``init(preprocess(graph))``. Raises :class:`CompileError` with the backend's own exception chained."""
    return finish(backend, device, specs, prepare(backend, specs, graph, mark, source))


def prepare(
    backend: Backend, specs: CompileSpecs, graph: fx.GraphModule, mark: str = "", source: str | None = None
) -> Prepared:
    """The first half, ``preprocess``, which needs no device. Raises :class:`CompileError`, the backend's own chained.

    ``mark``: the graph's fingerprint. ``source``: the user's line to name in an error where the graph knows none.
    """
    if config.verify_graphs:
        verify_graph(graph)
    inputs, outputs = input_specs(graph), output_specs(graph)
    calls = [node for node in graph.graph.nodes if node.op == "call_function"]
    names = tuple(node.name for node in graph.graph.nodes if node.op == "placeholder")
    label = str(calls[-1].target) if len(calls) == 1 else f"a graph of {len(calls)} operators"
    source = (calls[-1].meta.get("source") if calls else None) or source
    start = perf_counter()
    try:
        data = checked_processed(backend, backend.preprocess(graph, specs)).data
    except Exception as error:
        raise _failed(backend, error, label, source) from error
    return Prepared(data, inputs, outputs, names, mark, len(calls), label, source, perf_counter() - start)


def finish(backend: Backend, device: BackendDevice, specs: CompileSpecs, prepared: Prepared) -> Computation:
    """The second half, ``init``, where it will run. Raises :class:`CompileError`, the backend's own chained."""
    start = perf_counter()
    try:
        context = InitContext(device, prepared.inputs, prepared.outputs)
        handle = backend.init(FreeableBuffer(prepared.data), specs, context)
    except Exception as error:
        raise _failed(backend, error, prepared.label, prepared.source) from error
    seconds = prepared.seconds + perf_counter() - start
    metrics.count("UncachedCompile")
    metrics.metrics.add_time("CompileTime", seconds)
    outputs = prepared.outputs
    return Computation(
        backend,
        device,
        prepared.inputs,
        prepared.names,
        outputs,
        handle,
        ExecutionContext(device, outputs),
        prepared.mark,
        prepared.ops,
        seconds,
    )


def _failed(backend: Backend, error: Exception, label: str, source: str | None) -> CompileError:
    return CompileError(
        f"backend {backend.name!r} failed to compile: {type(error).__name__}: {error}", op=label, source=source
    )
