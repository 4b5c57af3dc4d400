"""How Dynamo and AOTAutograd see ``port`` tensors: one shim for each place where PyTorch looks inside a tensor.

Private torch APIs used here: ``torch._subclasses.meta_utils.MetaTensorDescriber.describe_tensor``, which takes every
functionalization wrapper apart except those of the devices ``xla`` and ``lazy``. A ``port`` tensor is such a wrapper,
too, and is to be described as what the user sees: a plain strided tensor, whose storage says which tensors are views
of one another. ``torch._functorch._aot_autograd.runtime_wrappers.HANDLED_TYPES`` are the classes of tensors that a
compiled function's first call may meet. ``torch._subclasses.functional_tensor.CppFunctionalizeAPI.wrap_tensors`` wraps
what comes out of higher-order operators. ``torch.multiprocessing.reductions.StorageWeakRef`` is what fake tensors hold
of constants' storages.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import types
import warnings
from typing import Any, Final
from weakref import WeakSet

import torch
from torch.utils._pytree import tree_map

from ...core.default_state import default_state
from ...trace.handle import DEVICE_TYPE, IndexedLazyTensor, LazyTensor
from .memory import is_ours
from .patches import is_applied, replace, when_imported
from .shims import TorchWithoutWrapping
from .writes import is_conjugate_view

__all__ = ["handle_handles", "install", "install_lift", "offset_in_base", "saw_conjugate_views", "stock_lift"]

aten = torch.ops.aten


def install() -> None:
    """Apply every shim, each once: the device may be made ready again after it failed."""
    _describe_as_seen()
    _no_constants()
    _share_weak_references()
    when_imported("torch._subclasses.functional_tensor", _wrap_results_of_higher_order_operators)
    _handle_handles_if_compiling()


@functools.cache
def _describe_as_seen() -> None:
    """Wrap the describer. Tensors of this device are described by a copy of it that sees other globals."""
    import torch._subclasses.meta_utils as module

    describer: Any = module.MetaTensorDescriber
    original = describer.describe_tensor
    ours: Any = types.FunctionType(original.__code__, {**vars(module), "torch": TorchWithoutWrapping()})
    ours.__kwdefaults__ = original.__kwdefaults__

    @functools.wraps(original)
    def describe_tensor(self: Any, t: torch.Tensor, *, recurse: bool = True, trace: bool = False) -> Any:
        _handle_handles_if_compiling()
        if t.device.type != DEVICE_TYPE or not torch._is_functional_tensor(t):
            return original(self, t, recurse=recurse, trace=trace)
        torch._sync(t)
        if is_conjugate_view(t):
            _saw_conjugate_views.add(self)
        described = ours(self, t, recurse=recurse, trace=trace)
        return dataclasses.replace(described, storage_offset=offset_in_base(t)) if t._base is not None else described

    replace("torch._subclasses.meta_utils.MetaTensorDescriber.describe_tensor", describe_tensor)


_saw_conjugate_views: Final[WeakSet[Any]] = WeakSet()
"""The describers that have described a conjugate view. The program sees it as a plain tensor of conjugated values."""


def saw_conjugate_views(mode: Any) -> bool:
    """Whether a fake tensor mode has described a tensor of this device that is a conjugate view."""
    return mode.fake_tensor_converter.meta_converter.describer in _saw_conjugate_views


def offset_in_base(view: torch.Tensor) -> int:
    """The offset of a view in its base. The view's handle does not know it, since each handle has its own value."""
    base: Any = view._base
    with default_state():
        like = torch.empty_strided(base.shape, base.stride(), dtype=base.dtype, device="meta")
        return view._view_func_unsafe(like).storage_offset()  # type: ignore[attr-defined]


