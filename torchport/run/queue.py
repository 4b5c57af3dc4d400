"""A device's queue: jobs that run while the program goes on, on the backend's own queue or on a thread per device.

A backend with a queue of its own is told to start (:class:`.SupportsStart`). Where there is none, a thread runs jobs in
order; it never compiles and never takes the lock that recording and flushing hold.
"""

from __future__ import annotations

import contextlib
import enum
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Final

import torch

from ..backend.interface import Backend, BackendDevice
from ..backend.optional import SupportsOverlap, collectors, optional_of
from ..core import metrics
from ..core.config import config
from ..core.default_state import default_state
from ..core.errors import ExecutionError, TorchportError
from ..core.profiling import is_profiled
from ..trace.trace import lock
from .future import UnseenErrors
from .jobs import Job, JobState, here, on_device_thread
from .overlap_trial import runs_beside

__all__ = ["DeviceQueue", "Where", "queue_of", "queues"]

SHORT: Final = 0.005
"""Seconds under which a computation runs on the calling thread if the device is idle. The other thread may have to wait
for the interpreter as long as Python's switch interval, which this is; on two busy cores a step with a computation of
0.4 ms took 3.6 ms longer when it was handed over."""

LITTLE: Final = 0.0001
"""Seconds under which starting a computation on the backend's own queue would take about as long as computing it."""

QUEUED_AT_MOST: Final = 2
"""Computations that may wait behind the running one; each holds its inputs in memory."""


class Where(enum.Enum):
    """Where a job runs.

    ``HERE``: on the calling thread. ``OVERLAPPED``: there, while the device is at another job. ``THREAD``: on the
    device's own thread. ``BACKEND``: on the backend's own queue.
    """

    HERE = enum.auto()
    OVERLAPPED = enum.auto()
    THREAD = enum.auto()
    BACKEND = enum.auto()


def _execution() -> str:
    """What ``config.execution`` says; while a profiler is on, which sees the program's thread, that is where to run."""
    return "inline" if config.execution == "auto" and is_profiled() else config.execution


