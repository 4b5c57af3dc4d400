"""``fully_shard``: it frees the memory of gathered parameters, and makes it again; here there is none.

It resizes storages, so that whatever autograd has saved of a gathered parameter finds the values that are gathered
again for backward. On this device a view finds its base's present value anyway, so only the values are let go of.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from ...core.errors import StorageAccess
from ...core.releases import operators
from ...trace.handle import LazyTensor, make_handle
from ..device.inplace import unwrapped
from ..device.opaque import opaque
from .collectives import contiguous
from .kernels import for_ours, write

__all__ = ["free", "install", "make_again"]


_library: Final[list[torch.library.Library]] = []


def install(module: Any) -> None:
    """Have the operators that copy parameters see the program's tensors: below functionalization writes would be lost.

    ``module``: ``torch.distributed.fsdp._fully_shard._fsdp_collectives``.
    """
    if _library:
        return
    library = torch.library.Library("fsdp", "IMPL")
    _library.append(library)
    bodies = {
        "all_gather_copy_in": module.all_gather_copy_in_cuda,
        "split_with_sizes_copy": _split_with_sizes_copy,
        "chunk_cat": _chunk_cat,
        "chunk_cat_mixed_dtype": _chunk_cat_mixed_dtype,  # since 2.15, which gradients go through
    }
    for name, body in bodies.items():
        if not operators(torch.ops.fsdp, name):
            continue
        stock = torch.library.get_kernel(f"fsdp::{name}", "Functionalize")
        library.impl(name, opaque(for_ours(body, stock)), "Functionalize", with_keyset=True)


def _split_with_sizes_copy(
    whole: torch.Tensor, sizes: Sequence[int], dim: int = 0, *, out: Sequence[torch.Tensor]
) -> None:
    for target, part in zip(out, whole.split_with_sizes(list(sizes), dim), strict=True):
        target.copy_(part)


def _chunk_cat(tensors: Sequence[torch.Tensor], dim: int, num_chunks: int, *, out: torch.Tensor) -> None:
    out.copy_(torch._chunk_cat(list(tensors), dim, num_chunks))


def _chunk_cat_mixed_dtype(tensors: Sequence[torch.Tensor], dim: int, num_chunks: int, *, out: torch.Tensor) -> None:
    _chunk_cat([tensor.to(out.dtype) for tensor in tensors], dim, num_chunks, out=out)


def _is_freed(tensor: torch.Tensor) -> bool:
    inner = unwrapped(tensor)
    return isinstance(inner, LazyTensor) and isinstance(inner.failure, _Freed)


class _Freed(StorageAccess):
    """Why a tensor has no value."""


def free(tensor: torch.Tensor) -> None:
    """Let go of a tensor's value. Its use raises :class:`StorageAccess` until it has another."""
    try:
        inner: Any = unwrapped(tensor)
    except _Freed:  # a view, of what was let go of before
        return
    if _is_freed(tensor) or not tensor.numel():
        return
    empty = make_handle(contiguous(inner.shape, inner.dtype), inner.get_device())
    empty.failure = _Freed("fully_shard has freed this parameter's gathered values; it gathers them when they are used")
    write(tensor, empty)


def make_again(tensor: torch.Tensor) -> None:
    """Give a freed tensor a value, which is to be written."""
    if _is_freed(tensor):
        with torch.no_grad():
            blank: Any = unwrapped(torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device))
        write(tensor, blank)
