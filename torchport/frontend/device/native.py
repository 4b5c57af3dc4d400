"""Put torchport's C++ libraries in the place of what Python does on the device, where they are there."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ... import native
from ...backend.interface import BackendData
from ...run import donation
from ...run.future import Future
from ...trace import pool, trace, trie
from ...trace.handle import LazyTensor
from ...trace.kernels import Kernel, letters
from ...trace.threads import threads
from . import copies, shims
from .writes import Checked

__all__ = ["install"]


def _use_guard(library: ctypes.PyDLL) -> None:
    library.torchport_use_guard.restype = None
    library.torchport_use_guard()


_OBJECTS: Final = (LazyTensor, trace.Trace, trie.Node, BackendData)
"""The types whose parts C++ looks at."""


def _functions(library: ctypes.PyDLL, **arguments: int) -> list[Any]:
    """Functions of Python objects, by name and number of arguments."""
    found: list[Any] = []
    for name, count in arguments.items():
        function = getattr(library, f"torchport_{name}")
        function.argtypes, function.restype = [ctypes.py_object] * count, ctypes.py_object
        found.append(function)
    return found


def use_flush(library: ctypes.PyDLL) -> None:
    """Do what is done to many values at once with the functions of :data:`torchport.native.flush`."""
    start, alive, sweep, pending = _functions(library, flush_start=6, alive=1, sweep=3, pending=1)
    forget, unshared, own_gradients = _functions(library, forget=1, unshared=2, own_gradients=1)
    start(*_OBJECTS, Future, pool.release)
    pool.use(pool.HandleOperations(alive, sweep, pending, forget))
    donation.use_native(unshared)
    shims.use_native(own_gradients)


def _use_follow(
    library: ctypes.PyDLL, kernels: Sequence[Kernel], forms: Mapping[Any, Any], checked: Sequence[Checked]
) -> None:
    (start,) = _functions(library, follow_start=9)
    follow, same_value = library.torchport_follow, library.torchport_follow_same_value
    follow.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_longlong, ctypes.c_char_p]
    same_value.argtypes = [ctypes.c_char_p]
    out = library.torchport_follow_out
    out.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_longlong, ctypes.py_object]
    follow.restype = same_value.restype = out.restype = ctypes.py_object
    start(*_OBJECTS, threads, (trie.FLOATS, trie.LIMITS), trace.COPIES_UNDER_GRAD, trie.LEAF, trie.SPAN)
    for kernel in kernels:
        kinds = letters(kernel)
        if kinds is None:
            continue
        name = kernel.op._schema.name
        overload = kernel.op._schema.overload_name
        in_place = forms[kernel.op]._schema.name if kernel.op in forms else ""
        follow(name.encode(), overload.encode(), kinds.encode(), kernel.serial, in_place.encode())
    for op in copies.SAME_VALUE:
        same_value(op._schema.name.encode())
    for op, outs, original in checked:
        out(op._schema.name.encode(), op._schema.overload_name.encode(), outs, original)


def install(kernels: Sequence[Kernel], forms: Mapping[Any, Any], checked: Sequence[Checked]) -> None:
    """Called once the device is registered: its guard must not take another device's place.

    ``kernels``: those that PyTorch's dispatcher calls as they are. ``forms``: functional operator → the one
    that does the same in place and has a kernel of this device's. ``checked``: operators with ``out=``.
    """
    native.guard.when_there(_use_guard)
    native.follow.when_there(lambda library: _use_follow(library, kernels, forms, checked))
    native.flush.when_there(use_flush)
