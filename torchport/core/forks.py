"""Locks that a fork waits for, so that a child never finds one that a thread of its parent's has locked for good.

A fork copies the memory and one thread. A lock that another thread holds at that moment would stay locked in the
child, and what it guards half done. So a fork waits a while for each lock that was made here, as Python's ``logging``
does with its own, and the child has all of them open.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from typing import Any, Final

__all__ = ["guarded_lock", "guarded_rlock"]

LONGEST_WAIT: Final = 5.0
"""Seconds that one fork waits for all locks together: a thread may hold one as long as a compiler runs."""

_locks: Final[weakref.WeakSet[Any]] = weakref.WeakSet()
_held: Final[list[Any]] = []


def guarded_lock() -> threading.Lock:
    """A ``threading.Lock`` that a fork waits for."""
    made = threading.Lock()
    _locks.add(made)
    return made


def guarded_rlock() -> threading.RLock:  # pyright: ignore[reportInvalidTypeForm]
    """A ``threading.RLock`` that a fork waits for."""
    made = threading.RLock()
    _locks.add(made)
    return made


def _all() -> list[Any]:
    while True:
        with contextlib.suppress(RuntimeError):  # another thread has made one meanwhile
            return list(_locks)


def _before_fork() -> None:
    end = time.monotonic() + LONGEST_WAIT
    _held[:] = [lock for lock in _all() if lock.acquire(timeout=max(0.0, end - time.monotonic()))]


def _after_fork_in_parent() -> None:
    while _held:
        _held.pop().release()


def _after_fork_in_child() -> None:
    held = set(map(id, _held))
    for lock in _all():
        if id(lock) in held:
            lock.release()  # what this thread itself holds it goes on holding
        elif not getattr(lock, "_is_owned", bool)():
            lock._at_fork_reinit()  # as the standard library does with its own locks
    _held.clear()


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
)  # fmt: skip
