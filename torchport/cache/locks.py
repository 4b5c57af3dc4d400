"""Locks between processes that end with the process that holds them (``flock(2)``).

A lock is a file. Whoever holds it alone removes it when done, and whoever opens it makes sure, once it has the lock,
that the file is still the one of that name: so no files pile up, and nobody holds a lock that others do not see. Where
a file system has no such locks, everybody gets them: work is then done twice, and files that are renamed into place
stay whole.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

__all__ = ["hold", "release", "try_lock"]

_NO_LOCKS: Final = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
_FIRST_PAUSE: Final = 0.002
_LONGEST_PAUSE: Final = 0.05

_held: Final[set[int]] = set()


def _after_fork_in_child() -> None:
    """A child has a copy of each descriptor, which would keep its parent's locks. Closing it leaves them alone."""
    for fd in _held:
        with contextlib.suppress(OSError):
            os.close(fd)
    _held.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)


def _is_at(fd: int, path: str) -> bool:
    try:
        there = os.stat(path, follow_symlinks=False)
    except OSError:
        return False
    here = os.fstat(fd)
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)


def try_lock(path: str, shared: bool = False, create: bool = True) -> int | None:
    """A descriptor of the file, locked; ``None`` where somebody else has it. For :func:`release`.

    ``shared``: beside others who hold it shared. Raises ``OSError`` where the file cannot be made or opened;
    ``FileNotFoundError`` where it is not to be made (``create``) and is not there.
    """
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
    while True:
        fd = os.open(path, flags, 0o600)
        try:
            try:
                fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                return None
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
            if _is_at(fd, path):
                _held.add(fd)
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # whoever had it has removed it meanwhile


def release(fd: int, path: str, remove: bool = True) -> None:
    """Give a lock back. ``remove``: the file goes; only for who holds it alone."""
    if fd not in _held:  # in a child of a fork
        return
    if remove and _is_at(fd, path):
        with contextlib.suppress(OSError):
            os.unlink(path)
    _held.discard(fd)
    os.close(fd)


@contextmanager
def hold(path: str, longest_wait: float) -> Iterator[bool]:
    """Hold a lock alone inside the block; false where another process still had it after so many seconds."""
    end, pause = time.monotonic() + longest_wait, _FIRST_PAUSE
    while (fd := try_lock(path)) is None and time.monotonic() < end:
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
    try:
        yield fd is not None
    finally:
        if fd is not None:
            release(fd, path)
