"""Gathering and scattering.

XLA cannot raise: an index that is out of range reads NaN (integers: 0), and writes nothing.
"""

from __future__ import annotations

import torch

from .support import (
    Any,
    Array,
    Call,
    Sequence,
    broadcast,
    cast,
    countable,
    fx,
    jnp,
    lax,
    literal,
    lowers,
    math,
    normalise_dim,
    np,
    out_shape,
    wide,
)

aten = torch.ops.aten

_INT32_MAX = (1 << 31) - 1


def _fill(dtype: np.dtype[Any]) -> Any:
    """What reading out of range gives."""
    return np.nan if dtype.kind in "fcV" else 0


def _small(index: Array, size: int) -> Array:
    """Indices as int32 where the dimension allows: half the memory traffic. Out of range stays out of range."""
    if index.dtype == np.int32 or size > _INT32_MAX or index.dtype.kind != "i" or index.dtype.itemsize < 8:
        return index
    return cast(
        lax.clamp(literal(-_INT32_MAX, index.dtype), index, literal(_INT32_MAX, index.dtype)), np.dtype(np.int32)
    )


def take(x: Array, index: Array, axis: int) -> Array:
    """Whole slices of ``x`` along ``axis``; negative indices are out of range."""
    index = _small(index, x.shape[axis])
    offset = tuple(d if d < axis else d + index.ndim - 1 for d in range(x.ndim) if d != axis)
    numbers = lax.GatherDimensionNumbers(offset_dims=offset, collapsed_slice_dims=(axis,), start_index_map=(axis,))
    sizes = tuple(1 if d == axis else s for d, s in enumerate(x.shape))
    return lax.gather(
        x, index[..., None], numbers, sizes, mode=lax.GatherScatterMode.FILL_OR_DROP, fill_value=_fill(x.dtype)
    )


@lowers(aten.embedding.default)
def embedding(call: Call, weight: Array, indices: Array, *rest: Any, **kwargs: Any) -> Array:
    return take(weight, indices, 0)


@lowers(aten.embedding_dense_backward.default)
def embedding_dense_backward(
    call: Call, grad: Array, indices: Array, count: int, padding_idx: int, scale_by_frequency: bool
) -> Array:
    flat = _small(lax.reshape(indices, (indices.size,)), count)
    width = grad.shape[-1]
    values = lax.reshape(wide(grad), (indices.size, width))
    if scale_by_frequency:
        seen = jnp.zeros((count,), values.dtype).at[flat].add(1, mode="drop")
        values = values / seen[flat][:, None]
    if padding_idx >= 0:
        values = jnp.where((flat == padding_idx)[:, None], jnp.zeros((), values.dtype), values)
    return jnp.zeros((count, width), values.dtype).at[flat].add(values, mode="drop")


@lowers(aten.index_select.default)
def index_select(call: Call, x: Array, dim: int, index: Array) -> Array:
    if not x.ndim:
        return x
    return take(x, lax.reshape(index, (index.size,)), normalise_dim(dim, x.ndim))


# -- advanced indexing -----------------------------------------------------------------------------
def _masks(node: fx.Node) -> list[Any]:
    indices: Any = node.args[1]
    vals = [index.meta["val"] for index in indices if index is not None]
    return [val for val in vals if val.dtype in (torch.bool, torch.uint8)]


def _refuse_masks(node: fx.Node) -> str | None:
    return "indexing with a mask: the shape of the result depends on values" if _masks(node) else None


def _refuse_mixed_masks(node: fx.Node) -> str | None:
    indices: Any = node.args[1]
    alone = len([i for i in indices if i is not None]) == 1
    return None if alone or not _masks(node) else "a mask beside another index: its places depend on values"


def _index(x: Array, indices: Sequence[Any]) -> tuple[Any, ...]:
    """Negative indices count from the end; what is out of range stays so."""
    places: list[Any] = []
    for axis, index in enumerate(indices):
        if index is None:
            places.append(slice(None))
            continue
        size = x.shape[axis]
        wrapped = lax.select(index < 0, index + literal(size, index.dtype), index)
        places.append(jnp.where(wrapped < 0, literal(size, index.dtype), wrapped))
    return tuple(places)


