"""The C++ that calls compiled libraries (``caller.cpp``): built once per machine, where there is a compiler.

Where it is not there, as on a machine without a compiler, :mod:`.library` makes the call through ctypes alone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from torchport.core.native import NativeLibrary
from torchport.core.specs import TensorSpec

__all__ = ["expected_layout", "load"]

_DTYPE_CODES: Final = {
    dtype: code
    for code, dtype in enumerate(
        (
            torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32,
            torch.float64, torch.complex32, torch.complex64, torch.complex128, torch.bool,
        )
    )
} | {torch.bfloat16: 15}  # fmt: skip
"""c10's ``ScalarType`` numbers (``c10/core/ScalarType.h``)."""


library: Final = NativeLibrary(Path(__file__).with_suffix(".cpp"), ("torch_python", "torch_cpu", "torch", "c10"))


def load() -> Callable[..., Any] | None:
    """``(run, container, list of tensors, expected layout, number of outputs, let go) → results``, or ``None``."""
    found = library.load()
    if found is None:
        return None
    function = found.torchport_call
    pointer = ctypes.c_void_p
    function.argtypes = [pointer, pointer, ctypes.py_object, pointer, ctypes.c_int64, ctypes.c_int]
    function.restype = ctypes.py_object
    return function


def expected_layout(specs: Sequence[TensorSpec]) -> Any | None:
    """What ``caller.cpp`` compares inputs with, as an array of int64; ``None`` for a dtype it does not know."""
    numbers: list[int] = []
    for spec in specs:
        if spec.dtype not in _DTYPE_CODES:
            return None
        numbers += [_DTYPE_CODES[spec.dtype], len(spec.shape), *spec.shape, *spec.strides]
    return (ctypes.c_int64 * max(1, len(numbers)))(*numbers)
