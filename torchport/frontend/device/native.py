"""Put torchport's C++ libraries in the place of what Python does on the device, where they are there."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

from ...backend.interface import BackendData
from ...core import native
from ...lazy import trace
from ...lazy.kernel import Kernel, letters
from ...lazy.runtime import threads
from ...lazy.tensor import LazyTensor
from . import inplace

__all__ = ["install"]


def _use_guard(library: ctypes.PyDLL) -> None:
    library.torchport_use_guard.restype = None
    library.torchport_use_guard()


def _use_lists(library: ctypes.PyDLL) -> None:
    inner, written, write = library.torchport_inner, library.torchport_written, library.torchport_write
    alive = library.torchport_alive
    inner.argtypes = alive.argtypes = [ctypes.py_object]
    written.argtypes = write.argtypes = [ctypes.py_object, ctypes.py_object]
    inner.restype = written.restype = write.restype = alive.restype = ctypes.py_object
    inplace.use_native(inner, written, write)
    trace.use_native(alive)


def _use_follow(library: ctypes.PyDLL, kernels: Sequence[Kernel], forms: Mapping[Any, Any]) -> None:
    start, follow = library.torchport_follow_start, library.torchport_follow
    start.argtypes = [ctypes.py_object] * 6
    follow.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_longlong, ctypes.c_char_p]
    start.restype = follow.restype = ctypes.py_object
    start(threads, LazyTensor, trace.Trace, trace.Node, BackendData, trace.FLOAT)
    for kernel in kernels:
        kinds = letters(kernel)
        if kinds is None:
            continue
        name = kernel.op._schema.name
        overload = kernel.op._schema.overload_name
        in_place = forms[kernel.op]._schema.name if kernel.op in forms else ""
        follow(name.encode(), overload.encode(), kinds.encode(), kernel.number, in_place.encode())


def install(kernels: Sequence[Kernel], forms: Mapping[Any, Any]) -> None:
    """Called once the device is registered: its guard must not take another device's place.

    ``kernels``: those that PyTorch's dispatcher calls as they are. ``forms``: functional operator → the one that does the
    same in place and has a kernel of this device's.
    """
    native.guard.when_there(_use_guard)
    native.follow.when_there(lambda library: _use_follow(library, kernels, forms))
    native.lists.when_there(_use_lists)