class DeviceQueue:
    """Has one device's jobs run in order, while the program goes on.

    ``starts``: the backend has a queue of its own (:class:`.SupportsStart`). The thread begins with the first job that
    it is needed for. What the backend has started and what waits for the thread are never there at the same time.
    """

    def __init__(self, name: str, starts: bool, overlap: SupportsOverlap | None = None) -> None:
        self.name = name
        self.starts = starts
        self._overlap = overlap
        self.running = threading.RLock()
        """Held while a computation runs, on whichever thread: one at a time. Also while the backend is told to start
        one, so that a fork finds out about it."""
        self._started: deque[Job] = deque()
        self._queue: deque[Job] = deque()
        self._changed = threading.Condition(threading.Lock())
        self._current: Job | None = None
        self._thread: threading.Thread | None = None
        self._stopping = False
        self.failed: list[Job] = []
        """Jobs that failed on the worker and whose values nobody has asked for."""
        self.unseen = UnseenErrors()
        """What such jobs ended in, if it was not raised yet."""

    def poll(self) -> bool:
        """Collect what was started and has ended; whether something is left that runs or waits."""
        return self._thread_is_busy() or self.collect_ended()

    def _thread_is_busy(self) -> bool:
        return self._current is not None or bool(self._queue)

    # -- where a job runs ------------------------------------------------------------------------------------
    def place(self, job: Job, wanted_now: bool, startable: bool = True) -> Where:
        """Settle where a job runs. Collects what has ended, and waits for what has to end before.

        ``wanted_now``: the calling thread needs a value at once. ``startable``: the backend has not refused it.
        """
        if startable and self._is_to_be_started(job, wanted_now):
            return Where.BACKEND
        return self._here_or_thread(job, wanted_now)

    def _is_to_be_started(self, job: Job, wanted_now: bool) -> bool:
        """Settle whether it pays to have the backend start a job."""
        computation = job.computation
        assert computation is not None
        if not self.starts or computation.backend is not job.runtime.backend:  # such as one that is interpreted
            return False
        if not computation.checked or self._stopping:
            return False
        execution = _execution()
        if execution != "auto":
            if execution == "inline" or on_device_thread():
                return False
            self._wait(self._thread_is_busy)
            return True
        if self._thread_is_busy():
            return False
        is_busy, pays = self.collect_ended(), self._should_overlap()
        if pays is None:
            return not wanted_now and computation.seconds > LITTLE and runs_beside(computation)
        if is_busy:
            return not (wanted_now and self._is_short(job) and self._can_overlap(job))
        return not wanted_now and computation.seconds > LITTLE and pays

    def _here_or_thread(self, job: Job, wanted_now: bool) -> Where:
        """Settle whether a job runs at once on the calling thread, overlapped or not, or on the device's."""
        assert job.computation is not None
        backend, short, execution = job.computation.backend, self._is_short(job), _execution()
        if self._started:  # it could not be started itself
            if execution == "auto" and wanted_now and short and self._can_overlap(job):
                return Where.OVERLAPPED
            self.collect_started()
        if execution != "auto":
            return Where.THREAD if execution == "worker" and not self._stopping else Where.HERE
        if not backend.capabilities.releases_gil or self._stopping:
            return Where.HERE
        if self.poll():
            return Where.OVERLAPPED if wanted_now and short and self._can_overlap(job) else Where.THREAD
        return Where.THREAD if not (wanted_now or short) and self._should_overlap() else Where.HERE

    def _should_overlap(self) -> bool | None:
        return self._overlap is None or self._overlap.should_overlap()

    @staticmethod
    def _is_short(job: Job) -> bool:
        """Whether a computation is not worth the thread. Before its first run nobody knows how long it takes."""
        assert job.computation is not None
        return not job.computation.checked or job.computation.seconds <= SHORT

    @staticmethod
    def _can_overlap(job: Job) -> bool:
        assert job.computation is not None
        return job.runtime.backend.capabilities.concurrent and job.computation.checked and job.has_arguments()

    # -- the backend's own queue -----------------------------------------------------------------------------
    def start(self, job: Job) -> bool:
        """Have the backend start a job that has made its futures, if it can. Raises :class:`ExecutionError`."""
        self._started.append(job)  # first, so that an interrupt cannot come between
        begun = False
        try:
            begun = job.start()
        finally:
            if not begun and job.state is not JobState.STARTED:
                self._started.remove(job)
        return begun

    def collect_ended(self) -> bool:
        """Collect what was started and has ended; whether there is something left."""
        while self._started:
            with contextlib.suppress(IndexError):  # another thread collects, too
                job = self._started[0]
                if job.started is None or not job.started.done():
                    return True
                self.collect(job)
        return False

    def collect(self, job: Job) -> None:
        """Wait for a job that was started. Its error is kept for whoever needs a value."""
        if job.started is None:  # another thread is about to start it
            time.sleep(0)
            return
        if job.started.done():
            job.collect()
        else:
            with metrics.metrics.timer("DeviceWaitTime"):
                job.collect()
        with contextlib.suppress(ValueError):
            self._started.remove(job)

    def collect_started(self) -> None:
        """Wait for everything that was started."""
        while self._started:
            with contextlib.suppress(IndexError):
                self.collect(self._started[0])

    # -- the thread ------------------------------------------------------------------------------------------
    def submit(self, job: Job) -> None:
        """Queue a job."""
        job.state = JobState.QUEUED
        job.threads = torch.get_num_threads()
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=f"torchport {self.name}", daemon=True)
                self._thread.start()
            self._queue.append(job)
            self._changed.notify_all()
        metrics.count("AsyncExecute")

    def wait_for_room(self) -> None:
        """Return when few enough jobs wait: the program must not run ahead of the device without bound."""
        while len(self._started) > QUEUED_AT_MOST + 1:
            with metrics.metrics.timer("QueueWaitTime"), contextlib.suppress(IndexError):
                self.collect(self._started[0])
        if len(self._queue) > QUEUED_AT_MOST and not on_device_thread():
            with metrics.metrics.timer("QueueWaitTime"), self._changed:
                while len(self._queue) > QUEUED_AT_MOST:
                    self._changed.wait()

    def wait_for(self, job: Job) -> None:
        """Return when a queued job has ended. Raises :class:`ExecutionError` on the worker itself."""
        if on_device_thread():
            raise ExecutionError("a finalizer on the device's own thread cannot wait for values that the thread brings")
        self._wait(lambda: job.state in (JobState.QUEUED, JobState.RUNNING))

    def drain(self) -> None:
        """Return when every job has ended."""
        if on_device_thread():
            return
        self.collect_started()
        if self.poll():
            self._wait(self._thread_is_busy)

    def _wait(self, unfinished: Callable[[], bool]) -> None:
        """Wait; what the worker has not begun meanwhile is done here, since handing it over would take longer."""
        while unfinished():
            with self._changed:
                job = self._take()
                if job is None and unfinished():
                    with metrics.metrics.timer("DeviceWaitTime"):
                        self._changed.wait()
            if job is not None:
                with default_state():
                    self._perform(job)
                del job

    def settle_failures(self) -> None:
        """Find out which values the failed jobs could bring; their errors are kept until somebody has seen them."""
        failed, self.failed = self.failed, []
        for job in failed:
            if job.futures:
                job.finish()
                if job.error is not None:
                    self.unseen.add(job.error)

    def take_unseen(self) -> TorchportError | None:
        """The first error that nobody has seen; all are forgotten."""
        self.settle_failures()
        errors = self.unseen.take()
        return errors[0] if errors else None

    def stop(self) -> None:
        """End the thread once every job is done; later jobs run on the thread that flushes."""
        self.drain()
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread is not None and not on_device_thread():
            self._thread.join(5)

    def _work(self) -> None:
        here.queue = self
        with torch.no_grad():
            while True:
                with self._changed:
                    while (job := self._take()) is None:
                        if self._stopping and not self._queue:
                            return
                        self._changed.wait()
                if torch.get_num_threads() != job.threads:
                    torch.set_num_threads(job.threads)
                self._perform(job)
                del job

    def _take(self) -> Job | None:
        """The next job, if none is running. Call it with the condition held."""
        if self._current is not None or not self._queue:
            return None
        job = self._current = self._queue.popleft()
        job.state = JobState.RUNNING
        self._changed.notify_all()
        return job

    def _perform(self, job: Job) -> None:
        try:
            job.attempt()
        except BaseException as error:
            if not on_device_thread():
                if job.state is JobState.RUNNING:
                    job.state = JobState.HELD
                raise
            job.fail(ExecutionError(f"the device's thread was interrupted: {type(error).__name__}: {error}"))
        finally:
            with self._changed:
                self._current = None
                if job.state is JobState.FAILED:
                    self.failed.append(job)
                self._changed.notify_all()

    # -- fork ------------------------------------------------------------------------------------------------
    def wait_for_started(self) -> None:
        """Return when everything that was started has ended; it is collected later, in the child, too."""
        for job in list(self._started):
            with contextlib.suppress(Exception):
                if job.started is not None:
                    job.started.wait()

    def after_fork_in_child(self) -> None:
        """The thread is gone: what it had to do is done by whoever needs a value."""
        unfinished = [*([self._current] if self._current is not None else []), *self._queue]
        for job in [job for job in self._started if job.started is None]:
            # The thread that was about to start it is gone, and whoever waited for it would wait for ever.
            self._started.remove(job)
            job.state = JobState.HELD
        for job in unfinished:
            if job.state in (JobState.QUEUED, JobState.RUNNING):
                job.state = JobState.HELD
        self._queue.clear()
        self._current = self._thread = None
        self._changed = threading.Condition(threading.Lock())
        self.running = threading.RLock()


