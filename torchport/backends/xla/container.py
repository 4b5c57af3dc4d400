"""The bytes ``preprocess`` returns (:mod:`torchport.backend.container`), as a dataclass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torchport.backend.container import pack, spec_from_json, spec_to_json, unpack
from torchport.core.specs import TensorSpec

__all__ = ["XlaArtifact", "decode", "encode"]

_MAGIC = b"TPXLA001"


@dataclass(slots=True)
class XlaArtifact:
    """One lowered graph and how it is to be compiled."""

    module: bytes
    """What ``jax.export`` serialised: portable StableHLO with its calling convention."""
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    origins: tuple[int, ...]
    """Where each output comes from: a position among the module's results, or ``-1 - i`` for input ``i`` itself."""
    updates: tuple[int, ...] = ()
    """Per result of the module the input whose next value it is, -1 for none: they lie on several devices alike."""
    again: tuple[int, ...] = ()
    """Inputs that the module takes a second time, after all others: updates are computed from these. The first ones may
    be brought to every device before anything is computed from them."""
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The settings compiled with, as :meth:`Settings.to_json` gives them."""
    made_by: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Versions and platforms, for messages and for checking."""
    placement: Mapping[str, Any] | None = None
    """Mesh and input shardings, as :meth:`Placement.to_json` gives them, for more than one device."""
    executable: bytes = b""
    """The compiled executable for the device and machine in ``made_by["executable"]``; empty where there is none."""


def encode(artifact: XlaArtifact) -> bytes:
    """The artifact as bytes."""
    sections = {"module": artifact.module, "executable": artifact.executable}
    document = {
        "inputs": [spec_to_json(spec) for spec in artifact.inputs],
        "outputs": [spec_to_json(spec) for spec in artifact.outputs],
        "origins": list(artifact.origins),
        "updates": list(artifact.updates),
        "again": list(artifact.again),
        "settings": dict(artifact.settings),
        "made_by": dict(artifact.made_by),
        "placement": artifact.placement,
    }
    return pack(_MAGIC, document, sections)


def decode(data: bytes | memoryview) -> XlaArtifact:
    """The artifact :func:`encode` wrote. Raises :class:`CompileError` for anything else, or when a checksum differs."""

    def build(document: dict[str, Any], sections: dict[str, bytes]) -> XlaArtifact:
        return XlaArtifact(
            module=sections["module"],
            inputs=tuple(spec_from_json(value) for value in document["inputs"]),
            outputs=tuple(spec_from_json(value) for value in document["outputs"]),
            origins=tuple(document["origins"]),
            updates=tuple(document.get("updates", ())),
            again=tuple(document.get("again", ())),
            settings=document["settings"],
            made_by=document["made_by"],
            placement=document["placement"],
            executable=sections["executable"],
        )

    return unpack(_MAGIC, data, "xla", build)
