"""In-place operators without the detour: functionalization runs each on meta tensors first, in Python, to check shapes.

On this device the trace has inferred the shapes already, so the functional operator's kernel is called directly and its
result put into the wrapper. Measured on torch 2.13: a traced AdamW step of a small MLP takes a quarter of the time.
Every other tensor, and every call whose result would change shape or dtype, goes to PyTorch's own kernel.

Private torch APIs used here: ``torch._functionalize_replace``, ``torch._functionalize_commit_update``,
``torch._functionalize_sync``, ``torch._from_functional_tensor``, ``torch._is_functional_tensor`` (what
functionalization does after such an op).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...lazy.tensor import LazyTensor
from .opaque import opaque

__all__ = ["install"]

_is_functional = torch._is_functional_tensor
_inner_of = torch._from_functional_tensor
_sync = torch._functionalize_sync
_replace = torch._functionalize_replace
_commit = torch._functionalize_commit_update


def install(library: torch.library.Library, functional: Mapping[Any, Callable[..., Any]]) -> None:
    """Register the in-place operators whose functional forms have kernels here."""
    with warnings.catch_warnings():
        # PyTorch says once that kernels are overridden; the ones overridden are kept, and called for other devices.
        warnings.filterwarnings("ignore", message="(?s).*[Oo]verriding a previously registered kernel")
        for name in torch._C._dispatch_get_all_op_names():
            found = _pair(name, functional)
            if found is not None:
                op, kernel = found
                original = torch.library.get_kernel(name, "Functionalize")
                listed = str(op._schema.arguments[0].real_type) == "List[Tensor]"
                restride = functional[torch.ops.aten.copy.default]
                fn = _of_list(kernel, original, restride) if listed else _of_tensor(op, kernel, original, restride)
                short = name.removeprefix("aten::")
                library.impl(short, opaque(fn), "Functionalize", with_keyset=True, allow_override=True)


def _pair(name: str, functional: Mapping[Any, Callable[..., Any]]) -> tuple[Any, Callable[..., Any]] | None:
    """An in-place operator and its functional form's kernel, if the two differ in nothing but the write to ``self``."""
    base, _, overload = name.removeprefix("aten::").partition(".")
    if not name.startswith("aten::") or not base.endswith("_") or base.endswith("__") or base == "copy_":
        return None
    if not torch._C._dispatch_has_kernel_for_dispatch_key(name, "Functionalize"):
        return None
    op = getattr(getattr(torch.ops.aten, base), overload or "default")
    form = getattr(getattr(torch.ops.aten, base[:-1], None), overload or "default", None)
    kernel = functional.get(form)
    arguments = op._schema.arguments
    if kernel is None or form is None or _shape(op) != _shape(form):
        return None
    written = [a.alias_info is not None for a in arguments]
    first = str(arguments[0].real_type)
    return (op, kernel) if written[0] and sum(written) == 1 and first in {"Tensor", "List[Tensor]"} else None


def _shape(op: Any) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.real_type)) for argument in op._schema.arguments]


def _unwrapped(value: Any) -> Any:
    if value.__class__ is LazyTensor:
        return value
    if isinstance(value, torch.Tensor):
        if _is_functional(value):
            _sync(value)
            return _inner_of(value)
        return value
    if value.__class__ is list and value and isinstance(value[0], torch.Tensor):
        return [_unwrapped(item) for item in value]
    return value


def _boxable(op: Any, args: Sequence[Any]) -> list[Any]:
    """Arguments for PyTorch's kernel: Python numbers in a tensor's place as tensors again."""
    kinds = [str(a.real_type) for a in op._schema.arguments[1:]]
    return [
        torch.tensor(a) if kind == "Tensor" and isinstance(a, (int, float, complex)) else a
        for a, kind in zip(args, kinds, strict=False)
    ]


def _of_tensor(op: Any, kernel: Callable[..., Any], original: Any, restride: Callable[..., Any]) -> Callable[..., Any]:
    scalar_form = getattr(op.overloadpacket, "Scalar", None) if op._overloadname == "Tensor" else None

    def inplace(keys: Any, self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        inner = _unwrapped(self)
        if inner.__class__ is not LazyTensor or inner is self:
            if scalar_form is not None and args and isinstance(args[0], (bool, int, float, complex)):
                # A number that became a tensor here would be a constant of whatever traces the program (torch.export).
                return scalar_form.redispatch(keys, self, *args, **kwargs)
            return original.call_boxed(keys, self, *_boxable(op, args), **kwargs)
        out = kernel(inner, *map(_unwrapped, args), **{name: _unwrapped(value) for name, value in kwargs.items()})
        if out.shape != inner.shape or out.dtype is not inner.dtype:
            return original.call_boxed(keys, self, *_boxable(op, args), **kwargs)
        if out.stride() != inner.stride():
            out = restride(inner, out)  # a write never changes the strides, which views and ``reshape`` go by
        _replace(self, out)
        _commit(self)
        _sync(self)
        return self

    return inplace


def _of_list(kernel: Callable[..., Any], original: Any, restride: Callable[..., Any]) -> Callable[..., Any]:
    def inplace(keys: Any, selfs: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        inner = [_unwrapped(item) for item in selfs]
        twice = len({id(item) for item in selfs}) != len(selfs)
        if (
            twice
            or not inner
            or any(i.__class__ is not LazyTensor or i is s for i, s in zip(inner, selfs, strict=True))
        ):
            return original.call_boxed(keys, selfs, *args, **kwargs)
        outs = kernel(inner, *map(_unwrapped, args), **{name: _unwrapped(value) for name, value in kwargs.items()})
        if any(o.shape != i.shape or o.dtype is not i.dtype for o, i in zip(outs, inner, strict=True)):
            return original.call_boxed(keys, selfs, *args, **kwargs)
        for item, before, out in zip(selfs, inner, outs, strict=True):
            _replace(item, out if out.stride() == before.stride() else restride(before, out))
            _commit(item)
            _sync(item)
        return None

    return inplace
