"""Composite operators where autograd is off: decomposed above functionalization, as they are with autograd on.

PyTorch decomposes a composite (``linear``, ``x.square_()``) at its autograd key. In inference mode, and inside the
kernels of other libraries, that key is skipped, and functionalization's fallback hands the whole composite to the
device. The views and writes in its body would then apply to handles, which share no memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from ...trace.handle import LazyTensor
from ...trace.wrapping import inner_of
from .layouts import COMPRESSED
from .opaque import opaque
from .registered import KEPT_WHOLE, aten_operator, names_with_kernel
from .routes import call_autograd_kernel

__all__ = ["apart", "install"]

apart: Final[list[Any]] = []
"""The operators that are taken apart where autograd is off."""

_IMPLICIT = torch._C.DispatchKey.CompositeImplicitAutograd
_EXPLICIT = torch._C.DispatchKey.CompositeExplicitAutograd


def _record_stream(self: torch.Tensor, s: torch.Stream) -> None:
    """Nothing: a value lives as long as what uses it. DDP with ``device_ids`` calls it on its inputs."""


def install(library: torch.library.Library) -> None:
    """Register every composite of ATen that has no kernel of its own at functionalization."""
    known = {*names_with_kernel("Functionalize"), *KEPT_WHOLE}
    for name in names_with_kernel("CompositeImplicitAutograd"):
        op = None if name in known else aten_operator(name)
        if op is not None and op not in COMPRESSED:
            whole = torch.library.get_kernel(op, "Functionalize")
            fn = opaque(_apart(op, whole))
            library.impl(name.removeprefix("aten::"), fn, "Functionalize", with_keyset=True)
            apart.append(op)
    library.impl("record_stream", opaque(_record_stream), "AutogradPrivateUse1")
    # The lengths and one of the results are on the host, whatever device the sequence is on.
    op = torch.ops.aten._pack_padded_sequence.default
    whole = torch.library.get_kernel(op, "Functionalize")
    library.impl("_pack_padded_sequence", opaque(_apart(op, whole, _EXPLICIT)), "Functionalize", with_keyset=True)


def _apart(op: Any, whole: Any, key: Any = _IMPLICIT) -> Callable[..., Any]:
    def call(keys: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_ours(args) or _is_ours(tuple(kwargs.values())):
            if torch.is_inference_mode_enabled():  # a backend's kernel at Autograd was skipped, too
                return call_autograd_kernel(op, args, kwargs, lambda: op._op_dk(key, *args, **kwargs))
            return op._op_dk(key, *args, **kwargs)
        return whole.call_boxed(keys, *args, **kwargs)

    return call


def _is_ours(values: Any) -> bool:
    """Whether the first wrapper among the values is of a handle, and not of a compiler that traces."""
    for value in values:
        if isinstance(value, torch.Tensor) and torch._is_functional_tensor(value):
            return isinstance(inner_of(value), LazyTensor)
        if isinstance(value, (list, tuple)) and _is_ours(value):
            return True
    return False
