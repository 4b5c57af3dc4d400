"""One entry of the disk cache as bytes: a header, a description in JSON, and what a backend compiled.

Layout: magic number with the format's version, lengths of description and data as 8 little-endian bytes each, SHA-256
of the description, SHA-256 of the data; then description and data. Every byte is covered, so whatever was cut off,
added or changed is noticed before an engine sees it. An entry's key is the hash of its *manifest*, which holds what the
bytes depend on as component → digest or short text; so a file under another entry's name is noticed, too. The manifest
is made in :mod:`torchport.backend.compile_key`.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Final

__all__ = ["CacheEntry", "Damaged", "Description", "decode", "encode", "key_of", "read_description"]

_HEADER: Final = struct.Struct("<8sQQ32s32s")
_MAGIC: Final = b"TPCACHE1"
_LONGEST_DESCRIPTION: Final = 1 << 24


class Damaged(ValueError):
    """These bytes are not an entry, or not the one that was asked for."""


@dataclass(frozen=True, slots=True)
class Description:
    """An entry without its data: the manifest, and what people want to know (``about``)."""

    manifest: Mapping[str, str]
    about: Mapping[str, Any] = field(default_factory=dict[str, Any])
    size: int = 0
    """Bytes of the data."""

    @property
    def key(self) -> str:
        """The entry's key, which is its file's name."""
        return key_of(self.manifest)


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """What was compiled, and what it depends on."""

    manifest: Mapping[str, str]
    data: bytes
    about: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def key(self) -> str:
        """The entry's key, which is its file's name."""
        return key_of(self.manifest)


def key_of(manifest: Mapping[str, str]) -> str:
    """The hash of a manifest, as 64 hexadecimal digits; the order of its components does not matter."""
    return hashlib.sha256(_json(dict(manifest))).hexdigest()


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def encode(entry: CacheEntry) -> bytes:
    """The entry as a file's bytes."""
    text = _json({"manifest": dict(entry.manifest), "about": dict(entry.about)})
    digests = hashlib.sha256(text).digest(), hashlib.sha256(entry.data).digest()
    return _HEADER.pack(_MAGIC, len(text), len(entry.data), *digests) + text + entry.data


def _parts(header: bytes) -> tuple[int, int, bytes, bytes]:
    try:
        magic, length, size, digest, data_digest = _HEADER.unpack_from(header)
    except struct.error:
        raise Damaged(f"it has {len(header)} bytes, fewer than a header") from None
    if magic != _MAGIC:
        raise Damaged(f"it starts with {magic!r} instead of {_MAGIC!r}")
    if length > _LONGEST_DESCRIPTION:
        raise Damaged(f"its description would have {length} bytes")
    return length, size, digest, data_digest


def _described(text: bytes, digest: bytes, size: int) -> Description:
    if hashlib.sha256(text).digest() != digest:
        raise Damaged("its description does not have the checksum that its header says")
    document = json.loads(text)  # what has the checksum is what was written
    return Description(document["manifest"], document["about"], size)


def decode(data: bytes, key: str) -> CacheEntry:
    """The entry of that key. Raises :class:`Damaged` for any bytes but those that :func:`encode` gave for it."""
    length, size, digest, data_digest = _parts(data)
    start = _HEADER.size + length
    if len(data) != start + size:
        raise Damaged(f"it has {len(data)} bytes instead of {start + size}")
    found = _described(data[_HEADER.size : start], digest, size)
    content = data[start:]
    if hashlib.sha256(content).digest() != data_digest:
        raise Damaged("its data does not have the checksum that its header says")
    if found.key != key:
        raise Damaged(f"it is the entry {found.key}")
    return CacheEntry(found.manifest, content, found.about)


def read_description(file: BinaryIO) -> Description:
    """The description at the start of an open file; its data is not read. Raises :class:`Damaged`."""
    length, size, digest, _ = _parts(file.read(_HEADER.size))
    text = file.read(length)
    return _described(text, digest, size)
