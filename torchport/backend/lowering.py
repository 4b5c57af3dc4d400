"""Rewrites that bring traced operators to the FX normal form: views, scalar inputs, foreach lists, factories."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from ..core.specs import contiguous_strides
from .normal_form import is_view

if TYPE_CHECKING:
    from torch import fx

    from .builder import Builder

__all__ = ["LOWER", "lower_foreach", "lower_varying", "scalar_role", "view_form"]

aten = torch.ops.aten

_IDENTITIES: Final = {
    aten.detach_copy.default,
    aten.alias_copy.default,
    aten.lift_fresh_copy.default,
    aten.lift.default,
}


@functools.cache
def view_form(op: Any) -> Any:
    """The view operator whose copy ``op`` is (``aten.t_copy`` → ``aten.t``); any other operator unchanged.

    Functionalization hands us copies of views. Without mutation nobody can tell a view from its copy, and a view has
    the strides a user of eager PyTorch expects.
    """
    if not isinstance(op, torch._ops.OpOverload) or op.namespace != "aten":
        return op
    name, overload = op._schema.name.removeprefix("aten::"), op._overloadname
    if op is aten._reshape_alias_copy.default:
        return aten._reshape_alias.default
    if not name.endswith("_copy"):
        return op
    packet = getattr(aten, name.removesuffix("_copy"), None)
    view = getattr(packet, overload, None) if packet is not None and overload in packet.overloads() else None
    return view if view is not None and is_view(view) else op


# -- operators with a lowering of their own: (builder, output specs, args, kwargs) -> node ------------------------
def _identity(b: Builder, specs: Any, x: fx.Node, *args: Any, **kwargs: Any) -> fx.Node:
    return x


def _zeros(b: Builder, specs: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """``empty`` and its kin: nobody may rely on the values, so they are zeros on every backend."""
    (spec,) = specs
    return b.filled(spec, 0)


def _expanded(b: Builder, source: fx.Node, size: Sequence[int]) -> fx.Node:
    """The value at a larger size, in memory of its own: kernels that want contiguous arguments read past a stride 0."""
    node = b(aten.expand.default, source, list(size))
    return b(aten.clone.default, node, memory_format=torch.contiguous_format) if b.val(node).numel() > 1 else node


def _copy(b: Builder, specs: Any, x: fx.Node, source: fx.Node, non_blocking: bool = False) -> fx.Node:
    (spec,) = specs
    source = b.cast(source, spec.dtype)
    if tuple(b.val(source).shape) != spec.shape:
        source = _expanded(b, source, spec.shape)
    return source


def _to_copy(b: Builder, specs: Any, x: fx.Node, **kwargs: Any) -> fx.Node:
    (spec,) = specs
    kept = {name: kwargs[name] for name in ("dtype", "memory_format") if kwargs.get(name) is not None}
    if not kept or (set(kept) == {"dtype"} and b.val(x).dtype == kept["dtype"]):
        return x if b.val(x).stride() == spec.strides else b(aten.clone.default, x)
    return b(aten._to_copy.default, x, **kept)


def _converted(b: Builder, specs: Any, x: fx.Node, dtype: torch.dtype) -> fx.Node:
    return b.cast(x, dtype)


def _unsafe_view(b: Builder, specs: Any, x: fx.Node, size: Sequence[int]) -> fx.Node:
    return b(aten.view.default, x, list(size))


def _reshape_alias(b: Builder, specs: Any, x: fx.Node, size: Sequence[int], stride: Sequence[int]) -> fx.Node:
    return b(aten.view.default, x, list(size))


def _conjugated(b: Builder, specs: Any, x: fx.Node) -> fx.Node:
    """A value, not a view that says so: what reads it as real numbers or as another dtype goes by its memory."""
    return b(aten.conj_physical.default, x)


def _negated(b: Builder, specs: Any, x: fx.Node) -> fx.Node:
    return b(aten.neg.default, x)


def _in_one_piece(b: Builder, x: fx.Node) -> fx.Node:
    """A value, copied unless its strides are sure to be those of a new tensor.

    An engine may give a dimension of one element any stride, whatever it is here, and ``clone`` sets it.
    """
    value = b.val(x)
    if 1 not in value.shape and value.stride() == contiguous_strides(value.shape):
        return x
    return b(aten.clone.default, x, memory_format=torch.contiguous_format)


def _as_dtype(b: Builder, specs: Any, x: fx.Node, dtype: torch.dtype) -> fx.Node:
    """A view as a dtype of another size asks for strides that the program's tensor had, and this value may not have."""
    if dtype.itemsize != b.val(x).dtype.itemsize:
        x = _in_one_piece(b, x)
    return b(aten.view.dtype, x, dtype)


