"""Bytes of one computation for several sizes, and the computation that runs it for some of them.

The bytes say how many of what they hold were made for which other sizes; they are loaded once, whatever sizes come.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from ...core.errors import CompileError
from ...core.specs import TensorSpec
from ..container import pack, spec_from_json, spec_to_json, unpack
from ..execution import Computation
from ..interface import Backend, BackendDevice, ExecutionContext, InitContext
from ..optional import optional_of
from ..prepare import Prepared
from .padded import Padding, make_padded, padding_from_json, padding_to_json

__all__ = ["base_from", "base_to", "is_sized", "make_sized", "sized"]

_MAGIC: Final = b"TPSIZED1"


def base_to(base: Prepared) -> tuple[dict[str, Any], bytes]:
    """What is known of a computation for several sizes, as plain data, and its bytes."""
    known = {
        "inputs": list(map(spec_to_json, base.inputs)),
        "outputs": list(map(spec_to_json, base.outputs)),
        "names": list(base.names),
        "mark": base.mark,
        "ops": base.ops,
        "label": base.label,
        "source": base.source,
        "seconds": base.seconds,
    }
    return known, bytes(base.data)


def base_from(known: Mapping[str, Any], data: bytes, kept: str) -> Prepared:
    """What :func:`base_to` was given. Raises what unfit data causes."""

    def specs(side: str) -> tuple[TensorSpec, ...]:
        return tuple(map(spec_from_json, known[side]))

    return Prepared(
        data, specs("inputs"), specs("outputs"), tuple(known["names"]), known["mark"], known["ops"], known["label"],
        known["source"], known["seconds"], kept=kept,
    )  # fmt: skip


def is_sized(data: bytes) -> bool:
    """Whether bytes are of a computation for several sizes."""
    return data[: len(_MAGIC)] == _MAGIC


def sized(
    about: Prepared, base: Prepared, new: bool, padding: Padding | None = None, values: Sequence[int] = ()
) -> Prepared:
    """A graph, of which ``about`` is known, by the bytes of a computation for several sizes that was made just now
    (``new``) or before. ``padding``: how its inputs are padded, if they are; ``values``: the symbols'."""
    known, data = base_to(base)
    if padding is not None:
        known = {**known, "padding": padding_to_json(padding), "values": list(values)}
    seconds = base.seconds if new else 0.0
    return replace(
        about, data=pack(_MAGIC, known, {"base": data}), seconds=seconds, kept="" if new else base.kept, missed=new
    )


def make_sized(
    backend: Backend, device: BackendDevice, prepared: Prepared, loaded: Callable[[Prepared], Computation]
) -> Computation:
    """The computation of a graph by bytes from :func:`sized`; ``loaded``: makes that of their base.

    Raises :class:`CompileError`.
    """

    def build(known: dict[str, Any], sections: dict[str, bytes]) -> tuple[Prepared, Padding | None, Sequence[int]]:
        padding = padding_from_json(known["padding"]) if "padding" in known else None
        return base_from(known, sections["base"], prepared.kept), padding, known.get("values", ())

    found, padding, values = unpack(_MAGIC, prepared.data, backend.name, build)
    base = loaded(found)
    if padding is not None:
        return make_padded(backend, device, prepared, base, padding, values)
    able = optional_of(backend).symbolic_sizes
    if able is None:
        raise CompileError(f"these bytes are for several sizes, which backend {backend.name!r} has not; compile again")
    handle = able.resized(base.handle, InitContext(device, prepared.inputs, prepared.outputs))
    made = Computation(
        backend, device, prepared.inputs, prepared.names, prepared.outputs, handle,
        ExecutionContext(device, prepared.outputs), prepared.mark, prepared.ops, prepared.seconds, lock=base.lock,
    )  # fmt: skip
    made.resized = base
    return made
