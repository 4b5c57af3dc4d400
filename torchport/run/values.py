"""The value of a handle: its data on a device, or as a tensor of the host. A pending value is computed first."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

import torch

from ..backend.answers import checked_data, checked_tensor
from ..backend.interface import BackendData, TensorData
from ..core import metrics
from ..core.default_state import default_state
from ..core.errors import ExecutionError
from ..core.specs import TensorSpec
from ..trace.finalizers import refuse_computing, without_collecting
from ..trace.handle import LazyTensor, make_handle
from ..trace.pool import release
from ..trace.threads import threads
from ..trace.trace import Runner, Trace, lock, owners
from ..trace.trie import SPAN
from .flush import flush, note_fallbacks
from .future import resolve
from .host_forms import host_copy, own_value, with_shown_strides
from .jobs import Job, on_device_thread
from .overlap_trial import reads
from .plans import make_plan

if TYPE_CHECKING:
    from .device_runtime import DeviceRuntime

__all__ = [
    "any_value_of",
    "host_tensor",
    "leaf_from_data",
    "leaf_from_host",
    "note_copied",
    "note_read",
    "settle",
    "value_of",
]


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
            runtime: DeviceRuntime = trace.runtime  # type: ignore[assignment]
            runtime.holds_shared_tensors |= former.holds_shared_tensors
            return
        metrics.count("Moved")
        value.exported = True
        moved = trace.runtime.backend.to_device(host_copy(former, value), trace.runtime.device)
        moved.info, moved.exported = trace.runtime, True
        tensor.value = moved


def compute(tensor: LazyTensor) -> None:
    """Have a pending value computed, or in flight. Raises the error its computation ended in, if known."""
    if tensor.value is not None:
        return
    if tensor.failure is not None:
        raise tensor.failure
    refuse_computing()
    owner = owners.get(tensor.value_id // SPAN)
    if owner is None:
        with lock:  # its thread may have been about to give it a value
            if tensor.failure is not None:
                raise tensor.failure
            if tensor.value is not None:
                return
        raise ExecutionError("the value was lost: the thread that traced it has ended before it was computed")
    if on_device_thread():
        raise ExecutionError("a finalizer on the device's own thread cannot compute values that are pending")

    if threads.owns(owner):
        flush(owner, "read", tensor.value_id)
    else:
        _compute_alone(owner, tensor)
    if tensor.failure is not None:
        raise tensor.failure


def _compute_alone(owner: Trace, tensor: LazyTensor) -> None:
    """Compute one value of another thread's trace without touching that trace, which may be growing right now."""
    with lock, without_collecting:
        if tensor.value is not None or tensor.failure is not None:
            return
        node, value_id = owner.cursor, tensor.value_id
        metrics.count("Flush: thread")
        with default_state():
            specs = [leaf.spec or TensorSpec.of(leaf) for leaf in owner.leaves]
            runtime: DeviceRuntime = owner.runtime  # type: ignore[assignment]
            plan = make_plan(runtime, node.path(), (value_id,), specs)
            note_fallbacks(runtime, plan)
            (result,) = Job.of_trace(owner, plan, (value_id,)).run()
        release(tensor)
        owner.computed.append(tensor)  # its id ends with the trace
        tensor.value, tensor.spec = result, plan.specs[0]


def value_of(tensor: LazyTensor, trace: Trace) -> BackendData:
    """The data of a handle on the trace's runtime, as its backend has it, computed if pending."""
    data = any_value_of(tensor, trace)
    runtime: DeviceRuntime = trace.runtime  # type: ignore[assignment]
    return own_value(runtime, tensor) if runtime.holds_shared_tensors else data


def any_value_of(tensor: LazyTensor, trace: Trace) -> BackendData:
    """The data of a handle on the trace's runtime, in whatever form it is, computed if pending."""
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
    note_read()
    start = perf_counter()
    try:
        result = host_copy(runtime, value)
    except Exception as error:
        raise _transfer_failed(runtime, "to the host", error) from error
    spec = value.spec
    as_it_should = result.__class__ is torch.Tensor and result.shape == spec.shape and result.dtype is spec.dtype
    if not as_it_should or not result.is_cpu:  # most often without a call
        checked_tensor(runtime.backend, result, spec)
    metrics.metrics.add_time("TransferFromDeviceTime", perf_counter() - start)
    return with_shown_strides(result, tensor.shape, tensor.stride())


def note_read() -> None:
    """A value is read: where one is, a path of operators that are interpreted at once ends."""
    reads.count += 1
    for trace in threads.mine():
        if trace.direct:
            trace.end_direct()


def note_copied() -> None:
    """A tensor was copied to the device (``native/copies.h``)."""
    metrics.count("TransferToDevice")


def _transfer_failed(runtime: Runner, way: str, error: Exception) -> ExecutionError:
    return ExecutionError(
        f"backend {runtime.backend.name!r} failed to copy a tensor {way}: {type(error).__name__}: {error}"
    )


def leaf_from_data(runtime: Runner, data: BackendData) -> LazyTensor:
    """A handle whose value is there already."""
    handle = make_handle(data.spec, runtime.index)
    data.info, data.exported = runtime, True
    handle.value = data
    return handle


def leaf_from_host(runtime: Runner, tensor: torch.Tensor, private: bool = False) -> LazyTensor:
    """A handle with a CPU tensor's value. The tensor is the device's from now on; pass a copy if others may write.

    ``private``: nobody else can read its memory either, so it may be donated.
    """
    start = perf_counter()
    if tensor._is_zerotensor():  # what forward-mode differentiation makes of a missing tangent, without memory
        tensor = torch.zeros(tensor.shape, dtype=tensor.dtype)
    spec = TensorSpec.of(tensor)
    if runtime.is_lost and runtime.interprets:  # a CPU tensor takes the place of the engine's value
        data: BackendData = TensorData(runtime.device, spec, tensor)
    else:
        try:
            data = runtime.backend.to_device(tensor, runtime.device)
        except Exception as error:
            raise _transfer_failed(runtime, "to the device", error) from error
        checked_data(runtime.backend, "to_device", data, spec)
    metrics.count("TransferToDevice")
    metrics.metrics.add_time("TransferToDeviceTime", perf_counter() - start)
    handle = make_handle(spec, runtime.index)
    data.info, data.exported = runtime, not private
    handle.value = data
    return handle
