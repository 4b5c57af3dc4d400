"""Sees what a backend is asked to do: which graphs it compiles and runs, and so how a case passed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..backend.interface import Backend
from ..core import metrics

__all__ = ["Probe", "Seen"]


@dataclass
class Seen:
    """What happened while a case ran."""

    executed: int = 0
    compiled: int = 0
    kernels: int = 0
    decomposed: set[str] = field(default_factory=set[str])
    host_ops: tuple[str, ...] = ()

    @property
    def how(self) -> str:
        """``native``, ``decomposed``, ``kernel`` or ``fallback``: the least of the ways its operators went."""
        if self.host_ops:
            return "fallback"
        if self.kernels:
            return "kernel"
        return "decomposed" if self.decomposed else "native"


Watcher = Callable[[Any, Sequence[Any]], None]


class Probe:
    """Stands between torchport and one backend instance; ``watch`` starts afresh, ``seen`` says what was there.

    ``on_execute`` is called before each execution with the graph and the arguments, ``on_compile`` before a graph is
    compiled: what a crash leaves behind is then known.
    """

    def __init__(
        self,
        backend: Backend,
        on_compile: Callable[[Any], None] | None = None,
        on_execute: Watcher | None = None,
    ) -> None:
        self.backend = backend
        self._on_compile = on_compile
        self._on_execute = on_execute
        self._graphs: dict[str, Any] = {}
        self._handles: dict[int, Any] = {}
        self._now = Seen()
        self._before: dict[str, float] = {}
        self._wrap()

    def _wrap(self) -> None:
        backend: Any = self.backend
        preprocess, init, execute = backend.preprocess, backend.init, backend.execute

        def watched_preprocess(graph: Any, specs: Any) -> Any:
            if self._on_compile is not None:
                self._on_compile(graph)
            processed = preprocess(graph, specs)
            self._graphs[_mark(processed.data)] = graph if self._on_execute is not None else _decomposed(graph)
            self._now.compiled += 1
            return processed

        def watched_init(processed: Any, specs: Any, context: Any) -> Any:
            graph = self._graphs.get(_mark(processed.data))
            handle = init(processed, specs, context)
            self._handles[id(handle)] = graph
            return handle

        def watched_execute(handle: Any, args: Any, context: Any) -> Any:
            known = self._handles.get(id(handle))
            if self._on_execute is not None and known is not None:
                self._on_execute(known, args)
                known = _decomposed(known)
            self._now.executed += 1
            self._now.decomposed.update(known or ())
            return execute(handle, args, context)

        backend.preprocess, backend.init, backend.execute = watched_preprocess, watched_init, watched_execute

    def watch(self) -> None:
        """Forget what was seen."""
        self._now = Seen()
        self._before = dict(metrics.snapshot()["counters"])

    def seen(self) -> Seen:
        """What happened since :meth:`watch`."""
        grown = {
            name: value - self._before.get(name, 0)
            for name, value in metrics.snapshot()["counters"].items()
            if value > self._before.get(name, 0)
        }
        # In eager mode operators go through a boxed kernel, where the backend has one, and never to its ``execute``.
        boxed = 0 if self._now.executed else grown.get("Execute", 0)
        self._now.kernels = int(grown.get("KernelCall", 0) + boxed)
        if grown.get("Fallback"):
            # ``lazy::`` counts what was traced.
            self._now.host_ops = tuple(sorted(n for n in grown if "::" in n and not n.startswith("lazy::")))
        return self._now


def _mark(data: Any) -> str:
    return hashlib.blake2b(bytes(data), digest_size=16).hexdigest()


def _decomposed(graph: Any) -> tuple[str, ...]:
    """The operators of a graph that a decomposition stands for."""
    return tuple({node.meta["decomposed"]: None for node in graph.graph.nodes if "decomposed" in node.meta})
