"""The traces of each thread: one per device index and mode, and separate ones for finalizers.

Finalizers (``__del__``) run wherever the garbage collector comes by, also in the middle of a kernel
(:mod:`.finalizers`).
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable
from typing import ClassVar, Final

from ..core.config import config
from ..core.errors import TorchportError
from . import finalizers
from .eager import EagerTrace
from .trace import Runner, Trace, owners

__all__ = ["every_trace", "flush_mine", "threads"]


def _unbound(index: int) -> Runner:
    raise RuntimeError("the port device is not installed")


class _ThreadEnd:
    """Goes with its thread, and computes what the thread leaves pending: others may hold those values."""

    def __init__(self, traces: dict[int, Trace]) -> None:
        self._traces = traces
        self._process = os.getpid()

    def __del__(
        self, is_finalizing: Callable[[], bool] = sys.is_finalizing, getpid: Callable[[], int] = os.getpid
    ) -> None:
        # Default arguments, because this module's names may be gone when the interpreter ends. A forked child drops
        # what other threads had while it still holds, for good, the locks that they held.
        if not is_finalizing() and getpid() == self._process:
            for trace in self._traces.values():
                trace.runtime.flush(trace, "thread end")


class ThreadTraces(threading.local):
    """The calling thread's traces: index 0 as an attribute, once it is there, because every kernel starts there."""

    trace: Trace
    runner_of: ClassVar[Callable[[int], Runner]] = staticmethod(_unbound)
    """Who runs the traces of a device index; whoever binds indices to backends sets it."""

    def __init__(self) -> None:
        self.eager = config.mode == "eager"
        self._by_index: dict[int, Trace] = {}
        self._of_other_mode: dict[int, Trace] = {}
        self._at_end = [_ThreadEnd(self._by_index), _ThreadEnd(self._of_other_mode)]
        self._of_finalizers: tuple[dict[int, Trace], dict[int, Trace]] = ({}, {})
        # Last: a collection in the middle of this, which :meth:`set_aside` hears of, must find everything or nothing.
        self._set_aside: tuple[Trace | None, dict[int, Trace], dict[int, Trace]] | None = None

    def of(self, index: int) -> Trace:
        """The calling thread's trace on a device index. Raises :class:`TorchportError` for an unbound index.

        Its index is another one where the index that was asked for only stands for that one.
        """
        trace = self._by_index.get(index)
        if trace is None:
            runner = type(self).runner_of(index)
            if runner.index != index:
                return self.of(runner.index)
            kind = EagerTrace if self.eager else Trace
            trace = self._by_index[index] = kind(runner)
        if index == 0 and not trace.direct:  # kernels that do not find it ask here
            self.trace = trace
        return trace

    def switch(self, eager: bool) -> None:
        """Trace in the other mode from now on; what is pending is computed. Errors stay with their values."""
        if eager == self.eager:
            return
        for trace in self.mine():
            trace.runtime.flush(trace, "mode")
        self._by_index, self._of_other_mode = self._of_other_mode, self._by_index
        self.eager = eager
        self.__dict__.pop("trace", None)

    def hide(self, trace: Trace) -> None:
        """Have kernels ask for a trace of the calling thread: its operators are not to be recorded for now."""
        if self.__dict__.get("trace") is trace:
            del self.trace

    def set_aside(self) -> None:
        """Finalizers are about to run, maybe in the middle of a kernel: what they do goes to traces of their own."""
        mine = self.__dict__  # one look-up: a collection is frequent, a finalizer that computes is rare
        if mine.get("_set_aside", mine) is None:
            finalizers.running.here, finalizers.running.busy = True, finalizers.is_busy()
            mine["_set_aside"] = mine.pop("trace", None), mine["_by_index"], mine["_of_other_mode"]
            mine["_by_index"], mine["_of_other_mode"] = mine["_of_finalizers"]

    def take_up(self) -> None:
        """Finalizers have run: what they left pending is computed, and the thread goes on where it was."""
        mine = self.__dict__
        if mine.get("_set_aside") is None:
            return
        try:
            lazy, eager = mine["_of_finalizers"]
            if (lazy or eager) and not finalizers.is_busy():
                for trace in [*lazy.values(), *eager.values()]:
                    trace.runtime.flush(trace, "finalizer")
        finally:  # an interrupt may come anywhere, and then this is done once more
            trace, mine["_by_index"], mine["_of_other_mode"] = mine["_set_aside"]
            mine.pop("trace", None)
            if trace is not None:
                mine["trace"] = trace
            finalizers.running.here = False
            mine["_set_aside"] = None

    def owns(self, trace: Trace) -> bool:
        """Whether a trace is the calling thread's."""
        return self._by_index.get(trace.index) is trace

    def mine(self) -> list[Trace]:
        """The calling thread's traces."""
        return list(self._by_index.values())


threads: Final = ThreadTraces()


def _around_collection(phase: str, info: object, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
    """Called by the garbage collector: it runs finalizers (``__del__``) wherever a program happens to be."""
    if not is_finalizing():
        if phase == "start":
            threads.set_aside()
        else:
            threads.take_up()


gc.callbacks.extend([_around_collection] * 2)
"""Twice, for Python ignores an interrupt in the first: the thread would go on as if it were in a finalizer."""


def every_trace() -> list[Trace]:
    """The traces of all threads."""
    return list(owners.values())


def flush_mine(cause: str) -> TorchportError | None:
    """Flush every trace of the calling thread; returns the first error."""
    errors = [error for trace in threads.mine() if (error := trace.runtime.flush(trace, cause)) is not None]
    return errors[0] if errors else None
