"""Jobs: runs of plans, at once or while the program goes on tracing (:mod:`.queue`).

A :class:`Job` is one run of a plan on values it has taken hold of, so that nothing traced later can change it. What it
will bring are futures (:mod:`.future`); whoever needs one waits. When a job has failed, the first thread that asks for
one of its values, or that traces on, has its operators run one by one (:mod:`.replay`).
"""

from __future__ import annotations

import contextlib
import enum
import threading
from array import array
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from ..backend.execution import Computation, execute, execution_error, start
from ..backend.interface import BackendData, ExecutionContext
from ..backend.optional import Started
from ..core import metrics
from ..core.errors import ExecutionError, TorchportError
from ..core.sharding import is_partitioned
from ..core.specs import TensorSpec
from ..native.twins import twins
from ..trace.handle import LazyTensor
from ..trace.trace import Trace, lock
from ..trace.trie import Node
from .future import Future
from .host_forms import own_form, own_value
from .plans import ExecutionPlan

if TYPE_CHECKING:
    from .device_runtime import DeviceRuntime

__all__ = ["Job", "JobState", "here", "leaf_values", "on_device_thread"]

here: Final = threading.local()
"""``queue`` is there on a device's own thread."""


def on_device_thread() -> bool:
    """Whether the calling thread is a device's own."""
    return getattr(here, "queue", None) is not None


@twins.python
def leaf_values(leaves: list[LazyTensor], at: tuple[int, ...], future: type[Future]) -> tuple[list[Any], bool]:
    """The values of the leaves at some positions, and whether one of them is a ``future``."""
    values: list[Any] = [leaves[position].value for position in at]
    return values, any(value.__class__ is future for value in values)


class JobState(enum.Enum):
    """Where a job stands.

    ``HELD`` jobs run on the thread that first needs one of their values; ``STARTED`` ones run on the backend's own
    queue (:class:`.SupportsStart`), ``QUEUED`` and ``RUNNING`` ones on the device's own thread.
    """

    HELD = enum.auto()
    STARTED = enum.auto()
    QUEUED = enum.auto()
    RUNNING = enum.auto()
    DONE = enum.auto()
    FAILED = enum.auto()


