"""Running plans: at once, or in order on the device's own thread while the program goes on tracing.

A :class:`Job` is one run of a plan on values it has taken hold of, so that nothing traced later can change it. Values
that are on their way are :class:`Pending`; whoever needs one waits. When a job has failed, the first thread that asks
for one of its values, or that traces on, runs its operators one by one (:mod:`.isolate`): the worker itself never
compiles and never takes the lock that recording and flushing hold.
"""

from __future__ import annotations

import contextlib
import enum
import math
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import torch

from ..backend.compiler import check_results
from ..backend.interface import Backend, BackendData, BackendDevice
from ..core import metrics
from ..core.config import config
from ..core.errors import ExecutionError, TorchportError
from ..core.specs import TensorSpec
from .plans import Plan
from .torch_state import default_state
from .trace import Node, alive, lock

if TYPE_CHECKING:
    from .runtime import DeviceRuntime
    from .tensor import LazyTensor
    from .trace import Trace

__all__ = ["Job", "Pending", "Worker", "has_failed", "likely_donated", "on_worker", "resolve", "worker_of", "workers"]

SHORT: Final = 0.005
"""Seconds under which a computation runs on the calling thread if the device is idle. The other thread may have to wait
for the interpreter as long as Python's switch interval, which this is; on two busy cores a step with a computation of
0.4 ms took 3.6 ms longer when it was handed over."""

QUEUED_AT_MOST: Final = 2
"""Computations that may wait behind the running one; each holds its inputs in memory."""


class State(enum.Enum):
    """Where a job stands. ``HELD`` jobs run on the thread that first needs one of their values."""

    HELD = enum.auto()
    QUEUED = enum.auto()
    RUNNING = enum.auto()
    DONE = enum.auto()
    FAILED = enum.auto()


class Pending(BackendData):
    """A value that a job will bring: a placeholder of no backend's making, which any backend's value can replace."""

    __slots__ = ("data", "error", "job")

    def __init__(self, job: Job, spec: TensorSpec) -> None:
        super().__init__(job.runtime.device, spec)
        self.info = job.runtime
        self.job: Job | None = job
        self.data: BackendData | None = None
        self.error: TorchportError | None = None

    @property
    def has_value(self) -> bool:
        return self.data is not None

    def result(self) -> BackendData:
        """The value; waits for it. Raises the error its computation ended in."""
        job = self.job
        if job is not None:
            job.finish()
        if self.error is not None:
            note_seen(self.error)
            raise self.error
        assert self.data is not None
        return self.data

    def settle(self, outcome: BackendData | TorchportError) -> None:
        """What the job brought."""
        if isinstance(outcome, TorchportError):
            self.error = outcome
            self.info = None  # so that an operator that is given the value looks at it again
        else:
            self.data = outcome
        self.job = None


def resolve(tensor: LazyTensor) -> BackendData:
    """The data of a handle that is pending in no trace; waits for it. Raises the error its computation ended in."""
    value = tensor.value
    if value.__class__ is Pending:
        pending: Any = value
        try:
            data = pending.result()
        except TorchportError as error:
            tensor.failure, tensor.value = error, None
            raise
        if tensor.value is pending:
            tensor.value = data
        return data
    assert value is not None
    return value


def has_failed(tensor: LazyTensor) -> bool:
    """Whether a handle's computation is known to have ended in an error."""
    value: Any = tensor.value
    return tensor.failure is not None or (value.__class__ is Pending and value.error is not None)


# -- which arguments nobody else holds -----------------------------------------------------------------------------
def _make_reference_counts() -> tuple[Callable[[Sequence[Any]], list[int]], int]:
    """A function that counts the holders of a list's items, and what it says of items that only the list holds."""
    count = sys.getrefcount

    def counts(values: Sequence[Any]) -> list[int]:
        return [count(value) for value in values]

    (alone,) = counts([object()])
    return counts, alone


_counts, _ALONE = _make_reference_counts()


