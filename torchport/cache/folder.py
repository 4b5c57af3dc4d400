"""One folder of entries: read, written, kept within a size. Whatever goes wrong with it costs a compilation, no more.

A file per entry, ``KEY.entry``. It is written beside under a private name and renamed, so it is there as a whole or not
at all. Beside it, for as long as they are needed: ``KEY.lock``, held by who compiles it; ``KEY.loading``, held by who
loads it, which stays behind when that kills the process; ``KEY.crashes``, which counts that. ``DIGEST.path`` is empty,
and says of a program's path that what it leads to was compiled (``run/kept_paths.py``). Entries are code that will run
in this process: a folder or a file that somebody else could have written is not read.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import stat
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from ..core import metrics
from .digests import Digests
from .entry import CacheEntry, Damaged, Description, decode, encode, read_description
from .locks import hold, release, try_lock

__all__ = ["CacheFolder", "Listed", "say", "trouble_with"]

_NAME: Final = re.compile(r"([0-9a-f]{64})\.(entry|lock|loading|crashes|path)")
_PRIVATE: Final = re.compile(r"\.([0-9a-f]{64})\.[0-9a-f]{16}\.tmp")
_OURS: Final = re.compile(r"\.?digests\.json(\.\d+)?|evict\.lock")
_CRASHES_AT_MOST: Final = 2
_PATHS_AT_MOST: Final = 10_000
_PATH_IS_NOTED: Final = 3600.0
"""Seconds that a path may be noted before the entry is used for the last time that it leads to."""
_KEEP: Final = 0.9
"""Part of the size that eviction leaves, so that it does not run at each write."""

_said: Final[set[str]] = set()


def say(line: str) -> None:
    """Tell people something, once: a warning would break programs that turn warnings into errors."""
    if line not in _said:
        _said.add(line)
        print(f"torchport: {line}", file=sys.stderr)


def _others_may_write(found: os.stat_result) -> str:
    if found.st_uid not in (os.geteuid(), 0):
        return f"it belongs to user {found.st_uid}"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others may write to it (mode {stat.S_IMODE(found.st_mode):o})"
    return ""


def trouble_with(path: Path, create: bool) -> str:
    """Why a folder cannot be a cache; empty where it can. ``create``: it is made if it is not there."""
    try:
        if create:
            path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                path.mkdir(mode=0o700)
        found = path.stat()
    except OSError as error:
        return error.strerror or str(error)
    if not stat.S_ISDIR(found.st_mode):
        return "it is no folder"
    others = _others_may_write(found)
    return f"{others}, and entries are code" if others else ""


@dataclass(frozen=True, slots=True)
class Listed:
    """A file of an entry: when it was last used (seconds since 1970), and its size in bytes."""

    key: str
    used: float
    size: int


class CacheFolder:
    """The entries in a folder. ``limit``: bytes they may take together. ``writable``: whether anything is written."""

    def __init__(self, path: Path, limit: int, writable: bool = True) -> None:
        self.path = path
        self.limit = limit
        self.writable = writable
        self.digests = Digests(path / "digests.json")

    def _file(self, key: str, kind: str = "entry") -> str:
        return f"{self.path}/{key}.{kind}"

    # -- reading -----------------------------------------------------------------------------------------------------
    def read(self, key: str) -> CacheEntry | None:
        """The entry of that key, whole and unchanged; ``None``, and a line that says why, for anything else."""
        try:
            with self._opened(key) as file:
                if self._kills(key):
                    return None
                entry = decode(file.read(), key)
                if self.writable:
                    with contextlib.suppress(OSError):
                        os.utime(file.fileno())
                return entry
        except FileNotFoundError:
            return None
        except OSError as error:
            return self._unread(key, error.strerror or str(error))
        except Damaged as error:
            return self._unread(key, str(error))

    @contextmanager
    def _opened(self, key: str) -> Iterator[BinaryIO]:
        """An entry's file, open. Raises ``OSError``, or :class:`Damaged` for what is no file or may be another's."""
        fd = os.open(self._file(key), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise Damaged("it is no file")
            if others := _others_may_write(found):
                raise Damaged(others)
            with os.fdopen(fd, "rb", closefd=False) as file:
                yield file
        finally:
            os.close(fd)

    def _unread(self, key: str, why: str) -> None:
        metrics.count("DiskCacheDamaged")
        say(f"the entry {self._file(key)} is not used: {why}; what it would hold is compiled again")

    def description(self, key: str) -> Description | None:
        """What an entry says of itself; ``None`` where there is none or it is damaged."""
        try:
            with self._opened(key) as file:
                found = read_description(file)
        except (OSError, Damaged):
            return None
        return found if found.key == key else None

    def nearest(self, manifest: Mapping[str, str]) -> Description | None:
        """The entry with the most components in common, the one used last among equals."""
        best: tuple[int, Description] | None = None
        for listed in self.list():
            found = self.description(listed.key)
            if found is not None:
                common = sum(found.manifest.get(name) == value for name, value in manifest.items())
                if best is None or common > best[0]:
                    best = common, found
        return None if best is None else best[1]

    # -- the first load ----------------------------------------------------------------------------------------------
    @contextmanager
    def loading(self, key: str) -> Iterator[None]:
        """The block hands an entry to its engine. Should the process not survive that, others find out."""
        marker, fd = self._file(key, "loading"), None
        if self.writable:
            with contextlib.suppress(OSError):
                fd = try_lock(marker, shared=True)
                if fd is not None:
                    os.pwrite(fd, b"%d\n" % os.getpid(), 0)  # written under the lock: an empty one is not yet loading
        try:
            yield
        finally:
            if fd is not None:
                alone = True
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    alone = False  # another process loads it, too, and removes the file
                release(fd, marker, remove=alone)

    def _kills(self, key: str) -> bool:
        """Whether loading the entry has ended a process; then it goes, and after the second time for good."""
        marker = self._file(key, "loading")
        try:
            fd = try_lock(marker, create=False)
        except OSError:
            return self.gave_up(key)
        if fd is None:
            return False  # it is being loaded
        died = os.fstat(fd).st_size > 0
        release(fd, marker, remove=self.writable)
        if not died:
            return self.gave_up(key)
        metrics.count("DiskCacheCrashed")
        with contextlib.suppress(OSError), open(self._file(key, "crashes"), "ab") as file:
            file.write(b"x")
        self.drop(key)
        say(f"loading the entry {self._file(key)} ended another process, so it is compiled again")
        return True

    def gave_up(self, key: str) -> bool:
        """Whether loading this entry has ended processes more than once: it is neither read nor written any more."""
        try:
            return os.stat(self._file(key, "crashes")).st_size >= _CRASHES_AT_MOST
        except OSError:
            return False

    # -- writing -----------------------------------------------------------------------------------------------------
    @contextmanager
    def compiling(self, key: str, longest_wait: float) -> Iterator[None]:
        """Hold the entry's lock inside the block, as long as that is possible: who is second waits for the first."""
        with contextlib.ExitStack() as stack:
            if self.writable:
                with contextlib.suppress(OSError):  # a folder that nobody can write to, or that is gone
                    stack.enter_context(hold(self._file(key, "lock"), longest_wait))
            yield

    def write(self, entry: CacheEntry) -> bool:
        """Keep an entry, and the folder within its size. Where that is not possible a line says why.

        Nothing is forced to the disk: a file that a power failure has left empty or half written has another checksum
        and is compiled again, and waiting for the disk costs more than most loads.
        """
        key = entry.key
        if not self.writable or self.gave_up(key):
            return False
        data = encode(entry)
        if len(data) > self.limit:
            say(f"an entry of {len(data):,} bytes is not kept: config.cache_size is {self.limit:,}")
            return False
        private = f"{self.path}/.{key}.{secrets.token_hex(8)}.tmp"
        try:
            fd = os.open(private, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                rest = memoryview(data)
                while rest:
                    rest = rest[os.write(fd, rest) :]
            finally:
                os.close(fd)
            os.rename(private, self._file(key))
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(private)
            metrics.count("DiskCacheWriteFailed")
            say(f"nothing can be kept in {self.path}: {error.strerror or error}; what is compiled serves this process")
            return False
        metrics.count("DiskCacheWrite")
        self.evict(self.limit)
        return True

    def replace_by(self, key: str, other: str) -> None:
        """Have an entry hold what another one does, which was found to be quicker; nothing if one is not there."""
        mine, better = self.read(key), self.read(other)
        if mine is not None and better is not None:
            self.write(CacheEntry(mine.manifest, better.data, better.about))

    def drop(self, key: str) -> None:
        """Remove an entry, if it is there and that is possible."""
        if self.writable:
            with contextlib.suppress(OSError):
                os.unlink(self._file(key))

    # -- paths -------------------------------------------------------------------------------------------------------
    def note_path(self, digest: str) -> None:
        """Note that what a path leads to was compiled. What cannot be noted is looked for later."""
        if self.writable:
            with contextlib.suppress(OSError):
                flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
                fd = os.open(self._file(digest, "path"), flags, 0o600)
                try:
                    os.utime(fd)
                finally:
                    os.close(fd)

    def knows_path(self, digest: str) -> bool:
        """Whether that was noted. What is asked for is kept the longer."""
        file = self._file(digest, "path")
        if not os.path.lexists(file):
            return False
        if self.writable:
            with contextlib.suppress(OSError):
                os.utime(file, follow_symlinks=False)
        return True

    def forget_path(self, digest: str) -> None:
        """Note that no longer."""
        if self.writable:
            with contextlib.suppress(OSError):
                os.unlink(self._file(digest, "path"))

    def paths(self) -> list[Listed]:
        """The digests that were noted, last used first."""
        return self._listed("path")

    # -- everything --------------------------------------------------------------------------------------------------
    def list(self) -> list[Listed]:
        """Every entry, last used first."""
        return self._listed("entry")

    def _listed(self, kind: str) -> list[Listed]:
        found: list[Listed] = []
        with contextlib.suppress(OSError), os.scandir(self.path) as files:
            for file in files:
                match = _NAME.fullmatch(file.name)
                if match and match[2] == kind:
                    with contextlib.suppress(OSError):
                        about = file.stat(follow_symlinks=False)
                        found.append(Listed(match[1], about.st_mtime, about.st_size))
        return sorted(found, key=lambda one: (-one.used, one.key))

    def strangers(self) -> list[str]:
        """Files in the folder that are not the cache's; they are left alone."""
        with contextlib.suppress(OSError):
            return sorted(n for n in os.listdir(self.path) if not any(p.fullmatch(n) for p in (_NAME, _PRIVATE, _OURS)))
        return []

    def evict(self, limit: int) -> int:
        """Remove what was used least recently where entries take more than ``limit`` bytes; how many were removed.

        One process at a time does so. It never raises: what cannot be removed stays, and writing goes on.
        """
        guard = f"{self.path}/evict.lock"
        try:
            fd = try_lock(guard)
        except OSError as error:
            return self._not_evicted(error)
        if fd is None:
            return 0
        try:
            self._sweep()
            return self._evict(limit)
        except OSError as error:
            return self._not_evicted(error)
        finally:
            release(fd, guard)

    def _not_evicted(self, error: OSError) -> int:
        metrics.count("DiskCacheEvictionFailed")
        say(f"entries in {self.path} cannot be removed: {error.strerror or error}; it may grow beyond its size")
        return 0

    def _evict(self, limit: int) -> int:
        entries, now, removed = self.list(), time.time(), 0
        for one in entries:
            if one.used > now:  # the clock was ahead when it was used; it would stay for ever
                with contextlib.suppress(OSError):
                    os.utime(self._file(one.key), (now, now))
        total = sum(one.size for one in entries)
        if total <= limit:
            self._evict_paths(0.0)
            return 0
        for one in reversed(entries):
            if total <= limit * _KEEP:
                break
            os.unlink(self._file(one.key))
            total -= one.size
            removed += 1
        metrics.count("DiskCacheEvicted", removed)
        self._evict_paths(entries[-1 - removed].used if removed < len(entries) else now)
        return removed

    def _evict_paths(self, oldest: float) -> None:
        """Forget the paths of entries that are likely to be gone: those left were used at ``oldest`` or later."""
        for at, path in enumerate(self.paths()):
            if path.used < oldest - _PATH_IS_NOTED or at >= _PATHS_AT_MOST:
                self.forget_path(path.key)

    def _sweep(self) -> None:
        """Remove what processes left behind that were ended in the middle: private files, and locks nobody holds."""
        for name in os.listdir(self.path):
            private, other = _PRIVATE.fullmatch(name), _NAME.fullmatch(name)
            key = private[1] if private else other[1] if other and other[2] == "lock" else None
            if key is None:
                continue
            lock = self._file(key, "lock")
            with contextlib.suppress(OSError):
                fd = try_lock(lock)
                if fd is not None:  # who writes an entry holds its lock
                    if private:
                        with contextlib.suppress(OSError):
                            os.unlink(f"{self.path}/{name}")
                    release(fd, lock)

    def clear(self) -> int:
        """Remove every entry and whatever belongs to one; how many entries. Raises ``OSError``."""
        removed = 0
        self._sweep()
        for name in os.listdir(self.path):
            match = _NAME.fullmatch(name)
            if match and match[2] != "lock":
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(f"{self.path}/{name}")
                    removed += match[2] == "entry"
        return removed
