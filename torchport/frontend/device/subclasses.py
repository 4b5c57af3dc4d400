"""Tensor subclasses around tensors of this device: nested tensors of layout jagged, masked tensors, anybody's own.

A subclass with ``__torch_dispatch__`` is called below functionalization, which is switched off there: its code would
compute handles instead of tensors as the user has them. And an operator on a subclass and a plain tensor of this device
would reach functionalization first, which unwraps the plain tensor and wraps the subclass that comes back. So a
subclass of this device carries a dispatch key above all those; the kernels at that key pass an operator on without
functionalization. While the subclass's code runs, functionalization is on again, so the code sees the user's tensors.

Private torch APIs used here: ``torch.Tensor._make_wrapper_subclass`` (where such tensors are made),
``torch._C._ExcludeDispatchKeyGuard``, ``torch._C._dispatch_tls_set_dispatch_key_excluded``,
``torch._C._dispatch_tls_is_dispatch_key_excluded``, ``torch.nested._internal.nested_tensor.NestedTensor``.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch

from ...trace.handle import DEVICE_TYPE, LazyTensor
from ...trace.wrapping import inner_of
from .opaque import opaque
from .patches import replace
from .registered import KEPT_WHOLE, aten_operator

__all__ = ["install"]

_FUNCTIONALIZE: Final = torch._C.DispatchKey.Functionalize
_ABOVE: Final = "TESTING_ONLY_GenericWrapper"
"""A key that PyTorch keeps for wrappers in tests: it has no kernels, and only wrappers of this module carry it."""
_ABOVE_KEY: Final[Any] = torch._C._dispatch_key_parse(_ABOVE)
_BOTH: Final = torch._C.DispatchKeySet(_ABOVE_KEY) | torch._C.DispatchKeySet(_FUNCTIONALIZE)
_exclude: Callable[[Any, bool], None] = torch._C._dispatch_tls_set_dispatch_key_excluded
_is_excluded: Callable[[Any], bool] = torch._C._dispatch_tls_is_dispatch_key_excluded
_seen: Final[set[type]] = set()
_library: Final[list[torch.library.Library]] = []
_lock: Final = threading.RLock()
"""Held while a class is taken: another thread that makes a tensor of it goes on when its operators reach it."""


def install(library: torch.library.Library) -> None:
    """Check every wrapper that is made from now on; the first one of this device has the kernels registered."""
    _look_at_wrappers()
    _let_nested_tensors_pass(library)


@functools.cache
def _look_at_wrappers() -> None:
    original: Callable[..., Any] = torch.Tensor._make_wrapper_subclass
    names = [*inspect.signature(_parameters).parameters]

    @functools.wraps(original)
    def make(cls: type, size: Any, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        device = given.get("device")
        if device is None or torch.device(device).type != DEVICE_TYPE or not _is_anybodys(cls):
            return original(cls, size, *args, **kwargs)
        _take(cls)
        keys = torch._C.DispatchKeySet(_ABOVE_KEY)
        more: Any = given.get("_extra_dispatch_keys")
        given["_extra_dispatch_keys"] = keys if more is None else more | keys
        with torch.inference_mode(False):  # as this device's own tensors, which views of such a wrapper are taken of
            return original(cls, size, **{name: value for name, value in given.items() if value is not None})

    replace("torch.Tensor._make_wrapper_subclass", staticmethod(opaque(make)))


def _parameters(
    strides: Any,
    storage_offset: Any,
    memory_format: Any,
    dtype: Any,
    layout: Any,
    device: Any,
    pin_memory: Any,
    requires_grad: Any,
    dispatch_sizes_strides_policy: Any,
    dispatch_device: Any,
    dispatch_layout: Any,
    _extra_dispatch_keys: Any,
    storage_size: Any,
) -> None:
    """The arguments of ``torch.Tensor._make_wrapper_subclass`` after the first two, which may come by position."""


def _is_anybodys(cls: type) -> bool:
    """Whether a class of wrappers is neither this device's own nor one that PyTorch's compilers trace with."""
    return not issubclass(cls, LazyTensor) and not cls.__module__.startswith(("torch._subclasses", "torch._functorch"))


def _let_nested_tensors_pass(library: torch.library.Library) -> None:
    """A nested tensor is a view of its values to PyTorch, made by an operator that sees plain tensors only."""
    from torch.nested._internal.nested_tensor import NestedTensor

    for op in (torch.ops.aten._nested_view_from_jagged.default, torch.ops.aten._nested_from_padded_tensor.default):
        functionalized = torch.library.get_kernel(op, "Functionalize")
        kernel = functools.partial(_nest, NestedTensor, op, functionalized)
        opaque(_nest)
        library.impl(op._schema.name.removeprefix("aten::"), kernel, "Functionalize", with_keyset=True)


def _nest(cls: type, op: Any, functionalized: Any, keys: Any, values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if torch._is_functional_tensor(values) and isinstance(inner_of(values), LazyTensor):
        _take(cls)
        with torch._C._ExcludeDispatchKeyGuard(_BOTH):
            return op(values, *args, **kwargs)
    return functionalized.call_boxed(keys, values, *args, **kwargs)


def _take(cls: Any) -> None:
    """Have the ``__torch_dispatch__`` of a class run with functionalization on, and operators reach it."""
    if cls in _seen:
        return
    with _lock:
        if cls not in _seen:
            if not _library:
                _pass_on_every_operator()
            _take_dispatch(cls)
            _seen.add(cls)


def _take_dispatch(cls: Any) -> None:
    original = cls.__torch_dispatch__

    def dispatch(kind: type, func: Any, types: Iterable[type], args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if not _holds_ours((*args, *given.values())):
            return original.__func__(kind, func, types, args, given)
        before = [(key, _is_excluded(key)) for key in (_FUNCTIONALIZE, _ABOVE_KEY)]
        for key, _ in before:
            _exclude(key, False)
        try:
            return original.__func__(kind, func, types, args, given)
        finally:
            for key, excluded in before:
                _exclude(key, excluded)

    wrapped = opaque(functools.wraps(original.__func__)(dispatch))
    replace("*.__torch_dispatch__", classmethod(wrapped), owner=cls)


def _holds_ours(values: Iterable[Any]) -> bool:
    """Whether there is a tensor of this device among the values, or in a list of them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.device.type == DEVICE_TYPE:
                return True
        elif isinstance(value, torch.device):
            if value.type == DEVICE_TYPE:
                return True
        elif isinstance(value, (list, tuple)) and _holds_ours(value):
            return True
    return False


