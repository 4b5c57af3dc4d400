"""Two forms of a value: the backend's own, and a CPU tensor (:class:`.TensorData`), which the interpreter works on.

Many backends keep their values as CPU tensors, so that both are one. Others keep them in a form that shares memory with
a CPU tensor, such as a JAX array on the CPU or a NumPy array: each form is made of the other without a copy. There the
interpreter's results stay CPU tensors until a compiled computation or a kernel of the backend's is given one, and a
handle whose value was needed in the other form keeps it in that form.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any, Final

import torch

from ..backend.interface import Backend, BackendData, BackendDevice, TensorData
from ..core.specs import TensorSpec, is_dense

if TYPE_CHECKING:
    from ..trace.handle import LazyTensor
    from .device_runtime import DeviceRuntime

__all__ = [
    "HostForm",
    "as_tensor",
    "host_copy",
    "host_form",
    "keep_tensor",
    "own_form",
    "own_value",
    "with_shown_strides",
]

_ENOUGH: Final = 256
"""Elements of the tensor that is tried: backends may treat few ones, or none, in a way of their own."""


class HostForm(enum.Enum):
    """How a backend's values on one device and CPU tensors go together."""

    OWN = enum.auto()
    """They are CPU tensors."""
    SHARED = enum.auto()
    """They share memory with CPU tensors."""
    NONE = enum.auto()
    """They are elsewhere: each way is a copy."""


def host_form(backend: Backend, device: BackendDevice) -> HostForm:
    """Find out with one tensor."""
    tensor = torch.zeros(_ENOUGH)
    try:
        value = backend.to_device(tensor, device)
        if value.__class__ is TensorData:
            return HostForm.OWN if value.tensor is tensor else HostForm.NONE  # type: ignore[attr-defined]
        back = backend.from_device(value)
        shared = back.is_cpu and back.data_ptr() == tensor.data_ptr()
    except Exception:  # the program's own first copy says so
        return HostForm.NONE
    return HostForm.SHARED if shared else HostForm.NONE


def as_tensor(backend: Backend, value: BackendData) -> torch.Tensor:
    """A value as a CPU tensor to be read now. Raises what the backend's ``from_device`` raises."""
    if value.__class__ is TensorData and (tensor := value.tensor) is not None:  # type: ignore[attr-defined]
        return tensor
    return backend.from_device(value)


def host_copy(runtime: DeviceRuntime, value: BackendData) -> torch.Tensor:
    """A value as a CPU tensor for the program. Raises what the backend's ``from_device`` raises."""
    if runtime.holds_shared_tensors and value.__class__ is TensorData:
        return value.tensor  # type: ignore[attr-defined]
    return runtime.backend.from_device(value)


def with_shown_strides(tensor: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    """A CPU tensor with the strides that the program sees, or contiguous where those have gaps or overlap."""
    found = tensor.stride()
    if (tensor.is_contiguous() and found == strides) or not tensor.numel():
        return tensor
    if is_dense(shape, strides):
        if found == strides:
            return tensor
        return torch.empty_strided(shape, strides, dtype=tensor.dtype).copy_(tensor)
    return tensor.contiguous()


def own_form(runtime: DeviceRuntime, value: Any) -> Any:
    """A value in the backend's own form. It is not to be donated: whoever holds the tensor has its memory."""
    if value.__class__ is not TensorData or not runtime.holds_shared_tensors:
        return value
    made = runtime.backend.to_device(value.tensor, runtime.device)
    made.info, made.exported = value.info, True
    return made


def own_value(runtime: DeviceRuntime, handle: LazyTensor) -> Any:
    """A handle's value in the backend's own form, which the handle keeps; futures stay futures."""
    value = handle.value
    if value.__class__ is not TensorData:
        return value
    made = own_form(runtime, value)
    if handle.value is value:  # else another thread has given it one
        handle.value = made
    return made


def keep_tensor(runtime: DeviceRuntime, handle: LazyTensor, value: BackendData) -> TensorData:
    """A handle's value as a CPU tensor with the strides that the program sees; the handle keeps it."""
    shape, strides = tuple(handle.shape), handle.stride()
    tensor = with_shown_strides(runtime.backend.from_device(value), shape, strides)
    if not tensor.numel():
        tensor = torch.empty_strided(shape, strides, dtype=tensor.dtype)
    made = TensorData(runtime.device, TensorSpec.of(tensor), tensor)
    made.info, made.exported = runtime, True
    value.exported = True
    if handle.value is value:
        handle.value = made
    return made
