"""The process that compiles, from its start to its end. It is two: a small one that watches, and its child that works.

The watcher imports nothing but the standard library and does nothing but wait: for the program to end, for the child to
end, for a signal. A compiler cannot keep it from doing so, whatever it does with Python's lock. When it is time it ends
everything that was started below it, wherever that has gone: it is the *subreaper* of its descendants (``prctl(2)``),
so that a compiler's orphans become its own children.

That the program is gone it learns from the end of file of its standard input, a pipe whose other end the program holds.
Should somebody else have inherited that end, the kernel's parent death signal tells it.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import os
import resource
import select
import signal
import sys
import time
import traceback
from typing import Final

__all__ = ["main"]

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
"""Both from ``linux/prctl.h``."""
_PARENT_DIED: Final = signal.SIGUSR1
_ENOUGH: Final = 10.0
"""Seconds for descendants to be gone after SIGKILL; one that waits for a disk may take long."""


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):  # Linux's
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def main() -> None:
    """``python -m torchport.worker SOCKET PROGRAM NICE``: a file descriptor, the program's process id, a nice value."""
    fd, program, nice = map(int, sys.argv[1:4])
    os.set_inheritable(fd, False)
    wake, woken = os.pipe()
    for end in (wake, woken):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    for number in (_PARENT_DIED, signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # noted by way of the pipe
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the thread of the program that started this may block some
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _prctl(_PR_SET_PDEATHSIG, int(_PARENT_DIED))
    watcher = os.getpid()
    child = os.fork()
    if child == 0:
        _become_worker(watcher, nice)
        os.close(wake)
        os.close(woken)
        _work(fd)
    os.close(fd)
    _end_like(_watch(child, program, wake))


# -- the watcher -------------------------------------------------------------------------------------------------------
def _watch(child: int, program: int, wake: int) -> int | None:
    """Wait until the child has ended, and return how, or until it must end. Then nothing below is left."""
    poll = select.poll()
    poll.register(0, select.POLLIN)
    poll.register(wake, select.POLLIN)
    status: int | None = None
    while status is None and os.getppid() == program:
        ready = dict(poll.poll())
        if 0 in ready:
            break
        told = os.read(wake, 64)
        if signal.SIGTERM in told:
            break
        status = _reap(child)
    _end_descendants()
    return status


def _reap(child: int) -> int | None:
    """Collect whatever has ended; the child's status if it was among them."""
    status: int | None = None
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, found = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid == child:
                status = found
    return status


def _end_descendants() -> None:
    end = time.monotonic() + _ENOUGH
    while time.monotonic() < end:
        for pid in _descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.002)


def _descendants(root: int) -> list[int]:
    """Every process below this one; without ``/proc``, none but what shares its group can be found, and that is ended
    by whoever started it."""
    children: dict[int, list[int]] = {}
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc"):
            if name.isdigit():
                with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{name}/stat", "rb") as file:
                    # The program's name stands in parentheses and may hold anything; the parent comes second after it.
                    above = int(file.read().rpartition(b")")[2].split()[1])
                    children.setdefault(above, []).append(int(name))
    found: list[int] = []
    waiting = [root]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def _end_like(status: int | None) -> None:
    """End as the child did, so that whoever started this process learns how."""
    if status is not None and os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the child has left one, if one is wanted
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        time.sleep(_ENOUGH)
    os._exit(1 if status is None else os.waitstatus_to_exitcode(status))


# -- the worker --------------------------------------------------------------------------------------------------------
def _become_worker(watcher: int, nice: int) -> None:
    """In the child: end with the watcher, and take the place in the back."""
    signal.set_wakeup_fd(-1)
    for number in (_PARENT_DIED, signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != watcher:
        os._exit(1)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    faulthandler.enable(2)
    with contextlib.suppress(OSError):
        os.nice(nice)
    # A session of its own is a scheduling group of its own (sched(7), autogroup), within which alone ``nice`` counts.
    _tell("/proc/self/autogroup", str(nice))
    # Where memory runs out, this process ends and not the program.
    _tell("/proc/self/oom_score_adj", "500")


def _tell(file: str, text: str) -> None:
    with contextlib.suppress(OSError), open(file, "w") as opened:
        opened.write(text)


def _work(fd: int) -> None:
    status = 1
    try:
        gc.disable()
        from .compiling import serve  # on demand: it imports PyTorch, which the watcher does without

        gc.freeze()  # what was imported stays: the collector need never look at it
        gc.enable()
        serve(fd)
        status = 0
    except BaseException as error:
        traceback.print_exception(error)
    finally:
        sys.stderr.flush()
        os._exit(status)  # not through the interpreter's end: an engine's destructors have nothing to say here