def _pass_on_every_operator() -> None:
    """Register kernels above all keys, for the operators that PyTorch does not decompose.

    One fallback for all operators would do, but PyTorch finds no Python fallback where a tensor has a
    ``__torch_dispatch__``.
    """
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    library = torch.library.Library("aten", "IMPL")
    anything = torch.library.Library("_", "IMPL")
    _library.extend((library, anything))
    anything.fallback(torch.library.fallthrough_kernel, _ABOVE)
    for name in torch._C._dispatch_get_all_op_names():
        short = name.removeprefix("aten::")
        apart = has_kernel(name, "CompositeImplicitAutograd") and name not in KEPT_WHOLE
        if short == name or (apart and not has_kernel(name, "Autograd")):
            continue
        op = aten_operator(name)
        if op is not None and any("Tensor" in str(argument.type) for argument in op._schema.arguments):
            passing = _passing_nested(op) if apart else _passing(op)
            library.impl(short, opaque(passing), _ABOVE, with_keyset=apart)


def _passing(op: Any) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_BOTH):
            return op(*args, **kwargs)

    return call


def _passing_nested(op: Any) -> Callable[..., Any]:
    """For an operator that PyTorch decomposes unless a tensor is nested."""

    def call(keys: Any, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(value, torch.Tensor) and value.is_nested for value in (*args, *kwargs.values())):
            with torch._C._ExcludeDispatchKeyGuard(_BOTH):
                return op(*args, **kwargs)
        return op.redispatch(keys.remove(_ABOVE_KEY), *args, **kwargs)

    return call