_queues: Final[weakref.WeakKeyDictionary[Backend, dict[BackendDevice, DeviceQueue]]] = weakref.WeakKeyDictionary()


def queue_of(backend: Backend, device: BackendDevice) -> DeviceQueue:
    """The queue of a backend's device: one for all device indices that stand for it."""
    with lock:
        of_backend = _queues.setdefault(backend, {})
        if device not in of_backend:
            optional = optional_of(backend)
            name, starts = f"{backend.name} {device}", optional.start is not None
            of_backend[device] = DeviceQueue(name, starts, optional.overlap)
        return of_backend[device]


def queues() -> list[DeviceQueue]:
    """Every queue."""
    return [one for of_backend in list(_queues.values()) for one in list(of_backend.values())]


def _collect_ended() -> None:
    for queue in queues():
        queue.collect_ended()


collectors.append(_collect_ended)


# A fork copies the memory but no thread: a computation in the middle of its work would be lost, so the fork waits.
_paused: Final[list[DeviceQueue]] = []


def _before_fork() -> None:
    _paused[:] = [] if on_device_thread() else [queue for queue in queues() if queue.running.acquire(timeout=60)]
    for queue in _paused:
        queue.wait_for_started()


def _after_fork_in_parent() -> None:
    for queue in _paused:
        queue.running.release()
    _paused.clear()


def _after_fork_in_child() -> None:
    for queue in queues():
        queue.after_fork_in_child()
    _paused.clear()
    if not lock._is_owned():  # type: ignore[attr-defined]
        lock._at_fork_reinit()  # type: ignore[attr-defined]  # as the standard library does with its own locks


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
)  # fmt: skip