def _as_complex(b: Builder, specs: Any, x: fx.Node) -> fx.Node:
    return b(aten.view_as_complex.default, _in_one_piece(b, x))


def _group_norm(b: Builder, specs: Any, x: fx.Node, *args: Any) -> fx.Node:
    """The CPU's kernel wants its input in one piece, in the memory format it takes it to be in.

    PyTorch sees to that by the strides it knows. Those of a dimension of size 1 say nothing, and a value may have
    others there; a copy in a format of its own has the ones that the kernel goes by.
    """
    value = b.val(x)
    if 1 in value.shape and not value.is_contiguous():
        formats = {4: torch.channels_last, 5: torch.channels_last_3d}
        x = b(aten.clone.default, x, memory_format=formats.get(value.dim(), torch.contiguous_format))
    return b(aten.native_group_norm.default, x, *args)


LOWER: Final[dict[Any, Callable[..., Any]]] = {
    **dict.fromkeys((aten.view_as_complex.default, aten.view_as_complex_copy.default), _as_complex),
    **dict.fromkeys((aten._conj.default, aten._conj_copy.default), _conjugated),
    **dict.fromkeys((aten._neg_view.default, aten._neg_view_copy.default), _negated),
    **dict.fromkeys((aten.view.dtype, aten.view_copy.dtype), _as_dtype),
    torch.ops.prims.convert_element_type.default: _converted,  # Dynamo's for a number that it makes a tensor of
    **dict.fromkeys(_IDENTITIES, _identity),
    aten.empty.memory_format: _zeros,
    aten.empty_strided.default: _zeros,
    aten.empty_like.default: _zeros,
    aten.empty_permuted.default: _zeros,
    aten.new_empty.default: _zeros,
    aten.new_empty_strided.default: _zeros,
    aten._efficientzerotensor.default: _zeros,
    aten._new_zeros_with_same_feature_meta.default: _zeros,  # of forward-mode differentiation
    aten.copy.default: _copy,
    aten._to_copy.default: _to_copy,
    aten._unsafe_view.default: _unsafe_view,
    aten._reshape_alias_copy.default: _reshape_alias,
    aten.native_group_norm.default: _group_norm,
}


# -- scalar inputs -------------------------------------------------------------------------------------------------
# A Python float becomes a 0-dim tensor input. Where the operator has a Tensor in that place nothing else is needed;
# the operators below take a Scalar there and are written out with tensor arithmetic, in eager's order of operations.
def _scaled(b: Builder, factor: Any, x: fx.Node) -> fx.Node:
    if factor == 1 and not b.is_node(factor):
        return x
    return b(aten.mul.Tensor, x, factor)


_HALVES: Final = {torch.float16, torch.bfloat16}
_WIDE: Final = {torch.float32, torch.float64}