@lowers(aten.index.Tensor, aten._unsafe_index.Tensor, refuses=_refuse_masks)
def index(call: Call, x: Array, indices: Sequence[Any]) -> Array:
    given = [position for position, one in enumerate(indices) if one is not None]
    if len(given) == 1:
        (axis,) = given
        return take(x, _index(x, indices)[axis], axis)
    return x.at[_index(x, indices)].get(mode="fill", fill_value=_fill(x.dtype), wrap_negative_indices=False)


@lowers(aten.index_put.default, aten._unsafe_index_put.default, refuses=_refuse_mixed_masks)
def index_put(call: Call, x: Array, indices: Sequence[Any], values: Array, accumulate: bool = False) -> Array:
    masks = [one for one in indices if one is not None and one.dtype.kind in "bu"]
    source = cast(values, x.dtype)
    if masks:
        axis = next(position for position, one in enumerate(indices) if one is not None)
        return _put_where(x, axis, cast(masks[0], np.dtype(np.bool_)), source, accumulate)
    places = _index(x, indices)
    if not accumulate:
        return x.at[places].set(source, mode="drop", wrap_negative_indices=False)
    return countable(x).at[places].add(countable(source), mode="drop", wrap_negative_indices=False)


def _put_where(x: Array, axis: int, mask: Array, source: Array, accumulate: bool) -> Array:
    """``source`` written where a mask over some dimensions is set: as many slices as it has, or one for all."""
    if not source.size or not x.size:
        return x
    lead, after = x.shape[:axis], x.shape[axis + mask.ndim :]
    count = source.shape[source.ndim - len(after) - 1] if source.ndim > len(after) else 1
    rows, trail = math.prod(lead), math.prod(after)
    values = lax.reshape(broadcast(source, (*lead, count, *after)), (rows, count, trail))
    if count > 1:
        order = jnp.cumsum(lax.reshape(mask, (mask.size,)).astype(np.int64)) - 1
        values = jnp.take(values, jnp.clip(order, 0, count - 1), axis=1)
    whole = lax.reshape(x, (rows, mask.size, trail))
    new = countable(whole) + countable(values) if accumulate else values
    chosen = jnp.where(lax.reshape(mask, (1, mask.size, 1)), cast(new, x.dtype), whole)
    return lax.reshape(chosen, x.shape)


# -- gather and scatter ----------------------------------------------------------------------------
def _along(index: Array, axis: int) -> tuple[Any, ...]:
    """Index arrays that address one element per element of ``index``, which gives the place along ``axis``."""
    places: list[Any] = []
    for dim, size in enumerate(index.shape):
        if dim == axis:
            places.append(jnp.where(index < 0, literal(np.iinfo(index.dtype).max, index.dtype), index))
        else:
            shape = [size if d == dim else 1 for d in range(index.ndim)]
            places.append(lax.reshape(lax.iota(index.dtype, size), shape))
    return tuple(places)


@lowers(aten.gather.default)
def gather(call: Call, x: Array, dim: int, index: Array, **kwargs: Any) -> Array:
    if not x.ndim:
        return broadcast(x, index.shape)
    if not index.ndim:
        return lax.reshape(take(x, lax.reshape(index, (1,)), 0), ())
    if not index.size:
        return lax.full(out_shape(call), literal(0, x.dtype))
    axis = normalise_dim(dim, x.ndim)
    index = _small(index, x.shape[axis])
    return x.at[_along(index, axis)].get(mode="fill", fill_value=_fill(x.dtype), wrap_negative_indices=False)


_REDUCE = {"sum": "add", "add": "add", "prod": "multiply", "multiply": "multiply", "amax": "max", "amin": "min"}


def _scatter(x: Array, dim: int, index: Array, source: Any, method: str) -> Array:
    """``x`` with ``source`` written (``set``) or combined at the places along ``dim`` that ``index`` gives."""
    if not index.size:
        return x
    if isinstance(source, (bool, int, float, complex)):
        source = lax.full(index.shape, literal(source, x.dtype))
    shape = x.shape
    if not x.ndim:
        x = lax.reshape(x, (1,))
    if not index.ndim:
        index, source = lax.reshape(index, (1,)), lax.reshape(source, (source.size,))
    axis = normalise_dim(dim, x.ndim)
    index = _small(index, x.shape[axis])
    source = cast(source[tuple(slice(size) for size in index.shape)], x.dtype)
    if index.size == 1 or x.ndim != index.ndim:
        source = lax.reshape(source, index.shape)
    at = x.at[_along(index, axis)]
    return lax.reshape(getattr(at, method)(source, mode="drop", wrap_negative_indices=False), shape)


