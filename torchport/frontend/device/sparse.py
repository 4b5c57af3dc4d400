"""Sparse COO tensors of the device: their indices and values are tensors of the device.

PyTorch's own class of sparse tensors holds them, and PyTorch's own kernels that only handle the two parts serve every
device; they are registered here. Adding to a dense tensor and ``sparse_mask``, with which optimizers take sparse
gradients, are gathers and scatters on the device. Every other operator runs on the host, on a sparse tensor of the CPU,
and its result comes back. Functionalization knows no sparse tensors: they are in no wrapper, while their parts are.

Private torch APIs used here: ``torch._is_functional_tensor``, ``torch.Tensor._indices``, ``_values``,
``torch._C.DispatchKey``.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch.utils._pytree import tree_leaves, tree_map

from ...core.default_state import default_state
from ...core.errors import UnsupportedOp
from ...core.fallback import note_fallback
from ...core.frames import user_line
from ...run.values import host_tensor
from ...trace.handle import DEVICE_TYPE, LazyTensor
from ...trace.layouts import SPARSE, is_sparse_here, kind_of, refusal
from ...trace.wrapping import inner_of, is_below, unwrap
from .opaque import opaque
from .registered import aten_operator, names_with_kernel

__all__ = ["fallback", "install", "write"]

aten = torch.ops.aten
_PARTS: Final = (
    aten._indices.default,
    aten._values.default,
    aten.indices.default,
    aten.values.default,
    aten._nnz.default,
    aten.sparse_dim.default,
    aten.dense_dim.default,
    aten._dimI.default,
    aten._dimV.default,
    aten.is_coalesced.default,
    aten._coalesced_.default,
    aten.clone.default,
    aten.zero_.default,
    aten.copy_sparse_to_sparse_.default,
    aten.sparse_resize_.default,
    aten.sparse_resize_and_clear_.default,
)
"""Operators whose kernel in PyTorch hands on, replaces or counts the two parts, whatever device they are on."""
_MAKERS: Final = (
    aten._sparse_coo_tensor_with_dims_and_tensors.default,
    aten._sparse_coo_tensor_with_dims.default,
)
"""The operators that make every COO tensor; PyTorch's kernels of them serve all devices, too."""
_FROM_DENSE: Final = (aten._to_sparse.default, aten._to_sparse.sparse_dim)
_WHY: Final = "sparse tensors are computed on the host"


def install(library: torch.library.Library, to_stock_autograd: Callable[[Any], Any]) -> None:
    """Register the kernels; the fallback for all other operators on sparse tensors is registered in ``layouts``.

    ``to_stock_autograd``: the key set that leads from a kernel at AutogradPrivateUse1 to PyTorch's own.
    """
    for op in _PARTS:
        library.impl(_name(op), opaque(_pytorchs(op)), "SparsePrivateUse1", with_keyset=True)
    library.impl("empty.memory_format", opaque(_empty), "SparsePrivateUse1")
    library.impl("_to_copy", opaque(_to_copy), "SparsePrivateUse1")
    moved = torch.library.get_kernel(aten._to_copy.default, "SparseCPU")
    library.impl("_to_copy", opaque(_moved_here(moved)), "SparseCPU", with_keyset=True)
    for op in _MAKERS:
        for key in ("SparsePrivateUse1", "PrivateUse1", "Functionalize"):
            library.impl(_name(op), opaque(_first(_pytorchs(op))), key, with_keyset=True, allow_override=True)
    for op in _FROM_DENSE:
        functionalized = torch.library.get_kernel(op, "Functionalize")
        library.impl(_name(op), opaque(_from_dense(op, functionalized)), "Functionalize", with_keyset=True)
    of_bags = opaque(_gradient_of_bags(to_stock_autograd))
    library.impl("_embedding_bag_backward", of_bags, "AutogradPrivateUse1", with_keyset=True)
    masked = torch.library.get_kernel(aten.sparse_mask.default, "Functionalize")
    library.impl("sparse_mask", opaque(_masked(masked)), "Functionalize", with_keyset=True)


def _complete() -> None:
    """Register the fallback itself for the operators that would get a composite of PyTorch's first: on the CPU they
    have a kernel for sparse tensors, which counts more than a composite. Called when the first sparse tensor is made.
    """
    if _composites:
        return
    library = torch.library.Library("aten", "IMPL")
    _composites.append(library)
    composites = names_with_kernel("CompositeExplicitAutograd") | names_with_kernel(_NON_FUNCTIONAL)
    ours = names_with_kernel("SparsePrivateUse1")
    for name in names_with_kernel("SparseCPU"):
        if name in composites and name not in ours:
            op = aten_operator(name)
            library.impl(_name(op), opaque(functools.partial(fallback, op)), "SparsePrivateUse1")


_composites: Final[list[torch.library.Library]] = []
_NON_FUNCTIONAL: Final = "CompositeExplicitAutogradNonFunctional"


