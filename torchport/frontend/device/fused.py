"""Fused optimizers (``fused=True``): one operator writes the lists of parameters, gradients and states at once.

PyTorch's functionalization takes an empty list, such as AdamW's maxima without ``amsgrad``, for one of another device,
and ends in an internal assertion. It also runs each operator on meta tensors first, and most fused operators have no
meta kernel. So the functional operator's kernel is called directly here, as for the operators of :mod:`.inplace`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ...trace.handle import IndexedLazyTensor, LazyTensor
from ...trace.threads import threads
from .inplace import Kernels, overriding, unwrapped, write_each
from .opaque import opaque

__all__ = ["install"]

_NAMES = ("_fused_adam", "_fused_adamw", "_fused_sgd", "_fused_adagrad")


def install(library: torch.library.Library, functional: Mapping[Any, Kernels]) -> None:
    """Register each fused in-place operator whose functional form has kernels here."""
    with overriding():
        for name in _NAMES:
            packet, form = getattr(torch.ops.aten, f"{name}_", None), getattr(torch.ops.aten, name, None)
            for overload in packet.overloads() if packet is not None and form is not None else ():
                forms = functional.get(getattr(form, overload, None))
                if forms is not None:
                    short = f"{name}_" if overload == "default" else f"{name}_.{overload}"
                    original = torch.library.get_kernel(f"aten::{short}", "Functionalize")
                    fn = _fused(getattr(packet, overload), forms, original)
                    library.impl(short, opaque(fn), "Functionalize", with_keyset=True, allow_override=True)


def _fused(op: Any, forms: Kernels, original: Any) -> Callable[..., None]:
    written = [at for at, argument in enumerate(op._schema.arguments) if argument.alias_info is not None]

    def inplace(keys: Any, *args: Any, **kwargs: Any) -> None:
        inner = [unwrapped(value) for value in args]
        kind = type(inner[0][0]) if inner[0] else None
        if kind not in (LazyTensor, IndexedLazyTensor) or inner[0][0] is args[0][0]:
            return original.call_boxed(keys, *args, **kwargs)
        given = {name: unwrapped(value) for name, value in kwargs.items()}
        if kind is LazyTensor:
            results = forms.fast(*inner, **given)
        else:
            results = forms.indexed(threads.of(inner[0][0].get_device()), *inner, **given)
        for at, values in zip(written, results, strict=True):
            write_each(args[at], values)
        return None

    return inplace
