"""The bytes ``preprocess`` returns: a magic number, JSON metadata, then named sections. No pickle.

Layout: ``TPXLA001``, the length of the JSON as 8 little-endian bytes, the JSON, the sections one after the other.
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

_MAGIC = b"TPXLA001"
_HEADER = struct.Struct("<8sQ")


@dataclass(slots=True)
class Artifact:
    """One lowered graph and how it is to be compiled."""

    module: bytes
    """What ``jax.export`` serialised: portable StableHLO with its calling convention."""
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    origins: tuple[int, ...]
    """Where each output comes from: a position among the module's results, or ``-1 - i`` for input ``i`` itself."""
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The settings compiled with, as :meth:`Settings.to_json` gives them."""
    made_by: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Versions and platforms, for messages and for checking."""
    placement: Mapping[str, Any] | None = None
    """Mesh and input shardings, as :meth:`Placement.to_json` gives them, for more than one device."""
    executable: bytes = b""
    """The compiled executable for the device and machine in ``made_by["executable"]``; empty where there is none."""


def _spec_to_json(spec: TensorSpec) -> list[Any]:
    return [list(spec.shape), str(spec.dtype).removeprefix("torch."), list(spec.strides)]


def _spec_from_json(value: Any) -> TensorSpec:
    shape, dtype, strides = value
    found = getattr(torch, dtype)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{dtype!r} is not a dtype")
    return TensorSpec(tuple(shape), found, tuple(strides))


def encode(artifact: Artifact) -> bytes:
    """The artifact as bytes."""
    sections = {"module": artifact.module, "executable": artifact.executable}
    document = {
        "inputs": [_spec_to_json(spec) for spec in artifact.inputs],
        "outputs": [_spec_to_json(spec) for spec in artifact.outputs],
        "origins": list(artifact.origins),
        "settings": dict(artifact.settings),
        "made_by": dict(artifact.made_by),
        "placement": artifact.placement,
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
            module=sections["module"],
            inputs=tuple(_spec_from_json(value) for value in document["inputs"]),
            outputs=tuple(_spec_from_json(value) for value in document["outputs"]),
            origins=tuple(document["origins"]),
            settings=document["settings"],
            made_by=document["made_by"],
            placement=document["placement"],
            executable=sections["executable"],
        )
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CompileError(f"these bytes were not made by the xla backend: {error}; compile again") from error