class Job:
    """One run of a plan: the values it starts from, and whom its results belong to.

    ``wanted`` are the ids of the values to bring, ``args`` the values of the plan's leaves, ``scalar_inputs`` and
    ``random_keys`` the trace's. A job without a plan, whose computation did not compile, has failed from the start; its
    ``args`` are all leaves of the trace. ``waits``: some of them may be futures.
    """

    __slots__ = (
        "args",
        "computation",
        "cursor",
        "donated",
        "error",
        "futures",
        "overlapped",
        "plan",
        "random_keys",
        "runtime",
        "scalar_inputs",
        "started",
        "state",
        "threads",
        "waits",
        "wanted",
    )

    def __init__(
        self,
        runtime: DeviceRuntime,
        cursor: Node,
        plan: ExecutionPlan | None,
        args: list[Any],
        scalar_inputs: Sequence[float],
        random_keys: Sequence[int],
        wanted: tuple[int, ...],
        waits: bool = True,
    ) -> None:
        self.runtime = runtime
        self.cursor = cursor
        self.plan = plan
        self.computation = None if plan is None else plan.computation
        self.args = args
        self.waits = waits
        self.overlapped = False
        """Whether it runs on the calling thread while the worker is at another job."""
        self.scalar_inputs = scalar_inputs
        self.random_keys = random_keys
        self.wanted = wanted
        self.donated: frozenset[int] = frozenset()
        self.futures: list[Future] = []
        self.error: TorchportError | None = None
        self.state = JobState.HELD
        self.started: Started | None = None
        """What the backend said when it was started; its results are in the futures."""
        self.threads = 0

    @classmethod
    def of_trace(cls, trace: Trace, plan: ExecutionPlan | None, wanted: tuple[int, ...]) -> Job:
        """A run of a plan at the trace's cursor, on its present leaves, scalar inputs and random keys."""
        leaves = trace.leaves
        runtime: DeviceRuntime = trace.runtime  # type: ignore[assignment]
        waits = True
        if plan is None:
            args = [x.value for x in leaves]
        elif runtime.holds_shared_tensors and not plan.takes_tensors:
            args = [own_value(runtime, leaves[at]) for at in plan.leaves]
        else:
            args, waits = twins.leaf_values(leaves, plan.leaves, Future)
        return cls(runtime, trace.cursor, plan, args, trace.scalar_inputs, trace.random_keys, wanted, waits)

    @classmethod
    def of(
        cls,
        runtime: DeviceRuntime,
        plan: ExecutionPlan,
        args: Sequence[Any],
        scalar_inputs: Sequence[float],
        random_keys: Sequence[int],
    ) -> Job:
        """A run of a single op's plan on some of the values in ``args``, by the positions of its leaves."""
        return cls(
            runtime, Node.root(), plan, [args[at] for at in plan.leaves], scalar_inputs, random_keys, plan.value_ids
        )

    # -- running ---------------------------------------------------------------------------------------------
    def run(self) -> Sequence[BackendData]:
        """The values the plan brings, in its order. Raises :class:`ExecutionError`."""
        plan, computation, runtime = self.plan, self.computation, self.runtime
        assert plan is not None
        assert computation is not None
        # A list of its own in any case: what the job still holds besides tells what may be donated.
        args = [a.result() if a.__class__ is Future else a for a in self.args] if self.waits else self.args.copy()
        if runtime.holds_shared_tensors and not plan.takes_tensors:
            args = [own_form(runtime, a) for a in args]
        self._add_packs(plan, args)
        with contextlib.nullcontext() if self.overlapped else runtime.queue.running:
            results = execute(computation, args, self._context(computation, plan, args))
        self._note_donated()
        if on_device_thread():
            metrics.metrics.add_time("AsyncExecuteTime", computation.seconds)
        for result in results:
            result.info = runtime
        return results

    def _context(self, computation: Computation, plan: ExecutionPlan, args: Sequence[BackendData]) -> ExecutionContext:
        """What the backend is told about this run: which arguments nobody else holds."""
        if not computation.backend.capabilities.donation:
            return computation.context
        self.donated = twins.unshared(self.args, args)
        return plan.context(self.donated, computation.context)

    def _note_donated(self) -> None:
        if self.donated:
            metrics.count("Donated", len(self.donated))

    def has_arguments(self) -> bool:
        """Whether no argument is still in flight."""
        return all(a.__class__ is not Future or a.has_value for a in self.args)

    def _add_packs(self, plan: ExecutionPlan, args: list[Any]) -> None:
        """Add the packs of scalar inputs and random keys to the values of the plan's leaves: what ``execute`` gets."""
        if plan.singles:
            args.append(self._pack(plan, plan.singles, torch.float32))
        if plan.doubles:
            args.append(self._pack(plan, plan.doubles, torch.float64))
        if plan.random_keys:
            keys = torch.tensor([self.random_keys[at] for at in plan.random_keys], dtype=torch.int64)
            args.append(self.runtime.backend.to_device(keys, self.runtime.device))

    def _pack(self, plan: ExecutionPlan, positions: tuple[int, ...], dtype: torch.dtype) -> BackendData:
        """Scalar inputs as one value. Where they stay what they were in the run before, so does the value.

        Nobody writes to such a value, since the plan holds it, too; what is made for one run may be donated. Where a
        backend's values may lie on several devices none is kept: a run may put it on a mesh that is not the next one's.
        """
        numbers = [self.scalar_inputs[at] for at in positions]
        bits = array("d", numbers).tobytes()  # -0.0 is equal to 0.0, and NaN to nothing
        before, kept = plan.packs.get(dtype, (b"", None))
        if before != bits:
            plan.packs[dtype] = bits, None
        elif kept is not None:
            return kept
        backend = self.runtime.backend
        made = backend.to_device(torch.tensor(numbers, dtype=dtype), self.runtime.device)
        if before == bits and not is_partitioned(backend):
            plan.packs[dtype] = bits, made
        return made

    # -- on the backend's own queue --------------------------------------------------------------------------
    def start(self) -> bool:
        """Have the backend begin, if it can, what futures were made of. Raises :class:`ExecutionError`."""
        plan, computation = self.plan, self.computation
        assert plan is not None
        assert computation is not None
        args = [a.data if a.__class__ is Future else a for a in self.args]
        if None in args:  # to be run on the thread, or failed
            return False
        if self.runtime.holds_shared_tensors:
            args = [own_form(self.runtime, a) for a in args]
        self._add_packs(plan, args)
        with self.runtime.queue.running:
            context = self._context(computation, plan, args)
            started = start(computation, args, context)
            if started is None:
                self.donated = frozenset()
                return False
        results, started.results = started.results, ()  # nothing but the futures is to hold them
        for future, result in zip(self.futures, plan.select(self.wanted, results), strict=True):
            future.data, result.info = result, self.runtime
        self.started, self.state = started, JobState.STARTED
        metrics.count("AsyncExecute")
        self._note_donated()
        return True

    def collect(self) -> None:
        """Wait for what was started; an error is kept for whoever needs a value. Two threads may do so at once."""
        started = self.started
        assert started is not None
        try:
            seconds = started.wait()
        except Exception as error:
            if self.state is JobState.STARTED:
                assert self.computation is not None
                failed = execution_error(self.computation, error)
                failed.__cause__ = error
                self.fail(failed)
                self.runtime.queue.failed.append(self)
            return
        # Each of these does no harm when another thread does it, too.
        first = self.state is JobState.STARTED
        for future in self.futures:
            future.job = None
        self.state = JobState.DONE
        self.futures, self.args = [], []
        if first:
            assert self.computation is not None
            self.computation.seconds = seconds
            metrics.metrics.add_time("ExecuteTime", seconds)
            metrics.metrics.add_time("AsyncExecuteTime", seconds)

    # -- futures ---------------------------------------------------------------------------------------------
    def make_futures(self, owners: Iterable[Sequence[LazyTensor]], specs: Iterable[TensorSpec]) -> None:
        """Give handles values that this job will bring: ``owners`` has, in the order of ``wanted``, those of each."""
        groups, each = list(owners), list(specs)
        self.futures = Future.of_each(self, each)
        twins.give(groups, self.futures, each)

    def deliver(self, outcomes: Sequence[BackendData | TorchportError]) -> None:
        """Settle every future, in the order of ``wanted``; the job lets go of what it held."""
        for future, outcome in zip(self.futures, outcomes, strict=True):
            future.settle(outcome)
        self.futures, self.args = [], []

    def complete(self, results: Sequence[BackendData]) -> None:
        """Settle every future: the job has run."""
        self.deliver(results)
        self.state = JobState.DONE

    def attempt(self) -> None:
        """Run and deliver; an error is kept for whoever needs a value. After an interrupt it can be run again."""
        try:
            assert self.plan is not None
            self.complete(self.plan.select(self.wanted, self.run()))
        except TorchportError as error:
            self.fail(error)
        except BaseException as error:
            self.interrupted(error)
            raise

    def interrupted(self, error: BaseException) -> None:
        """Note that a run did not end: it can be repeated, unless inputs were given away and did not come back."""
        if self.state is JobState.STARTED:
            return
        given = [self.args[at] for at in self.donated if at < len(self.args)]
        kept = self.runtime.backend.capabilities.restores_donated and all(value.has_value for value in given)
        if self.donated and not kept:
            self.fail(ExecutionError(f"it was interrupted ({type(error).__name__}) while its inputs were donated"))

    def fail(self, error: TorchportError) -> None:
        """Note that the job as a whole ended in an error."""
        self.error = error
        self.state = JobState.FAILED

    def finish(self) -> None:
        """Return when every value is there or its error known: waits for the worker, or does what is left to do."""
        while self.futures and self.state is not JobState.DONE:
            if self.state is JobState.STARTED:
                self.runtime.queue.collect(self)
                continue
            if self.state in (JobState.QUEUED, JobState.RUNNING):
                self.runtime.queue.wait_for(self)
                continue
            with lock:  # meanwhile the thread that made it may have started it
                if self.state is JobState.HELD:
                    self.attempt()
                if self.state is JobState.FAILED and self.futures:
                    self.runtime.replay(self)