@lowers(aten.scatter.src, aten.scatter.value)
def scatter(call: Call, x: Array, dim: int, index: Array, source: Any) -> Array:
    return _scatter(x, dim, index, source, "set")


@lowers(aten.scatter.reduce, aten.scatter.value_reduce)
def scatter_reduce_name(call: Call, x: Array, dim: int, index: Array, source: Any, *, reduce: str) -> Array:
    if isinstance(source, (bool, int, float, complex)):
        source = lax.full(index.shape, literal(source, x.dtype))
    return _scatter(countable(x), dim, index, countable(source), _REDUCE[reduce])


@lowers(aten.scatter_add.default)
def scatter_add(call: Call, x: Array, dim: int, index: Array, source: Array) -> Array:
    if x.dtype.kind == "b":
        return _scatter(x, dim, index, source, "max")
    return _scatter(wide(x), dim, index, wide(source), "add")


@lowers(aten.scatter_reduce.two)
def scatter_reduce(
    call: Call, x: Array, dim: int, index: Array, source: Array, reduce: str, *, include_self: bool = True
) -> Array:
    value, src = wide(x), wide(source)
    if not include_self:
        neutral = _neutral(reduce, value.dtype)
        value = _scatter(value, dim, index, neutral, "set")
    if reduce != "mean":
        return _scatter(value, dim, index, src, _REDUCE[reduce])
    total = _scatter(value, dim, index, src, "add")
    ones = lax.full(source.shape, literal(1, total.dtype))
    counts = _scatter(lax.full(x.shape, literal(1 if include_self else 0, total.dtype)), dim, index, ones, "add")
    counts = lax.max(counts, lax.full_like(counts, 1))
    return jnp.floor_divide(total, counts) if total.dtype.kind in "iu" else lax.div(total, counts)


def _neutral(reduce: str, dtype: np.dtype[Any]) -> Any:
    """The value that a reduction leaves as it is."""
    if reduce in ("sum", "mean"):
        return 0
    if reduce == "prod":
        return 1
    if dtype.kind == "b":
        return reduce == "amin"
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return int(info.min if reduce == "amax" else info.max)
    return -np.inf if reduce == "amax" else np.inf


# -- whole slices ----------------------------------------------------------------------------------
def _slices(x: Array, dim: int, index: Array) -> tuple[Array, Any]:
    """``x`` with at least one dimension, and the places of the slices that ``index`` lists."""
    value = x if x.ndim else lax.reshape(x, (1,))
    axis = normalise_dim(dim, value.ndim)
    flat = lax.reshape(index, (index.size,))
    flat = lax.select(flat < 0, flat + literal(value.shape[axis], flat.dtype), flat)
    return value, (*[slice(None)] * axis, flat)


@lowers(aten.index_add.default)
def index_add(call: Call, x: Array, dim: int, index: Array, source: Array, *, alpha: Any = 1) -> Array:
    value, places = _slices(wide(x), dim, index)
    added = wide(source) if alpha == 1 else wide(source) * literal(alpha, value.dtype)
    added = lax.reshape(added, (1,)) if not added.ndim else added
    if value.dtype.kind == "b":
        return lax.reshape(value.at[places].max(added, mode="drop"), x.shape)
    return lax.reshape(value.at[places].add(added, mode="drop"), x.shape)


