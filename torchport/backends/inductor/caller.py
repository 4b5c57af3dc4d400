"""The C++ that calls compiled libraries (``caller.cpp``): built once per machine, where there is a compiler.

Where it is not there, as on a machine without a compiler, :mod:`.library` makes the call through ctypes alone.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from torchport.backend.interface import TensorData
from torchport.backend.optional import ended
from torchport.core.specs import TensorSpec
from torchport.core.threads import native_arguments
from torchport.native import NativeLibrary

__all__ = ["Caller", "layouts", "load"]

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


class Caller:
    """The functions of ``caller.cpp``, by their names without ``torchport_``.

    ``open``: (run, destroy, last error, operator's last error, container, layouts, their length, number of inputs, of
    outputs) → a library; ``resize``: (library, other layouts, their length) → another one with its container; ``close``
    frees a container that is the library's own. ``call``: (library, list of tensors, whether to empty it) →
    results, the position of an input that is not as expected, or what went wrong. ``start``: (library, tensors and
    slots, positions of those donated, overwritten and of results to copy, number of threads) → (what says how it goes,
    slots of the results). ``host_copy``: of a tensor or slot, what the host may have. ``chain``: (numbers of inputs and
    of values, parts, calls, results) → libraries that are called in order; ``run_chain``: (chain, sequence
    of :class:`.TensorData`, positions of those that lose their tensors to it) → results, or what went wrong.
    """

    def __init__(self, library: ctypes.PyDLL) -> None:
        pointer, obj, count = ctypes.c_void_p, ctypes.py_object, ctypes.c_int64
        for name, result, arguments in (
            ("open", pointer, [*[pointer] * 6, *[count] * 3]),
            ("resize", pointer, [pointer, pointer, count]),
            ("close", obj, [pointer]),
            ("call", obj, [pointer, obj, ctypes.c_int]),
            ("start", obj, [pointer, obj, obj, obj, obj, ctypes.c_int]),
            ("host_copy", obj, [obj]),
            ("chain", obj, [count, count, obj, obj, obj]),
            ("run_chain", obj, [obj, obj, obj]),
            ("caller_start", obj, [obj, obj, pointer, pointer]),
        ):
            function = getattr(library, f"torchport_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)
        _, of_openmp, of_mkl = native_arguments()
        self.caller_start(TensorData, ended, of_openmp or None, of_mkl or None)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


@functools.cache
def _caller(library: ctypes.PyDLL) -> Caller:
    return Caller(library)


def load() -> Caller | None:
    """The functions, if the library is there."""
    found = library.load()
    return None if found is None else _caller(found)


def layouts(specs: Iterable[TensorSpec]) -> Any | None:
    """What ``caller.cpp`` compares tensors with, as an array of int64; ``None`` for a dtype it does not know."""
    numbers: list[int] = []
    for spec in specs:
        if spec.dtype not in _DTYPE_CODES:
            return None
        numbers += [_DTYPE_CODES[spec.dtype], len(spec.shape), *spec.shape, *spec.strides]
    return (ctypes.c_int64 * max(1, len(numbers)))(*numbers)
