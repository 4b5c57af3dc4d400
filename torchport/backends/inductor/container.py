"""The bytes ``preprocess`` returns (:mod:`torchport.backend.container`), as a dataclass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torchport.backend.container import pack, spec_from_json, spec_to_json, unpack
from torchport.core.specs import TensorSpec

__all__ = ["InductorArtifact", "decode", "encode"]

_MAGIC = b"TPIND001"


@dataclass(slots=True)
class InductorArtifact:
    """One compiled graph: the shared library, what its interface is, and what it needs to run."""

    library: bytes
    """The shared library."""
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    borrowed: tuple[int, ...] = ()
    """Outputs that may show memory of an input, of a constant or of another output: to be copied."""
    overwritten: tuple[int, ...] = ()
    """Inputs that the code may write results over."""
    extern_nodes: str = ""
    """JSON of the operators without a C shim, for torch's proxy executor; empty where there are none."""
    source: bytes = b""
    """The generated C++, compressed with zlib; empty where it was too long to keep."""
    platform: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What the machine must offer: torch version, architecture, instruction set extensions."""


def encode(artifact: InductorArtifact) -> bytes:
    """The artifact as bytes."""
    sections = {"library": artifact.library, "source": artifact.source}
    document = {
        "inputs": [spec_to_json(spec) for spec in artifact.inputs],
        "outputs": [spec_to_json(spec) for spec in artifact.outputs],
        "borrowed": list(artifact.borrowed),
        "overwritten": list(artifact.overwritten),
        "extern_nodes": artifact.extern_nodes,
        "platform": dict(artifact.platform),
    }
    return pack(_MAGIC, document, sections)


def decode(data: bytes | memoryview) -> InductorArtifact:
    """The artifact :func:`encode` wrote. Raises :class:`CompileError` for anything else, or when a checksum differs."""

    def build(document: dict[str, Any], sections: dict[str, bytes]) -> InductorArtifact:
        return InductorArtifact(
            library=sections["library"],
            inputs=tuple(spec_from_json(value) for value in document["inputs"]),
            outputs=tuple(spec_from_json(value) for value in document["outputs"]),
            borrowed=tuple(document["borrowed"]),
            overwritten=tuple(document.get("overwritten", ())),
            extern_nodes=document["extern_nodes"],
            source=sections["source"],
            platform=document["platform"],
        )

    return unpack(_MAGIC, data, "inductor", build)
