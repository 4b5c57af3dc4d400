"""A device index bound to a backend: its queue, its generator, and what traces and jobs need of whoever runs them."""

from __future__ import annotations

import atexit
import functools
import itertools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from ..backend.builder import capture_of
from ..backend.forked import is_lost
from ..backend.inferences import recall_inferences
from ..backend.interface import Backend, BackendDevice
from ..backend.optional import optional_of
from ..backend.registrar import registrar_of
from ..backend.registry import note_used, registry, resolve_device
from ..core import metrics
from ..core.config import config, watch
from ..core.default_state import default_state
from ..core.errors import BackendUnavailable, TorchportError
from ..core.forks import guarded_rlock
from ..core.freed_memory import keep_freed_memory
from ..core.random_state import DEFAULT_SEED, RandomState, state_in_use
from ..core.sharding import is_partitioned
from ..core.specs import CompileSpecs
from ..core.traffic import is_own_rank, is_rehearsal
from ..trace.decide import AtOnce
from ..trace.handle import LazyTensor
from ..trace.threads import ThreadTraces, every_trace, threads
from ..trace.trace import Trace, lock
from ..trace.trie import Node, Sights
from . import direct, step_closures
from .barriers import make_barrier
from .flush import flush, is_known
from .host_forms import HostForm, host_form
from .jobs import Job
from .queue import queue_of, queues
from .regions import Regions
from .replay import replay
from .tiers import is_tiered
from .values import settle
from .worth import costs_enough, is_worth_recording, share_to_record

if TYPE_CHECKING:
    from ..trace.kernels import Kernel

__all__ = ["DeviceRuntime", "Runtimes", "default_backend", "rebind", "runtimes"]

_generations = itertools.count(1)


