"""Flush: (cursor, live values) → plan → job → values.

The steady state of a flush is a dictionary look-up of the live values' ids at the cursor's node, one list of
arguments and one call of the backend. Everything else here runs once per new computation, or when something fails.

Who asks names a cause: a value is read (:mod:`.values`), a barrier runs (:mod:`.barriers`), a batch comes from the host
or an optimizer has stepped (``frontend.device.copies`` and ``shims``), ranks meet (``frontend.distributed``), the
program asks (:mod:`.sync`), a trace is long (``trace.record``), a thread ends, changes its mode or has run finalizers
(``trace.threads``), the default dtype changes (``shims``), a setting changes (:mod:`.device_runtime`), a value is
placed on several devices (``frontend.spmd.placing``).
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Sequence, Set
from typing import TYPE_CHECKING, Any, Final

from ..backend.compiler import computations
from ..core import metrics
from ..core.default_state import default_state
from ..core.errors import CompileError, TorchportError
from ..core.fallback import note_fallback
from ..core.frames import user_line
from ..core.specs import TensorSpec
from ..native.twins import twins
from ..trace.decide import not_taken
from ..trace.finalizers import may_collect, refuse_computing, without_collecting
from ..trace.handle import LazyTensor, shown_as
from ..trace.trace import Trace, lock
from ..trace.trie import Node
from .donation import likely_donated
from .future import Future
from .handed_in import warming
from .history import history
from .independent_parts import parts_to_compute
from .interpreted import InterpretedPlan
from .jobs import Job
from .kept_paths import note_made
from .plans import ExecutionPlan, make_plan
from .queue import Where
from .reasons import APART, explain_compile
from .repeated import Repeated, expand_again, put_off
from .replay import replay
from .sizes import widened
from .tiers import Progress, first_plan, next_plan

if TYPE_CHECKING:
    from .device_runtime import DeviceRuntime

__all__ = [
    "ExecutionPlan",
    "by_value_id",
    "flush",
    "is_known",
    "note_fallbacks",
]

NOW: Final = frozenset({"read", "eager", "host", "kernel", "collective", "new"})
"""Causes of a flush after which the calling thread needs a value at once."""

PLANS_AT_MOST: Final = 256
"""Plans kept at one place of a trie: a program that keeps other values each time would fill it without end."""

WAITING: Final = NOW - {"eager", "collective", "new"}
"""Those that the program could do without."""


# -- flushing ----------------------------------------------------------------------------------------------------
def _plan(trace: Trace, node: Node, value_ids: tuple[int, ...], cause: str, whole: bool) -> ExecutionPlan:
    """The plan for these values at this node. If they are the ``whole``, a known one that gives more serves, too."""
    if node.plans is None:
        node.plans = {}
    plan = node.plans.get(value_ids)
    if plan.__class__ is not ExecutionPlan or plan.computation is None:  # type: ignore[union-attr]
        plan = _other_plan(trace, node, value_ids, plan, cause, whole)
        if plan is not node.plans.get(value_ids):
            if len(node.plans) >= PLANS_AT_MOST:
                node.plans.clear()
                node.apart = None
            node.plans[value_ids] = plan
    if isinstance(plan, CompileError):
        # What did not compile once is not tried again on every step.
        raise plan.with_traceback(None)
    assert plan is not None
    assert plan.computation is not None
    computations.touch(plan.computation)
    return plan


def _other_plan(
    trace: Trace, node: Node, value_ids: tuple[int, ...], known: Any, cause: str, whole: bool
) -> ExecutionPlan | CompileError:
    """What is done where no compiled plan is known: one that gives more, one that is interpreted, or compiling.

    ``known`` is what is remembered: nothing, an error, a plan that is interpreted or whose computation was dropped.
    """
    if isinstance(known, CompileError):
        return known
    runtime: DeviceRuntime = trace.runtime  # type: ignore[assignment]
    tiered = runtime.interprets and not trace.eager

    def specs() -> list[TensorSpec]:
        return [leaf.spec or TensorSpec.of(leaf) for leaf in trace.leaves]

    def donated() -> frozenset[int]:
        return likely_donated(trace) if whole else frozenset()  # others may hold a part's

    def note() -> None:
        history.reasons.append(explain_compile(trace, node, value_ids, cause))

    if isinstance(known, InterpretedPlan) and tiered:
        return next_plan(known, Progress(runtime, node, value_ids, specs, donated, note))
    wanted = set(value_ids)
    assert node.plans is not None
    compiled = (p for p in node.plans.values() if p.__class__ is ExecutionPlan and p.computation is not None)
    if whole and (larger := next((p for p in compiled if wanted.issubset(p.value_ids)), None)) is not None:
        return larger
    if known is None and tiered:
        return first_plan(runtime, node.path(), value_ids, specs(), trace.spent)
    if warming.active and not trace.eager:
        if isinstance(known, InterpretedPlan):
            return known
        handed_in = warming.plan(runtime, node, value_ids, specs(), donated())
        if handed_in is not None:
            return handed_in
    reason = explain_compile(trace, node, value_ids, cause)
    before = metrics.counter("UncachedCompile")
    try:
        with may_collect():
            plan: ExecutionPlan | CompileError = _compiled(trace, node.path(), value_ids, specs(), donated(), whole)
    except CompileError as error:
        plan = error
    if metrics.counter("UncachedCompile") > before:
        history.reasons.append(reason)
    return plan


def _compiled(
    trace: Trace,
    path: Sequence[Node],
    value_ids: tuple[int, ...],
    given: Sequence[TensorSpec],
    donated: Set[int],
    whole: bool,
) -> ExecutionPlan:
    """A new plan, which may give more values than these. Raises what :func:`make_plan` raises for these alone."""
    runtime: DeviceRuntime = trace.runtime  # type: ignore[assignment]
    if not whole or trace.eager:
        return make_plan(runtime, path, value_ids, given, alone=trace.eager, donated=donated)
    wider = widened(runtime.backend.name, path, value_ids, given)
    try:
        made = make_plan(runtime, path, wider, given, donated=donated)
    except TorchportError:
        if wider == value_ids:
            raise
        # What nobody wants now cannot be computed: it has to be no error of what is wanted.
        made = make_plan(runtime, path, value_ids, given, donated=donated)
    note_made(made, runtime.backend, path, given)
    return made


def by_value_id(handles: Iterable[LazyTensor]) -> dict[int, list[LazyTensor]]:
    """The pending values' ids in the trace, in order, and the handles of each.

    Several may stand for one value (a parameter's wrapper and its storage do), which is then computed once.
    """
    groups: dict[int, list[LazyTensor]] = {}
    for handle in handles:
        groups.setdefault(handle.value_id, []).append(handle)
    return groups


def is_known(trace: Trace) -> bool:
    """Whether the values that are pending were computed before at the same place, so that a flush compiles nothing."""
    with lock:
        plans = trace.cursor.plans
        return bool(plans) and tuple(by_value_id(trace.live())) in plans


def flush(trace: Trace, cause: str, read: int | None = None) -> TorchportError | None:
    """Compute every live value of the trace and begin an empty one. ``read``: the id of the value it is done for.

    If the computation fails, its ops are run one by one: values that do not depend on the failing op get computed,
    the others remember the error and raise it when they are used. Returns the first such error, unless the computation
    runs on the device's own thread: then whoever uses a value gets it.
    """
    runtime: DeviceRuntime = trace.runtime  # type: ignore[assignment]
    queue = runtime.queue
    if trace.direct:
        trace.end_direct()
    refuse_computing()
    with lock, without_collecting:
        if queue.failed:
            queue.settle_failures()
        if trace.cursor.parent is None:
            if trace.leaves or trace.scalar_inputs or trace.generation != trace.runtime.generation:
                trace.restart()
            return None
        handles = trace.live()
        if not handles:
            trace.restart()
            return None
        kind = cause.split()[0]
        later: Sequence[Repeated] = ()
        if kind == "kernel":
            handles, later = put_off(trace, handles)
        metrics.count("Flush")
        metrics.count(f"Flush: {kind}")
        metrics.count("TracedOps", trace.cursor.depth)
        history.flushed(trace.cursor)
        if kind in WAITING:
            history.waited(cause, user_line())
        with default_state():
            try:
                failure = _run(trace, handles, cause, read)
            finally:
                # After an interrupt, too, but for one in the compiler: then they are pending as all others are.
                if later and trace.cursor is trace.root:
                    expand_again(trace, later)
    queue.wait_for_room()
    return failure


def _run(trace: Trace, handles: Sequence[LazyTensor], cause: str, read: int | None) -> TorchportError | None:
    """Compute the handles' values; returns the first error where some could not be computed."""
    groups = by_value_id(handles)
    parts = parts_to_compute(trace, tuple(groups), read)
    # After an interrupt in here the values are still pending in the trace, and the next flush computes them.
    try:
        jobs = deque([_job(trace, part, cause, whole=len(parts) == 1) for part in parts])
    except Exception:
        trace.restart()
        raise
    trace.restart()
    handles_of = [[groups[value_id] for value_id in job.wanted] for job in jobs]
    for job, of_job in list(zip(jobs, handles_of, strict=True))[1:]:
        # While the first runs, and if it is interrupted, other threads find out whom to ask.
        job.make_futures(of_job, _specs(of_job) if job.plan is None else job.plan.select(job.wanted, job.plan.specs))
    failure: TorchportError | None = None
    kind = cause.split()[0]
    for of_job in handles_of:
        error = _start(jobs.popleft(), of_job, kind)  # popped, so that nothing holds what a job has run on
        failure = failure or error
        kind = "rest"
    return failure


def _job(trace: Trace, value_ids: tuple[int, ...], cause: str, whole: bool) -> Job:
    """A run that brings these values, which are the ``whole`` of what is pending or not. It may not compile: failed."""
    try:
        plan = _plan(trace, trace.cursor, value_ids, cause if whole else cause + APART, whole)
        if plan.refusals:
            note_fallbacks(trace.runtime, plan)  # type: ignore[arg-type]
    except TorchportError as error:
        job = Job.of_trace(trace, None, value_ids)
        job.fail(error)
        return job
    return Job.of_trace(trace, plan, value_ids)


def note_fallbacks(runtime: DeviceRuntime, plan: ExecutionPlan) -> None:
    """Count what the host runs of a plan. Raises :class:`UnsupportedOp` where the policy forbids it."""
    for one in plan.refusals:
        note_fallback(one.op, one.source, not_taken(runtime.backend, one.reason))
        history.hosted(one.op, one.source)


def _start(job: Job, owners: Sequence[Sequence[LazyTensor]], kind: str) -> TorchportError | None:
    """Run a job, or hand it to the device's queue, and give the owners of its values what it brings or will bring."""
    plan = job.plan
    if plan is None:
        return _replay(job, owners)
    try:
        if kind != "eager" and _hand_over(job, owners, plan, kind in NOW):
            return None
        results = job.run()
    except TorchportError as error:
        job.fail(error)
        return _replay(job, owners)
    except BaseException as error:
        # An interrupt: whoever needs one of the values has the job run again, if its inputs are still there.
        if not job.futures:
            job.make_futures(owners, _specs(owners))
        job.interrupted(error)
        raise
    if job.futures:
        job.complete(plan.select(job.wanted, results))
        return None
    specs = plan.select(job.wanted, plan.specs)
    twins.give(owners, plan.select(job.wanted, results), specs)
    return None


def _hand_over(job: Job, owners: Sequence[Sequence[LazyTensor]], plan: ExecutionPlan, wanted_now: bool) -> bool:
    """Have the backend or the device's thread run a job, if that is where it runs; its values are futures then."""
    queue = job.runtime.queue
    where = queue.place(job, wanted_now)
    if where in (Where.BACKEND, Where.THREAD) and not job.futures:
        job.make_futures(owners, plan.select(job.wanted, plan.specs))
    if where is Where.BACKEND:
        if queue.start(job):
            return True
        where = queue.place(job, wanted_now, startable=False)
    job.overlapped = where is Where.OVERLAPPED
    if where is Where.THREAD:
        queue.submit(job)
        return True
    return False


def _specs(groups: Sequence[Sequence[LazyTensor]]) -> list[TensorSpec]:
    return [group[0].spec or TensorSpec.of(group[0]) for group in groups]


def _replay(job: Job, owners: Sequence[Sequence[LazyTensor]]) -> TorchportError | None:
    if not job.futures:
        job.make_futures(owners, _specs(owners))
    error = replay(job)
    for handle in itertools.chain(*owners):
        future: Any = handle.value
        if future.__class__ is not Future:  # another thread has asked for it meanwhile
            continue
        handle.value, handle.failure = future.data, future.error
        if future.data is not None:
            handle.spec = shown_as(future.data.spec, TensorSpec.of(handle))
    return error
