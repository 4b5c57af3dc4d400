"""The bytes ``preprocess`` returns: a magic number, JSON metadata, then named sections. No pickle.

Layout: ``TPIND001``, the length of the JSON as 8 little-endian bytes, the JSON, the sections one after the other.
The JSON holds the metadata and each section's name, length and CRC-32.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from torchport.core.errors import CompileError
from torchport.core.specs import TensorSpec

__all__ = ["Artifact", "decode", "encode"]

_MAGIC = b"TPIND001"
_HEADER = struct.Struct("<8sQ")


@dataclass(slots=True)
class Artifact:
    """One compiled graph: the shared library, what its interface is, and what it needs to run."""

    library: bytes
    """The shared library."""
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    borrowed: tuple[int, ...] = ()
    """Outputs that may show memory of an input, of a constant or of another output: to be copied."""
    extern_nodes: str = ""
    """JSON of the operators without a C shim, for torch's proxy executor; empty where there are none."""
    source: bytes = b""
    """The generated C++, compressed with zlib; empty where it was too long to keep."""
    platform: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What the machine must offer: torch version, architecture, instruction set extensions."""


def _spec_to_json(spec: TensorSpec) -> list[Any]:
    return [list(spec.shape), str(spec.dtype).removeprefix("torch."), list(spec.strides)]


def _spec_from_json(value: Any) -> TensorSpec:
    shape, dtype, strides = value
    return TensorSpec(tuple(shape), getattr(torch, dtype), tuple(strides))


def encode(artifact: Artifact) -> bytes:
    """The artifact as bytes."""
    sections = {"library": artifact.library, "source": artifact.source}
    document = {
        "inputs": [_spec_to_json(spec) for spec in artifact.inputs],
        "outputs": [_spec_to_json(spec) for spec in artifact.outputs],
        "borrowed": list(artifact.borrowed),
        "extern_nodes": artifact.extern_nodes,
        "platform": dict(artifact.platform),
        "sections": [[name, len(data), zlib.crc32(data)] for name, data in sections.items()],
    }
    text = json.dumps(document, separators=(",", ":")).encode()
    return b"".join([_HEADER.pack(_MAGIC, len(text)), text, *sections.values()])


def decode(data: bytes | memoryview) -> Artifact:
    """The artifact :func:`encode` wrote. Raises :class:`CompileError` for anything else, or when a checksum differs."""
    try:
        magic, length = _HEADER.unpack_from(data)
        if magic != _MAGIC:
            raise ValueError(f"it starts with {magic!r} instead of {_MAGIC!r}")
        start = _HEADER.size + length
        document = json.loads(bytes(data[_HEADER.size : start]))
        sections: dict[str, bytes] = {}
        for name, size, checksum in document["sections"]:
            sections[name] = bytes(data[start : start + size])
            if len(sections[name]) != size or zlib.crc32(sections[name]) != checksum:
                raise ValueError(f"section {name!r} is damaged")
            start += size
        return Artifact(
            library=sections["library"],
            inputs=tuple(_spec_from_json(value) for value in document["inputs"]),
            outputs=tuple(_spec_from_json(value) for value in document["outputs"]),
            borrowed=tuple(document["borrowed"]),
            extern_nodes=document["extern_nodes"],
            source=sections["source"],
            platform=document["platform"],
        )
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CompileError(f"these bytes were not made by the inductor backend: {error}; compile again") from error
