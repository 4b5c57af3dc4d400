"""The container: a zip archive of stored, aligned entries, as PyTorch's ``.pt2`` files are, read strictly.

PyTorch's reader opens what :func:`write_archive` writes. :class:`Archive` reads that dialect and nothing else: stored
entries without encryption or data descriptors, one after the other without gaps, local headers that agree with the
central directory, unique relative names, ZIP64 where a number needs it, no comment, nothing before or after. So there
is one way to read a file, and no part of it is read by nobody. (.ZIP File Format Specification, APPNOTE 6.3.10.)
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import BinaryIO, Final

from ..core.errors import ErrorCode, ProgramError
from .loader import DataLoader, SegmentInfo

__all__ = ["ALIGNMENT", "Archive", "Entry", "write_archive"]

ALIGNMENT: Final = 64
"""Every entry's data begins at a multiple of this, in bytes; PyTorch's files have the same."""

_ALIGNMENTS: Final = tuple(1 << power for power in range(6, 16))  # an extra field has 16 bits for its length
_LOCAL: Final = struct.Struct("<4s5H3I2H")
_CENTRAL: Final = struct.Struct("<4s6H3I5H2I")
_END: Final = struct.Struct("<4s4H2IH")
_END64: Final = struct.Struct("<4sQ2H2I4Q")
_LOCATOR: Final = struct.Struct("<4sIQI")
_FIELD: Final = struct.Struct("<2H")
_ZIP64: Final = 0x0001
_PADDING: Final = 0x4246  # the field PyTorch pads with
_MAX32: Final = 0xFFFFFFFF
_MAX16: Final = 0xFFFF
_LONGEST_NAME: Final = 0xFFFF
_UTF8: Final = 0x0800
_DIRECTORY: Final = SegmentInfo("program", "directory")


@dataclass(frozen=True, slots=True)
class Entry:
    """One file of the archive: where its bytes lie, and their CRC-32."""

    name: str
    header: int
    offset: int
    size: int
    crc: int


def _bad(why: str, entry: str | None = None) -> ProgramError:
    where = "" if entry is None else f" (entry {entry!r})"
    return ProgramError(f"this is not a whole program file: {why}{where}; save it again", entry=entry)


def _checked_name(raw: bytes) -> str:
    try:
        name = raw.decode("utf-8")
    except UnicodeDecodeError:
        raise _bad("an entry's name is not UTF-8") from None
    parts = name.split("/")
    if not name.isprintable() or "\\" in name or ":" in name or any(part in ("", ".", "..") for part in parts):
        raise _bad(f"an entry has the name {name[:80]!r}, which is not a plain relative path")
    return name


def _zip64_values(extra: memoryview, wanted: Sequence[int]) -> list[int]:
    """The 64-bit numbers that stand for those of ``wanted`` that are all ones; raises for malformed extra fields."""
    at = 0
    values: list[int] = []
    need = sum(value == _MAX32 for value in wanted)
    while at < len(extra):
        if len(extra) - at < _FIELD.size:
            raise _bad("an extra field is cut off")
        kind, size = _FIELD.unpack_from(extra, at)
        at += _FIELD.size
        if size > len(extra) - at or kind not in (_ZIP64, _PADDING):
            raise _bad("an extra field is unknown or too long")
        if kind == _ZIP64:
            if values or size != 8 * need:
                raise _bad("a ZIP64 field does not fit its entry")
            values = list(struct.unpack_from(f"<{need}Q", extra, at))
        at += size
    if need and not values:
        raise _bad("a ZIP64 field is missing")
    found = iter(values)
    return [next(found) if value == _MAX32 else value for value in wanted]


class Archive:
    """The entries of a program file. Raises :class:`ProgramError` for everything that is not exactly as written.

    All entries share one top folder, :attr:`root`; names are given without it.
    """

    def __init__(self, loader: DataLoader) -> None:
        self._loader = loader
        start, end, count = self._directory()
        entries = self._central(start, end, count)
        self._check_locals(entries, start)
        roots = {entry.name.split("/", 1)[0] for entry in entries}
        if len(roots) != 1 or any("/" not in entry.name for entry in entries):
            raise _bad("its entries are not all in one top folder")
        (self.root,) = roots
        self.entries = {entry.name.removeprefix(f"{self.root}/"): entry for entry in entries}
        if len(self.entries) != len(entries):
            raise _bad("two entries have one name")

    def _read(self, offset: int, size: int) -> memoryview:
        if offset < 0 or size < 0 or offset + size > self._loader.size:
            raise _bad("it ends too early")
        view = self._loader.load(offset, size, _DIRECTORY)
        if len(view) != size:
            raise _bad("it ends too early")
        return view

    def _directory(self) -> tuple[int, int, int]:
        """Start, end and number of entries of the central directory."""
        at = self._loader.size - _END.size
        signature, disk, disk2, here, count, size, start, comment = _END.unpack(self._read(at, _END.size))
        if signature != b"PK\x05\x06" or disk or disk2 or here != count or comment:
            raise _bad("it does not end in a zip directory")
        if _MAX32 in (size, start) or count == _MAX16:
            locator = self._read(at - _LOCATOR.size, _LOCATOR.size)
            signature, disk, where, disks = _LOCATOR.unpack(locator)
            at = at - _LOCATOR.size - _END64.size
            if signature != b"PK\x06\x07" or disk or disks != 1 or where != at:
                raise _bad("its ZIP64 directory cannot be found")
            fields = _END64.unpack(self._read(at, _END64.size))
            signature, length, _, _, disk, disk2, here, count, size, start = fields
            if signature != b"PK\x06\x06" or length != _END64.size - 12 or disk or disk2 or here != count:
                raise _bad("its ZIP64 directory is malformed")
        if start + size != at:
            raise _bad("its zip directory does not lie where it says")
        return start, at, count

    def _central(self, start: int, end: int, count: int) -> list[Entry]:
        data = self._read(start, end - start)
        entries: list[Entry] = []
        at = 0
        for _ in range(count):
            if len(data) - at < _CENTRAL.size:
                raise _bad("its zip directory is cut off")
            fields = _CENTRAL.unpack_from(data, at)
            signature, _, _, flags, method, _, _, crc, packed, size, name, extra, comment, disk, _, _, header = fields
            at += _CENTRAL.size
            if signature != b"PK\x01\x02" or flags not in (0, _UTF8) or method or comment or disk:
                raise _bad("an entry is compressed, encrypted or otherwise not as torchport writes it")
            if name + extra > len(data) - at:
                raise _bad("its zip directory is cut off")
            text = _checked_name(bytes(data[at : at + name]))
            at += name
            size, packed, header = _zip64_values(data[at : at + extra], (size, packed, header))
            at += extra
            if size != packed:
                raise _bad("an entry is compressed", text)
            entries.append(Entry(text, header, 0, size, crc))
        if at != len(data):
            raise _bad("its zip directory has another number of entries than it says")
        return entries

    def _check_locals(self, entries: list[Entry], end: int) -> None:
        """Compare local headers with the directory, and see that entries follow one another without gaps."""
        expected = 0
        for index, entry in enumerate(entries):
            if entry.header != expected:
                raise _bad("entries overlap or leave a gap", entry.name)
            fields = _LOCAL.unpack(self._read(entry.header, _LOCAL.size))
            signature, _, flags, method, _, _, crc, packed, size, name, extra = fields
            if signature != b"PK\x03\x04" or flags not in (0, _UTF8) or method or crc != entry.crc:
                raise _bad("a local header differs from the directory", entry.name)
            after = entry.header + _LOCAL.size
            view = self._read(after, name + extra)
            size, packed = _zip64_values(view[name:], (size, packed))
            if bytes(view[:name]) != entry.name.encode() or size != entry.size or packed != entry.size:
                raise _bad("a local header differs from the directory", entry.name)
            offset = after + name + extra
            expected = offset + entry.size
            if expected > end:
                raise _bad("an entry reaches beyond the data", entry.name)
            if offset % ALIGNMENT:
                raise _bad(f"an entry is not aligned to {ALIGNMENT} bytes", entry.name)
            entries[index] = Entry(entry.name, entry.header, offset, entry.size, entry.crc)
        if expected != end:
            raise _bad("there are bytes between the entries and the directory")

    def view(self, name: str, segment: SegmentInfo | None = None) -> memoryview:
        """An entry's bytes, unchecked. Raises :class:`ProgramError` if there is none of that name."""
        entry = self.entries.get(name)
        if entry is None:
            raise _bad("an entry is missing", name)
        view = self._loader.load(entry.offset, entry.size, segment or SegmentInfo("program", name))
        if len(view) != entry.size:
            raise ProgramError(f"the loader gave {len(view)} of {entry.size} bytes", code=ErrorCode.ACCESS_FAILED)
        return view

    def verified(self, name: str) -> memoryview:
        """An entry's bytes, after its CRC-32 was compared."""
        view = self.view(name)
        if zlib.crc32(view) != self.entries[name].crc:
            raise _bad("a checksum differs", name)
        return view


