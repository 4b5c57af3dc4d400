"""What a fork leaves of an engine: the child has the parent's memory, and none of its threads.

Waiting for a thread that is not there lasts for ever. OpenMP's threads, which PyTorch's kernels and Inductor's code
use, are ended before a fork, so that parent and child each start their own when they next need them. An engine with
threads that cannot be started again refuses to work in the child (:class:`.SupportsFork`), in words and at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

from ..core.errors import ExecutionError
from .interface import Backend
from .optional import optional_of

__all__ = ["abandon", "end_openmp_team", "is_lost", "refuse_lost"]

_lost: Final[weakref.WeakSet[Backend]] = weakref.WeakSet()

_SOFT: Final = 1
"""``omp_pause_soft`` of OpenMP 5.0 (``omp.h``)."""

_COMPUTES: Final = (
    "preprocess", "preprocess_methods", "preprocess_all", "init", "execute", "start", "execute_on_host", "to_device",
    "borrow",
)  # fmt: skip
"""Methods of a backend that need its engine at work."""


@functools.cache
def _find_pause(torch_file: str) -> Callable[[int], int] | None:
    """OpenMP's ``omp_pause_resource_all`` of the library that PyTorch uses, if it has one."""
    for path in sorted((Path(torch_file).parent / "lib").glob("libgomp*.so*")):
        with contextlib.suppress(OSError, AttributeError):
            library = ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_NOW)
            return library.omp_pause_resource_all
    return None


def end_openmp_team() -> None:
    """End the threads that OpenMP keeps for the calling thread; the next parallel loop starts others.

    A child of a process that has such threads waits for them for ever in its first parallel loop. Other threads'
    teams do no harm: a child has only the thread that forked.
    """
    torch: Any = sys.modules.get("torch")  # the runtime of program files works without
    pause = None if torch is None else _find_pause(torch.__file__)
    if pause is not None:
        pause(_SOFT)


def abandon(*objects: object) -> None:
    """Never destroy these objects, nor what C++ libraries destroy when a process ends: it would wait for threads.

    Memory and files of a process are given back in any case when it ends.
    """
    for one in objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))
    _skip_destructors()


@functools.cache
def _skip_destructors() -> None:
    """Have the process end right after Python has: ``exit`` calls the last function that was registered first."""
    libc = ctypes.CDLL(None)
    with contextlib.suppress(AttributeError):  # glibc's; elsewhere destructors run
        libc.on_exit(libc._exit, None)  # with the exit status
        libc.on_exit(libc.fcloseall, None)


def refuse_lost(backends: Iterable[Backend]) -> None:
    """In a forked child: have backends whose engine is lost say so, instead of waiting for threads that are gone."""
    for backend in backends:
        fork = optional_of(backend).fork
        reason = "" if fork is None else fork.forked()
        if reason:
            _refuse(
                backend,
                f"{backend.name} cannot compute in this process: {reason}. Values that were there can still be read. "
                "Start the process with 'spawn' instead of 'fork', as in multiprocessing.get_context('spawn') or "
                "DataLoader(multiprocessing_context='spawn'), and load programs there; or use the backend only after "
                "the fork",
            )


def is_lost(backend: Backend) -> bool:
    """Whether this is a forked child, and the backend's engine works in the parent only."""
    return backend in _lost


def _refuse(backend: Any, message: str) -> None:
    _lost.add(backend)

    def refuse(*args: object, **options: object) -> None:
        raise ExecutionError(message)

    def nothing(*args: object) -> None:
        return None

    for name in _COMPUTES:
        if hasattr(backend, name):
            setattr(backend, name, refuse)
    backend.is_available = lambda: False
    backend.unavailable_reason = lambda: message
    backend.destroy = abandon
    backend.synchronize = backend.shutdown = nothing
    backend.memory_info = lambda device: {}
