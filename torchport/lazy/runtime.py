"""What belongs to one device index: its backend, its trie, its generator; and the traces of each thread."""

from __future__ import annotations

import atexit
import gc
import itertools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Final

import torch

from ..backend.builder import Refused, capture_of
from ..backend.interface import Backend, BackendDevice
from ..backend.registry import note_used, registry, resolve_device
from ..core import metrics
from ..core.config import config
from ..core.errors import BackendUnavailable, TorchportError
from ..core.specs import CompileSpecs, TensorSpec
from . import closures, finalizers
from .eager import EagerTrace
from .executor import flush, is_known
from .graph import build_graph
from .kernels import registrar_of
from .trace import Node, Trace, lock
from .worker import worker_of, workers

__all__ = ["DeviceRuntime", "Runtimes", "runtimes"]

_SPLITMIX: Final = 0x9E3779B97F4A7C15
_MASK64: Final = (1 << 64) - 1
DEFAULT_SEED: Final = 67280421310721
"""PyTorch's default seed (c10::detail ``default_rng_seed_val``)."""


_generations = itertools.count(1)


def mix64(value: int) -> int:
    """SplitMix64's finaliser (Steele, Lea and Flood 2014) on an unsigned 64-bit integer."""
    value &= _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


class DeviceRuntime:
    """One device index bound to one backend device. A new binding of the index is a new runtime."""

    def __init__(self, index: int, backend: Backend, device: BackendDevice) -> None:
        self.index = index
        self.backend = backend
        self.device = device
        self.specs = CompileSpecs()
        self.generation = next(_generations)
        self.seed = DEFAULT_SEED
        self.draws = 0
        self.capture = capture_of(backend)
        self._drawing = threading.Lock()
        self.worker = worker_of(backend, device)
        self.kernels = registrar_of(backend)
        self.kernels.listen(self)
        note_used(backend)

    def forget_decisions(self) -> None:
        """The backend's kernels have changed: traces start from an empty trie after what is pending."""
        self.generation = next(_generations)
        for trace in list(_every_trace):
            if trace.runtime is self and trace.cursor.parent is None:
                trace.restart()

    def refusal(self, node: Node, specs: Sequence[TensorSpec]) -> str | None:
        """Why the backend cannot have the op in a graph, or ``None`` if it can.

        ``node`` is a path of its own whose leaves have these specs. An unsupported operator is replaced by its
        decomposition, the backend's own or PyTorch's core ATen one, if what that gives is supported.
        """
        outputs = [number for number, spec in enumerate(node.specs) if spec is not None]
        try:
            build_graph([node], outputs, specs, self.capture, strict=True)
        except Refused as refused:
            return refused.reason
        return None

    def next_key(self) -> int:
        """The key of the next random operator, a signed 64-bit integer: a function of the seed and of the count."""
        with self._drawing:
            draw, self.draws = self.draws, self.draws + 1
        return self._key(draw)

    def _key(self, draw: int) -> int:
        key = mix64(mix64(self.seed + _SPLITMIX) + draw * _SPLITMIX)
        return key - (1 << 64) if key >> 63 else key

    def take_back(self, key: int) -> None:
        """The operator with this key was refused: the next one gets it, unless another thread has drawn meanwhile."""
        with self._drawing:
            if self.draws and self._key(self.draws - 1) == key:
                self.draws -= 1

    def __repr__(self) -> str:
        return f"port:{self.index} ({self.backend.name} on {self.device})"