@lowers(aten.index_reduce.default)
def index_reduce(
    call: Call, x: Array, dim: int, index: Array, source: Array, reduce: str, *, include_self: bool = True
) -> Array:
    value, places = _slices(wide(x), dim, index)
    given = wide(source)
    given = lax.reshape(given, (1,)) if not given.ndim else given
    if not include_self:
        value = value.at[places].set(literal(_neutral(reduce, value.dtype), value.dtype), mode="drop")
    method = {"mean": "add", "prod": "multiply", "amax": "max", "amin": "min"}[reduce]
    found = getattr(value.at[places], method)(given, mode="drop")
    if reduce == "mean":
        axis = normalise_dim(dim, value.ndim)
        counts = jnp.full((value.shape[axis],), int(include_self), value.dtype).at[places[-1]].add(1, mode="drop")
        shape = [size if d == axis else 1 for d, size in enumerate(value.shape)]
        counts = lax.reshape(jnp.maximum(counts, 1), shape)
        found = jnp.floor_divide(found, counts) if found.dtype.kind in "iu" else found / counts
    return lax.reshape(found, x.shape)


@lowers(aten.index_copy.default)
def index_copy(call: Call, x: Array, dim: int, index: Array, source: Array) -> Array:
    value, places = _slices(x, dim, index)
    source = lax.reshape(source, (1,)) if not source.ndim else source
    return lax.reshape(value.at[places].set(cast(source, x.dtype), mode="drop"), x.shape)


@lowers(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)
def index_fill(call: Call, x: Array, dim: int, index: Array, filler: Any) -> Array:
    value, places = _slices(x, dim, index)
    return lax.reshape(value.at[places].set(cast(filler, x.dtype), mode="drop"), x.shape)


@lowers(aten.take.default)
def take_flat(call: Call, x: Array, index: Array) -> Array:
    flat = lax.reshape(x, (x.size,))
    wrapped = lax.select(index < 0, index + literal(x.size, index.dtype), index)
    return take(flat, wrapped, 0) if index.size else lax.full(index.shape, literal(0, x.dtype))


@lowers(aten.put.default)
def put(call: Call, x: Array, index: Array, source: Array, accumulate: bool = False) -> Array:
    kept = countable if accumulate else wide
    flat = lax.reshape(kept(x), (x.size,))
    places, values = lax.reshape(index, (index.size,)), lax.reshape(kept(source), (source.size,))
    at = flat.at[places]
    return lax.reshape(at.add(values, mode="drop") if accumulate else at.set(values, mode="drop"), x.shape)


@lowers(aten.masked_scatter.default)
def masked_scatter(call: Call, x: Array, mask: Array, source: Array) -> Array:
    shape = out_shape(call)
    value, chosen = broadcast(x, shape), broadcast(cast(mask, np.dtype(np.bool_)), shape)
    if not value.size or not source.size:
        return value
    order = jnp.cumsum(lax.reshape(chosen, (chosen.size,)).astype(np.int64)) - 1
    taken = lax.reshape(source, (source.size,))[jnp.maximum(order, 0)]
    return lax.select(chosen, cast(lax.reshape(taken, shape), value.dtype), value)


@lowers(aten.repeat_interleave.self_int)
def repeat_interleave(call: Call, x: Array, repeats: int, dim: int | None = None, **kwargs: Any) -> Array:
    return jnp.repeat(x, repeats, axis=dim)


def _refuse_unknown_size(node: fx.Node) -> str | None:
    return "the result's shape depends on values" if node.kwargs.get("output_size") is None else None


@lowers(aten.repeat_interleave.Tensor, refuses=_refuse_unknown_size)
def repeated_places(call: Call, repeats: Array, *, output_size: int) -> Array:
    places = lax.iota(np.dtype(repeats.dtype), repeats.size)
    return jnp.repeat(places, repeats, total_repeat_length=output_size)


@lowers(aten.nonzero_static.default)
def nonzero_static(call: Call, x: Array, *, size: int, fill_value: int = -1) -> Array:
    """The first ``size`` places that are not zero, ``fill_value`` where there are fewer."""
    if not x.size or not x.ndim or not size:
        there = 1 if not x.ndim and x.size else 0
        filled = jnp.full(out_shape(call), fill_value, np.int64)
        return filled if not there else filled[:, :0]
    found = jnp.nonzero(lax.reshape(x, (x.size,)), size=size, fill_value=x.size)[0]
    places = jnp.stack(jnp.unravel_index(found, x.shape), axis=1)
    return jnp.where((found < x.size)[:, None], places, fill_value)