class DeviceRuntime:
    """One device index bound to one backend device. A new binding of the index is a new runtime."""

    def __init__(self, index: int, backend: Backend, device: BackendDevice) -> None:
        self.index = index
        self.backend = backend
        self.device = device
        self.specs = CompileSpecs()
        self.generation = next(_generations)
        self.random = RandomState()
        self.capture = capture_of(backend)
        self.optional = optional_of(backend)
        self.queue = queue_of(backend, device)
        self.kernels = registrar_of(backend)
        self.kernels.listen(self)
        self.manners: dict[Any, Any] = {}
        """How operators are interpreted, by kernel."""
        self.regions = Regions()
        self.empties: dict[torch.dtype, LazyTensor] = {}
        """Tensors of one dimension without elements, whose values every copy of such a host tensor has."""
        self.holds_shared_tensors = False
        """Whether values may be CPU tensors though the backend has a form of its own (:mod:`.host_forms`)."""
        self.keeps_tensors = 0
        """Whether handles may be given CPU tensors without asking the backend: 2 where its values are such, 1 where it
        takes them when it needs them, 0 where not, or where nothing was interpreted yet."""
        self.is_lost = False
        """Whether this is a forked child, where the backend's engine does not work: everything is interpreted."""
        note_used(backend)

    def forget_decisions(self) -> None:
        """The backend's kernels have changed: traces start from an empty trie after what is pending."""
        self.generation = next(_generations)
        self.manners.clear()
        for forget in direct.on_forgotten:
            forget()
        self.regions.clear()
        for trace in every_trace():
            if trace.runtime is self and trace.cursor.parent is None:
                trace.restart()

    # -- what traces and jobs need --------------------------------------------------------------------------------
    def settle(self, trace: Trace, handle: LazyTensor) -> None:
        """Give a handle from elsewhere data on this runtime. Raises the error its computation ended in."""
        settle(trace, handle)

    def flush(self, trace: Trace, cause: str, read: int | None = None) -> TorchportError | None:
        """Compute what is live and begin an empty trace; the first error."""
        return flush(trace, cause, read)

    @functools.cached_property
    def host_form(self) -> HostForm:
        """How the backend's values and CPU tensors go together; asked of it before anything is interpreted."""
        found = host_form(self.backend, self.device)
        self.holds_shared_tensors = found is HostForm.SHARED
        self.keeps_tensors = {HostForm.OWN: 2, HostForm.SHARED: 1, HostForm.NONE: 0}[found]
        if found is not HostForm.NONE:
            keep_freed_memory()
        return found

    @property
    def interprets(self) -> bool:
        """Whether operators seen for the first time are interpreted."""
        if self.is_lost:
            return self.host_form is not HostForm.NONE
        if not is_tiered(self.backend) or self.capture.kernels or is_partitioned(self.backend):
            return False
        if is_rehearsal():
            return False  # a model of any size is traced, and nothing of it computed
        if self.host_form is HostForm.NONE:
            return False  # a copy to the host and back for each operator costs more than it saves
        if torch.are_deterministic_algorithms_enabled() and not self.backend.capabilities.skips_cache:
            return False  # when the compiled computation takes over depends on time, and its last bits may be others
        # Else an operator that the backend does not take is to be warned about, or refused.
        return self.capture.takes_all or config.fallback == "allow"

    def is_worth_recording(self, sights: Sights) -> bool:
        """Whether what was seen so often, without being recorded, is to become part of the trie."""
        return not self.is_lost and is_worth_recording(self.backend, sights)

    def share_to_record(self, sights: Sights) -> int:
        """How many operators of it are to be recorded at one time."""
        return share_to_record(self.backend, sights)

    def is_worth_comparing(self, seconds: float, ops: int, runs: int) -> bool:
        """Whether paths that never came back have cost so much, in so many runs of so many operators each, that it pays
        to look for what they have in common."""
        return not self.is_lost and costs_enough(self.backend, seconds, ops, runs)

    def enter_region(self, trace: Trace, kernel: Kernel, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Compute what is pending, and begin a path with an operator that a region begins with; its result."""
        return direct.enter_region(trace, kernel, args, kwargs)

    def begins_region(self, kernel: Kernel, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether a part that comes back in paths that do not begins with an operator."""
        if kernel.serial not in self.regions.serials or not self.interprets:
            return False
        return self.regions.anchor(kernel, args, kwargs) is not None

    def begin_direct(self, trace: Trace, sights: Sights) -> None:
        """Compute what is pending, and interpret the operators that follow at once, until the next flush."""
        direct.begin(trace, sights)

    def run_direct(self, trace: Trace, kernel: Kernel, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Interpret an operator at once; its results have values. Raises what the CPU raises."""
        return direct.run(trace, kernel, args, kwargs)

    def barrier(self, node: Node, decision: AtOnce) -> Callable[..., Any]:
        """What runs a node's operator at once. Raises :class:`UnsupportedOp` where the policy forbids it."""
        return make_barrier(self, node, decision)

    def replay(self, job: Job) -> TorchportError | None:
        """Run a failed job's operators one by one; the first error."""
        return replay(job)

    def memory_info(self) -> Mapping[str, int]:
        """``free``, ``total`` and ``allocated`` bytes as far as the backend knows."""
        known = self.optional.memory_info
        return {} if known is None else known.memory_info(self.device)

    # -- random numbers ------------------------------------------------------------------------------------------
    def set_seed(self, seed: int) -> None:
        """Start the device's generator from an unsigned 64-bit integer, and the backend's own ones if it has any."""
        self.random.set_seed(seed)
        if self.optional.seed is not None:
            self.optional.seed.seed(seed)

    def next_key(self) -> int:
        """The key of the next random operator, from the generator that it was given or the device's."""
        return state_in_use(self.random).next_key()

    def take_back(self, key: int) -> None:
        """The operator with this key was refused."""
        state_in_use(self.random).take_back(key)

    def __repr__(self) -> str:
        return f"port:{self.index} ({self.backend.name} on {self.device})"


class Runtimes:
    """Which device index stands for which backend device. Index 0 is the default, bound on first use."""

    def __init__(self) -> None:
        self._by_index: list[DeviceRuntime | None] = [None]
        self._lock = guarded_rlock()
        self._seed = DEFAULT_SEED
        self._seeded = False

    def get(self, index: int) -> DeviceRuntime:
        """The runtime of an index; that of index 0 for the process's own number among the ranks of a program.

        Raises :class:`TorchportError` for an index nothing is bound to.
        """
        with self._lock:
            if index == 0 and self._by_index[0] is None:
                self._by_index[0] = self._make(0, *default_backend())
            runtime = self._by_index[index] if 0 <= index < len(self._by_index) else None
            if runtime is None and index > 0 and is_own_rank(index):
                runtime = self.get(0)  # programs write ``f"cuda:{local_rank}"``
        if runtime is None:
            bound = ", ".join(repr(r) for r in self._by_index if r is not None) or "none yet"
            raise TorchportError(
                f"no backend is bound to port:{index}. Bound are: {bound}. "
                "Write torchport.device('backend name') to get the device of a backend"
            )
        return runtime

    def _make(self, index: int, backend: Backend, ordinal: int) -> DeviceRuntime:
        recall_inferences()
        with default_state():  # whatever the program has on where it first uses the device
            runtime = DeviceRuntime(index, backend, resolve_device(backend, ordinal))
            runtime.random.seed = self._seed
            if self._seeded and all(other.backend is not backend for other in self.all()):
                runtime.set_seed(self._seed)  # as if it had been there when ``torch.manual_seed`` was called
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
        self._seed, self._seeded = seed & ((1 << 64) - 1), True
        for runtime in self.all():
            runtime.set_seed(self._seed)


runtimes: Final = Runtimes()
ThreadTraces.runner_of = staticmethod(runtimes.get)


@atexit.register
def _shut_down() -> None:
    """Let every device end its work, and say which errors nobody has seen. Backends end after this.

    What is pending is computed as far as that needs no compiling: nobody can read it any more.
    """
    try:
        step_closures.finish()
    except Exception as error:
        print(f"torchport: a step closure raised {type(error).__name__}: {error}", file=sys.stderr)
    for trace in threads.mine():
        if is_known(trace):
            flush(trace, "exit")
    for queue in queues():
        queue.stop()
        error = queue.take_unseen()
        if error is not None:
            print(f"torchport: a computation failed, and its values were never used: {error}", file=sys.stderr)


def _backend_metrics() -> dict[str, float]:
    """The counters of every backend that was used, under its name."""
    backends = {runtime.backend: runtime.optional.metrics for runtime in runtimes.all()}
    return {
        f"{backend.name}: {name}": value
        for backend, counts in backends.items()
        if counts is not None
        for name, value in counts.metrics().items()
    }


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


def rebind(backend: Backend, ordinal: int = 0, index: int = 0) -> None:
    """Bind an existing index to another backend: pending values are computed on the former one first.

    Call it while no other thread traces on that index.
    """
    with lock:
        former = [trace for trace in every_trace() if trace.index == index]
        for trace in former:
            flush(trace, "rebind")
        runtime = runtimes.use(backend, ordinal, index)
        for trace in former:
            trace.runtime = runtime
            trace.restart()
            trace.end_direct()


def _settings_changed() -> None:
    """Whether operators are interpreted may be another matter now; the traces of the calling thread begin anew."""
    for trace in threads.mine():
        if trace.direct or trace.eager:
            flush(trace, "setting")
            trace.end_direct()


def _forked() -> None:
    """In a forked child: what was compiled for an engine that is lost is forgotten."""
    for runtime in runtimes.all():
        if is_lost(runtime.backend):
            runtime.is_lost = True
            runtime.empties.clear()
            runtime.forget_decisions()


os.register_at_fork(after_in_child=_forked)

for _name in ("fallback", "tiers"):
    watch(_name, _settings_changed)
