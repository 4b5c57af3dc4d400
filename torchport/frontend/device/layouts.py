"""Sparse, quantized, nested and oneDNN tensors: refused where they would be made, unless a backend has kernels.

PyTorch's own kernels for these layouts look at memory, which tensors of this device do not have; some end the process.
A backend's kernels at Sparse, SparseCsr, Quantized and NestedTensor are routed in ``routes.py`` and come first, and so
do those at Dense for the operators that make such a tensor of a strided one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch.utils._pytree import tree_leaves

from ...core.errors import UnsupportedOp
from ...core.frames import user_line
from ...dispatch import Functionality
from ...trace.handle import DEVICE_TYPE, LazyTensor
from ...trace.layouts import NESTED, ONEDNN, QUANTIZED, SPARSE, refusal
from ...trace.threads import threads
from ...trace.wrapping import unwrap
from . import routes, sparse
from .inplace import overriding
from .opaque import opaque

__all__ = ["COMPRESSED", "install", "refusing"]

aten = torch.ops.aten
_KEYS: Final = {
    "SparseCsrPrivateUse1": SPARSE,
    "QuantizedPrivateUse1": QUANTIZED,
    "NestedTensorPrivateUse1": NESTED,
}
_FROM_STRIDED: Final = {
    SPARSE: (
        aten._to_sparse,
        aten._to_sparse_csr,
        aten._to_sparse_csc,
        aten._to_sparse_bsr,
        aten._to_sparse_bsc,
        aten._spdiags,
    ),
    QUANTIZED: (aten.quantize_per_tensor, aten.quantize_per_tensor_dynamic, aten.quantize_per_channel),
    NESTED: (
        aten._nested_tensor_from_tensor_list,
        aten._nested_tensor_from_mask,
        aten._nested_from_padded,
        aten._nested_view_from_buffer_copy,
    ),
    ONEDNN: (aten.to_mkldnn,),
}
COMPRESSED: Final = (
    aten._sparse_compressed_tensor_unsafe.default,
    aten._sparse_csr_tensor_unsafe.default,
    aten._sparse_csc_tensor_unsafe.default,
    aten._sparse_bsr_tensor_unsafe.default,
    aten._sparse_bsc_tensor_unsafe.default,
    aten._sparse_compressed_tensor_with_dims.default,
)
"""The operators that make every compressed sparse tensor. PyTorch's kernel of each serves all devices."""


def install(library: torch.library.Library, libraries: list[torch.library.Library]) -> None:
    """Register refusals where PyTorch would run its own kernels or raise an error about its dispatcher.

    The fallbacks are in a library of their own, which is added to ``libraries``.
    """
    anything = torch.library.Library("_", "IMPL")
    libraries.append(anything)
    for key, kind in _KEYS.items():
        anything.fallback(opaque(_refuse_with(kind)), key)
    anything.fallback(opaque(sparse.fallback), "SparsePrivateUse1")
    with overriding():
        sparse.install(library, routes.to_stock_autograd)
    for op in COMPRESSED:
        kernel = opaque(_compressed(op))
        name = op._schema.name.removeprefix("aten::")
        for key in ("AutogradPrivateUse1", "PrivateUse1", "SparseCsrPrivateUse1"):
            with overriding():  # one has its kernel at PrivateUse1 already, as every operator with a kernel of its own
                library.impl(name, kernel, key, allow_override=True)
    # CPU tensors that are to become a nested tensor of this device carry no dispatch key of this device.
    make, move = aten._nested_tensor_from_tensor_list.default, aten._to_copy.default
    explicit = functools.partial(make._op_dk, torch._C.DispatchKey.CompositeExplicitAutograd)
    library.impl(
        "_nested_tensor_from_tensor_list", opaque(_not_here(make, lambda keys: explicit)), "CPU", with_keyset=True
    )
    moved = torch.library.get_kernel(move, "NestedTensorCPU")
    with overriding():
        stays = _not_here(move, lambda keys: functools.partial(moved.call_boxed, keys))
        library.impl("_to_copy", opaque(stays), "NestedTensorCPU", with_keyset=True, allow_override=True)


def _refuse_with(kind: str) -> Callable[..., Any]:
    def refuse(op: Any, *args: Any, **kwargs: Any) -> Any:
        raise UnsupportedOp(refusal(kind), op=str(op), source=user_line())

    return refuse


def _compressed(op: Any) -> Callable[..., Any]:
    """Make a compressed sparse tensor, if the backend has kernels at SparseCsr."""
    implicit, explicit = torch._C.DispatchKey.CompositeImplicitAutograd, torch._C.DispatchKey.CompositeExplicitAutograd
    takes_apart = torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")
    key = implicit if takes_apart else explicit

    def kernel(*args: Any, **kwargs: Any) -> Any:
        registrar = routes.registrar_for(args, kwargs)
        if registrar is None or Functionality.SparseCsr not in registrar.functionalities:
            raise UnsupportedOp(refusal(SPARSE), op=str(op), source=user_line())
        return op._op_dk(key, *args, **kwargs)

    return kernel


def _not_here(op: Any, original: Callable[[Any], Callable[..., Any]]) -> Callable[..., Any]:
    """A kernel that refuses a nested tensor of this device and calls PyTorch's kernel for one of the CPU."""

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        device = next((v for v in (*args, *kwargs.values()) if isinstance(v, torch.device)), None)
        if device is not None and device.type == DEVICE_TYPE:
            raise UnsupportedOp(refusal(NESTED), op=str(op), source=user_line())
        return original(keys)(*args, **kwargs)

    return kernel


def refusing(generated: Mapping[Any, Any]) -> dict[Any, Callable[..., Any]]:
    """Operator → kernel, for operators that make such a tensor of strided ones. ``generated``: the device's kernels."""
    table: dict[Any, Callable[..., Any]] = {}
    for kind, packets in _FROM_STRIDED.items():
        for packet in packets:
            for overload in packet.overloads():
                op = getattr(packet, overload)
                if not op._schema.is_mutable:
                    table[op] = opaque(_refusing(kind, op, generated))
    table.update((op, opaque(_compressed(op))) for op in COMPRESSED)
    return table


def _refusing(kind: str, op: Any, generated: Mapping[Any, Any]) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        mine = next((x for x in map(_inner, tree_leaves((args, kwargs))) if isinstance(x, LazyTensor)), None)
        if mine is not None and op in generated:
            trace = threads.of(mine.get_device())
            if trace.runtime.kernels.kernel(op) is not None:
                return (
                    generated[op].indexed(trace, *args, **kwargs)
                    if trace.index
                    else generated[op].fast(*args, **kwargs)
                )
        raise UnsupportedOp(refusal(kind), op=str(op), source=user_line())

    return kernel


def _inner(value: Any) -> Any:
    return unwrap(value) if isinstance(value, torch.Tensor) else value
