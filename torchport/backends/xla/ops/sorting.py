"""Sorting, selection, scans and binary search."""

from __future__ import annotations

import torch

from .reductions import position_of_extreme
from .support import (
    Any,
    Array,
    Call,
    cast,
    compute_dtype,
    jnp,
    lax,
    literal,
    lowers,
    math,
    normalise_dim,
    np,
    out_dtype,
    out_shape,
)

aten = torch.ops.aten

_INT64 = np.dtype(np.int64)


def _iota(shape: tuple[int, ...], axis: int) -> Array:
    return lax.broadcasted_iota(_INT64, shape, axis)


def sort_with_positions(x: Array, axis: int, descending: bool) -> tuple[Array, Array]:
    """A stable sort and where each value was; NaN counts as the largest."""
    if not x.ndim:
        return x, jnp.zeros((), _INT64)
    places = _iota(x.shape, axis)
    if not descending:
        values, order = lax.sort((x, places), dimension=axis, num_keys=1, is_stable=True)
        return values, order
    # Sorting the reverse ascending and reversing again keeps equal values in their first order.
    values, order = lax.sort(
        (lax.rev(x, (axis,)), lax.rev(places, (axis,))), dimension=axis, num_keys=1, is_stable=True
    )
    return lax.rev(values, (axis,)), lax.rev(order, (axis,))


@lowers(aten.sort.default)
def sort(call: Call, x: Array, dim: int = -1, descending: bool = False) -> tuple[Array, Array]:
    return sort_with_positions(x, normalise_dim(dim, x.ndim), descending)