def _name(op: Any) -> str:
    return str(op.name()).removeprefix("aten::")


def _pytorchs(op: Any) -> Callable[..., Any]:
    kernel = torch.library.get_kernel(op, "SparseCPU")

    def call(keys: Any, *args: Any, **kwargs: Any) -> Any:
        return kernel.call_boxed(keys, *args, **kwargs)

    return call


def _first(maker: Callable[..., Any]) -> Callable[..., Any]:
    def call(keys: Any, *args: Any, **kwargs: Any) -> Any:
        device = next((v.device for v in args if isinstance(v, torch.Tensor)), kwargs.get("device"))
        if device is not None and device.index:
            # PyTorch's class makes its first two parts on the current device, which is index 0 always.
            raise UnsupportedOp(refusal(SPARSE), source=user_line())
        _complete()
        return maker(keys, *args, **kwargs)

    return call


# -- made and moved ----------------------------------------------------------------------------------------------------
def _made(indices: torch.Tensor, values: torch.Tensor, size: Sequence[int], coalesced: bool) -> torch.Tensor:
    sparse_dim, dense_dim = int(indices.shape[0]), values.dim() - 1
    return aten._sparse_coo_tensor_with_dims_and_tensors.default(
        sparse_dim, dense_dim, [*size], indices, values,
        dtype=values.dtype, layout=torch.sparse_coo, device=values.device, is_coalesced=coalesced,
    )  # fmt: skip


def _empty(size: Sequence[int], *, device: torch.device | None = None, **kwargs: Any) -> torch.Tensor:
    dtype = kwargs.get("dtype") or torch.get_default_dtype()
    return aten._sparse_coo_tensor_with_dims.default(
        len(size), 0, [*size], dtype=dtype, layout=torch.sparse_coo, device=device
    )


def _to(sparse: torch.Tensor, device: torch.device, dtype: torch.dtype | None) -> torch.Tensor:
    """A copy on another device, or of another dtype."""
    indices, values = sparse._indices(), sparse._values()
    return _made(indices.to(device, copy=True), values.to(device, dtype, copy=True), sparse.shape, _coalesced(sparse))


def _coalesced(sparse: torch.Tensor) -> bool:
    return aten.is_coalesced.default(sparse)


def _to_copy(
    self: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    **_: Any,
) -> torch.Tensor:
    if layout not in (None, torch.sparse_coo):
        raise UnsupportedOp(refusal(kind_of(layout)), op="aten._to_copy.default", source=user_line())
    return _to(self, device or self.device, dtype)


