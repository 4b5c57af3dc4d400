"""Operators that reach the device before it is ready: they make it ready, and are called again.

PyTorch makes a device ready where a program names it in a factory or a copy, but neither for ``torch.ops`` nor while a
``FakeTensorMode`` is on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from .opaque import opaque

__all__ = ["expect", "forget"]

_NAMES: Final = ("empty.memory_format", "empty_strided", "_to_copy", "tril_indices", "triu_indices")
_libraries: Final[list[torch.library.Library]] = []


def expect(make_ready: Callable[[], None]) -> None:
    """Have operators that need no tensor of the device call ``make_ready`` first."""
    library = torch.library.Library("aten", "IMPL")
    _libraries.append(library)

    def first(name: str, overload: str = "default") -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            make_ready()
            return getattr(getattr(torch.ops.aten, name), overload)(*args, **kwargs)

        return call

    for name in _NAMES:
        library.impl(name, opaque(first(*name.split("."))), "PrivateUse1")


def forget() -> None:
    """Remove the kernels of :func:`expect`, whose places the device's own kernels take."""
    while _libraries:
        _libraries.pop()._destroy()
