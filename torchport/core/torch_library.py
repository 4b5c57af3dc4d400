"""PyTorch's CPU library as ctypes sees it: C functions that its Python does not have."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch

__all__ = ["cpu_library"]


@functools.cache
def cpu_library() -> ctypes.PyDLL | None:
    """The library with the CPU's operators, which is loaded already; ``None`` where it has another name.

    Functions of the libraries it depends on are found in it, too. They are called with Python's lock held.
    """
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    return ctypes.PyDLL(str(path)) if path.exists() else None
