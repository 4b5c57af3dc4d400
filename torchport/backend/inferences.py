"""What shape inference and decompositions gave, in the disk cache: who compiles nothing need not infer either.

Fake tensors import Dynamo, Inductor's settings and SymPy, which takes longer than all else that a process does before
its first step where everything is found on disk.
"""

from __future__ import annotations

import atexit
import functools
import io
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any, Final

import torch

from ..cache.current import disk_cache
from ..cache.entry import CacheEntry, key_of
from ..cache.folder import CacheFolder
from ..core.specs import TensorSpec
from .compile_key import own_code, torch_build
from .infer import Inferred, remembered
from .inlined import Inlined, Ref, inlined
from .serialize import resolve_op

__all__ = ["keep_inferences", "recall_inferences"]

_AT_MOST: Final = 8_192
"""Calls that are kept, the newest ones."""
_PLAIN: Final = (int, float, bool, complex, list, tuple)
_known = 0
"""How many were known when they were last read or kept."""

_read: Final[set[Path]] = set()
"""Folders of which that is known."""


class _CallPickler(pickle.Pickler):
    """Refuses (``PicklingError``) what is not an argument of an operator of PyTorch's own."""

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, torch._ops.OpOverload):
            if obj.namespace not in ("aten", "prims"):
                raise pickle.PicklingError("an operator that another process may not have")
            return ("operator", str(obj))
        if isinstance(obj, (torch.dtype, torch.layout, torch.memory_format)):
            return ("constant", str(obj).removeprefix("torch."))
        if obj.__class__ is TensorSpec:
            return ("spec", obj.shape, obj.dtype, obj.strides)
        if obj.__class__ is Ref:
            return ("ref", obj.position)
        if obj.__class__ is Inlined:
            return ("inlined", obj.calls, obj.returns)
        if obj.__class__ is Inferred:
            return ("inferred", obj.container, obj.specs)
        if isinstance(obj, type) and obj not in _PLAIN and obj is not torch.device:
            raise pickle.PicklingError(f"{obj.__name__} is no plain number's type")
        return None


class _CallUnpickler(pickle.Unpickler):
    """Reads what :class:`_CallPickler` wrote, and makes nothing else."""

    def persistent_load(self, pid: Any) -> Any:
        kind, *rest = pid
        if kind == "operator":
            return resolve_op(rest[0])
        if kind == "constant":
            return getattr(torch, rest[0])
        return _MADE[kind](*rest)

    def find_class(self, module: str, name: str) -> Any:
        for one in _PLAIN:
            if (module, name) == ("builtins", one.__name__):
                return one
        if (module, name) == ("torch", "device"):
            return torch.device
        raise pickle.UnpicklingError(f"{module}.{name} is no part of an operator's arguments")


_MADE: Final[dict[str, Any]] = {"spec": TensorSpec, "inferred": Inferred, "inlined": Inlined, "ref": Ref}


def _tables() -> tuple[OrderedDict[Any, Any], ...]:
    return (*remembered(), inlined)


def _written(items: Any) -> bytes:
    file = io.BytesIO()
    _CallPickler(file, protocol=5).dump(items)
    return file.getvalue()


def _manifest(folder: CacheFolder) -> dict[str, str]:
    return {"what": "shape inference", "torch": torch_build(), "torchport": own_code(folder.digests)}


def recall_inferences() -> None:
    """Remember what other processes have inferred, as far as there is a disk cache; it is read once."""
    global _known
    folder = disk_cache()
    if folder is None or folder.path in _read:
        return
    _read.add(folder.path)
    manifest = _manifest(folder)
    folder.digests.save()
    entry = folder.read(key_of(manifest))
    if entry is None:
        return
    try:
        tables = _CallUnpickler(io.BytesIO(entry.data)).load()
    except Exception:  # written by the same code: what it cannot read is inferred
        return
    for table, read in zip(_tables(), tables, strict=True):
        for key, inferred in read:
            table.setdefault(key, inferred)
    _known = sum(map(len, _tables()))


@functools.cache
def keep_inferences() -> None:
    """At the end of the process, keep what it has inferred: to be called when something was compiled."""
    atexit.register(_keep)


def _keep() -> None:
    if sum(map(len, _tables())) == _known or (folder := disk_cache()) is None:
        return
    tables: list[list[Any]] = []
    for table in _tables():
        kept: list[Any] = []
        for item in list(table.items())[-_AT_MOST:]:
            try:
                _written(item)
            except (pickle.PicklingError, TypeError, AttributeError):
                continue
            kept.append(item)
        tables.append(kept)
    manifest = _manifest(folder)
    about = {"backend": "(shapes)", "operators": sum(map(len, tables))}
    with folder.compiling(key_of(manifest), 1.0):
        folder.write(CacheEntry(manifest, _written(tables), about))
