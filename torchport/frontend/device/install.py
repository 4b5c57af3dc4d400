"""Fill the device: a kernel for every functional ATen operator, the copies, autocast, and the shims. Runs once."""

from __future__ import annotations

from typing import Any, Final

import torch

from ...lazy.kernel import Kernel, make_kernel, supported_schema
from ...lazy.runtime import threads
from ...lazy.tensor import IndexedLazyTensor
from ...lazy.trace import unwrap
from . import autocast, copies, fork, shims

__all__ = ["install", "kernels"]

kernels: Final[dict[Any, Kernel]] = {}
_libraries: Final[list[torch.library.Library]] = []


def _operators() -> list[torch._ops.OpOverload]:
    """Every functional ATen overload that is not a composite PyTorch takes apart above the device."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    found: list[torch._ops.OpOverload] = []
    for name in torch._C._dispatch_get_all_op_names():
        if not name.startswith("aten::") or has_kernel(name, "CompositeImplicitAutograd"):
            continue
        base, _, overload = name.removeprefix("aten::").partition(".")
        packet = getattr(torch.ops.aten, base)
        op = getattr(packet, overload or "default", None)
        if op is not None and not any(a.alias_info is not None for a in op._schema.arguments):
            found.append(op)
    return found


def install() -> None:
    """Register everything with PyTorch's dispatcher. Called once, when the device is first used."""
    fork.note_use()
    library = torch.library.Library("aten", "IMPL")
    _libraries.append(library)
    special = copies.special_kernels()
    for op in _operators():
        if supported_schema(op):
            kernels[op] = make_kernel(op, threads, copies.with_generator, copies.elsewhere)
        fn = special.get(op) or (kernels[op].fast if op in kernels else None)
        if fn is None:
            continue
        name = op._schema.name.removeprefix("aten::")
        library.impl(f"{name}.{op._overloadname}" if op._overloadname != "default" else name, fn, "PrivateUse1")
    copies.kernels.update(kernels)
    IndexedLazyTensor.dispatch = staticmethod(_dispatch_indexed)
    autocast.install()
    shims.install()


def _dispatch_indexed(func: Any, args: Any, kwargs: Any) -> Any:
    """An operator on a tensor of an index above 0."""
    special = copies.special_kernels().get(func)
    if special is not None:
        return special(*args, **kwargs)
    kernel = kernels.get(func)
    if kernel is None:
        return copies.no_kernel(func, args, kwargs)
    for value in torch.utils._pytree.tree_leaves((args, kwargs)):
        if isinstance(value, torch.Tensor):
            inner = unwrap(value)
            if isinstance(inner, IndexedLazyTensor):
                return kernel.indexed(threads.of(inner.get_device()), *args, **kwargs)
    raise RuntimeError(f"{func} reached the device without a tensor of it")