def unshared(given: Sequence[Any], args: Sequence[Any]) -> frozenset[int]:
    """Positions of the arguments that nobody but a job holds, whose memory the backend may have.

    ``given`` are the values of its leaves, which may be promises; ``args`` what ``execute`` gets for them, and packs of
    numbers. Nothing else of the job may hold them meanwhile.
    """
    counts, held = _counts(args), _counts(given)
    # Besides ``args``, the job's own list holds a leaf, or a promise does that only that list holds; packs are its own.
    leaves = [
        counts[at] == _ALONE + 1 and not data.exported and (mine is data or held[at] == _ALONE)
        for at, (mine, data) in enumerate(zip(given, args, strict=False))
    ]
    packs = [counts[at] == _ALONE for at in range(len(leaves), len(args))]
    return frozenset(at for at, alone in enumerate(leaves + packs) if alone)


_unshared = unshared


def use_native(form: Callable[[Sequence[Any], Sequence[Any]], frozenset[int]]) -> None:
    """Find what nobody else holds by this function from now on (:data:`torchport.core.native.flush`)."""
    global _unshared
    _unshared = form


LARGE: Final = 1 << 20
"""Bytes from which on it matters whether a computation can write over an input."""


def likely_donated(trace: Trace) -> frozenset[int]:
    """The positions of a trace's leaves that a flush would give away now: large, and held by nobody but the trace.

    It is a guess that a compiler may act on: each run finds out by itself (:func:`unshared`).
    """
    if not trace.runtime.backend.donation:
        return frozenset()
    held = set(map(id, alive(trace.leaves)))
    counts = _counts([leaf.value for leaf in trace.leaves])
    found: list[int] = []
    for position, (leaf, count) in enumerate(zip(trace.leaves, counts, strict=True)):
        spec, value = leaf.spec, leaf.value
        if id(leaf) in held or value is None or spec is None or not spec.is_contiguous:
            continue
        if math.prod(spec.shape) * spec.dtype.itemsize < LARGE:
            continue
        # Besides the handle the job that brings a value holds the promise of it.
        promised = value.__class__ is Pending and count <= _ALONE + 2
        if promised or (count == _ALONE + 1 and not value.exported):
            found.append(position)
    return frozenset(found)


