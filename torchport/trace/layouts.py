"""What is not strided: why this device refuses it, in words."""

from __future__ import annotations

from typing import Any, Final

import torch

from .handle import DEVICE_TYPE

__all__ = ["NESTED", "ONEDNN", "QUANTIZED", "SPARSE", "is_sparse_here", "kind_of", "refusal"]

SPARSE: Final = "sparse"
QUANTIZED: Final = "quantized"
NESTED: Final = "nested"
ONEDNN: Final = "mkldnn"

_INSTEAD: Final = {
    SPARSE: "keep it on the CPU (x.cpu()), or move its dense form (x.to_dense())",
    QUANTIZED: "keep it on the CPU (x.cpu()), or move x.dequantize()",
    NESTED: "write layout=torch.jagged, which works on this device, or keep it on the CPU (x.cpu())",
    ONEDNN: "keep it on the CPU (x.cpu()), or leave the layout out",
}
_NAMES: Final = {
    SPARSE: "another sparse tensor, or makes one of a dense and a sparse one",
    QUANTIZED: "a quantized tensor",
    NESTED: "a nested tensor with layout=torch.strided",
    ONEDNN: "a tensor of layout torch._mkldnn",
}


_EXCEPT: Final = {SPARSE: ", apart from COO ones on its index 0"}


def refusal(kind: str) -> str:
    """The message of the error for one of the kinds above."""
    held = f"this device holds strided tensors only{_EXCEPT.get(kind, '')}"
    return f"{held}, and the operator makes or takes {_NAMES[kind]}; {_INSTEAD[kind]}"


def kind_of(layout: object) -> str:
    """The kind of a ``torch.layout`` other than strided."""
    return ONEDNN if "mkldnn" in str(layout) else SPARSE


def is_sparse_here(value: Any) -> bool:
    """Whether a value is a COO tensor of this device."""
    return isinstance(value, torch.Tensor) and value.layout is torch.sparse_coo and value.device.type == DEVICE_TYPE
