"""torch dtypes ↔ NumPy dtypes as JAX uses them (``ml_dtypes`` supplies what NumPy lacks)."""

from __future__ import annotations

from typing import Any, Final

import ml_dtypes
import numpy as np
import torch

__all__ = ["JAX_DTYPES", "jax_dtype", "wide_dtype"]

JAX_DTYPES: Final[dict[torch.dtype, np.dtype[Any]]] = {
    torch.bool: np.dtype(np.bool_),
    torch.uint8: np.dtype(np.uint8),
    torch.int8: np.dtype(np.int8),
    torch.int16: np.dtype(np.int16),
    torch.int32: np.dtype(np.int32),
    torch.int64: np.dtype(np.int64),
    torch.uint16: np.dtype(np.uint16),
    torch.uint32: np.dtype(np.uint32),
    torch.uint64: np.dtype(np.uint64),
    torch.float16: np.dtype(np.float16),
    torch.bfloat16: np.dtype(ml_dtypes.bfloat16),
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
    torch.complex64: np.dtype(np.complex64),
    torch.complex128: np.dtype(np.complex128),
}
"""Every dtype that a value on the device may have."""

_HALVES: Final = {np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)}


def jax_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """The NumPy dtype of a torch dtype. Raises ``KeyError`` for one that XLA does not have."""
    return JAX_DTYPES[dtype]


def wide_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """What torch's CPU kernels compute in before they round to ``dtype``: float32 for half precision, else the same."""
    return np.dtype(np.float32) if dtype in _HALVES else dtype
