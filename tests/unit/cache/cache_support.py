"""What tests of the disk cache share: entries, and a program that works on a folder until it is ended."""

from __future__ import annotations

import fcntl
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchport.cache.entry import CacheEntry, Damaged, decode
from torchport.cache.folder import CacheFolder

ROOT = Path(__file__).parents[3]
LIMIT = 1 << 20


def entry(number: int, size: int = 3_000) -> CacheEntry:
    """One of many entries."""
    data = random.Random(number).randbytes(size)
    return CacheEntry({"graph": f"{number:064x}", "backend": "b 1"}, data, {"backend": "b", "operators": number})


def run_alone(program: str, *args: str, timeout: float = 60.0, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program text in a process of its own, with a time limit."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program, *args]
    return subprocess.run(
        command, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False, **options
    )


def is_sound(folder: CacheFolder) -> None:
    """Raise unless every file that is named as an entry is one, whole."""
    for name in os.listdir(folder.path):
        key, _, kind = name.partition(".")
        if kind == "entry":
            try:
                decode((folder.path / name).read_bytes(), key)
            except Damaged as error:
                raise AssertionError(f"{name}: {error}") from error


def works(folder: CacheFolder, number: int) -> None:
    """Raise unless an entry can be kept and found again, and nothing is left but entries."""
    one = entry(number)
    with folder.compiling(one.key, 5.0):
        assert folder.write(one)
    assert folder.read(one.key) == one
    folder.evict(folder.limit)
    left = [n for n in os.listdir(folder.path) if n.endswith((".tmp", ".lock"))]
    assert not left, left


def one_write(folder: CacheFolder, one: CacheEntry) -> None:
    """All that a process does about a computation that is not there: look, lock, look again, write, load."""
    if folder.read(one.key) is None:
        with folder.compiling(one.key, 5.0):
            if folder.read(one.key) is None:
                folder.write(one)
    with folder.loading(one.key):
        pass


# -- ended at every system call ----------------------------------------------------------------------------------------
CALLS = ("open", "write", "close", "rename", "unlink", "utime", "stat", "fstat", "listdir", "scandir", "pwrite")


def end_at(call: int, before: bool) -> None:
    """Have this process killed at its ``call``-th call into the system from here on, before or after it is made."""
    counted = 0

    def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal counted
            mine = counted
            counted += 1
            if mine == call and before:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                return original(*args, **kwargs)
            finally:
                if mine == call:
                    os.kill(os.getpid(), signal.SIGKILL)

        return run

    for name in CALLS:
        setattr(os, name, wrapped(getattr(os, name)))
    fcntl.flock = wrapped(fcntl.flock)  # type: ignore[assignment]


def in_child(work: Callable[[], object], longest: float = 20.0, kill_after: float | None = None) -> int:
    """Do work in a forked child, killed after so many seconds if that is said; its wait status."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)
    end = time.monotonic() + longest
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return status
        time.sleep(0.0005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError(f"the child did not end within {longest} s")
