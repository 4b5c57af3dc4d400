"""A program taken apart: its document and the bytes that the document names. From a file, or as lowering makes it."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal

from ..core.errors import ErrorCode, ProgramError
from ..core.forks import guarded_lock
from . import document as doc
from . import safetensors
from .archive import ALIGNMENT, Archive
from .loader import BytesLoader, DataLoader, FileLoader, SegmentInfo

__all__ = ["Package", "Source", "Verification", "check_header", "open_package"]

Verification = Literal["full", "header"]
Source = str | os.PathLike[str] | bytes | bytearray | memoryview | BinaryIO | DataLoader

_DIRECTORY: Final = 1 << 20
"""Bytes at the end of a file among which its directory is looked for, to say what kind of file it is."""
_PARALLEL: Final = 32 << 20
"""From this many bytes on, checksums are computed by two threads: starting one costs about as much as 0.1 MB."""


@dataclass(slots=True)
class Package:
    """A document with access to its entries. ``view`` gives an entry's bytes, ``external`` an external constant's."""

    document: doc.Document
    view: Callable[[str, SegmentInfo], memoryview]
    external: Callable[[doc.Constant], memoryview]
    debug: Callable[[], doc.DebugInfo]
    size: int = 0
    origin: str = "memory"


def _loader_of(source: Source) -> tuple[DataLoader, str, Path | None]:
    if isinstance(source, (str, os.PathLike)):
        return FileLoader(source), os.fspath(source), Path(source).parent
    if isinstance(source, (bytes, bytearray, memoryview)):
        return BytesLoader(source), "memory", None
    given: Any = source
    if callable(getattr(given, "load", None)) and isinstance(getattr(given, "size", None), int):
        return given, type(given).__name__, None
    if callable(getattr(given, "read", None)):
        return BytesLoader(_read_all(given)), str(getattr(given, "name", "memory")), None
    raise ProgramError(
        "a program is loaded from a path, bytes, a file that is open for reading bytes, or a loader with load() and "
        f"size; got {type(given).__name__}",
        code=ErrorCode.INVALID_ARGUMENT,
    )


def _read_all(file: Any) -> bytes | bytearray | memoryview:
    """What an open file holds from where it is on."""
    try:
        data = file.read()
    except (OSError, ValueError) as error:
        raise ProgramError(f"cannot read from {file!r}: {error}", code=ErrorCode.ACCESS_FAILED) from error
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise ProgramError(
            f'reading {file!r} gives {type(data).__name__}, and a program is bytes; open the file with mode "rb"',
            code=ErrorCode.INVALID_ARGUMENT,
        )
    return data


def check_header(source: Source) -> Literal["compatible", "incompatible", "not_present", "short_data"]:
    """Whether a file is a program that this runtime can read, from its directory and header alone.

    ``short_data``: too short to tell. ``not_present``: something else, or damaged. ``incompatible``: another version.
    """
    try:
        loader, _, _ = _loader_of(source)
        if loader.size < 64:
            return "short_data"
        doc.decode_header(Archive(loader).view(doc.PROGRAM))
    except ProgramError as error:
        return "incompatible" if error.code == ErrorCode.DELEGATE_INVALID_COMPATIBILITY else "not_present"
    return "compatible"


def _check_digest(name: str, view: memoryview, size: int, sha256: str) -> None:
    if len(view) != size or hashlib.sha256(view).hexdigest() != sha256:
        raise ProgramError(
            f"this program file is damaged: {name}: its checksum differs; copy or save it again", entry=name
        )


def _verify(archive: Archive, digests: Mapping[str, tuple[int, str]]) -> None:
    """Compare every entry's SHA-256; large programs with two threads (hashing lets go of the interpreter's lock)."""
    names = sorted(digests, key=lambda name: -digests[name][0])
    failed: list[BaseException] = []
    iterator = iter(names)
    lock = threading.Lock()

    def work() -> None:
        while not failed:
            with lock:
                name = next(iterator, None)
            if name is None:
                return
            try:
                _check_digest(name, archive.view(name), *digests[name])
            except BaseException as error:
                failed.append(error)

    helper = (
        threading.Thread(target=work, daemon=True) if sum(size for size, _ in digests.values()) > _PARALLEL else None
    )
    if helper is not None:
        helper.start()
    work()
    if helper is not None:
        helper.join()
    if failed:
        raise failed[0]


class _External:
    """Constants in ``.safetensors`` files beside the program; each file is opened once, each constant checked once."""

    def __init__(self, folder: Path | None, given: Mapping[str, str | os.PathLike[str]], check: bool) -> None:
        self._folder = folder
        self._given = given
        self._check = check
        self._files: dict[str, safetensors.File] = {}
        self._lock = guarded_lock()

    def __call__(self, constant: doc.Constant) -> memoryview:
        with self._lock:
            if constant.external not in self._files:
                self._files[constant.external] = safetensors.File(self._path(constant.external))
            found = self._files[constant.external].get(constant.entry)
        spec = constant.spec
        where = f"external data {constant.external!r}, tensor {constant.entry!r}"
        if found is None or (found.dtype, found.shape) != (spec.dtype, spec.shape):
            got = "is not there" if found is None else f"is {found.dtype}{list(found.shape)}, expected {spec}"
            raise ProgramError(f"{where} {got}", entry=constant.entry, code=ErrorCode.INVALID_EXTERNAL_DATA)
        if self._check and hashlib.sha256(found.data).hexdigest() != constant.sha256:
            raise ProgramError(
                f"{where} has other values than when the program was saved; save the program again with this file",
                entry=constant.entry,
                code=ErrorCode.INVALID_EXTERNAL_DATA,
            )
        return found.data

    def _path(self, name: str) -> str | os.PathLike[str]:
        if name in self._given:
            return self._given[name]
        if self._folder is None:
            raise ProgramError(
                f"the program's weights are in {name!r}: say where, with external_data={{{name!r}: path}}",
                code=ErrorCode.INVALID_EXTERNAL_DATA,
            )
        return self._folder / name


def _archive(loader: DataLoader) -> Archive:
    """The archive, if it holds a program."""
    absent = ProgramError(
        "this is an archive, but holds no torchport program; make one with torchport.aot.lower(...).save(path)",
        entry=doc.PROGRAM,
    )
    try:
        archive = Archive(loader)
    except ProgramError as error:
        # What other programs wrote, torch.export.save among them, is not damaged: there is no program in it.
        size = min(loader.size, _DIRECTORY)
        end = bytes(loader.load(loader.size - size, size, SegmentInfo("program", "directory")))
        if b"PK\x01\x02" in end and b"PK\x05\x06" in end[-64:] and doc.PROGRAM.encode() not in end:
            raise absent from error
        raise
    if doc.PROGRAM not in archive.entries:
        raise absent
    return archive


def open_package(
    source: Source,
    verification: Verification = "full",
    external_data: Mapping[str, str | os.PathLike[str]] | None = None,
) -> Package:
    """Open a program file. Raises :class:`ProgramError` for whatever is wrong with it; nothing is executed."""
    if verification not in ("full", "header"):
        raise ProgramError(f'verification is "full" or "header", not {verification!r}', code=ErrorCode.INVALID_ARGUMENT)
    loader, origin, folder = _loader_of(source)
    archive = _archive(loader)
    document = doc.decode(archive.view(doc.PROGRAM), loader.size)
    for name, (size, _) in document.digests.items():
        entry = archive.entries.get(name)
        if entry is None or entry.size != size or entry.offset % ALIGNMENT:
            raise ProgramError(f"this program file is damaged: {name} is missing or has another size", entry=name)
    if verification == "full":
        _verify(archive, document.digests)
    external = _External(folder, external_data or {}, verification == "full")
    return Package(
        document=document,
        view=archive.view,
        external=external,
        debug=lambda: doc.decode_debug(archive.view(doc.DEBUG), loader.size),
        size=loader.size,
        origin=origin,
    )
