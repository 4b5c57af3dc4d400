"""Fill the device on first use: a kernel for every functional ATen operator, the copies, autocast, and the shims."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch.utils._pytree import tree_leaves

from ...core import releases
from ...core.collection import made_to_stay
from ...core.default_state import default_state
from ...core.errors import UnsupportedOp
from ...trace.handle import DEVICE_TYPE, IndexedLazyTensor
from ...trace.kernels import Kernel, make_kernel, supported_schema
from ...trace.threads import threads
from ...trace.trace import Trace
from ...trace.wrapping import call_above, is_bypassed, unwrap
from . import (
    autocast,
    composites,
    copies,
    custom,
    factories,
    fake,
    first_factories,
    fork,
    fused,
    inner,
    inplace,
    layouts,
    libraries,
    library_composites,
    library_ops,
    native,
    placement,
    processes,
    routes,
    shims,
    strided,
    subclasses,
    transforms,
    writes,
)
from .opaque import opaque
from .registered import KEPT_WHOLE, aten_operator, names_with_kernel

__all__ = ["install", "kernels"]

kernels: Final[dict[Any, Kernel]] = {}
_libraries: Final[list[torch.library.Library]] = []
_IMPLICIT: Final = torch._C.DispatchKey.CompositeImplicitAutograd
_EXPLICIT: Final = torch._C.DispatchKey.CompositeExplicitAutograd
_OURS: Final = torch._C.DispatchKey.PrivateUse1


def _operators() -> list[torch._ops.OpOverload]:
    """Every functional ATen overload that is not a composite PyTorch takes apart above the device."""
    composites = set(names_with_kernel("CompositeImplicitAutograd")) - KEPT_WHOLE
    found: list[torch._ops.OpOverload] = []
    for name in torch._C._dispatch_get_all_op_names():
        if not name.startswith("aten::") or name in composites:
            continue
        op = aten_operator(name)
        if op is not None and not any(a.alias_info is not None for a in op._schema.arguments):
            found.append(op)
    return found


def install() -> None:
    """Register everything with PyTorch's dispatcher. Called when the device is first used, and again if that failed.

    The first use may happen under any mode of the caller, so the registration runs without modes.
    """
    _drop()
    if releases.version() < (2, 13):
        # Where PyTorch was built for CUDA and there is no GPU, several threads that make the first fake tensors at once
        # end the process: each puts another guard in the place of CUDA's.
        torch._C._ensureCUDADeviceGuardSet()
    try:
        with default_state(), made_to_stay():
            _install()
    except BaseException:
        _drop()
        raise


def _drop() -> None:
    """Undo the registrations of an attempt that failed, or that another thread was at when this process was forked."""
    for library in reversed(_libraries):
        library._destroy()
    _libraries.clear()


def _install() -> None:
    fork.note_use()
    first_factories.forget()
    library = torch.library.Library("aten", "IMPL")
    _libraries.append(library)
    special = copies.special_kernels()
    for op in _operators():
        if supported_schema(op):
            kernels[op] = make_kernel(op, threads, copies.with_generator, copies.elsewhere, opaque)
        fn = special.get(op) or (kernels[op].fast if op in kernels else None)
        if fn is None or op in factories.OPS:
            continue
        name = op._schema.name.removeprefix("aten::")
        full = f"{name}.{op._overloadname}" if op._overloadname != "default" else name
        library.impl(full, opaque(fn), "PrivateUse1")
    copies.kernels.update(kernels)
    strided.install_views(library, kernels[torch.ops.aten.alias_copy.default].fast)
    library.impl("polygamma_", opaque(_polygamma_), "Functionalize")
    library.impl("copy_", opaque(_copy_), "AutogradPrivateUse1", with_keyset=True)
    for name in ("_assert_async", "_assert_async.msg"):
        library.impl(name, opaque(_assert_async), "PrivateUse1")
    strided.install(library)
    library.impl("native_batch_norm", opaque(_native_batch_norm), "AutogradPrivateUse1", with_keyset=True)
    for name in ("_linalg_det", "_linalg_slogdet", "_linalg_solve_ex"):
        op = getattr(torch.ops.aten, name).default
        library.impl(name, opaque(_of_contiguous(op)), "AutogradPrivateUse1", with_keyset=True)
    fake.install_lift(library)
    anything = torch.library.Library("_", "IMPL")
    _libraries.append(anything)

    def fallback(op: Any, *args: Any, **kwargs: Any) -> Any:
        if any(map(is_bypassed, tree_leaves((args, kwargs)))):
            return call_above(op, args, kwargs)
        return inner.fallback(threads.of(0), op, args, kwargs, call)

    anything.fallback(opaque(fallback), "PrivateUse1")
    IndexedLazyTensor.dispatch = staticmethod(opaque(_dispatch_indexed))
    forms = {op: _forms(kernel, special.get(op)) for op, kernel in kernels.items()}
    in_place = inplace.install(library, forms)
    fused.install(library, forms)
    generated = [kernel for op, kernel in kernels.items() if op not in special and op not in factories.OPS]
    placement.install(library, generated)
    factories.install(library)
    composites.install(library)
    with inplace.overriding():
        copies.install(library)
        checked = writes.install(library)
    custom.install()
    library_composites.install()
    routes.install()
    library_ops.install()
    autocast.install(_libraries)
    shims.install()
    libraries.install()
    processes.install()
    layouts.install(library, _libraries)
    subclasses.install(library)
    transforms.install()
    fake.install()
    native.install(generated, in_place, checked)


def _forms(kernel: Kernel, special: Any) -> Kernel | inplace.KernelPair:
    """An operator's kernels on handles; a special one finds the trace itself."""
    if special is None:
        return kernel
    return inplace.KernelPair(special, lambda trace, *args, **kwargs: special(*args, **kwargs))


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
    given: Any = src
    if not isinstance(given, torch.Tensor):  # ``x.copy_(2)``: PyTorch hands wrapped numbers to Python as such
        src = torch.tensor(given)
    if self.device.type != DEVICE_TYPE:
        return self.copy_(src.to(self.device), non_blocking)
    return torch.ops.aten.copy_.default.redispatch(routes.to_stock_autograd(keys), self, src, non_blocking)