def _rounded_once(fn: Callable[..., fx.Node]) -> Callable[..., fx.Node]:
    """Half precision is computed in float32 and rounded at the end, as PyTorch's own kernels do it.

    Integers are first turned into what they are computed with.
    """

    @functools.wraps(fn)
    def lower(b: Builder, *args: Any, **kwargs: Any) -> fx.Node:
        nodes = [b.val(value) for value in args if b.is_node(value)]
        floats = [value for value in nodes if value.is_floating_point()]
        dtypes = {value.dtype for value in floats if value.dim()} or {value.dtype for value in floats}
        if len(dtypes) != 1 or any(value.dtype.is_complex for value in nodes):
            return fn(b, *args, **kwargs)
        (dtype,) = dtypes
        given = [
            b.cast(value, dtype) if b.is_node(value) and not b.val(value).is_floating_point() else value
            for value in args
        ]
        if dtype not in _HALVES:
            return fn(b, *given, **kwargs)
        wide = [b.cast(value, torch.float32) if b.is_node(value) else value for value in given]
        return b.cast(fn(b, *wide, **kwargs), dtype)

    return lower


def _wide_dtype(b: Builder, *nodes: Any) -> torch.dtype | None:
    """What PyTorch computes with these in, if it is float32 or float64."""
    found = [b.val(one) for one in nodes]
    if not {one.dtype for one in found} <= _WIDE:
        return None
    deciding = [one.dtype for one in found if one.dim()] or [one.dtype for one in found]
    return torch.float64 if torch.float64 in deciding else torch.float32


def _in_one_dtype(b: Builder, *nodes: Any) -> Sequence[Any]:
    """These, in the dtype that PyTorch computes with them in where that is float32 or float64."""
    dtype = _wide_dtype(b, *nodes)
    return nodes if dtype is None else [b.cast(one, dtype) for one in nodes]


def _product_added(b: Builder, x: fx.Node, y: fx.Node, z: fx.Node) -> fx.Node:
    """``x + y * z`` rounded once, as PyTorch's kernels for ``add`` with ``alpha`` and for ``addcmul`` do it."""
    return b(aten.addcmul.default, x, y, z)


def _multiple_added(b: Builder, x: Any, y: fx.Node, alpha: Any) -> fx.Node | None:
    """``x + alpha * y``, likewise; ``None`` where they compute in another dtype, and where ``alpha`` is no input."""
    if not (b.is_node(alpha) and b.is_node(x)) or (dtype := _wide_dtype(b, x, y)) is None:
        return None
    return _product_added(b, *(b.cast(one, dtype) for one in (x, y, alpha)))


@_rounded_once
def _add(b: Builder, x: Any, y: Any, alpha: Any = 1) -> fx.Node:
    if not b.is_node(y):
        return b(aten.add.Tensor, x, b.times(alpha, y))
    made = _multiple_added(b, x, y, alpha)
    return b(aten.add.Tensor, x, _scaled(b, alpha, y)) if made is None else made


@_rounded_once
def _sub(b: Builder, x: Any, y: Any, alpha: Any = 1) -> fx.Node:
    if not b.is_node(y):
        return b(aten.sub.Tensor, x, b.times(alpha, y))
    made = _multiple_added(b, x, y, b(aten.neg.default, alpha) if b.is_node(alpha) else alpha)
    return b(aten.sub.Tensor, x, _scaled(b, alpha, y)) if made is None else made


@_rounded_once
def _rsub(b: Builder, x: Any, y: Any, alpha: Any = 1) -> fx.Node:
    if b.is_node(y):
        return _sub(b, y, x, alpha)
    return b(aten.rsub.Scalar, _scaled(b, alpha, x), y)


@_rounded_once
def _addcmul(b: Builder, x: Any, y: Any, z: Any, value: Any = 1) -> fx.Node:
    dtype = _wide_dtype(b, x, y, z)
    x, y, z = _in_one_dtype(b, x, y, z)
    scaled = _scaled(b, value, y)
    return b(aten.add.Tensor, x, b(aten.mul.Tensor, scaled, z)) if dtype is None else _product_added(b, x, scaled, z)


@_rounded_once
def _addcdiv(b: Builder, x: Any, y: Any, z: Any, value: Any = 1) -> fx.Node:
    x, y, z = _in_one_dtype(b, x, y, z)
    return b(aten.add.Tensor, x, b(aten.div.Tensor, _scaled(b, value, y), z))


