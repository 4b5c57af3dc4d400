"""Functionalization's wrappers: what the user holds of a handle."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

__all__ = ["call_above", "inner_of", "is_below", "is_bypassed", "unwrap", "use_shown", "wrap"]


_show: Callable[[torch.Tensor], torch.Tensor] | None = None


def use_shown(show: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Call a function with what is in a wrapper and Python has not seen. C++ makes such handles, and has the function:
    it gives them the class and the value that Python knows (``native/unseen.h``)."""
    global _show
    _show = show


def inner_of(wrapper: torch.Tensor) -> torch.Tensor:
    """The inner tensor of a functionalization wrapper, as of the wrapper's last use."""
    inner = torch._from_functional_tensor(wrapper)
    return _show(inner) if _show is not None and inner.__class__ is torch.Tensor else inner


def unwrap(tensor: torch.Tensor) -> torch.Tensor:
    """The inner tensor of a functionalization wrapper, brought up to date; any other tensor unchanged."""
    if torch._is_functional_tensor(tensor):
        torch._functionalize_sync(tensor)  # what ``torch._sync`` comes to for a wrapper, 3 µs later
        return inner_of(tensor)
    return tensor


_FUNCTIONALIZE: Final = torch._C.DispatchKey.Functionalize
_OUTERMOST: Final = torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode
"""The fallback of tensor subclasses switches off this and all keys between; functionalization's kernels do not."""
_UNSEEN: Final = torch._C._dispatch_key_parse("DeferredInit")
"""The key of handles that Python has not seen (``native/objects.h``)."""
_is_excluded: Final = torch._C._dispatch_tls_is_dispatch_key_excluded
_exclude: Final = torch._C._dispatch_tls_set_dispatch_key_excluded


def is_bypassed(value: object) -> bool:
    """Whether a value is what the user holds of a handle, though functionalization is switched off.

    PyTorch's C++ calls operators so on the tensors inside of a ``DTensor``.
    """
    return isinstance(value, torch.Tensor) and torch._is_functional_tensor(value) and _is_excluded(_FUNCTIONALIZE)


def call_above(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call an operator with functionalization switched on, as if the program had called it."""
    keys = (_FUNCTIONALIZE, _OUTERMOST, _UNSEEN)
    excluded = [_is_excluded(key) for key in keys]
    for key in keys:
        _exclude(key, False)
    try:
        return op(*args, **kwargs)
    finally:
        for key, before in zip(keys, excluded, strict=True):
            _exclude(key, before)


def is_below() -> bool:
    """Whether functionalization itself is at work: what is made is its own, and in no wrapper."""
    return _is_excluded(_FUNCTIONALIZE) and not _is_excluded(_OUTERMOST)


def wrap(tensor: torch.Tensor) -> torch.Tensor:
    """A new value as the user gets it: in a functionalization wrapper, unless functionalization itself asked for it."""
    if _is_excluded(_FUNCTIONALIZE) and not _is_excluded(_OUTERMOST):
        return tensor
    return torch._to_functional_tensor(tensor)
