"""Factories that take tensors as numbers: ``torch.linspace(torch.tensor(0.), torch.tensor(1.), 5, device="port")``.

PyTorch reads such tensors and makes the result where ``device`` says, wherever the tensors are. Neither the tensors nor
their device belong to the result, so the factory is called with their numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from .opaque import opaque

__all__ = ["OPS", "install"]

aten = torch.ops.aten
OPS: Final = tuple(
    getattr(packet, name)
    for packet in (aten.linspace, aten.logspace)
    for name in ("Tensor_Tensor", "Tensor_Scalar", "Scalar_Tensor")
)
"""The operators of this kind."""


def install(library: torch.library.Library) -> None:
    """Register the factories for results on this device, and at Functionalize for arguments on this device."""
    for op in OPS:
        for key in ("PrivateUse1", "Functionalize"):
            library.impl(op._schema.name.removeprefix("aten::") + "." + op._overloadname, opaque(_of_numbers(op)), key)


def _of_numbers(op: Any) -> Callable[..., Any]:
    factory = op.overloadpacket.default

    def call(*args: Any, **kwargs: Any) -> Any:
        tensors = [value for value in args[:2] if isinstance(value, torch.Tensor)]
        if any(tensor.dim() for tensor in tensors):  # the CPU raises its error
            return op(*[v.cpu() if isinstance(v, torch.Tensor) else v for v in args], **{**kwargs, "device": "cpu"})
        numbers = [value.item() if isinstance(value, torch.Tensor) else value for value in args[:2]]
        return factory(*numbers, *args[2:], **kwargs)

    return call
