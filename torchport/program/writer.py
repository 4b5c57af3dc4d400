"""Write a program file: completely or not at all, whatever happens meanwhile."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import BinaryIO, Final

from ..core.errors import ErrorCode, ProgramError
from .archive import ALIGNMENT, write_archive
from .document import DEBUG, PROGRAM, DebugInfo, Document, encode, encode_debug

__all__ = ["BLOBS", "ROOT", "atomic_file", "digest", "program_entries", "write_program"]

ROOT: Final = "torchport"
BLOBS: Final = "data/torchport/"
"""Where delegates' bytes lie. Not in ``extra/``: ``torch.export.load`` reads every file there as UTF-8 text."""

_ABANDONED: Final = 24 * 3600
"""Seconds after which a half-written file belongs to nobody."""

Buffer = bytes | bytearray | memoryview


@contextmanager
def atomic_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A new binary file that takes ``path``'s place when the block ends well, and is gone when it does not.

    The data is on the disk before the name changes, so a killed process or a crash leaves the old file or the new one.
    Raises :class:`ProgramError` with ``ACCESS_FAILED`` where the file cannot be written.
    """
    target = os.path.abspath(os.fspath(path))
    folder, name = os.path.split(target)
    private = os.path.join(folder, f".{name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    _sweep(folder, name)
    try:
        descriptor = os.open(private, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
    except OSError as error:
        raise ProgramError(f"cannot write {target!r}: {error}", code=ErrorCode.ACCESS_FAILED) from error
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(private, target)
    except OSError as error:
        raise ProgramError(f"cannot write {target!r}: {error}", code=ErrorCode.ACCESS_FAILED) from error
    finally:
        with suppress(OSError):
            os.unlink(private)
    _sync_folder(folder)


def _sweep(folder: str, name: str) -> None:
    """Remove what processes that were killed long ago left of this file."""
    mark = re.compile(rf"\.{re.escape(name)}\.\d+-[0-9a-f]{{8}}\.tmp")
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