class Job:
    """One run of a plan: the values it starts from, and whom its results belong to.

    ``wanted`` are the numbers of the values to bring, ``args`` the values of the plan's leaves, ``numbers`` and
    ``keys`` the trace's. A job without a plan, whose computation did not compile, has failed from the start; its
    ``args`` are all leaves of the trace.
    """

    __slots__ = (
        "args",
        "beside",
        "computation",
        "cursor",
        "donated",
        "error",
        "keys",
        "numbers",
        "pendings",
        "plan",
        "runtime",
        "state",
        "threads",
        "wanted",
    )

    def __init__(
        self,
        runtime: DeviceRuntime,
        cursor: Node,
        plan: Plan | None,
        args: list[Any],
        numbers: Sequence[float],
        keys: Sequence[int],
        wanted: tuple[int, ...],
    ) -> None:
        self.runtime = runtime
        self.cursor = cursor
        self.plan = plan
        self.computation = None if plan is None else plan.computation
        self.args = args
        self.beside = False
        """Whether it runs on the calling thread while the worker is at another job."""
        self.numbers = numbers
        self.keys = keys
        self.wanted = wanted
        self.donated: frozenset[int] = frozenset()
        self.pendings: list[Pending] = []
        self.error: TorchportError | None = None
        self.state = State.HELD
        self.threads = 0

    @classmethod
    def of_trace(cls, trace: Trace, plan: Plan | None, wanted: tuple[int, ...]) -> Job:
        """A run of a plan at the trace's cursor, on its present leaves, numbers and keys."""
        leaves = trace.leaves
        args = [x.value for x in leaves] if plan is None else [leaves[at].value for at in plan.leaves]
        return cls(trace.runtime, trace.cursor, plan, args, trace.numbers, trace.keys, wanted)

    @classmethod
    def of(
        cls, runtime: DeviceRuntime, plan: Plan, args: Sequence[Any], numbers: Sequence[float], keys: Sequence[int]
    ) -> Job:
        """A run of a single op's plan on some of the values in ``args``, by the positions of its leaves."""
        return cls(runtime, Node.root(), plan, [args[at] for at in plan.leaves], numbers, keys, plan.numbers)

    # -- running ---------------------------------------------------------------------------------------------
    def run(self) -> Sequence[BackendData]:
        """The values the plan brings, in its order. Raises :class:`ExecutionError`."""
        plan, computation, runtime = self.plan, self.computation, self.runtime
        assert plan is not None
        assert computation is not None
        backend = computation.backend
        args = self._arguments(plan)
        with contextlib.nullcontext() if self.beside else runtime.worker.running, computation.lock:
            context = computation.context
            if backend.donation:
                self.donated = _unshared(self.args, args)
                context = plan.context(self.donated, context)
            start = perf_counter()
            try:
                results = backend.execute(computation.handle, args, context)
                if not plan.checked:
                    check_results(results, plan.specs)
                    plan.checked = True
            except Exception as error:
                raise ExecutionError(
                    f"backend {backend.name!r} failed to execute: {type(error).__name__}: {error}",
                    op=f"a computation of {computation.graph_ops} operators",
                ) from error
            plan.seconds = perf_counter() - start
        metrics.count("Execute")
        metrics.metrics.add_time("ExecuteTime", plan.seconds)
        if on_worker():
            metrics.metrics.add_time("AsyncExecuteTime", plan.seconds)
        if self.donated:
            metrics.count("Donated", len(self.donated))
        for result in results:
            result.info = runtime
        return results

    def has_arguments(self) -> bool:
        """Whether no argument is still on its way."""
        return all(a.__class__ is not Pending or a.has_value for a in self.args)

    def _arguments(self, plan: Plan) -> list[Any]:
        """The arguments of ``execute``, waited for. Raises the error that one of them ended in."""
        args = [a.result() if a.__class__ is Pending else a for a in self.args]
        backend, device = self.runtime.backend, self.runtime.device
        for positions, source, dtype in (
            (plan.singles, self.numbers, torch.float32),
            (plan.doubles, self.numbers, torch.float64),
            (plan.keys, self.keys, torch.int64),
        ):
            if positions:
                packed = torch.tensor([source[at] for at in positions], dtype=dtype)
                args.append(backend.to_device(packed, device))
        return args

    # -- promises --------------------------------------------------------------------------------------------
    def promise(self, owners: Iterable[Sequence[LazyTensor]], specs: Iterable[TensorSpec]) -> None:
        """Give handles values that this job will bring: ``owners`` has, in the order of ``wanted``, those of each."""
        for handles, spec in zip(owners, specs, strict=True):
            pending = Pending(self, spec)
            self.pendings.append(pending)
            for handle in handles:
                handle.value, handle.spec = pending, spec

    def deliver(self, outcomes: Sequence[BackendData | TorchportError]) -> None:
        """Keep every promise, in the order of ``wanted``; the job lets go of what it held."""
        for pending, outcome in zip(self.pendings, outcomes, strict=True):
            pending.settle(outcome)
        self.pendings, self.args = [], []

    def keep(self, results: Sequence[BackendData]) -> None:
        """Keep every promise: the job has run."""
        self.deliver(results)
        self.state = State.DONE

    def attempt(self) -> None:
        """Run and deliver; an error is kept for whoever needs a value. After an interrupt it can be run again."""
        try:
            assert self.plan is not None
            self.keep(self.plan.select(self.wanted, self.run()))
        except TorchportError as error:
            self.fail(error)
        except BaseException as error:
            self.interrupted(error)
            raise

    def interrupted(self, error: BaseException) -> None:
        """Note that a run did not end: it can be repeated, unless inputs were given away and did not come back."""
        given = [self.args[at] for at in self.donated if at < len(self.args)]
        kept = self.runtime.backend.restores_donated and all(value.has_value for value in given)
        if self.donated and not kept:
            self.fail(ExecutionError(f"it was interrupted ({type(error).__name__}) while its inputs were donated"))

    def fail(self, error: TorchportError) -> None:
        """Note that the job as a whole ended in an error."""
        self.error = error
        self.state = State.FAILED

    def finish(self) -> None:
        """Return when every value is there or its error known: waits for the worker, or does what is left to do."""
        from .isolate import isolate

        while self.pendings and self.state is not State.DONE:
            if self.state in (State.QUEUED, State.RUNNING):
                self.runtime.worker.wait_for(self)
                continue
            with lock:  # meanwhile the thread that made it may have started it
                if self.state is State.HELD:
                    self.attempt()
                if self.state is State.FAILED and self.pendings:
                    isolate(self)


