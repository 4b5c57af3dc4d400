"""One worker process, seen from the program: how it starts, how it is talked to, how it ended and how it is ended."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from pathlib import Path
from typing import Any, Final

from .protocol import Kind, read_message, write_message

__all__ = ["Worker"]

_BOUNDS: Final = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""What libraries read when they are loaded; the rest comes with the first message."""
START_SECONDS: Final = 300
END_SECONDS: Final = 1.0
_TAIL: Final = 4_096


class Worker:
    """A worker process and the socket to it. Used by one thread; others may only :meth:`end` it."""

    def __init__(self, nice: int) -> None:
        """Start it, at this nice value below the program. Raises ``OSError`` where the system gives no process."""
        if not sys.executable:
            raise FileNotFoundError("sys.executable does not say which Python to start")
        self._socket, theirs = socket.socketpair()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process lives
        fcntl.fcntl(self._log, fcntl.F_SETFL, os.O_APPEND)  # the worker empties it now and then
        try:
            self.process: Any = subprocess.Popen(
                [sys.executable, "-m", "torchport.worker", str(theirs.fileno()), str(os.getpid()), str(nice)],
                stdin=subprocess.PIPE,  # its end of file says that this process is gone
                stdout=self._log,
                stderr=self._log,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # a terminal's Ctrl-C is for the program
                env={**os.environ, **_BOUNDS, "PYTHONPATH": os.pathsep.join(_search_path())},
                cwd=_folder(),
            )
        except BaseException:
            self._socket.close()
            self._log.close()
            raise
        finally:
            theirs.close()
        self.pid: Final[int] = self.process.pid
        self._begun = time.monotonic()
        self.start_seconds = 0.0
        self._told: bytes | None = None
        self._memory_kills = _memory_kills()
        self.ended = False
        _every.add(self)

    def wait_until_ready(self) -> None:
        """Return when it has imported what it needs. Raises ``EOFError`` or ``TimeoutError``."""
        read_message(self._socket, START_SECONDS)
        self.start_seconds = time.monotonic() - self._begun

    def begin(self, body: bytes) -> None:
        """Give it a request, and return when it has that. Raises ``OSError`` or ``EOFError`` where it is dead."""
        surroundings = pickle.dumps((dict(os.environ), _search_path(), _folder()))
        if surroundings != self._told:
            write_message(self._socket, Kind.SURROUNDINGS, surroundings)
            self._told = surroundings
        write_message(self._socket, Kind.REQUEST, body)
        read_message(self._socket, START_SECONDS)

    def has_answer(self, seconds: float) -> bool:
        """Wait so long at most; whether :meth:`answer` has something to read, which may be that it died."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(1e3 * seconds))

    def answer(self, seconds: float) -> bytes:
        """Its answer. Raises ``OSError`` or ``EOFError`` if it died, ``TimeoutError`` if it took longer."""
        return read_message(self._socket, seconds)[1]

    def hang_up(self) -> None:
        """Have it end, with all that it has started; returns at once."""
        self.ended = True
        with contextlib.suppress(OSError):
            self.process.stdin.close()

    def end(self, seconds: float = END_SECONDS) -> None:
        """End it and all that it has started, and return when that is done, or after so many seconds."""
        self.hang_up()
        if not self._collect(seconds):
            self._kill_group()
            self._collect(END_SECONDS)

    def alive(self) -> bool:
        """Whether it runs and has not been told to end."""
        return not self.ended and not self._exited()

    def _exited(self) -> bool:
        """Whether the process has come to its end, collected or not."""
        if self.process.returncode is not None:
            return True
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True

    def _collect(self, seconds: float) -> bool:
        """Wait for its end, so many seconds at most; whether it has come. Then nothing is left of its process group.

        The watcher leaves nothing, but somebody may have killed the watcher.
        """
        end = time.monotonic() + seconds
        while not self._exited():
            if time.monotonic() > end:
                return False
            time.sleep(0.002)
        if self.process.returncode is None:
            self._kill_group()
            self.process.wait()
        return True

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)  # not collected yet, so the number is still its own

    def close(self) -> None:
        """Give back the socket and the log."""
        _every.discard(self)
        self._socket.close()
        self._log.close()

    def death(self) -> str:
        """How it ended, once it has, in words."""
        self._collect(END_SECONDS)
        code = self.process.returncode
        if code is None:
            return "stopped to answer"
        if code >= 0:
            return f"ended with exit code {code}"
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = str(-code)
        if code == -signal.SIGKILL:
            known = _memory_kills() > self._memory_kills
            because = ": the system ran out of memory" if known else ", as systems do that run out of memory"
            return f"was ended by signal SIGKILL{because}"
        return f"was ended by signal {name}"

    def last_words(self) -> str:
        """The end of what it printed, which after a crash is where that was."""
        with contextlib.suppress(OSError, ValueError):
            size = os.fstat(self._log.fileno()).st_size
            data = os.pread(self._log.fileno(), _TAIL, max(0, size - _TAIL))
            return data.decode("utf-8", "replace").split("\nExtension modules:")[0].strip("\0\n ")
        return ""

    def forget_in_child(self) -> None:
        """This process was forked: the worker is its parent's."""
        self.ended = True
        self.process.returncode = 0  # else it would be waited for
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        self.close()


_every: Final[weakref.WeakSet[Worker]] = weakref.WeakSet()


def _forget_all() -> None:
    for worker in list(_every):
        worker.forget_in_child()


os.register_at_fork(after_in_child=_forget_all)


def _folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return "/"


def _search_path() -> list[str]:
    return [entry or _folder() for entry in sys.path]


def _memory_kills() -> int:
    """How many processes Linux has ended for memory so far."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