@_rounded_once
def _lerp(b: Builder, x: Any, end: Any, weight: Any) -> fx.Node:
    return b(aten.lerp.Tensor, x, end, b.cast(weight, b.val(x).dtype))


def _tensor_form(op: Any) -> Callable[..., fx.Node]:
    def lower(b: Builder, x: Any, y: Any, **kwargs: Any) -> fx.Node:
        return b(op, x, y, **kwargs)

    return lower


def _spread(b: Builder, value: Any, dtype: torch.dtype, size: Sequence[int]) -> fx.Node:
    """A tensor of one scalar input."""
    return _expanded(b, b.cast(value, dtype), size)


def _fill(b: Builder, x: fx.Node, value: Any) -> fx.Node:
    val = b.val(x)
    return _spread(b, value, val.dtype, val.shape)


def _full(b: Builder, size: Sequence[int], value: Any, dtype: Any = None, **kwargs: Any) -> fx.Node:
    return _spread(b, value, dtype or torch.get_default_dtype(), size)


def _full_like(b: Builder, x: fx.Node, value: Any, dtype: Any = None, **kwargs: Any) -> fx.Node:
    return _spread(b, value, dtype or b.val(x).dtype, b.val(x).shape)


def _new_full(b: Builder, x: fx.Node, size: Sequence[int], value: Any, dtype: Any = None, **kw: Any) -> fx.Node:
    return _spread(b, value, dtype or b.val(x).dtype, size)


def _scalar_tensor(b: Builder, value: Any, dtype: Any = None, **kwargs: Any) -> fx.Node:
    return b.cast(value, dtype or torch.get_default_dtype())


def _masked_fill(b: Builder, x: fx.Node, mask: fx.Node, value: Any) -> fx.Node:
    return b(aten.where.self, mask, b.cast(value, b.val(x).dtype), x)


_VARYING: Final[dict[Any, Callable[..., fx.Node]]] = {
    aten.add.Tensor: _add,
    aten.add.Scalar: _add,
    aten.sub.Tensor: _sub,
    aten.sub.Scalar: _sub,
    aten.rsub.Tensor: _rsub,
    aten.rsub.Scalar: _rsub,
    aten.mul.Scalar: _tensor_form(aten.mul.Tensor),
    aten.div.Scalar: _tensor_form(aten.div.Tensor),
    aten.addcmul.default: _addcmul,
    aten.addcdiv.default: _addcdiv,
    aten.lerp.Scalar: _lerp,
    aten.fill.Scalar: _fill,
    aten.full.default: _full,
    aten.full_like.default: _full_like,
    aten.new_full.default: _new_full,
    aten.scalar_tensor.default: _scalar_tensor,
    aten.masked_fill.Scalar: _masked_fill,
}
_FOREACH_VARYING: Final = {"add", "sub", "mul", "div", "addcmul", "addcdiv", "lerp"}


def _foreach_name(op: Any) -> str | None:
    name = op._schema.name.removeprefix("aten::")
    return name.removeprefix("_foreach_") if name.startswith("_foreach_") else None


_FILLS: Final = {aten.fill.Scalar, aten.full.default, aten.full_like.default, aten.new_full.default,
                 aten.scalar_tensor.default, aten.masked_fill.Scalar}  # fmt: skip


@functools.cache
def scalar_role(op: Any) -> str:
    """What floats given as Scalars to the op are: ``scalar`` or ``filler`` (inputs), or ``constant``."""
    if op in _FILLS:
        return "filler"
    return "scalar" if op in _VARYING or _foreach_name(op) in _FOREACH_VARYING else "constant"


def lower_varying(op: Any) -> Callable[..., fx.Node] | None:
    """The rewrite of an op that got a scalar input in a Scalar's place."""
    return _VARYING.get(op)