# -- the device's own thread ---------------------------------------------------------------------------------------
class Worker:
    """Runs one device's jobs in order on a thread of its own, which starts with the first of them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.running = threading.RLock()
        """Held while a computation runs, on whichever thread: one at a time."""
        self._queue: deque[Job] = deque()
        self._changed = threading.Condition(threading.Lock())
        self._current: Job | None = None
        self._thread: threading.Thread | None = None
        self._stopping = False
        self.failed: list[Job] = []
        """Jobs that failed on the worker and whose values nobody has asked for."""
        self.unseen: list[TorchportError] = []
        """What such jobs ended in, if it was not raised yet."""

    @property
    def busy(self) -> bool:
        """Whether a job runs or waits."""
        return self._current is not None or bool(self._queue)

    def takes(self, job: Job, wanted_now: bool) -> bool:
        """Whether a run of a plan goes to the worker, rather than be done at once on the calling thread."""
        plan, backend = job.plan, job.runtime.backend
        assert plan is not None
        if config.execution != "auto":
            return config.execution == "worker" and not self._stopping
        if not backend.releases_gil or self._stopping:
            return False
        # Before its first run nobody knows how long a plan takes.
        short = not plan.checked or plan.seconds <= SHORT
        if self.busy:
            job.beside = wanted_now and backend.concurrent and plan.checked and short and job.has_arguments()
            return not job.beside
        return not (wanted_now or short)

    def submit(self, job: Job) -> None:
        """Queue a job."""
        job.state = State.QUEUED
        job.threads = torch.get_num_threads()
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=f"torchport {self.name}", daemon=True)
                self._thread.start()
            self._queue.append(job)
            self._changed.notify_all()
        metrics.count("AsyncExecute")

    def wait_for_room(self) -> None:
        """Return when few enough jobs wait: the program must not run ahead of the device without bound."""
        if len(self._queue) > QUEUED_AT_MOST and not on_worker():
            with metrics.metrics.timer("QueueWaitTime"), self._changed:
                while len(self._queue) > QUEUED_AT_MOST:
                    self._changed.wait()

    def wait_for(self, job: Job) -> None:
        """Return when a queued job has ended. Raises :class:`ExecutionError` on the worker itself."""
        if on_worker():
            raise ExecutionError("a finalizer on the device's own thread cannot wait for values that the thread brings")
        self._wait(lambda: job.state in (State.QUEUED, State.RUNNING))

    def drain(self) -> None:
        """Return when every job has ended."""
        if self.busy and not on_worker():
            self._wait(lambda: self.busy)

    def _wait(self, unfinished: Callable[[], bool]) -> None:
        """Wait; what the worker has not begun meanwhile is done here, since handing it over would take longer."""
        while unfinished():
            with self._changed:
                job = self._take()
                if job is None and unfinished():
                    with metrics.metrics.timer("DeviceWaitTime"):
                        self._changed.wait()
            if job is not None:
                with default_state():
                    self._perform(job)
                del job

    def settle_failures(self) -> None:
        """Find out which values the failed jobs could bring; their errors are kept until somebody has seen them."""
        failed, self.failed = self.failed, []
        for job in failed:
            if job.pendings:
                job.finish()
                if job.error is not None:
                    self.unseen = [*self.unseen[-15:], job.error]

    def take_unseen(self) -> TorchportError | None:
        """The first error that nobody has seen; all are forgotten."""
        self.settle_failures()
        errors, self.unseen = self.unseen, []
        return errors[0] if errors else None

    def stop(self) -> None:
        """End the thread once every job is done; later jobs run on the thread that flushes."""
        self.drain()
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread is not None and not on_worker():
            self._thread.join(5)

    def _work(self) -> None:
        _here.worker = self
        with torch.no_grad():
            while True:
                with self._changed:
                    while (job := self._take()) is None:
                        if self._stopping and not self._queue:
                            return
                        self._changed.wait()
                if torch.get_num_threads() != job.threads:
                    torch.set_num_threads(job.threads)
                self._perform(job)
                del job

    def _take(self) -> Job | None:
        """The next job, if none is running. Call it with the condition held."""
        if self._current is not None or not self._queue:
            return None
        job = self._current = self._queue.popleft()
        job.state = State.RUNNING
        self._changed.notify_all()
        return job

    def _perform(self, job: Job) -> None:
        try:
            job.attempt()
        except BaseException as error:
            if not on_worker():
                if job.state is State.RUNNING:
                    job.state = State.HELD
                raise
            job.fail(ExecutionError(f"the device's thread was interrupted: {type(error).__name__}: {error}"))
        finally:
            with self._changed:
                self._current = None
                if job.state is State.FAILED:
                    self.failed.append(job)
                self._changed.notify_all()

    # -- fork ------------------------------------------------------------------------------------------------
    def after_fork_in_child(self) -> None:
        """The thread is gone: what it had to do is done by whoever needs a value."""
        unfinished = [*([self._current] if self._current is not None else []), *self._queue]
        for job in unfinished:
            if job.state in (State.QUEUED, State.RUNNING):
                job.state = State.HELD
        self._queue.clear()
        self._current = self._thread = None
        self._changed = threading.Condition(threading.Lock())
        self.running = threading.RLock()


def note_seen(error: TorchportError) -> None:
    """An error is about to be raised where the user sees it."""
    for worker in workers():
        if worker.unseen:
            worker.unseen = [other for other in worker.unseen if other is not error]


_here = threading.local()
_workers: Final[weakref.WeakKeyDictionary[Backend, dict[BackendDevice, Worker]]] = weakref.WeakKeyDictionary()


def on_worker() -> bool:
    """Whether the calling thread is a device's own."""
    return getattr(_here, "worker", None) is not None


def worker_of(backend: Backend, device: BackendDevice) -> Worker:
    """The worker of a backend's device: one for all device indices that stand for it."""
    with lock:
        of_backend = _workers.setdefault(backend, {})
        if device not in of_backend:
            of_backend[device] = Worker(f"{backend.name} {device}")
        return of_backend[device]


def workers() -> list[Worker]:
    """Every worker."""
    return [worker for of_backend in list(_workers.values()) for worker in list(of_backend.values())]


# A fork copies the memory but no thread: a computation in the middle of its work would be lost, so the fork waits.
_paused: Final[list[Worker]] = []


def _before_fork() -> None:
    _paused[:] = [] if on_worker() else [worker for worker in workers() if worker.running.acquire(timeout=60)]


def _after_fork_in_parent() -> None:
    for worker in _paused:
        worker.running.release()
    _paused.clear()


def _after_fork_in_child() -> None:
    for worker in workers():
        worker.after_fork_in_child()
    _paused.clear()
    if not lock._is_owned():  # type: ignore[attr-defined]
        lock._at_fork_reinit()  # type: ignore[attr-defined]  # as the standard library does with its own locks


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
)  # fmt: skip