@lowers(aten.embedding_renorm.default)
def embedding_renorm(call: Call, weight: Array, indices: Array, max_norm: float, norm_type: float) -> Array:
    """The rows that are looked up, made shorter where their norm is above ``max_norm``."""
    rows = wide(weight)
    size = jnp.linalg.norm(rows, ord=norm_type, axis=1)
    seen = jnp.zeros((rows.shape[0],), np.bool_).at[lax.reshape(indices, (indices.size,))].set(True, mode="drop")
    factor = jnp.where(seen & (size > max_norm), max_norm / (size + 1e-7), 1)
    return rows * cast(factor, rows.dtype)[:, None]


# -- segments --------------------------------------------------------------------------------------
def _segments(data: Array, lengths: Array | None, offsets: Array | None, axis: int) -> tuple[Array, Array]:
    """Which segment each element of ``data`` along ``axis`` is in, as ``[rows, elements]``, and their lengths."""
    if offsets is None:
        assert lengths is not None
        ends = jnp.cumsum(cast(lengths, np.dtype(np.int64)), axis=-1)
        starts = ends - lengths
    else:
        starts, ends = cast(offsets[..., :-1], np.dtype(np.int64)), cast(offsets[..., 1:], np.dtype(np.int64))
    rows, count = math.prod(starts.shape[:-1]), starts.shape[-1]
    starts, ends = lax.reshape(starts, (rows, 1, count)), lax.reshape(ends, (rows, 1, count))
    place = lax.iota(np.dtype(np.int64), data.shape[axis])[None, :, None]
    inside = (place >= starts) & (place < ends)
    segment = jnp.argmax(inside, axis=-1) if count else jnp.zeros((rows, data.shape[axis]), np.int64)
    return jnp.where(jnp.any(inside, axis=-1), segment, count), (ends - starts)[:, 0]


_SEGMENT_METHODS = {"sum": "add", "mean": "add", "prod": "multiply", "max": "max", "min": "min"}
_SEGMENT_STARTS = {"sum": 0.0, "mean": 0.0, "prod": 1.0, "max": -np.inf, "min": np.inf}


@lowers(aten.segment_reduce.default)
def segment_reduce(
    call: Call,
    data: Array,
    reduce: str,
    *,
    lengths: Array | None = None,
    indices: Array | None = None,
    offsets: Array | None = None,
    axis: int = 0,
    unsafe: bool = False,
    initial: Any = None,
) -> Array:
    """One reduction per run of elements; a mean that begins with nothing is NaN where the run is empty."""
    segment, sizes = _segments(data, lengths, offsets, axis)
    rows, count = sizes.shape
    inner = math.prod(data.shape[axis + 1 :])
    values = lax.reshape(wide(data), (rows, data.shape[axis], inner))
    start = literal(_SEGMENT_STARTS[reduce] if initial is None else initial, values.dtype)
    at = jnp.full((rows, count, inner), start, values.dtype).at[np.arange(rows)[:, None], segment]
    found = getattr(at, _SEGMENT_METHODS[reduce])(values, mode="drop")
    if reduce == "mean":
        empty = (sizes == 0)[..., None]
        found = jnp.where(empty, found if initial is not None else np.nan, found / cast(sizes, found.dtype)[..., None])
    return lax.reshape(found, out_shape(call))


