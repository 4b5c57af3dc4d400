"""``config.check_backends``: what an ``execute`` must not do, found where it does it.

It must not change its arguments, keep their memory, or return memory that somebody else has. Each is a wrong number
somewhere else, and much later. Costs a copy of every argument, so it is for finding out.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from ..core.errors import ContractError
from .answers import contents_of
from .interface import Backend, BackendData, ExecutionContext

__all__ = ["watched"]


def watched(
    backend: Backend, handle: Any, args: Sequence[BackendData], context: ExecutionContext
) -> Sequence[BackendData]:
    """``backend.execute``, looked at. Raises :class:`ContractError` for what it must not do."""
    kept = [at for at in range(len(args)) if at not in context.donated]
    before = {at: backend.from_device(args[at]).clone() for at in kept}
    holders = {at: _holders(args[at]) for at in kept}
    results = backend.execute(handle, args, context)
    for at in kept:
        if not _equal(before[at], backend.from_device(args[at])):
            raise _wrong(backend, f"changed its argument {at} ({args[at].spec})", "compute into new memory")
    _refuse_aliases(backend, args, kept, results)
    for at in kept:
        if _holders(args[at]) > holders[at]:
            raise _wrong(
                backend, f"kept its argument {at} ({args[at].spec}), or its memory, after it returned",
                "copy what is needed later: the memory may be given away, and is not freed as long as it is held",
            )  # fmt: skip
    return results


def _wrong(backend: Backend, what: str, instead: str) -> ContractError:
    return ContractError(f"backend {backend.name!r}: execute() {what}; {instead}", method="execute")


def _holders(data: BackendData) -> int:
    """How many references there are to a value and to what is in it."""
    contents = contents_of(data)
    return sys.getrefcount(data) + (sys.getrefcount(contents) if contents is not None else 0)


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    same = one.shape == other.shape and one.dtype == other.dtype
    if not same or torch.equal(one, other):
        return same
    return bool(((one == other) | ((one != one) & (other != other))).all())


def _memory(data: Any) -> Any:
    """What names the memory of a value that is host memory, or ``None``."""
    contents = contents_of(data) if isinstance(data, BackendData) else None
    if isinstance(contents, torch.Tensor):
        return contents.untyped_storage().data_ptr() if contents.numel() else None
    if contents is not None and contents.size:
        base = contents
        while getattr(base, "base", None) is not None and hasattr(base.base, "__array_interface__"):
            base = base.base
        return base.__array_interface__["data"][0]
    return None


def _refuse_aliases(
    backend: Backend, args: Sequence[BackendData], kept: Sequence[int], results: Sequence[BackendData]
) -> None:
    owner = {memory: f"argument {at}" for at in kept if (memory := _memory(args[at])) is not None}
    for at, result in enumerate(results):
        memory = _memory(result)
        if memory is None:
            continue
        if memory in owner:
            raise _wrong(
                backend, f"returned result {at} in the memory of {owner[memory]}",
                "return a value with memory of its own: a copy",
            )  # fmt: skip
        owner[memory] = f"result {at}"
