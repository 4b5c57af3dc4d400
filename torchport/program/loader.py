"""Where a program's bytes come from: a memory-mapped file, bytes in memory, or anything that can load a range."""

from __future__ import annotations

import mmap
import os
import stat
from dataclasses import dataclass
from typing import Literal, Protocol

from ..core.errors import ErrorCode, ProgramError

__all__ = ["BytesLoader", "DataLoader", "FileLoader", "SegmentInfo"]

SegmentKind = Literal["program", "constant", "state", "delegate", "named_data", "external"]


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    """What a range of bytes is for (ExecuTorch's ``DataLoader::SegmentInfo``).

    ``name`` is the archive's entry, ``descriptor`` the backend where a delegate's bytes are loaded.
    """

    kind: SegmentKind
    name: str = ""
    descriptor: str = ""


class DataLoader(Protocol):
    """Loads ranges of a program file. Must be safe to call from several threads."""

    @property
    def size(self) -> int:
        """The file's size in bytes."""
        ...

    def load(self, offset: int, size: int, segment: SegmentInfo) -> memoryview:
        """``size`` bytes at ``offset``; valid as long as the view is."""
        ...


class BytesLoader:
    """A program in memory."""

    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data)
        if not view.contiguous:
            raise ProgramError("a program in memory is bytes one after the other", code=ErrorCode.INVALID_ARGUMENT)
        self._view = view.cast("B") if view.nbytes else memoryview(b"")

    @property
    def size(self) -> int:
        """The program's size in bytes."""
        return len(self._view)

    def load(self, offset: int, size: int, segment: SegmentInfo) -> memoryview:
        """A view of the bytes."""
        return self._view[offset : offset + size]


class FileLoader(BytesLoader):
    """A memory-mapped file: pages are read when they are first used, and writes never reach the file.

    The mapping stays valid when the file is replaced or deleted, as :meth:`LoweredProgram.save` does it. A file that
    another process truncates in place cannot be caught: no memory-mapped file can.
    Raises :class:`ProgramError` with ``ACCESS_FAILED`` for what is not a readable, regular, non-empty file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        try:
            # Not blocking: opening a named pipe would wait for a writer.
            descriptor = os.open(self.path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise ProgramError(f"cannot open {self.path!r}: {why}", code=ErrorCode.ACCESS_FAILED) from error
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise ProgramError(f"{self.path!r} is not a regular file", code=ErrorCode.ACCESS_FAILED)
            if found.st_size == 0:
                raise ProgramError(f"{self.path!r} is empty")
            super().__init__(memoryview(mmap.mmap(descriptor, found.st_size, access=mmap.ACCESS_COPY)))
        except OSError as error:
            raise ProgramError(f"cannot map {self.path!r}: {error}", code=ErrorCode.ACCESS_FAILED) from error
        finally:
            os.close(descriptor)