@lowers(aten.sort.stable)
def sort_stable(
    call: Call, x: Array, *, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> tuple[Array, Array]:
    return sort_with_positions(x, normalise_dim(dim, x.ndim), descending)


@lowers(aten.topk.default)
def topk(call: Call, x: Array, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Array, Array]:
    axis = normalise_dim(dim, x.ndim)
    values, order = sort_with_positions(x, axis, largest)
    if not x.ndim:
        return lax.reshape(values, out_shape(call, 0)), lax.reshape(order, out_shape(call, 0))
    return lax.slice_in_dim(values, 0, k, 1, axis), lax.slice_in_dim(order, 0, k, 1, axis)


@lowers(aten.kthvalue.default)
def kthvalue(call: Call, x: Array, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Array, Array]:
    return _at_rank(call, x, k - 1, dim)


def _at_rank(call: Call, x: Array, rank: Any, dim: int) -> tuple[Array, Array]:
    """The value at a place of the sorted dimension, and where it was."""
    shape = out_shape(call, 0)
    axis = normalise_dim(dim, x.ndim)
    values, order = sort_with_positions(x, axis, False)
    if not x.ndim:
        return lax.reshape(values, shape), lax.reshape(order, shape)
    if isinstance(rank, int):
        return tuple(lax.reshape(lax.index_in_dim(v, rank, axis), shape) for v in (values, order))  # type: ignore[return-value]
    return tuple(lax.reshape(jnp.take_along_axis(v, rank, axis), shape) for v in (values, order))  # type: ignore[return-value]


@lowers(aten.median.dim)
def median_dim(call: Call, x: Array, dim: int, keepdim: bool = False) -> tuple[Array, Array]:
    axis = normalise_dim(dim, x.ndim)
    size = x.shape[axis] if x.ndim else 1
    values, order = _at_rank(call, x, (size - 1) // 2, dim)
    if x.dtype.kind in "iub" or not x.ndim:
        return values, order
    # The first NaN is the median where there is one.
    missing = lax.reshape(jnp.any(x != x, axis=axis), values.shape)
    first = lax.reshape(position_of_extreme(x, axis, True), order.shape)
    return jnp.where(missing, literal(math.nan, values.dtype), values), lax.select(missing, first, order)


@lowers(aten.median.default)
def median(call: Call, x: Array) -> Array:
    if not x.size:
        return lax.full((), literal(math.nan if x.dtype.kind not in "iu" else np.iinfo(x.dtype).min, x.dtype))
    flat = lax.sort(lax.reshape(x, (x.size,)))
    middle = flat[(x.size - 1) // 2]
    return middle if x.dtype.kind in "iu" else jnp.where(jnp.any(x != x), literal(math.nan, x.dtype), middle)


@lowers(aten.nanmedian.dim)
def nanmedian_dim(call: Call, x: Array, dim: int, keepdim: bool = False) -> tuple[Array, Array]:
    if x.dtype.kind in "iub" or not x.ndim:
        return median_dim(call, x, dim)
    axis = normalise_dim(dim, x.ndim)
    there = jnp.sum((x == x).astype(_INT64), axis=axis, keepdims=True)
    return _at_rank(call, x, jnp.maximum(there - 1, 0) // 2, dim)


@lowers(aten.nanmedian.default)
def nanmedian(call: Call, x: Array) -> Array:
    if x.dtype.kind in "iu" or not x.size:
        return median(call, x)
    flat = lax.sort(lax.reshape(x, (x.size,)))
    return flat[jnp.maximum(jnp.sum((flat == flat).astype(_INT64)) - 1, 0) // 2]


@lowers(aten.mode.default)
def mode(call: Call, x: Array, dim: int = -1, keepdim: bool = False) -> tuple[Array, Array]:
    """The most frequent value, the smallest of those as frequent, and the last place where it is."""
    shape = out_shape(call, 0)
    if not x.ndim or not x.size:
        return lax.reshape(x, shape) if x.size else jnp.zeros(shape, x.dtype), jnp.zeros(shape, _INT64)
    axis = normalise_dim(dim, x.ndim)
    values, order = sort_with_positions(x, axis, False)
    places = _iota(x.shape, axis)
    before = jnp.roll(values, 1, axis)
    start = lax.cummax(jnp.where((values != before) | (places == 0), places, 0), axis)
    best = jnp.argmax(places - start, axis=axis, keepdims=True)
    return tuple(lax.reshape(jnp.take_along_axis(v, best, axis), shape) for v in (values, order))  # type: ignore[return-value]


# -- scans -----------------------------------------------------------------------------------------
@lowers(aten.cumsum.default)
def cumsum(call: Call, x: Array, dim: int, *, dtype: Any = None) -> Array:
    value = cast(x, compute_dtype(call))
    return lax.cumsum(value, normalise_dim(dim, x.ndim)) if x.ndim else value


@lowers(aten.cumprod.default)
def cumprod(call: Call, x: Array, dim: int, *, dtype: Any = None) -> Array:
    value = cast(x, compute_dtype(call))
    return lax.cumprod(value, normalise_dim(dim, x.ndim)) if x.ndim else value


@lowers(aten._logcumsumexp.default, aten.logcumsumexp.default)
def logcumsumexp(call: Call, x: Array, dim: int) -> Array:
    value = cast(x, compute_dtype(call))
    if not x.ndim or not x.size:
        return value
    if value.dtype.kind == "c":
        return lax.log(lax.cumsum(lax.exp(value), normalise_dim(dim, x.ndim)))
    return lax.cumlogsumexp(value, normalise_dim(dim, x.ndim))


@lowers(aten.cummax.default, aten.cummin.default)
def cummax(call: Call, x: Array, dim: int) -> tuple[Array, Array]:
    if not x.ndim:
        return x, jnp.zeros((), _INT64)
    axis = normalise_dim(dim, x.ndim)
    largest = call.node.target is aten.cummax.default

    def later(a: Any, b: Any) -> Any:
        (va, ia), (vb, ib) = a, b
        # The latest of equals, and NaN once there was one.
        wins = (vb >= va) if largest else (vb <= va)
        wins = (wins | (vb != vb)) & ~((va != va) & (vb == vb))
        return jnp.where(wins, vb, va), jnp.where(wins, ib, ia)

    return lax.associative_scan(later, (x, _iota(x.shape, axis)), axis=axis)


# -- search ----------------------------------------------------------------------------------------
def _search(sorted_values: Array, values: Any, right: bool, dtype: np.dtype[Any]) -> Array:
    common = np.promote_types(sorted_values.dtype, values.dtype) if hasattr(values, "dtype") else sorted_values.dtype
    boundaries, wanted = cast(sorted_values, common), cast(values, common)
    side = "right" if right else "left"
    if not boundaries.size or not np.size(wanted):
        return jnp.zeros(np.shape(wanted), dtype)
    if boundaries.ndim == 1:
        return cast(jnp.searchsorted(boundaries, jnp.asarray(wanted), side=side, method="scan_unrolled"), dtype)
    rows = boundaries.reshape(-1, boundaries.shape[-1])
    asked = jnp.asarray(wanted).reshape(rows.shape[0], -1)
    below = (rows[:, None, :] <= asked[:, :, None]) if right else (rows[:, None, :] < asked[:, :, None])
    return cast(jnp.sum(below, axis=-1).reshape(jnp.shape(wanted)), dtype)


@lowers(aten.searchsorted.Tensor, aten.searchsorted.Scalar)
def searchsorted(
    call: Call,
    boundaries: Array,
    values: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Any = None,
) -> Array:
    if sorter is not None:
        boundaries = jnp.take_along_axis(boundaries, sorter, axis=-1)
    return lax.reshape(_search(boundaries, values, right or side == "right", out_dtype(call)), out_shape(call))


@lowers(aten.bucketize.Tensor, aten.bucketize.Scalar)
def bucketize(call: Call, values: Any, boundaries: Array, *, out_int32: bool = False, right: bool = False) -> Array:
    return lax.reshape(_search(boundaries, values, right, out_dtype(call)), out_shape(call))