@functools.cache
def _no_constants() -> None:
    """Keep the device's tensors out of fake ones, which may carry a real tensor of one element to compute with."""
    import torch._subclasses.fake_tensor as module

    mode, converter = module.FakeTensorMode, module.FakeTensorConverter
    may_turn, invalidate = mode.may_turn_const, converter.invalidate_constant_aliases

    @functools.wraps(may_turn)
    def may_turn_const(self: Any, t: torch.Tensor) -> bool:
        return t.device.type != DEVICE_TYPE and may_turn(self, t)

    @functools.wraps(invalidate)
    def invalidate_constant_aliases(self: Any, tensor: torch.Tensor) -> None:
        if tensor.device.type != DEVICE_TYPE:
            invalidate(self, tensor)

    fake = "torch._subclasses.fake_tensor"
    replace(f"{fake}.FakeTensorMode.may_turn_const", may_turn_const)
    replace(f"{fake}.FakeTensorConverter.invalidate_constant_aliases", invalidate_constant_aliases)


@functools.cache
def _share_weak_references() -> None:
    """The copy of a weak reference to a storage is the reference itself, as with Python's weak references.

    ``deepcopy`` of a fake tensor copies its mode, with the weak references to storages of constants in it. Each copy
    would release the one reference that the original took, and so write to memory that may be another object's.
    """
    reference = "torch.multiprocessing.reductions.StorageWeakRef"
    replace(f"{reference}.__copy__", lambda self: self)
    replace(f"{reference}.__deepcopy__", lambda self, memo: self)


def _wrap_results_of_higher_order_operators(module: Any) -> None:
    """Wrap results of ``torch.cond`` as every tensor of the device is wrapped, not for a level of a transformation."""
    target = "torch._subclasses.functional_tensor.CppFunctionalizeAPI.wrap_tensors"
    if is_applied(target):  # installing was tried again
        return
    original = module.CppFunctionalizeAPI.wrap_tensors

    @functools.wraps(original)
    def wrap_tensors(self: Any, args: Any) -> Any:
        def wrapped(value: Any) -> Any:
            return torch._to_functional_tensor(value) if isinstance(value, LazyTensor) else original(self, value)

        return tree_map(wrapped, args)

    replace(target, wrap_tensors)


_RUNTIME_WRAPPERS = "torch._functorch._aot_autograd.runtime_wrappers"


def _handle_handles_if_compiling() -> None:
    """Call :func:`handle_handles` if AOTAutograd is imported: a function that it compiled may use the device."""
    if _RUNTIME_WRAPPERS in sys.modules:
        handle_handles()


@functools.cache
def handle_handles() -> None:
    """Add handles to the classes that AOTAutograd, which watches a compiled function's first call, lets pass."""
    import torch._functorch._aot_autograd.runtime_wrappers as module

    watched: Any = module
    replace(f"{_RUNTIME_WRAPPERS}.HANDLED_TYPES", (*watched.HANDLED_TYPES, LazyTensor, IndexedLazyTensor))


@functools.cache
def stock_lift() -> Any:
    """PyTorch's own kernel of ``lift_fresh``. The first call must come before another is registered."""
    return torch.library.get_kernel("aten::lift_fresh", "Functionalize")


def install_lift(library: torch.library.Library) -> None:
    """``torch.tensor(data, device="port")`` under a dispatch mode: a constant on the host that moves to the device.

    PyTorch makes the tensor with modes off and then passes it to the modes by the operator ``lift_fresh``. Fake tensors
    and tracing take a host tensor for a constant, but cannot see the value of a handle.
    """
    original = stock_lift()

    def lift_fresh(keys: Any, self: torch.Tensor) -> torch.Tensor:
        if not (torch._C._len_torch_dispatch_stack() and self.device.type == DEVICE_TYPE and is_ours(self)):
            return original.call_boxed(keys, self)
        with default_state():
            held = self.cpu()
        return aten.lift_fresh.default(held).to(self.device)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns that a kernel is overridden, which is intended
        library.impl("lift_fresh", lift_fresh, "Functionalize", with_keyset=True, allow_override=True)
