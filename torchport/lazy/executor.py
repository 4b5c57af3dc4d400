"""Flush: (cursor, live values) → plan → job → values; and how values get in from and out to the host.

The steady state of a flush is a dictionary look-up of the live values' numbers at the cursor's node, one list of
arguments and one call of the backend. Everything else here runs once per new computation, or when something fails.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import torch

from ..backend.compiler import computations
from ..backend.interface import BackendData
from ..core import metrics
from ..core.errors import CompileError, ExecutionError, TorchportError
from ..core.specs import TensorSpec
from .finalizers import may_collect, refuse_computing, without_collecting
from .history import history
from .isolate import isolate
from .jobs import Job, Pending, likely_donated, on_worker, resolve
from .parts import parts_to_compute
from .plans import Plan, make_plan
from .reasons import APART, explain_compile
from .tensor import LazyTensor, make_handle, shown_as
from .torch_state import default_state
from .trace import SPAN, Node, Trace, lock, owners, release
from .user_code import user_line

if TYPE_CHECKING:
    from .runtime import DeviceRuntime

__all__ = [
    "Plan",
    "by_number",
    "flush",
    "host_tensor",
    "is_dense",
    "is_known",
    "leaf_from_data",
    "leaf_from_host",
    "settle",
    "value_of",
]

NOW: Final = frozenset({"read", "eager", "host", "kernel"})
"""Causes of a flush after which the calling thread needs a value at once."""

PLANS_AT_MOST: Final = 256
"""Plans kept at one place of a trie: a program that keeps other values each time would fill it without end."""

WAITING: Final = NOW - {"eager"}
"""Those that the program could do without."""


# -- flushing ----------------------------------------------------------------------------------------------------
def _plan(trace: Trace, node: Node, numbers: tuple[int, ...], cause: str, whole: bool) -> Plan:
    """The plan for these values at this node. If they are the ``whole``, a known one that gives more serves, too."""
    if node.plans is None:
        node.plans = {}
    plan = node.plans.get(numbers)
    if plan is None or (plan.__class__ is Plan and plan.computation is None):  # type: ignore[union-attr]
        wanted = set(numbers)
        known = (p for p in node.plans.values() if isinstance(p, Plan) and p.computation is not None)
        plan = next((p for p in known if whole and wanted.issubset(p.numbers)), None)
        if plan is None:
            specs = [leaf.spec or TensorSpec.of(leaf) for leaf in trace.leaves]
            reason = explain_compile(trace, node, numbers, cause)
            compiled = metrics.counter("UncachedCompile")
            try:
                with may_collect():
                    donated = likely_donated(trace) if whole else frozenset[int]()  # others may hold a part's
                    plan = make_plan(trace.runtime, node.path(), numbers, specs, alone=trace.eager, donated=donated)
            except CompileError as error:
                plan = error
            if metrics.counter("UncachedCompile") > compiled:
                history.reasons.append(reason)
        if len(node.plans) >= PLANS_AT_MOST:
            node.plans.clear()
            node.apart = None
        node.plans[numbers] = plan
    if isinstance(plan, CompileError):
        # What did not compile once is not tried again on every step.
        raise plan.with_traceback(None)
    assert plan.computation is not None
    computations.touch(plan.computation)
    return plan


def by_number(handles: Iterable[LazyTensor]) -> dict[int, list[LazyTensor]]:
    """The pending values' numbers in the trace, in order, and the handles of each.

    Several may stand for one value (a parameter's wrapper and its storage do), which is then computed once.
    """
    groups: dict[int, list[LazyTensor]] = {}
    for handle in handles:
        groups.setdefault(handle.number, []).append(handle)
    return groups


def is_known(trace: Trace) -> bool:
    """Whether the values that are pending were computed before at the same place, so that a flush compiles nothing."""
    with lock:
        plans = trace.cursor.plans
        return bool(plans) and tuple(by_number(trace.live())) in plans


def flush(trace: Trace, cause: str, read: int | None = None) -> TorchportError | None:
    """Compute every live value of the trace and begin an empty one. ``read``: the number of the value it is done for.

    If the computation fails, its ops are run one by one: values that do not depend on the failing op get computed,
    the others remember the error and raise it when they are used. Returns the first such error, unless the computation
    runs on the device's own thread: then whoever uses a value gets it.
    """
    worker = trace.runtime.worker
    refuse_computing()
    with lock, without_collecting:
        if worker.failed:
            worker.settle_failures()
        if trace.cursor.parent is None:
            if trace.leaves or trace.numbers or trace.generation != trace.runtime.generation:
                trace.restart()
            return None
        handles = trace.live()
        if not handles:
            trace.restart()
            return None
        kind = cause.split()[0]
        metrics.count("Flush")
        metrics.count(f"Flush: {kind}")
        metrics.count("TracedOps", trace.cursor.depth)
        history.flushed(trace.cursor)
        if kind in WAITING:
            history.waited(cause, user_line())
        with default_state():
            failure = _run(trace, handles, cause, read)
    worker.wait_for_room()
    return failure


def _run(trace: Trace, handles: Sequence[LazyTensor], cause: str, read: int | None) -> TorchportError | None:
    """Compute the handles' values; returns the first error where some could not be computed."""
    groups = by_number(handles)
    parts = parts_to_compute(trace, tuple(groups), read)
    # After an interrupt in here the values are still pending in the trace, and the next flush computes them.
    try:
        jobs = deque([_job(trace, part, cause, whole=len(parts) == 1) for part in parts])
    except Exception:
        trace.restart()
        raise
    trace.restart()
    handles_of = [[groups[number] for number in job.wanted] for job in jobs]
    for job, of_job in list(zip(jobs, handles_of, strict=True))[1:]:
        # While the first runs, and if it is interrupted, other threads find out whom to ask.
        job.promise(of_job, _specs(of_job) if job.plan is None else job.plan.select(job.wanted, job.plan.specs))
    failure: TorchportError | None = None
    kind = cause.split()[0]
    for of_job in handles_of:
        error = _start(jobs.popleft(), of_job, kind)  # popped, so that nothing holds what a job has run on
        failure = failure or error
        kind = "rest"
    return failure


def _job(trace: Trace, numbers: tuple[int, ...], cause: str, whole: bool) -> Job:
    """A run that brings these values, which are the ``whole`` of what is pending or not. It may not compile: failed."""
    try:
        plan = _plan(trace, trace.cursor, numbers, cause if whole else cause + APART, whole)
    except TorchportError as error:
        job = Job.of_trace(trace, None, numbers)
        job.fail(error)
        return job
    return Job.of_trace(trace, plan, numbers)


def _start(job: Job, owners: Sequence[Sequence[LazyTensor]], kind: str) -> TorchportError | None:
    """Run a job, or hand it to the worker, and give the owners of its values what it brings or will bring."""
    plan, worker = job.plan, job.runtime.worker
    if plan is None:
        return _isolate(job, owners)
    try:
        if kind != "eager":
            now = kind in NOW
            if worker.may_start(job, now):
                if not job.pendings:
                    job.promise(owners, plan.select(job.wanted, plan.specs))
                if worker.start(job):
                    return None
            if worker.takes(job, now):
                if not job.pendings:
                    job.promise(owners, plan.select(job.wanted, plan.specs))
                worker.submit(job)
                return None
        results = job.run()
    except TorchportError as error:
        job.fail(error)
        return _isolate(job, owners)
    except BaseException as error:
        # An interrupt: whoever needs one of the values has the job run again, if its inputs are still there.
        if not job.pendings:
            job.promise(owners, _specs(owners))
        job.interrupted(error)
        raise
    if job.pendings:
        job.keep(plan.select(job.wanted, results))
        return None
    specs = plan.select(job.wanted, plan.specs)
    for group, result, spec in zip(owners, plan.select(job.wanted, results), specs, strict=True):
        for handle in group:
            handle.value, handle.spec = result, spec
    return None


def _specs(groups: Sequence[Sequence[LazyTensor]]) -> list[TensorSpec]:
    return [group[0].spec or TensorSpec.of(group[0]) for group in groups]


def _isolate(job: Job, owners: Sequence[Sequence[LazyTensor]]) -> TorchportError | None:
    if not job.pendings:
        job.promise(owners, _specs(owners))
    error = isolate(job)
    for handle in itertools.chain(*owners):
        pending: Any = handle.value
        if pending.__class__ is not Pending:  # another thread has asked for it meanwhile
            continue
        handle.value, handle.failure = pending.data, pending.error
        if pending.data is not None:
            handle.spec = shown_as(pending.data.spec, TensorSpec.of(handle))
    return error


def settle(trace: Trace, tensor: LazyTensor) -> None:
    """Give a value from elsewhere (another trace, a former binding of the index) data on this trace's runtime.

    Raises the error its computation ended in, if it did.
    """
    compute(tensor)
    value = tensor.value
    assert value is not None
    if value.info is trace.runtime:
        return
    value = resolve(tensor)
    if value.info is not trace.runtime:
        former: DeviceRuntime = value.info  # type: ignore[assignment]
        if former.backend is trace.runtime.backend and former.device == trace.runtime.device:
            value.info = trace.runtime
            return
        metrics.count("Moved")
        value.exported = True
        moved = trace.runtime.backend.to_device(former.backend.from_device(value), trace.runtime.device)
        moved.info, moved.exported = trace.runtime, True
        tensor.value = moved


def compute(tensor: LazyTensor) -> None:
    """Have a value on its way that is pending in a trace. Raises the error its computation ended in, if known."""
    if tensor.value is not None:
        return
    if tensor.failure is not None:
        raise tensor.failure
    refuse_computing()
    owner = owners.get(tensor.number // SPAN)
    if owner is None:
        with lock:  # its thread may have been about to give it a value
            if tensor.failure is not None:
                raise tensor.failure
            if tensor.value is not None:
                return
        raise ExecutionError("the value was lost: the thread that traced it has ended before it was computed")
    if on_worker():
        raise ExecutionError("a finalizer on the device's own thread cannot compute values that are pending")
    from .runtime import threads

    if threads.owns(owner):
        flush(owner, "read", tensor.number)
    else:
        _compute_alone(owner, tensor)
    if tensor.failure is not None:
        raise tensor.failure


def _compute_alone(owner: Trace, tensor: LazyTensor) -> None:
    """Compute one value of another thread's trace without touching that trace, which may be growing right now."""
    with lock, without_collecting:
        if tensor.value is not None or tensor.failure is not None:
            return
        node, number = owner.cursor, tensor.number
        metrics.count("Flush: thread")
        with default_state():
            specs = [leaf.spec or TensorSpec.of(leaf) for leaf in owner.leaves]
            plan = make_plan(owner.runtime, node.path(), (number,), specs)
            (result,) = Job.of_trace(owner, plan, (number,)).run()
        release(tensor)
        owner.computed.append(tensor)  # its number ends with the trace
        tensor.value, tensor.spec = result, plan.specs[0]


def value_of(tensor: LazyTensor, trace: Trace) -> BackendData:
    """The data of a handle on the trace's runtime, computed if pending."""
    if tensor.value is None or tensor.value.info is not trace.runtime:
        settle(trace, tensor)
    return resolve(tensor)


# -- the host ----------------------------------------------------------------------------------------------------
def host_tensor(tensor: LazyTensor) -> torch.Tensor:
    """The value as a CPU tensor with the handle's strides. It may share the device's memory: do not write."""
    compute(tensor)
    value = resolve(tensor)
    runtime: DeviceRuntime = value.info  # type: ignore[assignment]
    value.exported = True
    start = perf_counter()
    try:
        result = runtime.backend.from_device(value)
    except Exception as error:
        raise _transfer_failed(runtime, "to the host", error) from error
    metrics.metrics.add_time("TransferFromDeviceTime", perf_counter() - start)
    strides = tensor.stride()
    if result.stride() == strides or not result.numel():
        return result
    if is_dense(tensor.shape, strides):
        return torch.empty_strided(result.shape, strides, dtype=result.dtype).copy_(result)
    return result.contiguous()


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the strides are the row-major ones of some permutation of the dimensions."""
    step = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size != 1):
        if stride != step:
            return False
        step *= size
    return True


def _transfer_failed(runtime: DeviceRuntime, way: str, error: Exception) -> ExecutionError:
    return ExecutionError(
        f"backend {runtime.backend.name!r} failed to copy a tensor {way}: {type(error).__name__}: {error}"
    )


def leaf_from_data(runtime: DeviceRuntime, data: BackendData) -> LazyTensor:
    """A handle whose value is there already."""
    handle = make_handle(data.spec, runtime.index)
    data.info, data.exported = runtime, True
    handle.value = data
    return handle


def leaf_from_host(runtime: DeviceRuntime, tensor: torch.Tensor, private: bool = False) -> LazyTensor:
    """A handle with a CPU tensor's value. The tensor is the device's from now on; pass a copy if others may write.

    ``private``: nobody else can read its memory either, so it may be donated.
    """
    start = perf_counter()
    if tensor._is_zerotensor():  # what forward-mode differentiation makes of a missing tangent, without memory
        tensor = torch.zeros(tensor.shape, dtype=tensor.dtype)
    try:
        data = runtime.backend.to_device(tensor, runtime.device)
    except Exception as error:
        raise _transfer_failed(runtime, "to the device", error) from error
    metrics.count("TransferToDevice")
    metrics.metrics.add_time("TransferToDeviceTime", perf_counter() - start)
    handle = make_handle(TensorSpec.of(tensor), runtime.index)
    data.info, data.exported = runtime, not private
    handle.value = data
    return handle
