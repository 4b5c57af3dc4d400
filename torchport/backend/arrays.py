"""CPU tensors as NumPy arrays and back, sharing memory; imports neither library before it is needed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import torch

__all__ = ["AS_INTEGERS", "array_to_tensor", "tensor_to_array"]

AS_INTEGERS: Final = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8", "complex32": "uint32"}
"""Dtypes that NumPy does not have, and what their bits are held as."""


def tensor_to_array(tensor: torch.Tensor) -> Any:
    """A CPU tensor as an array that shares its memory; dtypes that NumPy lacks come as integers of their size."""
    name = str(tensor.dtype).removeprefix("torch.")
    if name in AS_INTEGERS:
        import torch

        tensor = tensor.view(getattr(torch, AS_INTEGERS[name]))
    return tensor.numpy()


def array_to_tensor(array: Any, dtype: torch.dtype) -> torch.Tensor:
    """The opposite of :func:`tensor_to_array`; an array that cannot be written is copied."""
    import torch

    if not array.flags.writeable:
        array = array.copy()
    tensor = torch.from_numpy(array) if array.size else torch.empty(array.shape, dtype=dtype)  # NumPy's strides are 0
    return tensor if tensor.dtype is dtype else tensor.view(dtype)