def _moved_here(original: Any) -> Callable[..., Any]:
    """A CPU tensor's ``to``: to this device by its parts, everything else as PyTorch does it."""

    def to_copy(keys: Any, self: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if device is not None and device.type == DEVICE_TYPE:
            return _to(self, device, kwargs.get("dtype"))
        return original.call_boxed(keys, self, **kwargs)

    return to_copy


def _host(value: Any) -> Any:
    """A tensor of this device, dense or sparse, as a CPU tensor."""
    if is_sparse_here(value):
        return _to(value, torch.device("cpu"), None)
    if isinstance(value, torch.Tensor):
        inner = unwrap(value)
        return host_tensor(inner) if isinstance(inner, LazyTensor) else value
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == DEVICE_TYPE else value


# -- on the device -----------------------------------------------------------------------------------------------------
def write(op: Any, self: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor:
    """An in-place operator on a dense tensor that was given a sparse one.

    Adding is a scatter on the device. The result of everything else is made on the host.
    """
    if op in _ADDING:
        other, alpha = args[0], kwargs.get("alpha", 1)
        if other.shape == self.shape and torch.can_cast(other.dtype, self.dtype):
            places = tuple(other._indices().unbind(0))
            values = other._values().to(self.dtype) * (alpha if op is aten.add_.Tensor else -alpha)
            return self.index_put_(places, values, accumulate=True) if places else self.add_(values.sum(0))
    held = _host(self).clone()
    _run(op, (held, *args), kwargs, _host)
    return self.copy_(held)


_ADDING: Final = (aten.add_.Tensor, aten.sub_.Tensor)


def _masked(functionalized: Any) -> Callable[..., Any]:
    def sparse_mask(keys: Any, self: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if not is_sparse_here(mask) or not torch._is_functional_tensor(self):
            return functionalized.call_boxed(keys, self, mask)
        if self.shape != mask.shape:
            return _on_host(aten.sparse_mask.default, (self, mask), {})  # the CPU raises its error
        indices = mask._indices()
        values = self[tuple(indices.unbind(0))] if indices.shape[0] else self.expand(mask._values().shape)
        return _made(indices.clone(), values, mask.shape, _coalesced(mask))

    return sparse_mask


def _bag_of_each(indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """The bag that each index is in. The forward leaves it out for sums, whose gradient is an operator otherwise."""
    starts = torch.zeros(indices.numel() + 1, dtype=offsets.dtype, device=offsets.device)  # an offset may be the end
    return starts.index_add(0, offsets, torch.ones_like(offsets)).cumsum(0)[:-1] - 1


def _gradient_of_bags(to_stock_autograd: Callable[[Any], Any]) -> Callable[..., Any]:
    """The gradient of ``embedding_bag(sparse=True)``, made by PyTorch's own kernels; the dense one is an operator."""
    op = aten._embedding_bag_backward.default
    names = [argument.name for argument in op._schema.arguments]

    def backward(keys: Any, *args: Any) -> torch.Tensor:
        given = dict(zip(names, args, strict=False))
        if not given["sparse"]:
            return op.redispatch(to_stock_autograd(keys), *args)
        given["offset2bag"] = _bag_of_each(given["indices"], given["offsets"])
        sparse = aten._embedding_bag_sparse_backward.default
        return sparse(*[given[argument.name] for argument in sparse._schema.arguments if argument.name in given])

    return backward


# -- on the host -------------------------------------------------------------------------------------------------------
def _from_dense(op: Any, functionalized: Any) -> Callable[..., Any]:
    def to_sparse(keys: Any, self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        layouts = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.layout)]
        ours = torch._is_functional_tensor(self) and isinstance(inner_of(self), LazyTensor)
        if not ours or any(layout is not torch.sparse_coo for layout in layouts):
            return functionalized.call_boxed(keys, self, *args, **kwargs)
        return _on_host(op, (self, *args), kwargs)

    return to_sparse


def fallback(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Every other operator on a sparse tensor of this device."""
    if not any(map(is_sparse_here, tree_leaves((args, kwargs)))):  # a sparse tensor of the CPU beside a dense one here
        raise UnsupportedOp(refusal(SPARSE), op=str(op), source=user_line())
    if (joined := _joined(op, *args, **kwargs)) is not None:
        return joined
    written = [a for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    if not written:
        return _on_host(op, args, kwargs)
    given = {a.name: v for a, v in zip(op._schema.arguments, args, strict=False)} | kwargs
    targets = [given[a.name] for a in written]
    if not all(map(is_sparse_here, targets)):
        raise UnsupportedOp(refusal(SPARSE), op=str(op), source=user_line())
    held: dict[int, Any] = {id(target): _host(target) for target in targets}
    _run(op, args, kwargs, lambda value: held.get(id(value)) if id(value) in held else _host(value))
    for target in targets:
        _assign(target, _to(held[id(target)], target.device, None))
    return targets[0] if len(targets) == 1 else tuple(targets)


def _assign(target: torch.Tensor, made: torch.Tensor) -> None:
    aten.sparse_resize_and_clear_.default(target, made.shape, made.sparse_dim(), made.dense_dim())
    aten.copy_sparse_to_sparse_.default(target, made)
    aten._coalesced_.default(target, _coalesced(made))


def _joined(op: Any, *args: Any, **kwargs: Any) -> torch.Tensor | None:
    """A gradient added to another one: the parts of both, one after the other, as CUDA does it; ``None`` for the rest.

    Two coalesced tensors give a coalesced one, which the host makes.
    """
    if op not in (aten.add.Tensor, aten.add_.Tensor) or kwargs or not all(map(is_sparse_here, args)):
        return None
    one, other = args[0], args[1]
    like = one.shape == other.shape and one.dtype is other.dtype and one.sparse_dim() == other.sparse_dim()
    if not like or (_coalesced(one) and _coalesced(other)):
        return None
    indices = torch.cat([one._indices(), other._indices()], 1)
    made = _made(indices, torch.cat([one._values(), other._values()]), one.shape, False)
    if op is aten.add.Tensor:
        return made
    _assign(one, made)
    return one


def _on_host(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operator on CPU copies of its arguments and bring the results back."""
    device = next((v.device for v in tree_leaves((args, kwargs)) if _is_here(v)), torch.device(DEVICE_TYPE))
    asked = kwargs.get("device")
    if isinstance(asked, torch.device):
        device = asked
    below = is_below()

    def result(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if value.layout is torch.sparse_coo and not below:
            return _to(value, device, None)
        if value.layout is not torch.strided:
            raise UnsupportedOp(refusal(SPARSE), op=str(op), source=user_line())
        return unwrap(value.to(device)) if below else value.to(device)

    return tree_map(result, _run(op, args, kwargs, _host))


def _run(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], moved: Callable[[Any], Any]) -> Any:
    note_fallback(op, user_line(), _WHY)
    given = tree_map(moved, (tuple(args), dict(kwargs)))
    with default_state(), warnings.catch_warnings():
        return op(*given[0], **given[1])


def _is_here(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == DEVICE_TYPE
