"""Operators of other libraries that a backend has a kernel for: on its devices they are traced like PyTorch's own.

The device has a kernel for every functional operator of ATen. An operator of another library runs by what PyTorch
knows: a composite's body, a custom operator's Python code, the CPU's kernel on the host. Once a backend has a kernel
for such an operator, the device registers a tracing kernel at Functionalize and at PrivateUse1. Calls on tensors of
other backends go on to what PyTorch knows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from ...backend.lowering import view_form
from ...backend.own_kernels import OwnKernel, given_kernels, on_added
from ...backend.registrar import BackendRegistrar, on_registered
from ...core.errors import DispatchError
from ...dispatch import Functionality
from ...run.device_runtime import DeviceRuntime, runtimes
from ...trace.handle import LazyTensor
from ...trace.kernels import Kernel, has_tensor_argument, make_kernel, supported_schema
from ...trace.threads import threads
from ...trace.wrapping import inner_of, unwrap, wrap
from . import copies, custom
from .inplace import overriding
from .opaque import opaque

__all__ = ["install"]

_kernels: Final[dict[Any, Kernel]] = copies.kernels
"""The device's kernels: those of ATen's operators, and those that this module makes."""
_libraries: Final[dict[str, torch.library.Library]] = {}


def install() -> None:
    """Adopt the operators that backends have kernels for, now and when a backend registers another."""
    if _registered not in on_registered:
        on_registered.append(_registered)
        on_added.append(_added)
    for own in given_kernels():
        _adopt(own.op)


def _added(backend: str, own: OwnKernel) -> None:
    _adopt(own.op)


def _registered(registrar: BackendRegistrar, op: torch._ops.OpOverload, functionality: Functionality) -> None:
    if functionality is Functionality.Dense:
        _adopt(op)


def _adopt(op: torch._ops.OpOverload) -> None:
    """Give an operator a kernel on the device. Raises :class:`DispatchError` if no call could reach the kernel."""
    if op in _kernels:
        return
    reason = _unreachable(op)
    if reason is not None:
        raise DispatchError(f"a kernel for {op.name()} at Dense would never be called: {reason}", op=op.name())
    kernel = make_kernel(op, threads, copies.with_generator, copies.elsewhere, opaque)
    above, below = (torch.library.get_kernel(op, key) for key in ("Functionalize", "PrivateUse1"))
    library = _libraries.get(op.namespace)
    if library is None:
        library = _libraries[op.namespace] = torch.library.Library(op.namespace, "IMPL")
    name = op.name().partition("::")[2]
    with overriding():
        for key, other in (("Functionalize", above), ("PrivateUse1", below)):
            library.impl(name, opaque(_routed(kernel, other)), key, with_keyset=True, allow_override=True)
    custom.hide(op)
    _kernels[op] = kernel


def _unreachable(op: torch._ops.OpOverload) -> str | None:
    """Why no call of the operator could reach a kernel at Dense, or ``None``."""
    schema, name = op._schema, op.name()
    form = view_form(op)
    if schema.is_mutable:
        return "it writes, and the device is given functional operators only; register the one that returns a new value"
    if any(argument.alias_info is not None for argument in schema.arguments):
        return "it gives a view, and the device is given copies of views; register its _copy form"
    if form is not op:
        return f"it is captured as {form.name()}"
    if torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"):
        return "PyTorch takes it apart into other operators above the device; register it at 'Autograd'"
    if op.namespace == "aten" or op in copies.special_kernels():
        return "it moves data or gives Python values, which the device does itself"
    if not has_tensor_argument(op):
        return "it has no tensor argument that says which device is meant"
    if not supported_schema(op):
        return "it takes or gives something else than tensors, numbers, names and lists of them"
    return None


def _routed(kernel: Kernel, other: Any) -> Callable[..., Any]:
    op = kernel.op

    def call(keys: Any, *args: Any, **kwargs: Any) -> Any:
        runtime = _runtime(args, kwargs)
        if runtime is None or (op not in runtime.capture.kernels and runtime.kernels.kernel(op) is None):
            return other.call_boxed(keys, *args, **kwargs)
        given, named = tree_map_only(torch.Tensor, unwrap, (list(args), dict(kwargs)))
        if runtime.index == 0:
            result = kernel.fast(*given, **named)
        else:
            result = kernel.indexed(threads.of(runtime.index), *given, **named)
        return tree_map_only(LazyTensor, wrap, result)

    return call


def _runtime(args: Sequence[Any], kwargs: Mapping[str, Any]) -> DeviceRuntime | None:
    """The runtime of the first tensor of this device, not of a compiler that traces."""
    for value in tree_leaves((args, kwargs)):
        if isinstance(value, torch.Tensor):
            inner = inner_of(value) if torch._is_functional_tensor(value) else value
            if isinstance(inner, LazyTensor):
                return runtimes.get(inner.device.index or 0)
    return None
