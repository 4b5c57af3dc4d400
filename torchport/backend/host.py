"""For backends whose data is host memory: run a single operator at once with PyTorch's CPU kernels, without copies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

from ..core.specs import TensorSpec
from .interface import BackendData, BackendDevice, TensorData

__all__ = ["cpu_fallback"]


def cpu_fallback(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A boxed kernel: the operator on CPU, for values that are :class:`TensorData`.

    Give it to ``registrar.fallback("Dense", cpu_fallback)``: it then runs what a graph of static shapes cannot hold,
    such as ``nonzero`` or indexing with a mask. Raises what the CPU kernel raises.
    """
    device = BackendDevice("cpu")

    def to_tensor(value: Any) -> Any:
        if isinstance(value, TensorData):
            return value.tensor
        return torch.device("cpu") if isinstance(value, torch.device) else value

    def to_data(value: Any) -> Any:
        return TensorData(device, TensorSpec.of(value), value) if isinstance(value, torch.Tensor) else value

    call_args, call_kwargs = tree_map(
        to_tensor, (list(args), dict(kwargs)), is_leaf=lambda value: isinstance(value, BackendData)
    )
    with torch.no_grad():
        return tree_map(to_data, op(*call_args, **call_kwargs))
