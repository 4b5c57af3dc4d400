"""Compiling: ``init(preprocess(graph))``, and the computations that are kept in memory.

It has two halves: :func:`.prepare` makes bytes of a graph, in whichever process, and :func:`finish` makes a computation
of them. In between the bytes may have been on disk (:mod:`.kept`). Every frontend comes through
:class:`Computations`, so equal graphs for one device share a computation whichever frontend they came by and wherever
they were prepared.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from time import perf_counter
from typing import Final, cast

from torch import fx

from ..cache.current import disk_cache
from ..cache.folder import CacheFolder, say
from ..core import metrics
from ..core.config import config
from ..core.errors import CompileError
from ..core.forks import guarded_rlock
from ..core.profiling import profiled
from ..core.sharding import is_partitioned
from ..core.specs import CompileSpecs
from .execution import Computation
from .inferences import keep_inferences
from .interface import (
    Backend,
    BackendDevice,
    ExecutionContext,
    FreeableBuffer,
    InitContext,
)
from .kept import find_kept, find_or_prepare, prepare_all
from .optional import compilation_devices, optional_of
from .pieced import is_pieced, make_pieced
from .prepare import Prepared, failure_of, prepare
from .runner import owner_of
from .serialize import fingerprint
from .sizes.families import forget
from .sizes.sized import is_sized, make_sized

log: Final = logging.getLogger("torchport.compile")

__all__ = ["Computations", "EntryRefused", "beside", "compile_graph", "computations", "finish"]


class EntryRefused(CompileError):
    """The engine does not take what the disk cache has. The entry is gone: to be compiled anew."""


class SizesRefused(CompileError):
    """The engine does not load a computation for several sizes, which was made just now. It may take one for each."""


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
        return found or self.keep(_load_or_compile(backend, device, specs, graph, mark, source), specs)

    def find(self, backend: Backend, device: BackendDevice, specs: CompileSpecs, mark: str) -> Computation | None:
        """The computation of the graph with this fingerprint, if it is in memory."""
        key = _key(backend, device, specs, mark)
        with self._lock:
            found = self._cache.get(key)
            # How values lie on several devices is decided for a whole graph.
            own = found is not None and owner_of(found.backend) is backend
            if found is not None and own and (found.backend is backend or not is_partitioned(backend)):
                self._cache.move_to_end(key)
                metrics.count("CachedCompile")
                return found
        for other in compilation_devices(backend, device):
            with self._lock:
                found = self._cache.get(_key(backend, other, specs, mark))
            # Pieces are shared one by one: each has a device of its own.
            if found is not None and found.backend is backend and not found.released:
                metrics.count("SharedComputation")
                return self.keep(found.on(device), specs)
        return None

    def get_all(
        self,
        backend: Backend,
        device: BackendDevice,
        specs: CompileSpecs,
        graphs: Sequence[fx.GraphModule],
        source: str | None,
    ) -> list[Computation]:
        """As :meth:`get` for several graphs that are wanted now: the backend may compile them together."""
        if optional_of(backend).preprocess_all is None or len(graphs) < 2:
            return [self.get(backend, device, specs, graph, source) for graph in graphs]
        marks = [fingerprint(graph) for graph in graphs]
        found = {mark: self.find(backend, device, specs, mark) for mark in marks}
        wanted = {mark: graph for mark, graph in zip(marks, graphs, strict=True) if found[mark] is None}
        with profiled("compile", backend.name):
            for prepared in prepare_all(backend, specs, wanted, source):
                try:
                    found[prepared.mark] = self.take(backend, device, specs, prepared)
                except (EntryRefused, SizesRefused):  # what was refused is gone: this one is compiled by itself
                    found[prepared.mark] = self.get(backend, device, specs, wanted[prepared.mark], source)
        return [cast("Computation", found[mark]) for mark in marks]

    def known(
        self, backend: Backend, device: BackendDevice, specs: CompileSpecs, graph: fx.GraphModule, mark: str
    ) -> Computation | None:
        """The computation of a graph in normal form, from memory or the disk cache; ``None`` if it is to be compiled.

        ``mark``: the graph's fingerprint. Raises :class:`CompileError` where the engine fails to load it.
        """
        found = self.find(backend, device, specs, mark)
        if found is not None:
            return found
        kept = find_kept(backend, specs, graph, mark)
        if kept is None:
            return None
        try:
            return self.keep(finish(backend, device, specs, kept), specs)
        except (EntryRefused, SizesRefused):
            return None

    def take(self, backend: Backend, device: BackendDevice, specs: CompileSpecs, prepared: Prepared) -> Computation:
        """The computation of a graph prepared elsewhere. Raises :class:`CompileError`, :class:`EntryRefused`."""
        found = self.find(backend, device, specs, prepared.mark)
        return found or self.keep(finish(backend, device, specs, prepared), specs)

    def keep(self, computation: Computation, specs: CompileSpecs) -> Computation:
        """Have a computation in memory; what was not used for longest is dropped where there are too many."""
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
            elif computation.segments:
                for one in computation.segments:
                    if one.key in self._cache:
                        self._cache.move_to_end(one.key)

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
    """``init(preprocess(graph))``, whatever the disk cache has. Raises :class:`CompileError`, the backend's chained."""
    return finish(backend, device, specs, prepare(backend, specs, graph, mark, source))


