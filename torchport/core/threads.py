"""Cores for the compiler's process: while one compiles, what the program computes takes fewer threads.

OpenMP's threads meet after each loop. If a compiler has the core of one of them the others wait for it, spinning,
through every operator, and between them they leave the compiler next to nothing. On two cores a GPT-2's compile took
80 s beside a training of two threads, and 30 s beside the same training on one, whose steps took no longer.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any, Final

import torch

from .torch_library import cpu_library

__all__ = ["FewerThreads", "cores", "leave_cores", "most", "native_arguments"]

most: Final = ctypes.c_int(0)
"""The most threads that computing should take, which C++ reads, too; 0: as many as PyTorch is set to."""


def _none_busy() -> None:
    most.value = 0


os.register_at_fork(after_in_child=_none_busy)


def cores() -> int:
    """How many cores the program may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def leave_cores(count: int) -> None:
    """Compute on so many cores less than there are, and on one at least; with 0, on as many as PyTorch is set to."""
    most.value = max(1, cores() - count) if count else 0


class _Functions:
    """What sets the calling thread's number of threads. MKL has one of its own once PyTorch's is set."""

    def __init__(self, library: Any) -> None:
        self.set = library.omp_set_num_threads
        self.of_mkl = getattr(library, "MKL_Set_Num_Threads_Local", None)
        self.set.argtypes, self.set.restype = [ctypes.c_int], None
        if self.of_mkl is not None:
            self.of_mkl.argtypes, self.of_mkl.restype = [ctypes.c_int], ctypes.c_int


def _find() -> _Functions | None:
    try:
        return _Functions(cpu_library())
    except AttributeError:  # another library than OpenMP, or none that can be found
        return None


_functions: Final = _find()


def native_arguments() -> tuple[int, int, int]:
    """For C++: where :data:`most` is, and the functions that set OpenMP's and MKL's number; zeros where none are."""
    if _functions is None:
        return 0, 0, 0
    functions = (_functions.set, _functions.of_mkl)
    of_openmp, of_mkl = (0 if one is None else ctypes.cast(one, ctypes.c_void_p).value or 0 for one in functions)
    return ctypes.addressof(most), of_openmp, of_mkl


class FewerThreads:
    """A block whose operators take no more threads than :data:`most`; not in PyTorch's deterministic mode.

    Sums over several threads have another order: when a compile began must not show there.
    C++ has the same in ``native/threads.h``.
    """

    __slots__ = ("_before", "_of_mkl")

    def __enter__(self) -> None:
        self._before, limit = 0, most.value  # asked once: a compile may end at any moment
        if not limit or _functions is None or torch.are_deterministic_algorithms_enabled():
            return
        before = torch.get_num_threads()  # in a thread that has not computed yet this sets PyTorch's number
        if limit < before:
            self._before = before
            _functions.set(limit)
            self._of_mkl = 0 if _functions.of_mkl is None else _functions.of_mkl(limit)

    def __exit__(self, *_: object) -> None:
        if self._before:
            assert _functions is not None
            _functions.set(self._before)
            if _functions.of_mkl is not None:
                _functions.of_mkl(self._of_mkl)
