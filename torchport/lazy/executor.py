"""Flush: (cursor, live values) → plan → computation → values; and how values get in from and out to the host.

The steady state of a flush is a dictionary look-up of the live values' numbers at the cursor's node, one list of
arguments and one call of the backend. Everything else here runs once per new computation, or when something fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from ..backend.compiler import computations
from ..backend.interface import BackendData, Computation
from ..core import metrics
from ..core.errors import CompileError, ExecutionError, TorchportError
from ..core.specs import TensorSpec
from .graph import build_graph
from .tensor import LazyTensor, intern_spec, make_handle
from .torch_state import default_state
from .trace import SPAN, Node, Trace, lock, owners, release

if TYPE_CHECKING:
    from .runtime import DeviceRuntime

__all__ = [
    "Plan",
    "flush",
    "host_tensor",
    "leaf_from_data",
    "leaf_from_host",
    "settle",
    "value_of",
]


@dataclass(slots=True, eq=False)
class Plan:
    """How to bring some values of a trace about: which computation, on what, and whose values come out.

    ``numbers`` are the values' numbers in output order; ``specs`` theirs, interned, ready for the handles.
    """

    computation: Computation
    leaves: tuple[int, ...]
    singles: tuple[int, ...]
    doubles: tuple[int, ...]
    keys: tuple[int, ...]
    numbers: tuple[int, ...]
    specs: tuple[TensorSpec, ...]
    checked: bool = False
    """Whether the backend's results were once seen to be what they should be."""


def execute(plan: Plan, trace: Trace) -> Sequence[BackendData]:
    """Run a plan on the trace's present leaves, numbers and keys. Raises :class:`ExecutionError`."""
    computation = plan.computation
    leaves = trace.leaves
    args: list[Any] = [leaves[position].value for position in plan.leaves]
    runtime = trace.runtime
    backend, device = runtime.backend, runtime.device
    if plan.singles:
        numbers = [trace.numbers[position] for position in plan.singles]
        args.append(backend.to_device(torch.tensor(numbers, dtype=torch.float32), device))
    if plan.doubles:
        numbers = [trace.numbers[position] for position in plan.doubles]
        args.append(backend.to_device(torch.tensor(numbers, dtype=torch.float64), device))
    if plan.keys:
        keys = [trace.keys[position] for position in plan.keys]
        args.append(backend.to_device(torch.tensor(keys, dtype=torch.int64), device))
    start = perf_counter()
    try:
        results = backend.execute(computation.handle, args, computation.context)
        if not plan.checked:
            _check_results(results, plan.specs)
            plan.checked = True
    except Exception as error:
        raise ExecutionError(
            f"backend {backend.name!r} failed to execute: {type(error).__name__}: {error}",
            op=f"a computation of {computation.graph_ops} operators",
        ) from error
    metrics.count("Execute")
    metrics.metrics.add_time("ExecuteTime", perf_counter() - start)
    return results


def _check_results(results: Sequence[Any], specs: Sequence[TensorSpec]) -> None:
    """Raise ``TypeError`` or ``ValueError`` unless a backend returned what its computation's outputs are."""
    if not isinstance(results, (list, tuple)):
        raise TypeError(f"execute() returned a {type(results).__name__}; return a list of BackendData")
    if len(results) != len(specs):
        raise ValueError(f"execute() returned {len(results)} values for {len(specs)} outputs")
    for position, (result, spec) in enumerate(zip(results, specs, strict=True)):
        if not isinstance(result, BackendData):
            raise TypeError(f"output {position} is a {type(result).__name__}; return BackendData")
        if result.spec.shape != spec.shape or result.spec.dtype != spec.dtype:
            raise ValueError(f"output {position} is {result.spec}, but the graph says {spec}")


# -- flushing ----------------------------------------------------------------------------------------------------
def _plan(trace: Trace, node: Node, numbers: tuple[int, ...]) -> Plan:
    """The plan for these values at this node; a known one that gives more values serves too."""
    if node.plans is None:
        node.plans = {}
    plan = node.plans.get(numbers)
    if plan is None:
        wanted = set(numbers)
        known = (p for p in node.plans.values() if isinstance(p, Plan))
        plan = next((p for p in known if wanted.issubset(p.numbers)), None)
        if plan is None:
            try:
                plan = make_plan(trace, node, numbers)
            except CompileError as error:
                plan = error
        node.plans[numbers] = plan
    if isinstance(plan, CompileError):
        # What did not compile once is not tried again on every step.
        raise plan.with_traceback(None)
    return plan


def make_plan(trace: Trace, node: Node, numbers: tuple[int, ...], path: Sequence[Node] | None = None) -> Plan:
    """Build and compile the computation of these values. Raises :class:`CompileError`."""
    specs = [leaf.spec or TensorSpec.of(leaf) for leaf in trace.leaves]
    start = perf_counter()
    try:
        made = build_graph(node.path() if path is None else path, numbers, specs, trace.runtime.capture)
    except Exception as error:
        raise CompileError(
            f"the trace could not be written as a graph: {type(error).__name__}: {error}",
            op=str(node.op),
            source=node.source,
        ) from error
    metrics.metrics.add_time("GraphTime", perf_counter() - start)
    runtime = trace.runtime
    computation = computations.get(runtime.backend, runtime.device, runtime.specs, made.module, node.source)
    results = tuple(intern_spec(spec) for spec in computation.results)
    return Plan(computation, made.leaves, made.singles, made.doubles, made.keys, numbers, results)