# -- foreach lists ------------------------------------------------------------------------------------------------
_FOREACH_OVERLOADS: Final = {
    ("add", "List"): aten.add.Tensor, ("add", "Scalar"): aten.add.Scalar, ("add", "Tensor"): aten.add.Tensor,
    ("sub", "List"): aten.sub.Tensor, ("sub", "Scalar"): aten.sub.Scalar,
    ("mul", "List"): aten.mul.Tensor, ("mul", "Scalar"): aten.mul.Scalar, ("mul", "Tensor"): aten.mul.Tensor,
    ("div", "List"): aten.div.Tensor, ("div", "Scalar"): aten.div.Scalar, ("div", "Tensor"): aten.div.Tensor,
    ("pow", "List"): aten.pow.Tensor_Tensor, ("pow", "Scalar"): aten.pow.Tensor_Scalar,
    ("pow", "ScalarAndTensor"): aten.pow.Scalar,
    ("clamp_max", "List"): aten.clamp_max.Tensor, ("clamp_max", "Scalar"): aten.clamp_max.default,
    ("clamp_min", "List"): aten.clamp_min.Tensor, ("clamp_min", "Scalar"): aten.clamp_min.default,
    ("maximum", "List"): aten.maximum.default, ("maximum", "Scalar"): aten.clamp_min.default,
    ("minimum", "List"): aten.minimum.default, ("minimum", "Scalar"): aten.clamp_max.default,
    ("lerp", "List"): aten.lerp.Tensor, ("lerp", "Scalar"): aten.lerp.Scalar,
    ("norm", "Scalar"): aten.linalg_vector_norm.default, ("copy", "default"): aten.copy.default,
    ("zero", "default"): aten.zeros_like.default, ("max", "default"): aten.max.default,
    ("addcmul", "Scalar"): aten.addcmul.default, ("addcdiv", "Scalar"): aten.addcdiv.default,
    ("clone", "default"): aten.clone.default,
}  # fmt: skip


@functools.cache
def foreach_target(op: Any) -> Any:
    """The operator a foreach op applies to each element, or ``None`` if there is none."""
    name = _foreach_name(op)
    if name is None:
        return None
    overload: str = "Scalar" if op._overloadname == "ScalarList" else op._overloadname
    if name in {"addcmul", "addcdiv"} and overload == "Tensor":
        overload = "Scalar"
    target = _FOREACH_OVERLOADS.get((name, overload))
    if target is None and overload == "default" and name in dir(aten):
        target = getattr(getattr(aten, name), "default", None)
    return target


_DROPPED: Final = {"non_blocking", "memory_format"}


def lower_foreach(b: Builder, op: Any, specs: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """One call per element: lists give their element, everything else is shared."""
    target = foreach_target(op)
    count = len(specs)
    listed = {a.name for a in op._schema.arguments if str(a.real_type) in {"List[Tensor]", "List[number]"}}
    names = [a.name for a in op._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    scalars = given.get("scalars")
    if b.is_node(scalars):
        given["scalars"] = [b(aten.select.int, scalars, 0, i) for i in range(count)]
        listed.add("scalars")
    results: list[Any] = []
    for position in range(count):
        values = [given[n][position] if n in listed else given[n] for n in names if n in given and n not in _DROPPED]
        results.append(_apply_foreach(b, target, values))
    return results


_KEYWORD_LAST: Final = {aten.addcmul.default: "value", aten.addcdiv.default: "value"}


def _apply_foreach(b: Builder, target: Any, values: list[Any]) -> Any:
    if target is aten.linalg_vector_norm.default:
        x, order, dtype = (*values, None)[:3]
        return b(target, x, order, dtype=dtype)
    if target in _KEYWORD_LAST and len(values) > 3:
        return b.call(target, values[:3], {_KEYWORD_LAST[target]: values[3]})
    if target in (aten.add.Tensor, aten.sub.Tensor, aten.add.Scalar, aten.sub.Scalar) and len(values) == 3:
        return b.call(target, values[:2], {"alpha": values[2]})
    return b.call(target, values, {})
