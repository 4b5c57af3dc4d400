"""One file: what ``torch.export.save`` writes, with every weight stored once, and the program beside it."""

from __future__ import annotations

import io
import json
import mmap
import os
import tempfile
import zipfile
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch
from torch.export import ExportedProgram

from ..core.errors import ErrorCode, ProgramError
from ..program import document as doc
from ..program import safetensors
from ..program.writer import BLOBS, atomic_file, cannot_write, digest, write_program

__all__ = ["Saved", "save_program"]

_WEIGHTS: Final = "data/weights/"
_CONSTANTS: Final = "data/constants/"
_FOLDERS: Final = {_WEIGHTS: "weight_", _CONSTANTS: "tensor_"}
_LOCAL_HEADER: Final = 30


@dataclass(frozen=True, slots=True)
class Saved:
    """Bytes of a file: all of it, the weights in it, the delegates; and the weights in the external file."""

    total: int
    weights: int
    delegates: int
    external: int


class _Sink(io.RawIOBase):
    """A file that PyTorch's zip writer writes to: once it cannot be written, everything goes nowhere, without an error.

    The writer ends the archive in its destructor, and an exception in there ends the process.
    """

    def __init__(self, file: BinaryIO) -> None:
        super().__init__()
        self._file = file
        self.failed: OSError | None = None
        """Why the file could not be written, if so."""

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True  # PyTorch warns otherwise, and goes back to the start when it is done

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        return offset

    def write(self, data: Any, /) -> int:
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view) and self.failed is None:
            try:
                done += self._file.write(view[done:])
            except OSError as error:
                self.failed = error
        return len(view)


class _Exported:
    """Entries of the ``.pt2`` files that ``torch.export.save`` writes, one per method, put into one archive.

    A method's program is ``models/<name>.json``; ``torch.export.load`` opens the one called ``model``, which the first
    method is. Raw tensors that are equal become one entry.
    """

    def __init__(self, exported: Mapping[str, ExportedProgram], folder: Path, stack: ExitStack) -> None:
        self.entries: dict[str, bytes | memoryview] = {}
        self.of_digest: dict[tuple[int, str], str] = {}
        self._counts = dict.fromkeys(_FOLDERS, 0)
        for position, (name, program) in enumerate(exported.items()):
            self._add("model" if position == 0 else name, self._saved(program, folder, stack))

    @staticmethod
    def _saved(program: ExportedProgram, folder: Path, stack: ExitStack) -> dict[str, memoryview]:
        """The entries ``torch.export.save`` writes, in a file without a name: nothing is left if we are killed."""
        file = stack.enter_context(tempfile.TemporaryFile(dir=folder, buffering=0))  # noqa: SIM115
        sink = _Sink(file)
        try:
            torch.export.save(program, sink)  # type: ignore[arg-type]
        except (NotImplementedError, ValueError, TypeError, RuntimeError) as error:
            if sink.failed is not None:
                raise sink.failed from error
            raise ProgramError(
                f"torch.export.save cannot write the exported model, which the file holds too: {type(error).__name__}: "
                f"{error}; have the model take and give plain tuples, lists and dicts of tensors",
                code=ErrorCode.NOT_SUPPORTED,
            ) from error
        if sink.failed is not None:
            raise sink.failed
        view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        found: dict[str, memoryview] = {}
        with zipfile.ZipFile(file) as archive:
            for info in archive.infolist():
                at = info.header_offset
                lengths = view[at + 26 : at + _LOCAL_HEADER]
                start = at + _LOCAL_HEADER + sum(memoryview(bytes(lengths)).cast("H"))
                found[info.filename.split("/", 1)[1]] = view[start : start + info.file_size]
        return found

    def _add(self, name: str, entries: dict[str, memoryview]) -> None:
        renamed: dict[str, str] = {}
        for folder, prefix in _FOLDERS.items():
            config = json.loads(bytes(entries[f"{folder}model_{folder.split('/')[1]}_config.json"]))
            for payload in config["config"].values():
                old = f"{folder}{payload['path_name']}"
                if old not in renamed:
                    renamed[old] = self._stored(folder, prefix, payload, entries[old])
                payload["path_name"] = renamed[old].removeprefix(folder)
            self.entries[f"{folder}{name}_{folder.split('/')[1]}_config.json"] = json.dumps(config).encode()
        self.entries[f"models/{name}.json"] = entries["models/model.json"]
        self.entries[f"data/sample_inputs/{name}.pt"] = entries["data/sample_inputs/model.pt"]

    def _stored(self, folder: str, prefix: str, payload: Mapping[str, Any], data: memoryview) -> str:
        """The entry for a tensor's bytes. What begins with ``prefix`` PyTorch's reader takes for a tensor."""
        mark = digest(data)
        known = self.of_digest.get(mark)
        if known is not None and known.startswith(folder) and not payload["use_pickle"]:
            return known
        old = str(payload["path_name"])
        entry = f"{folder}{old.rstrip('0123456789') or prefix}{self._counts[folder]}"
        self._counts[folder] += 1
        self.entries[entry] = data
        if not payload["use_pickle"]:
            self.of_digest[mark] = entry
        return entry


