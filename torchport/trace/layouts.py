"""What is not strided: why this device refuses it, in words."""

from __future__ import annotations

from typing import Final

__all__ = ["NESTED", "ONEDNN", "QUANTIZED", "SPARSE", "kind_of", "refusal"]

SPARSE: Final = "sparse"
QUANTIZED: Final = "quantized"
NESTED: Final = "nested"
ONEDNN: Final = "mkldnn"

_INSTEAD: Final = {
    SPARSE: "keep it on the CPU (x.cpu()), or move its dense form (x.to_dense()); for gradients of a gather write "
    "sparse_grad=False",
    QUANTIZED: "keep it on the CPU (x.cpu()), or move x.dequantize()",
    NESTED: "write layout=torch.jagged, which works on this device, or keep it on the CPU (x.cpu())",
    ONEDNN: "keep it on the CPU (x.cpu()), or leave the layout out",
}
_NAMES: Final = {
    SPARSE: "a sparse tensor",
    QUANTIZED: "a quantized tensor",
    NESTED: "a nested tensor with layout=torch.strided",
    ONEDNN: "a tensor of layout torch._mkldnn",
}


def refusal(kind: str) -> str:
    """The message of the error for one of the kinds above."""
    return f"this device holds strided tensors only, and the operator makes or takes {_NAMES[kind]}; {_INSTEAD[kind]}"


def kind_of(layout: object) -> str:
    """The kind of a ``torch.layout`` other than strided."""
    return ONEDNN if "mkldnn" in str(layout) else SPARSE