def _extra(size: int, position: int, name: bytes, alignment: int) -> bytes:
    """The extra fields of a local header: ZIP64 sizes where they are needed, and padding to the alignment."""
    zip64 = _FIELD.pack(_ZIP64, 16) + struct.pack("<2Q", size, size) if size >= _MAX32 else b""
    used = position + _LOCAL.size + len(name) + len(zip64) + _FIELD.size
    pad = -used % alignment
    return zip64 + _FIELD.pack(_PADDING, pad) + b"Z" * pad


def _central_record(entry: Entry) -> bytes:
    name = entry.name.encode()
    large = [value for value in (entry.size, entry.size, entry.header) if value >= _MAX32]
    extra = _FIELD.pack(_ZIP64, 8 * len(large)) + struct.pack(f"<{len(large)}Q", *large) if large else b""
    size, header = min(entry.size, _MAX32), min(entry.header, _MAX32)
    version = 45 if large else 20
    lengths = (len(name), len(extra), 0, 0, 0, 0)
    fields = (b"PK\x01\x02", version, version, _UTF8, 0, 0, 0x21, entry.crc, size, size, *lengths, header)
    return _CENTRAL.pack(*fields) + name + extra


def write_archive(
    file: BinaryIO,
    root: str,
    entries: Iterable[tuple[str, bytes | bytearray | memoryview]],
    alignment: int = ALIGNMENT,
) -> None:
    """Write entries, each a name below ``root`` and a contiguous buffer, to an empty binary file. Nothing is copied.

    ``alignment``: what every entry's first byte is a multiple of; a power of two from 64 to 32,768.
    Raises :class:`ProgramError` (``INVALID_ARGUMENT``) for another one.
    """
    if alignment not in _ALIGNMENTS:
        raise ProgramError(
            f"alignment is a power of two from {_ALIGNMENTS[0]} to {_ALIGNMENTS[-1]}, not {alignment}",
            code=ErrorCode.INVALID_ARGUMENT,
        )
    written: list[Entry] = []
    position = 0
    for short, data in entries:
        view = memoryview(data).cast("B")
        name = f"{root}/{short}".encode()
        if len(name) > _LONGEST_NAME:
            raise ProgramError(
                f"an entry's name has {len(name):,} bytes, and at most {_LONGEST_NAME:,} fit; give the method or the "
                f"data a shorter one than {short[:80]!r}…",
                code=ErrorCode.INVALID_ARGUMENT,
            )
        size, crc = len(view), zlib.crc32(view)
        extra = _extra(size, position, name, alignment)
        shown = min(size, _MAX32)
        version = 45 if size >= _MAX32 else 20
        fields = (b"PK\x03\x04", version, _UTF8, 0, 0, 0x21, crc, shown, shown, len(name), len(extra))
        file.write(_LOCAL.pack(*fields) + name + extra)
        file.write(view)
        header, position = position, position + _LOCAL.size + len(name) + len(extra) + size
        written.append(Entry(f"{root}/{short}", header, position - size, size, crc))
    directory = b"".join(map(_central_record, written))
    file.write(directory)
    count, size, end = len(written), len(directory), position + len(directory)
    if count >= _MAX16 or position >= _MAX32:
        numbers = (_END64.size - 12, 45, 45, 0, 0, count, count, size, position)
        file.write(_END64.pack(b"PK\x06\x06", *numbers) + _LOCATOR.pack(b"PK\x06\x07", 0, end, 1))
    count, position = min(count, _MAX16), min(position, _MAX32)
    file.write(_END.pack(b"PK\x05\x06", 0, 0, count, count, min(size, _MAX32), position, 0))