def _contiguous_bytes(constant: doc.Constant, memory: Mapping[str, memoryview]) -> memoryview | None:
    """A constant's bytes, if they lie one after the other."""
    if not constant.spec.is_contiguous or not constant.spec.nbytes:
        return None
    return memory[constant.entry][constant.offset : constant.offset + constant.spec.nbytes]


class _Checkpoint:
    """A ``.safetensors`` file that takes weights out of the program."""

    def __init__(self, path: Path, document: doc.Document, memory: Mapping[str, memoryview]) -> None:
        self.path = path
        wanted = {
            number: data
            for number, constant in enumerate(document.constants)
            if (data := _contiguous_bytes(constant, memory)) is not None
        }
        self._marks = {number: digest(data)[1] for number, data in wanted.items()}
        self._made = not path.exists()
        if self._made:
            self._write(document, wanted)
        self.keys = self._find(document)

    def discard(self) -> None:
        """Remove the file, if this wrote it: the program that it is for was not saved."""
        if self._made:
            with suppress(OSError):
                self.path.unlink()

    def _write(self, document: doc.Document, wanted: Mapping[int, memoryview]) -> None:
        tensors: dict[str, safetensors.Tensor] = {}
        for number, data in wanted.items():
            constant = document.constants[number]
            tensors.setdefault(constant.name, safetensors.Tensor(constant.spec.dtype, constant.spec.shape, data))
        with atomic_file(self.path) as file:
            safetensors.write(file, tensors)

    def _find(self, document: doc.Document) -> dict[int, str]:
        """Constant → key: of the same name if its value is the same, else of the same value."""
        file = safetensors.File(self.path)
        shapes: dict[tuple[str, tuple[int, ...]], list[str]] = {}
        for key in file.names():
            found = file.get(key)
            if found is not None:
                shapes.setdefault((found.dtype, found.shape), []).append(key)
        marks: dict[str, str] = {}
        keys: dict[int, str] = {}
        for number, mark in self._marks.items():
            constant = document.constants[number]
            candidates = shapes.get((constant.spec.dtype, constant.spec.shape), [])
            for key in sorted(candidates, key=lambda key: key != constant.name):
                if key not in marks:
                    tensor = file.get(key)
                    assert tensor is not None
                    marks[key] = digest(tensor.data)[1]
                if marks[key] == mark:
                    keys[number] = key
                    break
        if not keys:
            raise ProgramError(
                f"{str(self.path)!r} exists, but has none of the program's weights; give another path, or delete it",
                code=ErrorCode.INVALID_EXTERNAL_DATA,
            )
        return keys

    def constant(self, number: int, constant: doc.Constant) -> doc.Constant | None:
        """The constant as a reference to the file, if it is there."""
        if number not in self.keys:
            return None
        return replace(constant, entry=self.keys[number], offset=0, external=self.path.name, sha256=self._marks[number])


def save_program(
    path: str | os.PathLike[str],
    document: doc.Document,
    debug: doc.DebugInfo,
    exported: Mapping[str, ExportedProgram],
    blobs: Mapping[str, bytes],
    memory: Mapping[str, memoryview],
    external_weights: str | os.PathLike[str] | None,
    alignment: int,
) -> Saved:
    """Write a program. ``memory`` has the constants' bytes by entry, as ``document`` names them."""
    target = Path(os.fspath(path))
    if target.suffix != ".pt2":
        raise ProgramError(f"a program's file ends in .pt2, not {target.name!r}", code=ErrorCode.INVALID_ARGUMENT)
    checkpoint = None
    try:
        folder = Path(os.path.realpath(target)).parent
        if not os.path.isdir(folder):
            raise ProgramError(f"there is no folder {str(folder)!r}", code=ErrorCode.ACCESS_FAILED)
        if external_weights is not None:
            checkpoint = _Checkpoint(_weights_path(target, external_weights), document, memory)
    except (OSError, ValueError) as error:  # names that no system takes
        raise cannot_write(target, error) from error
    try:
        return _save(target, folder, document, debug, exported, blobs, memory, checkpoint, alignment)
    except BaseException:
        if checkpoint is not None:
            checkpoint.discard()
        raise