def _native_batch_norm(keys: Any, *args: Any) -> Any:
    """In training this operator writes the running statistics, which only its successor's schema declares."""
    _, _, _, running_mean, running_var, training, _, _ = args
    if training and running_mean is not None and running_var is not None:
        return torch.ops.aten._native_batch_norm_legit.default(*args)
    return torch.ops.aten.native_batch_norm.default.redispatch(routes.to_stock_autograd(keys), *args)


def _of_contiguous(op: Any) -> Callable[..., Any]:
    """An operator whose kernel factors a contiguous matrix as its transpose, and whose derivative asks which it was.

    The derivative looks at the strides that the program sees. The kernel is given a value, and that of a view has other
    strides once it was computed by itself. A contiguous matrix is one in both.
    """

    def call(keys: Any, matrix: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return op.redispatch(routes.to_stock_autograd(keys), matrix.contiguous(), *args, **kwargs)

    return call


def _assert_async(self: torch.Tensor, message: str = "Expected Tensor with single nonzero value, but got zero") -> None:
    """Read the value at once: the device cannot report a failed assertion later."""
    if not self.item():
        raise RuntimeError(message)


def _polygamma_(self: torch.Tensor, n: int) -> torch.Tensor:
    """The one in-place composite that PyTorch registers no functionalization for."""
    if self.device.type == DEVICE_TYPE:
        writes.refuse_as_cpu(torch.ops.aten.polygamma_.default, (self, n), {})
    return self.copy_(torch.polygamma(n, self))


def _dispatch_indexed(func: Any, args: Any, kwargs: Any) -> Any:
    """An operator on a tensor of an index above 0."""
    special = copies.special_kernels().get(func)
    if special is not None:
        return special(*args, **kwargs)
    kernel = copies.kernels.get(func)
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
    if func.namespace != "aten" and has_kernel(func.name(), _OURS):  # such as that of a functional collective
        return func._op_dk(_OURS, *args, **kwargs)
    if has_kernel(func.name(), _IMPLICIT):
        return func._op_dk(_IMPLICIT, *args, **kwargs)
    plain = all(argument.alias_info is None for argument in func._schema.arguments)
    if plain and has_kernel(func.name(), _EXPLICIT):  # an operator without results that checks its arguments
        return func._op_dk(_EXPLICIT, *args, **kwargs)
    return inner.fallback(trace, func, args, kwargs, _dispatch_indexed)
