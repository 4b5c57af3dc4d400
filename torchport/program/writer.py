"""Write a program file: completely or not at all, whatever happens meanwhile."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import BinaryIO, Final

from ..core.errors import ErrorCode, ProgramError
from .archive import ALIGNMENT, write_archive
from .document import DEBUG, PROGRAM, DebugInfo, Document, encode, encode_debug

__all__ = ["BLOBS", "ROOT", "atomic_file", "cannot_write", "digest", "program_entries", "write_program"]

ROOT: Final = "torchport"
BLOBS: Final = "data/torchport/"
"""Where delegates' bytes lie. Not in ``extra/``: ``torch.export.load`` reads every file there as UTF-8 text."""

_ABANDONED: Final = 24 * 3600
"""Seconds after which a half-written file belongs to nobody."""

_LONGEST_STEM: Final = 200
"""Bytes: file systems take names of 255, and a private file's has up to 30 more than this."""

Buffer = bytes | bytearray | memoryview


@contextmanager
def atomic_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A new binary file that takes ``path``'s place when the block ends well, and is gone when it does not.

    The data is on the disk before the name changes, so a killed process or a crash leaves the old file or the new one.
    A file that is there keeps its owner and mode; a link stays one, to the new file.
    Raises :class:`ProgramError` with ``ACCESS_FAILED`` where the file cannot be written.
    """
    target = os.path.abspath(os.fspath(path))
    try:
        target = os.path.realpath(target)  # what a link leads to is written, and the link stays
        before = _existing(target)
        folder, name = os.path.split(target)
        stem = _stem(name)
        private = os.path.join(folder, f".{stem}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
        _sweep(folder, stem)
        descriptor = os.open(private, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
    except (OSError, ValueError) as error:
        raise cannot_write(target, error) from error
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            if before is not None:
                _keep_owner_and_mode(file.fileno(), before)
            os.fsync(file.fileno())
        os.replace(private, target)
    except OSError as error:
        raise cannot_write(target, error) from error
    finally:
        with suppress(OSError):
            os.unlink(private)
    _sync_folder(folder)


def cannot_write(path: str | os.PathLike[str], error: Exception) -> ProgramError:
    """The error for a file that the system does not let us write."""
    why = getattr(error, "strerror", None) or error
    return ProgramError(f"cannot write {os.fspath(path)!r}: {why}", code=ErrorCode.ACCESS_FAILED)


def _existing(target: str) -> os.stat_result | None:
    """What is at a path; ``None`` for nothing. Raises ``OSError`` for what is no file: it would be gone."""
    try:
        found = os.stat(target)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(found.st_mode):
        raise OSError("it exists and is not a regular file")
    return found


def _keep_owner_and_mode(descriptor: int, before: os.stat_result) -> None:
    """Give a new file what the old one had, as far as the system lets us."""
    if not hasattr(os, "fchmod"):
        return
    now = os.fstat(descriptor)
    if (now.st_uid, now.st_gid) != (before.st_uid, before.st_gid):
        with suppress(OSError):
            os.fchown(descriptor, before.st_uid, before.st_gid)
    with suppress(OSError):
        os.fchmod(descriptor, stat.S_IMODE(before.st_mode))


def _stem(name: str) -> str:
    """What a private file's name has of the file's own: all of it, or a hash where that would be too long."""
    raw = os.fsencode(name)
    return name if len(raw) <= _LONGEST_STEM else hashlib.sha256(raw).hexdigest()[:32]


def _sweep(folder: str, stem: str) -> None:
    """Remove what processes that were killed long ago left of this file."""
    mark = re.compile(rf"\.{re.escape(stem)}\.\d+-[0-9a-f]{{8}}\.tmp")
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if mark.fullmatch(entry.name) and time.time() - entry.stat(follow_symlinks=False).st_mtime > _ABANDONED:
                with suppress(OSError):
                    os.unlink(entry.path)


def _sync_folder(folder: str) -> None:
    """Have the new name on the disk too, where the system can."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def digest(data: Buffer) -> tuple[int, str]:
    """Size in bytes and SHA-256."""
    view = memoryview(data).cast("B")
    return len(view), hashlib.sha256(view).hexdigest()


def program_entries(document: Document, debug: DebugInfo) -> list[tuple[str, Buffer]]:
    """The two entries that make an archive a program, and what marks it as PyTorch's ``.pt2`` format."""
    return [
        (PROGRAM, encode(document)),
        (DEBUG, encode_debug(debug)),
        ("archive_format", b"pt2"),
        ("archive_version", b"0"),
        ("byteorder", b"little"),
        (".data/version", b"6\n"),
    ]


def write_program(
    path: str | os.PathLike[str],
    document: Document,
    debug: DebugInfo,
    blobs: Mapping[str, Buffer],
    more: Sequence[tuple[str, Buffer]] = (),
    alignment: int = ALIGNMENT,
) -> None:
    """Write a program with its blobs, and ``more`` entries that are not the runtime's. Fills in the checksums."""
    others = dict(more)
    for name in document.digests:
        document.digests[name] = digest(blobs[name] if name in blobs else others[name])
    entries = [*more, *blobs.items(), *program_entries(document, debug)]
    with atomic_file(path) as file:
        write_archive(file, ROOT, entries, alignment)
