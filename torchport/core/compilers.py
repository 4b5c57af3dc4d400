"""Compilers that run as processes of their own: none outlives this process, and its end waits for none.

A daemon thread may be compiling when the program is over. ``concurrent.futures`` would wait for its workers, and they
for the compiler, so there are plain threads here; and a compiler that nobody waits for would go on alone.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from .forks import guarded_lock

__all__ = ["run_beside", "run_compiler", "side_by_side"]

_Result = TypeVar("_Result")
_running: Final[dict[subprocess.Popen[bytes], threading.Thread]] = {}
_stopped: Final[set[int]] = set()
"""Processes that were stopped as nobody wants their result any more."""
_starting: Final = guarded_lock()
"""Held while one is started, so that the end of the process misses none."""
_ending = False

_waiting: Final[set[threading.Thread]] = set()
"""Threads that wait for a compiler, or for threads of theirs that do."""

LEAVES_WITHIN: Final = 10.0
"""Seconds that the end of the process gives such threads to end, once their compilers are stopped. A thread that is
still inside PyTorch when the interpreter ends aborts the process (PyTorch's issue 38228, before Python 3.14)."""


def _forget() -> None:
    """Compilers and threads are the parent's."""
    _running.clear()
    _waiting.clear()


os.register_at_fork(after_in_child=_forget)


@contextlib.contextmanager
def _known_to_wait() -> Iterator[None]:
    thread = threading.current_thread()
    if thread in _waiting:
        yield
        return
    _waiting.add(thread)
    try:
        yield
    finally:
        _waiting.discard(thread)


def run_compiler(command: Sequence[str], directory: Path | None = None) -> tuple[int, str]:
    """Exit status and output (both streams). Raises ``OSError`` where it cannot be started.

    Ends the calling thread (``SystemExit``) where this process ends meanwhile.
    """
    _stop_at_exit()
    with _known_to_wait(), _start(command, directory) as process:
        try:
            output = process.communicate()[0]
        except BaseException:
            _stop(process)
            raise
        finally:
            _running.pop(process, None)
    if process.pid in _stopped:
        _stopped.discard(process.pid)
        raise SystemExit
    return process.returncode, output.decode(errors="replace")


def _start(command: Sequence[str], directory: Path | None) -> subprocess.Popen[bytes]:
    thread = threading.current_thread()
    with _starting:
        if _ending and thread is not threading.main_thread():
            raise SystemExit
        process = subprocess.Popen(
            command,
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,  # a compiler has processes of its own
        )
        _running[process] = thread
        return process


def side_by_side(calls: Iterable[Callable[[], _Result]]) -> list[_Result]:
    """The results of functions that run at the same time. Raises what the first that failed raised."""
    results: dict[int, Any] = {}
    errors: dict[int, BaseException] = {}

    def work(at: int, call: Callable[[], _Result]) -> None:
        try:
            results[at] = call()
        except BaseException as error:
            errors[at] = error

    threads = [
        threading.Thread(target=work, args=numbered, name="torchport build", daemon=True)
        for numbered in enumerate(calls)
    ]
    try:
        with _known_to_wait():
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    except BaseException:  # Ctrl-C: compilers are in groups of their own and have not heard of it
        for process in [process for process, thread in _running.copy().items() if thread in threads]:
            _stop(process)
        raise
    if errors:
        raise errors[min(errors)]
    return [results[at] for at in range(len(threads))]


def run_beside(call: Callable[[], object]) -> None:
    """Run a function that calls compilers on a thread that nobody waits for; what it raises is lost."""
    threading.Thread(target=call, name="torchport build", daemon=True).start()


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        _stopped.add(process.pid)
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)


@functools.cache
def _stop_at_exit() -> None:
    """Registered with the first compiler: what is registered before runs after, such as what waits for a lock."""
    atexit.register(_end)


def _end() -> None:
    global _ending
    with _starting:
        _ending = True
        waiting = _waiting - {threading.current_thread()}
    for process in _running.copy():
        _stop(process)
    until = time.monotonic() + LEAVES_WITHIN
    for thread in waiting:
        with contextlib.suppress(RuntimeError, AssertionError):  # a thread that Python has not started
            thread.join(max(0.0, until - time.monotonic()))
