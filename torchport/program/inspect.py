"""A program file described for people; nothing of it is initialised."""

from __future__ import annotations

import os
from collections.abc import Sequence

from . import document as doc
from .package import Package, Verification, open_package
from .program import MethodMeta, Program, TensorMeta

__all__ = ["describe"]

_SHOWN = 12


def _size(nbytes: int) -> str:
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{nbytes} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"


def _tensors(title: str, tensors: Sequence[TensorMeta]) -> list[str]:
    return [f"  {title} {one.name}: {one}" + (f"  {_size(one.nbytes)}" if one.dtype else "") for one in tensors]


def _specs(specs: dict[str, bytes]) -> str:
    shown = [f"{key}={value.decode(errors='replace')[:60]}" for key, value in specs.items()]
    return f"  specs: {', '.join(shown)}" if shown else ""


def _method(meta: MethodMeta) -> list[str]:
    lines = [f"method {meta.name}: {meta.instructions} instructions, {_size(meta.constant_bytes)} of constants"]
    lines += [*_tensors("input ", meta.inputs), *_tensors("output", meta.outputs)]
    lines += [f"  buffer {name}" for name in meta.state]
    for index, delegate in enumerate(meta.delegates):
        lines.append(
            f"  delegate #{index}: {delegate.backend} {delegate.version}, {_size(delegate.nbytes)}, "
            f"{len(delegate.inputs)} inputs ({len(delegate.constants)} constants), {len(delegate.outputs)} outputs"
            + _specs(dict(delegate.specs))
        )
    lines += [f"  operator {op} × {count}" for op, count in meta.kernels.items()]
    if meta.variants:
        how = "inputs are padded up to a variant's sizes" if meta.padded else f"no padding: {meta.reason}"
        lines.append(f"  {len(meta.variants)} variants ({how}); delegates above are of the largest")
        for one in meta.variants:
            nbytes = sum(delegate.nbytes for delegate in one.delegates)
            lines.append(f"  variant {one.name}: {len(one.delegates)} delegates, {_size(nbytes)}")
    return lines


def _constants(package: Package) -> list[str]:
    constants = package.document.constants
    if not constants:
        return []
    ordered = sorted(constants, key=lambda one: -one.spec.nbytes)
    lines = [f"constants: {len(constants)}, {_size(sum(one.spec.nbytes for one in constants))}"]
    for one in ordered[:_SHOWN]:
        place = f"{one.external}: {one.entry}" if one.external else one.entry
        lines.append(f"  {one.name}: {one.spec}  {_size(one.spec.nbytes)}  in {place}")
    if len(ordered) > _SHOWN:
        lines.append(f"  … and {len(ordered) - _SHOWN} smaller ones")
    return lines


def describe(path: str | os.PathLike[str], verification: Verification = "full") -> str:
    """Methods, inputs, delegates, constants, sizes and versions. Raises :class:`ProgramError` for a damaged file."""
    package = open_package(path, verification)
    program = Program(package)
    made = ", ".join(f"{name} {version}" for name, version in program.producer.items())
    checked = "all checksums match" if verification == "full" else "checksums of data not compared"
    lines = [f"{os.fspath(path)}: {_size(package.size)}, program version {doc.VERSION}, made by {made}; {checked}"]
    for name in program.methods:
        lines += ["", *_method(program.meta(name))]
    found = _constants(package)
    return "\n".join([*lines, "", *found] if found else lines)