def finish(backend: Backend, device: BackendDevice, specs: CompileSpecs, prepared: Prepared) -> Computation:
    """The second half, ``init``, where it will run. Raises :class:`CompileError`, the backend's own chained.

    Raises :class:`EntryRefused` for bytes from the disk cache that the engine does not take.
    """
    if prepared.missed:
        metrics.count("DiskCacheMiss")
        keep_inferences()
    start = perf_counter()
    refused: list[str] = []

    def part(one: Prepared) -> Computation:
        found = computations.find(backend, device, specs, one.mark)
        if found is None:
            if is_sized(one.data):
                found = make_sized(backend, device, one, base)
            else:
                found, why = _loaded(backend, device, specs, one)
                refused.extend([why] if why else [])
            computations.keep(found, specs)
        return found

    def base(one: Prepared) -> Computation:
        try:
            return part(one)
        except CompileError as error:
            forget(one.mark)
            if isinstance(error, EntryRefused):
                raise
            raise SizesRefused(error.message, op=error.op, source=error.source) from error

    if is_pieced(prepared.data):
        made = make_pieced(backend, device, prepared, part)
    elif is_sized(prepared.data):
        made = make_sized(backend, device, prepared, base)
        if not prepared.missed:
            metrics.count("OtherSizes")
            if not prepared.kept:
                return made
    else:
        made, why = _loaded(backend, device, specs, prepared)
        refused.extend([why] if why else [])
    why = "; ".join(refused)
    seconds = made.compile_seconds = prepared.seconds + perf_counter() - start
    if prepared.kept and not why:
        metrics.metrics.count_time("DiskCacheHit", "DiskCacheLoadTime", seconds)
        return made
    if prepared.kept:
        _refuse(disk_cache(), prepared, why)
    metrics.count("UncachedCompile")
    metrics.metrics.add_time("CompileTime", seconds)
    return made


_thread: Final = threading.local()


@contextmanager
def beside() -> Iterator[None]:
    """Inside of the block the calling thread makes computations while the program goes on (``InitContext.beside``)."""
    _thread.beside = True
    try:
        yield
    finally:
        _thread.beside = False


def _loaded(
    backend: Backend, device: BackendDevice, specs: CompileSpecs, prepared: Prepared
) -> tuple[Computation, str]:
    """What ``init`` makes of a backend's bytes, and why it had to compile them again, if it had to."""
    context = InitContext(device, prepared.inputs, prepared.outputs, beside=getattr(_thread, "beside", False))
    folder = disk_cache() if prepared.kept else None
    try:
        with nullcontext() if folder is None else folder.loading(prepared.kept):
            handle = backend.init(FreeableBuffer(prepared.data), specs, context)
    except Exception as error:
        failed = failure_of(backend, error, prepared.label, prepared.source)
        if prepared.kept:
            _refuse(folder, prepared, failed.message)
            raise EntryRefused(failed.message, op=failed.op, source=failed.source) from error
        raise failed from error
    outputs = prepared.outputs
    made = Computation(
        backend, device, prepared.inputs, prepared.names, outputs, handle, ExecutionContext(device, outputs),
        prepared.mark, prepared.ops, prepared.seconds,
    )  # fmt: skip
    return made, context.refused


def _refuse(folder: CacheFolder | None, prepared: Prepared, why: str) -> None:
    """An entry is whole, but no use to the engine: found, and still to be compiled."""
    metrics.count("DiskCacheRefused")
    if folder is not None:
        folder.drop(prepared.kept)
    say(f"an entry of the disk cache was found but refused, and what it would hold is compiled again: {why}")


def _load_or_compile(
    backend: Backend, device: BackendDevice, specs: CompileSpecs, graph: fx.GraphModule, mark: str, source: str | None
) -> Computation:
    with profiled("compile", backend.name):
        prepared = find_or_prepare(backend, specs, graph, mark, source)
        try:
            return finish(backend, device, specs, prepared)
        except EntryRefused:
            if config.cache == "cache-only":
                raise
            prepared = find_or_prepare(backend, specs, graph, mark, source)
        except SizesRefused as error:
            if config.cache == "cache-only":
                raise
            log.info("compiled for one set of sizes, since the engine does not load what is for several: %s", error)
            prepared = prepare(backend, specs, graph, mark, source)
        return finish(backend, device, specs, prepared)