def _weights_path(target: Path, given: str | os.PathLike[str]) -> Path:
    """Where a checkpoint lies: beside the program if no folder is given, since that is where it is looked for.

    Raises :class:`ProgramError` (``INVALID_ARGUMENT``) for the program's own file, which would take its place.
    """
    text = os.fspath(given)
    path = Path(text) if os.path.dirname(text) else target.parent / text
    same = os.path.realpath(path) == os.path.realpath(target)
    with suppress(OSError, ValueError):
        same = same or os.path.samefile(path, target)
    if same:
        raise ProgramError(
            f"external_weights is the program's own file, {str(target)!r}, and one would take the other's place; give "
            f"another name, such as {target.stem + '.safetensors'!r}",
            code=ErrorCode.INVALID_ARGUMENT,
        )
    if not path.name or not path.name.isprintable() or any(sign in path.name for sign in "\\:"):
        raise ProgramError(
            f"external_weights={text!r} is no name of a file that a program can tell; give a plain one, such as "
            f"{target.stem + '.safetensors'!r}",
            code=ErrorCode.INVALID_ARGUMENT,
        )
    return path


def _save(
    target: Path,
    folder: Path,
    document: doc.Document,
    debug: doc.DebugInfo,
    exported: Mapping[str, ExportedProgram],
    blobs: Mapping[str, bytes],
    memory: Mapping[str, memoryview],
    checkpoint: _Checkpoint | None,
    alignment: int,
) -> Saved:
    with ExitStack() as stack:
        try:
            pt2 = _Exported(exported, folder, stack)
        except OSError as error:
            raise cannot_write(target, error) from error
        constants, extra = _place(document, memory, pt2, checkpoint)
        stored = {one.entry for one in constants if not one.external}
        if checkpoint is not None:
            _empty_external(pt2, document, memory, checkpoint, stored)
        mine = {**blobs, **extra}
        digests: dict[str, tuple[int, str]] = dict.fromkeys([*blobs, *sorted(stored)], (0, ""))
        placed = replace(document, constants=constants, digests=digests)
        write_program(target, placed, debug, mine, list(pt2.entries.items()), alignment)
    weights = sum(placed.digests[entry][0] for entry in stored)
    external = 0 if checkpoint is None else sum(document.constants[one].spec.nbytes for one in checkpoint.keys)
    return Saved(target.stat().st_size, weights, sum(map(len, blobs.values())), external)


def _place(
    document: doc.Document, memory: Mapping[str, memoryview], pt2: _Exported, checkpoint: _Checkpoint | None
) -> tuple[list[doc.Constant], dict[str, memoryview]]:
    """Where each constant lies in the file: in the checkpoint, where PyTorch has it already, or in an entry of ours."""
    marks = {entry: digest(data) for entry, data in memory.items()}
    extra: dict[str, memoryview] = {}
    entries: dict[tuple[int, str], str] = {}
    placed: list[doc.Constant] = []
    for number, constant in enumerate(document.constants):
        outside = None if checkpoint is None else checkpoint.constant(number, constant)
        if outside is not None:
            placed.append(outside)
            continue
        mark = marks[constant.entry]
        entry = pt2.of_digest.get(mark) or entries.get(mark)
        if entry is None:
            entry = entries[mark] = f"{BLOBS}constant_{len(extra)}"
            extra[entry] = memory[constant.entry]
        placed.append(replace(constant, entry=entry))
    return placed, extra


def _empty_external(
    pt2: _Exported,
    document: doc.Document,
    memory: Mapping[str, memoryview],
    checkpoint: _Checkpoint,
    stored: set[str],
) -> None:
    """Leave weights that lie outside out of PyTorch's part too: it loads an empty record as zeros."""
    for number in checkpoint.keys:
        entry = pt2.of_digest.get(digest(memory[document.constants[number].entry]))
        if entry is not None and entry not in stored:
            pt2.entries[entry] = b""
