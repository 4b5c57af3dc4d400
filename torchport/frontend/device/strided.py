"""``as_strided`` and its kin count from the start of the memory that a tensor is a view of.

The device has no memory to count in. Outside inference mode PyTorch knows a view's base, and elements are counted in
the base instead. Autograd does not know the base of ``x[1:].detach()`` and of ``.data``: the operators are refused for
them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import torch

from ...core.errors import UnsupportedOp
from ...core.frames import user_line
from ...trace.handle import DEVICE_TYPE, LazyTensor
from ...trace.wrapping import call_above, is_bypassed, unwrap
from . import routes
from .inplace import overriding
from .opaque import opaque
from .places import begins_somewhere

__all__ = ["install", "seen_as"]


def install(library: torch.library.Library) -> None:
    """Register kernels in place of PyTorch's own, at autograd and, for inference mode, at functionalization."""
    library.impl("as_strided", opaque(_as_strided), "AutogradPrivateUse1", with_keyset=True)
    for name in _RESHAPING:
        library.impl(name, opaque(_reshaping(name)), "AutogradPrivateUse1", with_keyset=True)
    library.impl("fill_diagonal_", opaque(_fill_diagonal_), "AutogradPrivateUse1")
    library.impl("as_strided_copy", opaque(_as_strided_copy), "AutogradPrivateUse1", with_keyset=True)
    library.impl("as_strided_scatter", opaque(_as_strided_scatter), "AutogradPrivateUse1", with_keyset=True)
    with overriding():
        for name in ("as_strided", "as_strided_copy", "as_strided_scatter"):
            guarded = _without_autograd(name, torch.library.get_kernel(f"aten::{name}", "Functionalize"))
            library.impl(name, opaque(guarded), "Functionalize", with_keyset=True, allow_override=True)


def install_views(library: torch.library.Library, alias: Callable[..., Any]) -> None:
    """Views that PyTorch's C++ takes of a user's tensor with functionalization switched off, as inside a ``DTensor``.

    PyTorch would make each by ``as_strided``, of which neither its start nor how to take a write back is known.
    ``alias``: the kernel for a handle.
    """
    for name in _VIEWS:
        base, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, base), overload or "default")
        below = (
            alias if name == "alias" else functools.partial(op._op_dk, torch._C.DispatchKey.CompositeExplicitAutograd)
        )
        library.impl(name, opaque(_view_as_above(op, below)), "PrivateUse1")


_VIEWS: Final = (
    *("alias", "diagonal", "expand", "permute", "select.int", "slice.Tensor"),
    *(
        "split.Tensor",
        "split_with_sizes",
        "squeeze",
        "squeeze.dim",
        "squeeze.dims",
        "t",
        "transpose.int",
        "unbind.int",
        "unsqueeze",
    ),
    "view.dtype",
)


def _view_as_above(op: Any, below: Callable[..., Any]) -> Callable[..., Any]:
    def view(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return call_above(op, (self, *args), kwargs) if is_bypassed(self) else below(self, *args, **kwargs)

    return view


def _as_strided(
    keys: Any, self: torch.Tensor, size: Any, stride: Any, storage_offset: int | None = None
) -> torch.Tensor:
    """``as_strided`` counts from the start of the memory a tensor is a view of, so it is called on the base."""
    if self._is_view() and self.device.type == DEVICE_TYPE:
        extent = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=False))
        base: Any = self._base
        if storage_offset is not None and base.dtype != self.dtype:
            self = _memory_as(base, self.dtype)
        elif storage_offset is not None:
            # A view of make_dual's has the tangent. It shows all of its base, so it serves as well. Where a view of
            # another view is written, PyTorch's functionalization refuses: so not for the rest.
            whole = self.is_contiguous() and base.is_contiguous() and self.numel() == base.numel()
            self = self if whole and torch.autograd.forward_ad.unpack_dual(self).tangent is not None else base
        elif not self.is_contiguous() or extent > self.numel():
            # A contiguous view holds what it shows in one piece, which serves as well; any other would need its offset.
            raise UnsupportedOp(
                "where a view begins in its base is not known on this device; pass storage_offset, or index the base",
                op="aten.as_strided.default",
                source=user_line(),
            )
    elif self.device.type == DEVICE_TYPE and begins_somewhere(self) and not _within(self, size, stride, storage_offset):
        raise _unknown_start("aten.as_strided.default")
    return torch.ops.aten.as_strided.default.redispatch(
        routes.to_stock_autograd(keys), self, size, stride, storage_offset
    )


_RESHAPING: Final = ("t_", "transpose_", "squeeze_", "squeeze_.dim", "squeeze_.dims", "unsqueeze_", "as_strided_")
"""Operators that change the shape of a tensor in place."""


