"""Fill the device: a kernel for every functional ATen operator, the copies, autocast, and the shims. Runs once."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.utils._pytree import tree_leaves

from ...core.errors import UnsupportedOp
from ...lazy.kernel import Kernel, make_kernel, supported_schema
from ...lazy.runtime import threads
from ...lazy.tensor import DEVICE_TYPE, IndexedLazyTensor
from ...lazy.trace import Trace, unwrap
from ..compile import fake
from . import autocast, composites, copies, custom, fork, inner, inplace, native, placement, routes, shims, strided
from .opaque import opaque

__all__ = ["install", "kernels"]

kernels: Final[dict[Any, Kernel]] = {}
_libraries: Final[list[torch.library.Library]] = []
_IMPLICIT: Final = torch._C.DispatchKey.CompositeImplicitAutograd
_EXPLICIT: Final = torch._C.DispatchKey.CompositeExplicitAutograd


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
            opaque(kernels[op].fast)
            opaque(kernels[op].indexed)
        fn = special.get(op) or (kernels[op].fast if op in kernels else None)
        if fn is None:
            continue
        name = op._schema.name.removeprefix("aten::")
        full = f"{name}.{op._overloadname}" if op._overloadname != "default" else name
        library.impl(full, opaque(fn), "PrivateUse1")
    copies.kernels.update(kernels)
    library.impl("alias", kernels[torch.ops.aten.alias_copy.default].fast, "PrivateUse1")
    library.impl("polygamma_", opaque(_polygamma_), "Functionalize")
    library.impl("copy_", opaque(_copy_), "AutogradPrivateUse1", with_keyset=True)
    strided.install(library)
    library.impl("native_batch_norm", opaque(_native_batch_norm), "AutogradPrivateUse1", with_keyset=True)
    fake.install_lift(library)
    anything = torch.library.Library("_", "IMPL")
    _libraries.append(anything)

    def fallback(op: Any, *args: Any, **kwargs: Any) -> Any:
        return inner.fallback(threads.of(0), op, args, kwargs, call)

    anything.fallback(opaque(fallback), "PrivateUse1")
    IndexedLazyTensor.dispatch = staticmethod(opaque(_dispatch_indexed))
    in_place = inplace.install(library, {op: _forms(kernel, special.get(op)) for op, kernel in kernels.items()})
    placement.install(library, [kernel for op, kernel in kernels.items() if op not in special])
    composites.install(library)
    custom.install()
    routes.install()
    autocast.install()
    shims.install()
    fake.install()
    native.install([kernel for op, kernel in kernels.items() if op not in special], in_place)


def _forms(kernel: Kernel, special: Any) -> inplace.Forms:
    """An operator's kernels on handles; a special one finds the trace itself."""
    if special is None:
        return inplace.Forms(kernel.fast, kernel.indexed)
    return inplace.Forms(special, lambda trace, *args, **kwargs: special(*args, **kwargs))


def call(op: Any, args: Any, kwargs: Any) -> Any:
    """Run a functional operator through its kernel on index 0."""
    fn = copies.special_kernels().get(op) or (kernels[op].fast if op in kernels else None)
    if fn is None:
        raise UnsupportedOp("the port device has no kernel for it", op=str(op))
    return fn(*args, **kwargs)


def _copy_(keys: Any, self: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """``host.copy_(port)`` brings the source over first; functionalization refuses to write a host tensor.

    Everything else goes on to PyTorch's own autograd kernel.
    """
    if self.device.type != DEVICE_TYPE:
        return self.copy_(src.to(self.device), non_blocking)
    inplace.refuse_overlap(torch.ops.aten.copy_.default, self)
    return torch.ops.aten.copy_.default.redispatch(routes.to_stock_autograd(keys), self, src, non_blocking)


def _native_batch_norm(keys: Any, *args: Any) -> Any:
    """In training this operator writes the running statistics behind its schema's back; its successor says so."""
    _, _, _, running_mean, running_var, training, _, _ = args
    if training and running_mean is not None and running_var is not None:
        return torch.ops.aten._native_batch_norm_legit.default(*args)
    return torch.ops.aten.native_batch_norm.default.redispatch(routes.to_stock_autograd(keys), *args)


def _polygamma_(self: torch.Tensor, n: int) -> torch.Tensor:
    """The one in-place composite that PyTorch registers no functionalization for."""
    return self.copy_(torch.polygamma(n, self))


def _dispatch_indexed(func: Any, args: Any, kwargs: Any) -> Any:
    """An operator on a tensor of an index above 0."""
    special = copies.special_kernels().get(func)
    if special is not None:
        return special(*args, **kwargs)
    kernel = kernels.get(func)
    for value in tree_leaves((args, kwargs)):
        if isinstance(value, torch.Tensor):
            handle = unwrap(value)
            if isinstance(handle, IndexedLazyTensor):
                trace = threads.of(handle.get_device())
                return (
                    kernel.indexed(trace, *args, **kwargs) if kernel else _indexed_fallback(trace, func, args, kwargs)
                )
    raise RuntimeError(f"{func} reached the device without a tensor of it")


def _indexed_fallback(trace: Trace, func: Any, args: Any, kwargs: Any) -> Any:
    """What PyTorch's dispatcher does for index 0 with an operator that the device has no kernel for."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    if has_kernel(func.name(), _IMPLICIT):
        return func._op_dk(_IMPLICIT, *args, **kwargs)
    plain = all(argument.alias_info is None for argument in func._schema.arguments)
    if plain and has_kernel(func.name(), _EXPLICIT):  # one without results, that checks others'
        return func._op_dk(_EXPLICIT, *args, **kwargs)
    return inner.fallback(trace, func, args, kwargs, _dispatch_indexed)