@lowers(aten._segment_reduce_backward.default)
def segment_reduce_backward(
    call: Call,
    grad: Array,
    output: Array,
    data: Array,
    reduce: str,
    *,
    lengths: Array | None = None,
    offsets: Array | None = None,
    axis: int = 0,
    initial: Any = None,
) -> Array:
    """Extremes share the gradient among equals; a factor that is zero or NaN gets the product of the others."""
    segment, sizes = _segments(data, lengths, offsets, axis)
    rows, count = sizes.shape
    inner = math.prod(data.shape[axis + 1 :])
    if not data.size or not grad.size:
        return jnp.zeros(data.shape, data.dtype)
    values = lax.reshape(wide(data), (rows, data.shape[axis], inner))
    row, place = np.arange(rows)[:, None], jnp.minimum(segment, count - 1)

    def spread(per_segment: Array) -> Array:
        return lax.reshape(per_segment, (rows, count, per_segment.size // (rows * count)))[row, place]

    def counted(flags: Array) -> Array:
        zeros = jnp.zeros((rows, count, inner), values.dtype)
        return spread(zeros.at[row, segment].add(cast(flags, values.dtype), mode="drop"))

    g, result = spread(wide(grad)), spread(wide(output))
    if reduce == "mean":
        g = g / cast(spread(jnp.maximum(sizes, 1)), g.dtype)
    elif reduce in ("max", "min"):
        equal = (values == result) | (values != values)
        g = jnp.where(equal, g / jnp.maximum(counted(equal), 1), 0)
    elif reduce == "prod":
        zero, missing = values == 0, values != values
        start = literal(1 if initial is None else initial, values.dtype)
        rest = jnp.full((rows, count, inner), start, values.dtype)
        rest = spread(rest.at[row, segment].multiply(jnp.where(zero | missing, 1, values), mode="drop"))
        zeros, missings = counted(zero) - cast(zero, g.dtype), counted(missing) - cast(missing, g.dtype)
        others = jnp.where(missings > 0, np.nan, jnp.where(zeros > 0, 0, rest))
        g = g * jnp.where(zero | missing, others, result / values)
    return lax.reshape(jnp.where((segment < count)[..., None], g, 0), data.shape)


# -- bags ------------------------------------------------------------------------------------------
_SUM, _MEAN, _MAX = range(3)


@lowers(aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
def embedding_bag(
    call: Call,
    weight: Array,
    indices: Array,
    offsets: Array,
    scale_grad_by_freq: bool = False,
    mode: int = _SUM,
    sparse: bool = False,
    per_sample_weights: Array | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[Array, Array, Array, Array]:
    """Rows of ``weight`` summed, averaged or maximised per bag, and where each came from, for the backward pass.

    Follows ``aten/src/ATen/native/EmbeddingBag.cpp``; the three index tensors have the shapes of ``meta["val"]``.
    """
    bags = call.val[0].shape[0]
    starts = cast(offsets[:bags], np.dtype(np.int64))
    position = lax.iota(np.dtype(np.int64), indices.size)
    bag = jnp.searchsorted(starts, position, side="right", method="scan_unrolled") - 1 if bags else position
    counted = indices != padding_idx
    rows = wide(take(weight, indices, 0))
    if per_sample_weights is not None:
        rows = rows * wide(per_sample_weights)[:, None]
    place = jnp.where(counted, bag, bags)
    size = jnp.zeros((bags,), np.int64).at[place].add(1, mode="drop")
    shape, dtype = (bags, weight.shape[1]), rows.dtype
    if mode == _MAX:
        result = jnp.full(shape, -np.inf, dtype).at[place].max(rows, mode="drop")
        result = jnp.where(size[:, None] > 0, result, jnp.zeros((), dtype))
    else:
        result = jnp.zeros(shape, dtype).at[place].add(rows, mode="drop")
        if mode == _MEAN:
            result = result / jnp.maximum(size, 1)[:, None].astype(dtype)
    kept = [jnp.zeros(val.shape, np.int64) for val in call.val[1:]]
    if call.val[1].numel() == indices.size:
        kept[0] = bag
    # For sums the CPU leaves the sizes zero.
    if mode != _SUM and call.val[2].numel() == bags:
        kept[1] = size
    if mode == _MAX and call.val[3].dim() == 2:
        kept[2] = _bag_maxima(rows, result, bag, counted, indices, shape)
    elif mode != _SUM and call.val[3].numel() == bags:
        kept[2] = size
    return result, kept[0], kept[1], kept[2]


def _bag_maxima(
    rows: Array, result: Array, bag: Array, counted: Array, indices: Array, shape: tuple[int, int]
) -> Array:
    """The row of ``weight`` that each maximum came from: the first of equals."""
    winner = (rows == result[jnp.maximum(bag, 0)]) & counted[:, None]
    position = jnp.where(winner, lax.broadcasted_iota(np.dtype(np.int64), rows.shape, 0), indices.size)
    first = jnp.full(shape, indices.size, np.int64).at[bag].min(position, mode="drop")
    known = first < indices.size
    return jnp.where(known, indices[jnp.minimum(first, max(indices.size - 1, 0))], 0) if indices.size else first * 0