class Runtimes:
    """Which device index stands for which backend device. Index 0 is the default, bound on first use."""

    def __init__(self) -> None:
        self._by_index: list[DeviceRuntime | None] = [None]
        self._lock = threading.RLock()
        self._seed = DEFAULT_SEED

    def get(self, index: int) -> DeviceRuntime:
        """The runtime of an index. Raises :class:`TorchportError` for an index nothing is bound to."""
        with self._lock:
            if index == 0 and self._by_index[0] is None:
                self._by_index[0] = self._make(0, *default_backend())
            runtime = self._by_index[index] if 0 <= index < len(self._by_index) else None
        if runtime is None:
            bound = ", ".join(repr(r) for r in self._by_index if r is not None) or "none yet"
            raise TorchportError(
                f"no backend is bound to port:{index}. Bound are: {bound}. "
                "Write torchport.device('backend name') to get the device of a backend"
            )
        return runtime

    def _make(self, index: int, backend: Backend, ordinal: int) -> DeviceRuntime:
        runtime = DeviceRuntime(index, backend, resolve_device(backend, ordinal))
        runtime.seed = self._seed
        return runtime

    def bind(self, backend: Backend, ordinal: int = 0, least: int = 0) -> int:
        """The index that stands for a backend's device, ``least`` or above; a new one if there is none yet."""
        with self._lock:
            self.get(0)
            for runtime in self._by_index[least:]:
                if runtime and runtime.backend is backend and runtime.device.ordinal == ordinal:
                    return runtime.index
            self._by_index.append(self._make(len(self._by_index), backend, ordinal))
            return len(self._by_index) - 1

    def use(self, backend: Backend, ordinal: int = 0, index: int = 0) -> DeviceRuntime:
        """Bind an existing index. Values of the former binding move to the new one when they are next used."""
        with self._lock:
            current = self._by_index[index]
            if current is None or current.backend is not backend or current.device.ordinal != ordinal:
                self._by_index[index] = self._make(index, backend, ordinal)
            runtime = self._by_index[index]
            assert runtime is not None
            return runtime

    def all(self) -> list[DeviceRuntime]:
        """Every bound runtime."""
        return [runtime for runtime in self._by_index if runtime is not None]

    @property
    def count(self) -> int:
        """How many indices exist; index 0 always does."""
        return len(self._by_index)

    def seed_all(self, seed: int) -> None:
        """``torch.manual_seed``: also what devices bound later start from."""
        self._seed = seed & _MASK64
        for runtime in self.all():
            runtime.seed, runtime.draws = self._seed, 0
            runtime.backend.seed(self._seed)


runtimes: Final = Runtimes()


@atexit.register
def _shut_down() -> None:
    """Let every device end its work, and say which errors nobody has seen. Backends end after this.

    What is pending is computed as far as that needs no compiling: nobody can read it any more.
    """
    try:
        closures.finish()
    except Exception as error:
        print(f"torchport: a step closure raised {type(error).__name__}: {error}", file=sys.stderr)
    for trace in threads.mine():
        if is_known(trace):
            flush(trace, "exit")
    for worker in workers():
        worker.stop()
        error = worker.take_unseen()
        if error is not None:
            print(f"torchport: a computation failed, and its values were never used: {error}", file=sys.stderr)


def _backend_metrics() -> dict[str, float]:
    """The counters of every backend that was used, under its name."""
    backends = {runtime.backend for runtime in runtimes.all()}
    return {f"{backend.name}: {name}": value for backend in backends for name, value in backend.metrics().items()}


metrics.metrics.sources.append(_backend_metrics)


def default_backend() -> tuple[Backend, int]:
    """The backend of port:0 when nobody chose one: ``config.backend``, else inductor, else reference."""
    if config.backend:
        return registry.get(config.backend), 0
    try:
        return registry.get("inductor"), 0
    except TorchportError as error:
        reason = str(error)
    try:
        backend = registry.get("reference")
    except TorchportError as error:
        raise BackendUnavailable(f"no backend can run: {reason}; {error}") from error
    # Said once per process, to people: a warning would break programs that turn warnings into errors.
    print(f"torchport: using the 'reference' backend for port:0 ({reason})", file=sys.stderr)
    metrics.count("DefaultBackendFallback")
    return backend, 0


class _ThreadEnd:
    """Goes with its thread, and computes what the thread leaves pending: others may hold those values."""

    def __init__(self, traces: dict[int, Trace]) -> None:
        self._traces = traces
        self._process = os.getpid()

    def __del__(
        self, is_finalizing: Callable[[], bool] = sys.is_finalizing, getpid: Callable[[], int] = os.getpid
    ) -> None:
        # Default arguments, because this module's names may be gone when the interpreter ends. A forked child drops
        # what other threads had while it still holds, for good, the locks that they held.
        if not is_finalizing() and getpid() == self._process:
            for trace in self._traces.values():
                flush(trace, "thread end")


