"""Operators on a tensor of this device whose result is asked for on another: ``torch.zeros_like(x, device="cpu")``.

Functionalization wraps every operator's result, on whatever device the result is, and PyTorch's operators on the CPU do
not know such wrappers. So kernels at Functionalize make the result on this device and move it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ...trace.handle import DEVICE_TYPE, LazyTensor
from ...trace.kernels import Kernel
from ...trace.threads import threads
from ...trace.wrapping import inner_of, unwrap, wrap
from .opaque import opaque

__all__ = ["install"]


def install(library: torch.library.Library, kernels: Iterable[Kernel]) -> None:
    """Register kernels at Functionalize for the operators that take both a tensor and a device."""
    for kernel in kernels:
        if not kernel.is_factory and any(argument.is_device for argument in kernel.arguments):
            short = kernel.op.name().removeprefix("aten::")
            functionalized = torch.library.get_kernel(kernel.op, "Functionalize")
            library.impl(short, opaque(_before(kernel, functionalized)), "Functionalize", with_keyset=True)


def _before(kernel: Kernel, functionalized: Any) -> Callable[..., Any]:
    op, fast = kernel.op, kernel.fast
    of_one_tensor = kernel.arguments[0].holds_tensors and not any(a.holds_tensors for a in kernel.arguments[1:])

    def call(keys: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is None and of_one_tensor:
            inner = unwrap(self)
            if inner.__class__ is LazyTensor:  # saves the 3 µs of PyTorch's boxed fallback
                return wrap(fast(inner, *args, **kwargs))
        if device is not None and any(_is_elsewhere(value, device) for value in (self, *args)):
            if op is torch.ops.aten.new_empty_strided.default:  # no contents to move, and a move would lose the strides
                return op(torch.empty((), dtype=self.dtype), *args, **kwargs)
            return op(self, *args, **{**kwargs, "device": None}).to(device)
        return functionalized.call_boxed(keys, self, *args, **kwargs)

    return call


def _is_elsewhere(tensor: Any, device: torch.device) -> bool:
    """Whether a tensor is on this device, and ``device`` is not the tensor's."""
    if not isinstance(tensor, torch.Tensor) or not torch._is_functional_tensor(tensor):
        return False
    if not isinstance(inner_of(tensor), LazyTensor):
        return False  # a wrapper of a compiler that traces
    if device.type != DEVICE_TYPE:
        return True
    here = tensor.device.index or 0
    return device.index not in (None, here) and threads.of(device.index).index != here
