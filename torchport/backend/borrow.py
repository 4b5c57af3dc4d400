"""Borrowed host tensors: a CPU tensor of the program's as an argument of one call, without a copy where that can be.

The contract's part is :class:`.SupportsBorrow`. ``torch.compile`` and :func:`.execute_on_host` borrow. It needs no
PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..core.specs import TensorSpec
from .interface import Backend, BackendData, BackendDevice, TensorData
from .optional import optional_of

if TYPE_CHECKING:
    import torch

__all__ = ["borrower"]


def borrower(backend: Backend) -> Callable[[torch.Tensor, TensorSpec, BackendDevice], BackendData]:
    """How a CPU tensor, its spec and a device become an argument of one call: as the backend says
    (:class:`.SupportsBorrow`), as it is where the backend keeps tensors, else as a copy."""
    borrows = optional_of(backend).borrow
    if borrows is not None:
        return borrows.borrow
    if type(backend).to_device is Backend.to_device and not backend.capabilities.torch_free:
        return lambda tensor, spec, device: TensorData(device, spec, tensor)
    return lambda tensor, spec, device: backend.to_device(tensor.detach().clone(), device)
