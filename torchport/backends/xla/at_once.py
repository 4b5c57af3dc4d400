"""What runs at once instead of in a graph: operators whose result's shape depends on values, and recurrent layers.

Attention is the CPU's operator on the CPU: at once it is a quarter of the time that it takes written out, and what XLA
compiles from it is as fast or faster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map

from torchport.backend.host import cpu_attention, cpu_fallback
from torchport.backend.interface import BackendData, BackendDevice, KernelRegistrar, TensorData
from torchport.backend.recurrent import register_recurrent_layers

if TYPE_CHECKING:
    from . import XlaBackend

__all__ = ["register"]


def register(backend: XlaBackend, registrar: KernelRegistrar) -> None:
    """On the CPU platform host memory is the device's: PyTorch's CPU kernels run on it without copies."""
    devices = {device.type for device in backend.devices()}
    if devices == {"cpu"}:
        registrar.fallback("Dense", _Boxed(backend))
        registrar.impl("aten::scaled_dot_product_attention", "Autograd", cpu_attention)
        register_recurrent_layers(registrar, exact=False)


class _Boxed:
    """PyTorch's CPU kernel of any operator, on the backend's values."""

    def __init__(self, backend: XlaBackend) -> None:
        self.backend = backend

    def __call__(self, op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        device = BackendDevice("cpu")

        def to_host(value: Any) -> Any:
            if not isinstance(value, BackendData):
                return value
            return TensorData(value.device, value.spec, self.backend.from_device(value))

        def to_xla(value: Any) -> Any:
            if not isinstance(value, TensorData) or value.tensor is None:
                return value
            return self.backend.to_device(value.tensor, device)

        host_args, host_kwargs = tree_map(to_host, (list(args), dict(kwargs)), is_leaf=_is_data)
        # A result may be a view of an argument; values here are immutable, so nobody can tell.
        return tree_map(to_xla, cpu_fallback(op, host_args, host_kwargs), is_leaf=_is_data)


def _is_data(value: Any) -> bool:
    return isinstance(value, BackendData)