def flush(trace: Trace, cause: str) -> TorchportError | None:
    """Compute every live value of the trace and begin an empty one.

    If the computation fails, its ops are run one by one: values that do not depend on the failing op get computed,
    the others remember the error and raise it when they are used. Returns the first such error.
    """
    failure: TorchportError | None = None
    with lock:
        if trace.cursor.parent is None:
            if trace.leaves or trace.numbers or trace.generation != trace.runtime.generation:
                trace.restart()
            return None
        handles = trace.live()
        if not handles:
            trace.restart()
            return None
        metrics.count("Flush")
        metrics.count(f"Flush: {cause.split()[0]}")
        metrics.count("TracedOps", trace.cursor.depth)
        try:
            with default_state():
                failure = _run(trace, handles)
        except Exception:
            trace.restart()
            raise
        # Not in a ``finally``: after an interrupt the values are still pending, and the next flush computes them.
        trace.restart()
    return failure


def _run(trace: Trace, handles: Sequence[LazyTensor]) -> TorchportError | None:
    """Compute the handles' values; returns the first error where some could not be computed."""
    base = trace.base
    numbers = tuple([handle.number - base for handle in handles])
    try:
        plan = _plan(trace, trace.cursor, numbers)
        results = execute(plan, trace)
    except TorchportError as error:
        from .isolate import isolate

        return isolate(trace, handles, error)
    _assign(trace, plan, handles, numbers, results)
    return None


def _assign(
    trace: Trace, plan: Plan, handles: Sequence[LazyTensor], numbers: tuple[int, ...], results: Sequence[BackendData]
) -> None:
    runtime = trace.runtime
    for result in results:
        result.info = runtime
    if plan.numbers == numbers:
        for handle, result, spec in zip(handles, results, plan.specs, strict=True):
            handle.value = result
            handle.spec = spec
        return
    by_number = dict(zip(plan.numbers, zip(results, plan.specs, strict=True), strict=True))
    for handle, number in zip(handles, numbers, strict=True):
        handle.value, handle.spec = by_number[number]


def settle(trace: Trace, tensor: LazyTensor) -> None:
    """Give a value from elsewhere (another trace, a former binding of the index) data on this trace's runtime.

    Raises the error its computation ended in, if it did.
    """
    with lock:
        if tensor.value is None:
            compute(tensor)
        assert tensor.value is not None
        if tensor.value.info is not trace.runtime:
            former: DeviceRuntime = tensor.value.info  # type: ignore[assignment]
            if former.backend is not trace.runtime.backend or former.device != trace.runtime.device:
                metrics.count("Moved")
                moved = former.backend.from_device(tensor.value)
                tensor.value = trace.runtime.backend.to_device(moved, trace.runtime.device)
            tensor.value.info = trace.runtime


def compute(tensor: LazyTensor) -> None:
    """Bring a pending value about. Raises the error its computation ended in."""
    if tensor.value is not None:
        return
    if tensor.failure is not None:
        raise tensor.failure
    owner = owners.get(tensor.number // SPAN)
    if owner is None:
        raise ExecutionError("the value was lost: the thread that traced it has ended before it was computed")
    from .runtime import threads

    if threads.owns(owner):
        flush(owner, "read")
    else:
        _compute_alone(owner, tensor)
    if tensor.failure is not None:
        raise tensor.failure


def _compute_alone(owner: Trace, tensor: LazyTensor) -> None:
    """Compute one value of another thread's trace without touching that trace, which may be growing right now."""
    with lock:
        if tensor.value is not None or tensor.failure is not None:
            return
        node, number = owner.cursor, tensor.number - owner.base
        metrics.count("Flush: thread")
        with default_state():
            plan = make_plan(owner, node, (number,))
            (result,) = execute(plan, owner)
        result.info = owner.runtime
        release(tensor)
        tensor.value, tensor.spec = result, plan.specs[0]


def value_of(tensor: LazyTensor, trace: Trace) -> BackendData:
    """The data of a handle on the trace's runtime, computed if pending."""
    if tensor.value is None or tensor.value.info is not trace.runtime:
        settle(trace, tensor)
    assert tensor.value is not None
    return tensor.value


# -- the host ----------------------------------------------------------------------------------------------------
def host_tensor(tensor: LazyTensor) -> torch.Tensor:
    """The value as a CPU tensor with the handle's strides. It may share the device's memory: do not write."""
    compute(tensor)
    assert tensor.value is not None
    runtime: DeviceRuntime = tensor.value.info  # type: ignore[assignment]
    try:
        result = runtime.backend.from_device(tensor.value)
    except Exception as error:
        raise _transfer_failed(runtime, "to the host", error) from error
    strides = tensor.stride()
    if result.stride() == strides or not result.numel():
        return result
    if _is_dense(tensor.shape, strides):
        return torch.empty_strided(result.shape, strides, dtype=result.dtype).copy_(result)
    return result.contiguous()


def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
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
    data.info = runtime
    handle.value = data
    return handle


def leaf_from_host(runtime: DeviceRuntime, tensor: torch.Tensor) -> LazyTensor:
    """A handle with a CPU tensor's value. The tensor is the device's from now on; pass a copy if others may write."""
    start = perf_counter()
    try:
        data = runtime.backend.to_device(tensor, runtime.device)
    except Exception as error:
        raise _transfer_failed(runtime, "to the device", error) from error
    metrics.count("TransferToDevice")
    metrics.metrics.add_time("TransferToDeviceTime", perf_counter() - start)
    handle = make_handle(TensorSpec.of(tensor), runtime.index)
    data.info = runtime
    handle.value = data
    return handle
