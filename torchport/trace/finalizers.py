"""Finalizers (``__del__``) run wherever the garbage collector comes by, also in the middle of a kernel or of a flush.

A finalizer that runs in the middle of a kernel records into traces of its own (:meth:`.ThreadTraces.set_aside`). While
a thread holds the lock of recording and flushing, garbage collection is off. It is on again while a graph is compiled,
which takes long; a finalizer that runs then cannot compute.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from ..core.errors import ExecutionError
from .trace import lock

__all__ = ["is_busy", "may_collect", "refuse_computing", "running", "without_collecting"]


class _Running(threading.local):
    here = False
    """Whether the garbage collector runs on the calling thread."""
    busy = False
    """Whether it came by while the thread recorded, compiled or computed."""


running: Final = _Running()


class _WithoutCollecting:
    """No garbage is collected in the block. Enter it with the lock held, so that one thread at a time does."""

    def __init__(self) -> None:
        self._was: list[bool] = []

    def __enter__(self) -> None:
        self._was.append(gc.isenabled())
        gc.disable()

    def __exit__(self, *exc: object) -> None:
        if self._was.pop():
            gc.enable()


without_collecting: Final = _WithoutCollecting()


@contextmanager
def may_collect() -> Iterator[None]:
    """Inside ``without_collecting``: a block that takes long and makes much garbage."""
    was = bool(without_collecting._was) and without_collecting._was[0]
    if was:
        gc.enable()
    try:
        yield
    finally:
        if was:
            gc.disable()


def is_busy() -> bool:
    """Whether the calling thread records, compiles or computes."""
    return lock._is_owned()  # type: ignore[attr-defined]


def refuse_computing() -> None:
    """Raise :class:`ExecutionError` in a finalizer that interrupts this thread while it computes or compiles."""
    if running.here and running.busy:
        raise ExecutionError(
            "a finalizer (__del__) ran while a graph was being compiled, and cannot compute values then; "
            "read values before the object that holds them goes"
        )
