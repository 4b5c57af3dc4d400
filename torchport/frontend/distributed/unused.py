"""``DistributedDataParallel`` that looks for unused parameters: it copies a map of them through pinned memory.

It asks the device for an allocator of such memory in C++, which a device in Python cannot give. Nothing here is faster
from pinned memory, so once there is such a module, tensors that are asked for in it are made in other memory.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from ..device.inplace import overriding
from ..device.opaque import opaque

__all__ = ["make_without_pinning"]

_library: Final[list[torch.library.Library]] = []


def make_without_pinning() -> None:
    """From now on ``torch.empty(..., pin_memory=True)`` gives unpinned memory, also to PyTorch's own C++."""
    if _library:
        return
    stock = torch.library.get_kernel("aten::empty.memory_format", "BackendSelect")
    library = torch.library.Library("aten", "IMPL")
    _library.append(library)

    def empty(keys: Any, size: Any, *, pin_memory: bool | None = None, **options: Any) -> Any:
        return stock.call_boxed(keys, size, pin_memory=False if pin_memory else pin_memory, **options)

    with overriding():
        library.impl("empty.memory_format", opaque(empty), "BackendSelect", with_keyset=True, allow_override=True)