class _ThreadTraces(threading.local):
    """The calling thread's traces: index 0 as an attribute, once it is there, because every kernel starts there."""

    trace: Trace

    def __init__(self) -> None:
        self.eager = config.mode == "eager"
        self._by_index: dict[int, Trace] = {}
        self._of_other_mode: dict[int, Trace] = {}
        self._at_end = [_ThreadEnd(self._by_index), _ThreadEnd(self._of_other_mode)]
        self._of_finalizers: tuple[dict[int, Trace], dict[int, Trace]] = ({}, {})
        # Last: a collection in the middle of this, which :meth:`set_aside` hears of, must find everything or nothing.
        self._set_aside: tuple[Trace | None, dict[int, Trace], dict[int, Trace]] | None = None

    def of(self, index: int) -> Trace:
        """The calling thread's trace on a device index. Raises :class:`TorchportError` for an unbound index."""
        trace = self._by_index.get(index)
        if trace is None:
            # Backward runs on the calling thread, so that it continues the trace of the forward.
            torch.autograd.set_multithreading_enabled(False)
            kind = EagerTrace if self.eager else Trace
            trace = self._by_index[index] = kind(runtimes.get(index))
            _every_trace.add(trace)
        if index == 0:
            self.trace = trace
        return trace

    def switch(self, eager: bool) -> None:
        """Trace in the other mode from now on; what is pending is computed. Errors stay with their values."""
        if eager == self.eager:
            return
        for trace in self.mine():
            flush(trace, "mode")
        self._by_index, self._of_other_mode = self._of_other_mode, self._by_index
        self.eager = eager
        self.__dict__.pop("trace", None)

    def set_aside(self) -> None:
        """Finalizers are about to run, maybe in the middle of a kernel: what they do goes to traces of their own."""
        mine = self.__dict__  # one look-up: a collection is frequent, a finalizer that computes is rare
        if mine.get("_set_aside", mine) is None:
            finalizers.running.here, finalizers.running.busy = True, finalizers.is_busy()
            mine["_set_aside"] = mine.pop("trace", None), mine["_by_index"], mine["_of_other_mode"]
            mine["_by_index"], mine["_of_other_mode"] = mine["_of_finalizers"]

    def take_up(self) -> None:
        """Finalizers have run: what they left pending is computed, and the thread goes on where it was."""
        mine = self.__dict__
        if mine.get("_set_aside") is None:
            return
        try:
            lazy, eager = mine["_of_finalizers"]
            if (lazy or eager) and not finalizers.is_busy():
                for trace in [*lazy.values(), *eager.values()]:
                    flush(trace, "finalizer")
        finally:
            finalizers.running.here = False
            trace, mine["_by_index"], mine["_of_other_mode"] = mine["_set_aside"]
            mine["_set_aside"] = None
            mine.pop("trace", None)
            if trace is not None:
                mine["trace"] = trace

    def owns(self, trace: Trace) -> bool:
        """Whether a trace is the calling thread's."""
        return self._by_index.get(trace.index) is trace

    def mine(self) -> list[Trace]:
        """The calling thread's traces."""
        return list(self._by_index.values())


_every_trace: Final[weakref.WeakSet[Trace]] = weakref.WeakSet()
threads: Final = _ThreadTraces()


def _around_collection(phase: str, info: object, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
    """Called by the garbage collector: it runs finalizers (``__del__``) wherever a program happens to be."""
    if not is_finalizing():
        if phase == "start":
            threads.set_aside()
        else:
            threads.take_up()


gc.callbacks.append(_around_collection)


def every_trace() -> list[Trace]:
    """The traces of all threads."""
    return list(_every_trace)


def flush_mine(cause: str) -> TorchportError | None:
    """Flush every trace of the calling thread; returns the first error."""
    errors = [error for trace in threads.mine() if (error := flush(trace, cause)) is not None]
    return errors[0] if errors else None


def rebind(backend: Backend, ordinal: int = 0, index: int = 0) -> None:
    """Bind an existing index to another backend: pending values are computed on the former one first.

    Call it while no other thread traces on that index.
    """
    with lock:
        former = [trace for trace in _every_trace if trace.index == index]
        for trace in former:
            flush(trace, "rebind")
        runtime = runtimes.use(backend, ordinal, index)
        for trace in former:
            trace.runtime = runtime
            trace.restart()
