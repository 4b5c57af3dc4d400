"""Put torchport's C++ libraries in the place of what Python does on the device, where they are there."""

from __future__ import annotations

import ctypes

from ...core import native
from ...lazy import trace
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


def install() -> None:
    """Called once the device is registered: its guard must not take another device's place."""
    native.guard.when_there(_use_guard)
    native.lists.when_there(_use_lists)