def _reshaping(name: str) -> Callable[..., Any]:
    base, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, base), overload or "default")

    def reshape(keys: Any, self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # Afterwards autograd takes a view's gradient by ``as_strided``. On a device without memory it takes the former
        # views, and the gradient would have the wrong shape, or be transposed.
        if not torch.is_grad_enabled() and self._is_view() and self.requires_grad and self.device.type == DEVICE_TYPE:
            raise UnsupportedOp(
                f"{base}() under no_grad() on a view that requires a gradient: the device would not find its gradient "
                f"any more; take another view of it, x.{base.removesuffix('_')}(...), or call it with gradients on",
                op=str(op),
                source=user_line(),
            )
        return op.redispatch(routes.to_stock_autograd(keys), self, *args, **kwargs)

    return reshape


def _memory_as(base: Any, dtype: torch.dtype) -> torch.Tensor:
    """All of a tensor in one dimension, as another dtype. Raises :class:`UnsupportedOp` if it is not in one piece."""
    if not base.is_contiguous() or base.numel() * base.element_size() % dtype.itemsize:
        raise UnsupportedOp(
            f"it would count in the memory of a tensor of {base.dtype} that is not contiguous, or holds no whole "
            f"number of {dtype}; write x.clone() first",
            op="aten.as_strided.default",
            source=user_line(),
        )
    return seen_as(base.view(-1), dtype)


def seen_as(whole: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A one-dimensional tensor seen as one of another dtype, also in one dimension."""
    # Autograd differentiates these two views, but no ``view(dtype)``.
    if whole.dtype.is_complex and dtype == whole.dtype.to_real():
        return torch.view_as_real(whole).view(-1)
    if dtype.is_complex and whole.dtype == dtype.to_real():
        return torch.view_as_complex(whole.view(-1, 2))
    return whole.view(dtype)


def _fill_diagonal_(self: torch.Tensor, fill_value: Any, wrap: bool = False) -> torch.Tensor:
    """By diagonals: PyTorch's composite takes ``as_strided`` at ``storage_offset()``, which is not known here."""
    if self.dim() < 2 or (self.dim() > 2 and len(set(self.shape)) > 1):
        raise RuntimeError(
            "dimensions must larger than 1" if self.dim() < 2 else "all dimensions of input must be of equal length"
        )
    height, width = self.shape[0], self.shape[1]
    for start in range(0, height, width + 1) if wrap and self.dim() == 2 else (0,):
        diagonal = self[start:]
        while diagonal.dim() > 1:
            diagonal = diagonal.diagonal(0, 0, -1)
        diagonal.fill_(fill_value)
    return self


def _as_strided_copy(
    keys: Any, self: torch.Tensor, size: Any, stride: Any, storage_offset: int | None = None
) -> torch.Tensor:
    if _shows_a_part(self):
        return self.as_strided(size, stride, storage_offset).clone(memory_format=torch.contiguous_format)
    op = torch.ops.aten.as_strided_copy.default
    if type(self) is LazyTensor:
        # Functionalization takes a view again, on a handle. PyTorch's own kernel would clone the view and so change its
        # strides.
        return op._op_dk(torch._C.DispatchKey.PrivateUse1, self, size, stride, storage_offset)
    if self.device.type == DEVICE_TYPE and begins_somewhere(self) and not _within(self, size, stride, storage_offset):
        raise _unknown_start(str(op))
    return op.redispatch(routes.to_stock_autograd(keys), self, size, stride, storage_offset)


def _as_strided_scatter(
    keys: Any, self: torch.Tensor, src: torch.Tensor, size: Any, stride: Any, storage_offset: int | None = None
) -> torch.Tensor:
    op = torch.ops.aten.as_strided_scatter.default
    if self.device.type == DEVICE_TYPE and begins_somewhere(self):
        raise _unknown_start(str(op))
    if _shows_a_part(self):
        raise UnsupportedOp(
            "where a view begins in its base is not known on this device; scatter into the base, or into a clone",
            op=str(op),
            source=user_line(),
        )
    return op.redispatch(routes.to_stock_autograd(keys), self, src, size, stride, storage_offset)


def _shows_a_part(self: torch.Tensor) -> bool:
    """Whether a tensor of this device is a view that leaves out or reorders some of its base."""
    base: Any = self._base
    return (
        self.device.type == DEVICE_TYPE
        and base is not None
        and not (self.is_contiguous() and base.is_contiguous() and self.numel() == base.numel())
    )


def _within(self: torch.Tensor, size: Any, stride: Any, storage_offset: int | None) -> bool:
    """Whether the elements count from the view's own start and lie within a contiguous view."""
    extent = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=False))
    return storage_offset is None and self.is_contiguous() and extent <= self.numel()


def _unknown_start(op: str) -> UnsupportedOp:
    return UnsupportedOp(
        "where a view begins in its base is not known on this device after detach() or .data; call it on the view "
        "itself and detach the result, or write x.clone() first",
        op=op,
        source=user_line(),
    )


def _without_autograd(name: str, original: Any) -> Callable[..., Any]:
    """The refusals in inference mode, where autograd does not know a view's base."""

    def call(keys: Any, self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if (
            torch.is_inference_mode_enabled()
            and isinstance(unwrap(self), LazyTensor)
            and not torch._is_functional_tensor_base(self)
        ):
            size, stride, *offset = args[1:] if name == "as_strided_scatter" else args
            extent = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=False))
            given = offset[0] if offset else kwargs.get("storage_offset")
            if given is not None or not self.is_contiguous() or extent > self.numel() or name == "as_strided_scatter":
                raise UnsupportedOp(
                    "where a view begins in its base is not known on this device in inference mode; write x.clone() "
                    "first, or use torch.no_grad()",
                    op=f"aten.{name}.default",
                    source=user_line(),
                )
        return original.call_boxed(keys, self, *args, **kwargs)

    return call
