"""Running plans: at once, or while the program goes on tracing (:mod:`.worker`).

A :class:`Job` is one run of a plan on values it has taken hold of, so that nothing traced later can change it. Values
that are on their way are :class:`Pending`; whoever needs one waits. When a job has failed, the first thread that asks
for one of its values, or that traces on, runs its operators one by one (:mod:`.isolate`).
"""

from __future__ import annotations

import contextlib
import enum
import math
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import torch

from ..backend.compiler import check_results
from ..backend.interface import BackendData, Started
from ..core import metrics
from ..core.errors import ExecutionError, TorchportError
from ..core.specs import TensorSpec
from .plans import Plan
from .trace import Node, alive, lock

if TYPE_CHECKING:
    from .runtime import DeviceRuntime
    from .tensor import LazyTensor
    from .trace import Trace

__all__ = ["Job", "Pending", "State", "has_failed", "here", "likely_donated", "on_worker", "resolve", "unshared"]

here: Final = threading.local()
"""``worker`` is there on a device's own thread."""


def on_worker() -> bool:
    """Whether the calling thread is a device's own."""
    return getattr(here, "worker", None) is not None


class State(enum.Enum):
    """Where a job stands.

    ``HELD`` jobs run on the thread that first needs one of their values; ``STARTED`` ones run on the backend's own
    queue (:meth:`.Backend.start`), ``QUEUED`` and ``RUNNING`` ones on the device's own thread.
    """

    HELD = enum.auto()
    STARTED = enum.auto()
    QUEUED = enum.auto()
    RUNNING = enum.auto()
    DONE = enum.auto()
    FAILED = enum.auto()


class Pending(BackendData):
    """A value that a job will bring: a placeholder of no backend's making, which any backend's value can replace.

    Once the job has been started ``data`` is the backend's placeholder; the value is there when ``job`` is gone.
    """

    __slots__ = ("data", "error", "job")

    def __init__(self, job: Job, spec: TensorSpec) -> None:
        # As BackendData's: a training step makes hundreds.
        self.info = runtime = job.runtime
        self.device = runtime.device
        self.spec = spec
        self.exported = False
        self.job: Job | None = job
        self.data: BackendData | None = None
        self.error: TorchportError | None = None

    @property
    def has_value(self) -> bool:
        return self.job is None and self.data is not None and self.data.has_value

    def result(self) -> BackendData:
        """The value; waits for it. Raises the error its computation ended in."""
        job = self.job
        if job is not None:
            job.finish()
        if self.error is not None:
            from .worker import note_seen

            note_seen(self.error)
            raise self.error
        assert self.data is not None
        return self.data

    def settle(self, outcome: BackendData | TorchportError) -> None:
        """What the job brought."""
        if isinstance(outcome, TorchportError):
            self.error, self.data = outcome, None
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
    # Besides ``args``, the job's own list holds a leaf, or a promise does that only that list holds and the job that is
    # to keep it; packs are its own.
    leaves = [
        counts[at] == _ALONE + 1 and not data.exported and (mine is data or held[at] == _ALONE + (mine.job is not None))
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
        "started",
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
        self.started: Started | None = None
        """What the backend said when it was started; its results are in the pending values."""
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
        args = [a.result() if a.__class__ is Pending else a for a in self.args]
        self._add_packs(plan, args)
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
                raise self._failed(error) from error
            plan.seconds = perf_counter() - start
        self._count()
        self._add_time(plan.seconds, aside=on_worker())
        for result in results:
            result.info = runtime
        return results

    def has_arguments(self) -> bool:
        """Whether no argument is still on its way."""
        return all(a.__class__ is not Pending or a.has_value for a in self.args)

    def _add_packs(self, plan: Plan, args: list[Any]) -> None:
        """Add to the values of the plan's leaves the packs of numbers: together what ``execute`` gets."""
        backend, device = self.runtime.backend, self.runtime.device
        for positions, source, dtype in (
            (plan.singles, self.numbers, torch.float32),
            (plan.doubles, self.numbers, torch.float64),
            (plan.keys, self.keys, torch.int64),
        ):
            if positions:
                packed = torch.tensor([source[at] for at in positions], dtype=dtype)
                args.append(backend.to_device(packed, device))

    def _failed(self, error: Exception) -> ExecutionError:
        computation = self.computation
        assert computation is not None
        return ExecutionError(
            f"backend {computation.backend.name!r} failed to execute: {type(error).__name__}: {error}",
            op=f"a computation of {computation.graph_ops} operators",
        )

    def _count(self) -> None:
        metrics.count("Execute")
        if self.donated:
            metrics.count("Donated", len(self.donated))

    def _add_time(self, seconds: float, aside: bool) -> None:
        metrics.metrics.add_time("ExecuteTime", seconds)
        if aside:
            metrics.metrics.add_time("AsyncExecuteTime", seconds)

    # -- on the backend's own queue --------------------------------------------------------------------------
    def start(self) -> bool:
        """Have the backend begin, if it can, what promises were made of. Raises :class:`ExecutionError`."""
        plan, computation = self.plan, self.computation
        assert plan is not None
        assert computation is not None
        backend = computation.backend
        args = [a.data if a.__class__ is Pending else a for a in self.args]
        if None in args:  # to be run on the thread, or failed
            return False
        self._add_packs(plan, args)
        context = computation.context
        with self.runtime.worker.running:
            if backend.donation:
                self.donated = _unshared(self.args, args)
                context = plan.context(self.donated, context)
            try:
                started = backend.start(computation.handle, args, context)
            except Exception as error:
                raise self._failed(error) from error
            if started is None:
                self.donated = frozenset()
                return False
        results, started.results = started.results, ()  # nothing but the promises is to hold them
        for pending, result in zip(self.pendings, plan.select(self.wanted, results), strict=True):
            pending.data, result.info = result, self.runtime
        self.started, self.state = started, State.STARTED
        self._count()
        metrics.count("AsyncExecute")
        return True

    def collect(self) -> None:
        """Wait for what was started; an error is kept for whoever needs a value. Two threads may do so at once."""
        started = self.started
        assert started is not None
        try:
            seconds = started.wait()
        except Exception as error:
            if self.state is State.STARTED:
                failed = self._failed(error)
                failed.__cause__ = error
                self.fail(failed)
                self.runtime.worker.failed.append(self)
            return
        # Each of these does no harm when another thread does it, too.
        first = self.state is State.STARTED
        for pending in self.pendings:
            pending.job = None
        self.state = State.DONE
        self.pendings, self.args = [], []
        if first:
            assert self.plan is not None
            self.plan.seconds = seconds
            self._add_time(seconds, aside=True)

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
        if self.state is State.STARTED:
            return
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
            if self.state is State.STARTED:
                self.runtime.worker.collect(self)
                continue
            if self.state in (State.QUEUED, State.RUNNING):
                self.runtime.worker.wait_for(self)
                continue
            with lock:  # meanwhile the thread that made it may have started it
                if self.state is State.HELD:
                    self.attempt()
                if self.state is State.FAILED and self.pendings:
                    isolate(self)
