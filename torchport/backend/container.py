"""Framing for the bytes of a compiled graph: a magic number, JSON metadata, then named sections. No pickle.

Layout: an 8-byte magic number, the length of the JSON as 8 little-endian bytes, the JSON, the sections one after the
other. The JSON holds the metadata and each section's name, length and CRC-32.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import torch

from ..core.errors import CompileError
from ..core.specs import TensorSpec

__all__ = ["pack", "spec_from_json", "spec_to_json", "unpack"]

_HEADER: Final = struct.Struct("<8sQ")
_T = TypeVar("_T")


def spec_to_json(spec: TensorSpec) -> list[Any]:
    """Shape, dtype name, strides."""
    return [list(spec.shape), str(spec.dtype).removeprefix("torch."), list(spec.strides)]


def spec_from_json(value: Any) -> TensorSpec:
    """The spec :func:`spec_to_json` wrote. Raises ``ValueError``, ``TypeError`` or ``AttributeError``."""
    shape, dtype, strides = value
    found = getattr(torch, dtype)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{dtype!r} is not a dtype")
    return TensorSpec(tuple(shape), found, tuple(strides))


def pack(magic: bytes, metadata: Mapping[str, Any], sections: Mapping[str, bytes]) -> bytes:
    """Metadata, which JSON can hold, and sections as bytes. ``magic`` has 8 bytes."""
    listed = [[name, len(data), zlib.crc32(data)] for name, data in sections.items()]
    text = json.dumps({**metadata, "sections": listed}, separators=(",", ":")).encode()
    return b"".join([_HEADER.pack(magic, len(text)), text, *sections.values()])


def unpack(
    magic: bytes, data: bytes | memoryview, backend: str, build: Callable[[dict[str, Any], dict[str, bytes]], _T]
) -> _T:
    """What ``build(metadata, sections)`` makes of packed bytes.

    Raises :class:`CompileError` for bytes that :func:`pack` did not write with this magic number, when a checksum
    differs, and for what ``build`` cannot use.
    """
    try:
        found, length = _HEADER.unpack_from(data)
        if found != magic:
            raise ValueError(f"it starts with {found!r} instead of {magic!r}")
        start = _HEADER.size + length
        document = json.loads(bytes(data[_HEADER.size : start]))
        sections: dict[str, bytes] = {}
        for name, size, checksum in document.pop("sections"):
            sections[name] = bytes(data[start : start + size])
            if len(sections[name]) != size or zlib.crc32(sections[name]) != checksum:
                raise ValueError(f"section {name!r} is damaged")
            start += size
        return build(document, sections)
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CompileError(f"these bytes were not made by the {backend} backend: {error}; compile again") from error
