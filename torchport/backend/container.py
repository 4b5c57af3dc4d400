"""Framing for the bytes of a compiled graph: a magic number, JSON metadata, then named sections. No pickle.

Layout: an 8-byte magic number, the length of the JSON as 8 little-endian bytes, the JSON, the sections one after the
other. The JSON holds the metadata and each section's name, length and CRC-32.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import torch

from ..core.errors import CompileError
from ..core.specs import TensorSpec
from .interface import InitContext

__all__ = ["check_interface", "pack", "spec_from_json", "spec_to_json", "unpack"]

_HEADER: Final = struct.Struct("<8sQ")
_T = TypeVar("_T")


def spec_to_json(spec: TensorSpec) -> list[Any]:
    """Shape, dtype name, strides."""
    return [list(spec.shape), str(spec.dtype).removeprefix("torch."), list(spec.strides)]


def spec_from_json(value: Any) -> TensorSpec:
    """The spec :func:`spec_to_json` wrote. Raises ``ValueError``, ``TypeError`` or ``AttributeError``."""
    shape, dtype, strides = value
    found = vars(torch).get(dtype)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{dtype!r} is not a dtype")
    if len(shape) != len(strides) or not all(type(number) is int and number >= 0 for number in (*shape, *strides)):
        raise ValueError("a size or stride is not a whole number from 0 on")
    return TensorSpec(tuple(shape), found, tuple(strides))


def check_interface(
    backend: str, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec] | int, context: InitContext
) -> None:
    """Raise :class:`CompileError` where bytes are for other inputs or outputs than whoever loads them says.

    Compiled code reads as much memory as it was compiled for, whatever it is given. ``outputs`` may be their number.
    """
    if not context.inputs and not context.outputs:  # not said
        return
    sides: list[tuple[str, Sequence[TensorSpec] | int, Sequence[TensorSpec]]] = [
        ("inputs", inputs, context.inputs),
        ("outputs", outputs, context.outputs),
    ]
    for side, own, said in sides:
        count = own if isinstance(own, int) else len(own)
        if count != len(said):
            raise CompileError(f"these bytes of {backend} have {count} {side}, and not {len(said)}; compile again")
        for position, (one, other) in enumerate(zip(() if isinstance(own, int) else own, said, strict=False)):
            if one.shape != other.shape or one.dtype_name != other.dtype_name:
                raise CompileError(
                    f"these bytes of {backend} have {one} at {position} of their {side}, and not {other}; compile again"
                )


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
