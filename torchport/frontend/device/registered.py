"""Which ATen operators have a kernel at a dispatch key, asked once per key: asking for each takes 10 times as long.

Private torch API used here: ``torch._C._dispatch_get_registrations_for_dispatch_key``.
"""

from __future__ import annotations

from typing import Any, Final

import torch

__all__ = ["KEPT_WHOLE", "aten_operator", "names_with_kernel"]

KEPT_WHOLE: Final = frozenset({"aten::silu_backward", "aten::mish_backward"})
"""Composites that the device is given as they are: PyTorch's CPU has kernels of its own for them. Autograd calls them
with autograd off; taken apart, each is five operators to trace, and rounds half-precision values in between."""


def names_with_kernel(key: str) -> dict[str, None]:
    """The names of ATen operators that have a kernel at ``key`` now, such as ``aten::add.Tensor``: a set in order."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return dict.fromkeys(name for name in names if name.startswith("aten::"))


def aten_operator(name: str) -> Any:
    """The overload of a name such as ``aten::add.Tensor``; ``None`` where ``torch.ops`` has it not."""
    base, _, overload = name.removeprefix("aten::").partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default", None)
