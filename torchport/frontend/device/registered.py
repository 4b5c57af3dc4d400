"""Which ATen operators have a kernel at a dispatch key, asked once per key: asking for each takes 10 times as long.

Private torch API used here: ``torch._C._dispatch_get_registrations_for_dispatch_key``.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["aten_operator", "names_with_kernel"]


def names_with_kernel(key: str) -> dict[str, None]:
    """The names of ATen operators that have a kernel at ``key`` now, such as ``aten::add.Tensor``: a set in order."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return dict.fromkeys(name for name in names if name.startswith("aten::"))


def aten_operator(name: str) -> Any:
    """The overload of a name such as ``aten::add.Tensor``; ``None`` where ``torch.ops`` has it not."""
    base, _, overload = name.removeprefix("aten::").partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default", None)
