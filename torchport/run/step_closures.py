"""Functions that run when a step has ended: ``torchport.step_closure``.

A closure keeps its tensors alive, so they are results of the step's computation and reading them cuts nothing.
Synchronous closures run on the thread that ended the step. Asynchronous ones run in order on a thread of their own, a
bounded number ahead; what they raise is raised on the program's side when its next step ends, or by :func:`sync`.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from typing import Any, Final

from ..core import metrics, traffic
from ..core.errors import TorchportError

__all__ = ["finish", "step_closure", "step_ended"]

WAITING_AT_MOST: Final = 64
"""Asynchronous closures that may wait; the step that queues one more waits for room."""

Closure = Callable[[], object]


class _Pending(threading.local):
    """The calling thread's closures of the step that has not ended yet."""

    def __init__(self) -> None:
        self.now: list[Closure] = []
        self.later: list[Closure] = []


class _Runner:
    """The thread of the asynchronous closures; it starts with the first of them."""

    def __init__(self) -> None:
        self._queue: queue.Queue[Closure | None] = queue.Queue(WAITING_AT_MOST)
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._errors: list[Exception] = []

    def put(self, closure: Closure) -> None:
        """Queue a closure; waits while too many wait already."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="torchport step closures", daemon=True)
                self._thread.start()
        self._queue.put(closure)

    def _work(self) -> None:
        while True:
            closure = self._queue.get()
            try:
                if closure is None:
                    return
                closure()
            except Exception as error:
                self._errors.append(error)
            finally:
                del closure
                self._queue.task_done()

    def wait(self) -> None:
        """Return when every queued closure has run."""
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._queue.join()

    def take_error(self) -> Exception | None:
        """The first exception since the last call, the others noted on it."""
        errors, self._errors = self._errors, []
        return _first(errors)


_pending: Final = _Pending()
_runner = _Runner()


def _first(errors: list[Exception]) -> Exception | None:
    if not errors:
        return None
    for other in errors[1:]:
        errors[0].add_note(f"torchport: another step closure raised {type(other).__name__}: {other}")
    return errors[0]


def step_closure(fn: Callable[..., object], *args: Any, run_async: bool = False, **kwargs: Any) -> None:
    """Call ``fn(*args, **kwargs)`` when the step ends: after ``Optimizer.step`` or :func:`torchport.sync`.

    Closures of a step run in the order they were given, each also when one before it raised; the step then raises the
    first exception. ``run_async``: on a thread of its own, while the program goes on; its exception is raised when a
    later step ends, or by the next :func:`torchport.sync`, which waits for it. The process does not end before they
    have run. Raises :class:`TorchportError` if ``fn`` cannot be called.
    """
    if not callable(fn):
        raise TorchportError(f"step_closure() takes a function and its arguments, got {type(fn).__name__}")
    (_pending.later if run_async else _pending.now).append(lambda: fn(*args, **kwargs))


def step_ended() -> None:
    """Run the calling thread's closures. Raises the first exception of one, or of an earlier asynchronous one."""
    traffic.step_ended()
    if not _pending.now and not _pending.later and not _runner._errors:
        return
    later, _pending.later = _pending.later, []
    now, _pending.now = _pending.now, []
    deferred = _runner.take_error()  # before this step's own are started: theirs belong to a later one
    for closure in later:
        _runner.put(closure)
    del later
    errors: list[Exception] = []
    for closure in now:
        try:
            closure()
        except Exception as error:
            errors.append(error)
    metrics.count("StepClosures", len(now))
    first = _first([*errors, *([deferred] if deferred is not None else [])])
    if first is not None:
        raise first


def finish() -> None:
    """Run what is left and wait for it. Raises as :func:`step_ended` does."""
    try:
        step_ended()
    finally:
        _runner.wait()
    error = _runner.take_error()
    if error is not None:
        raise error


def _renew() -> None:
    """In a forked child: the thread and what it had to do stay with the parent."""
    global _runner
    _runner = _Runner()


os.register_at_fork(after_in_child=_renew)
