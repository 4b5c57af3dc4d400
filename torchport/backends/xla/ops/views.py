"""Shapes: views (which are values here, nothing aliases), joining, padding, and writing into a part."""

from __future__ import annotations

import torch

from .support import (
    Any,
    Array,
    Call,
    Sequence,
    broadcast,
    cast,
    fx,
    jax_dtype,
    jnp,
    lax,
    literal,
    lowers,
    math,
    merged,
    normalise_dim,
    normalise_dims,
    np,
    out_dtype,
    out_shape,
    unmerged,
)

aten = torch.ops.aten


@lowers(
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten._reshape_alias.default,
    aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default,
)  # fmt: skip
def reshape(call: Call, x: Array, *args: Any) -> Array:
    shape, whole = out_shape(call), unmerged(call, 0)
    if whole is not None and whole.shape == shape:
        return whole
    if x.ndim == 4 and shape == (x.shape[0] * x.shape[1], *x.shape[2:]):
        return merged(call, x)
    return lax.reshape(x, shape)


@lowers(aten.view.dtype)
def view_dtype(call: Call, x: Array, dtype: Any) -> Array:
    target = jax_dtype(dtype)
    if x.dtype == target:
        return x
    return x.view(target)


@lowers(aten.expand.default)
def expand(call: Call, x: Array, size: Sequence[int], **kwargs: Any) -> Array:
    return broadcast(x, out_shape(call))


@lowers(aten.permute.default)
def permute(call: Call, x: Array, dims: Sequence[int]) -> Array:
    whole = unmerged(call, 0)
    if whole is not None and list(dims) == [0, 2, 1]:
        return merged(call, lax.transpose(whole, [0, 1, 3, 2]))
    return lax.transpose(x, [normalise_dim(dim, x.ndim) for dim in dims])


@lowers(aten.t.default, aten.numpy_T.default)
def t(call: Call, x: Array) -> Array:
    return lax.transpose(x, tuple(reversed(range(x.ndim))))


@lowers(aten.transpose.int)
def transpose(call: Call, x: Array, first: int, second: int) -> Array:
    whole = unmerged(call, 0)
    if whole is not None and {first % 3, second % 3} == {1, 2}:
        return merged(call, lax.transpose(whole, [0, 1, 3, 2]))
    order = list(range(x.ndim))
    if order:
        a, b = normalise_dim(first, x.ndim), normalise_dim(second, x.ndim)
        order[a], order[b] = b, a
    return lax.transpose(x, order)


@lowers(aten.diagonal.default)
def diagonal(call: Call, x: Array, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Array:
    return jnp.diagonal(x, offset, dim1, dim2)


@lowers(aten.unfold.default)
def unfold(call: Call, x: Array, dim: int, size: int, step: int) -> Array:
    if not x.ndim:
        return lax.reshape(x, out_shape(call))
    axis = normalise_dim(dim, x.ndim)
    count = call.val.shape[axis]
    positions = np.arange(count)[:, None] * step + np.arange(size)[None, :]
    taken = jnp.take(x, positions.reshape(-1), axis=axis, mode="clip")
    taken = lax.reshape(taken, (*x.shape[:axis], count, size, *x.shape[axis + 1 :]))
    return jnp.moveaxis(taken, axis + 1, -1)


@lowers(aten.view_as_complex.default)
def view_as_complex(call: Call, x: Array) -> Array:
    return lax.complex(x[..., 0], x[..., 1])


@lowers(aten.view_as_real.default)
def view_as_real(call: Call, x: Array) -> Array:
    return jnp.stack([lax.real(x), lax.imag(x)], axis=-1)


# -- taking parts ----------------------------------------------------------------------------------
def _bounds(x: Array, dim: int, start: Any, end: Any) -> tuple[int, int, int]:
    """The axis, and where a slice begins and ends, as PyTorch clamps them."""
    axis = normalise_dim(dim, x.ndim)
    size = x.shape[axis]
    first, last, _ = slice(start, end).indices(size)
    return axis, first, max(first, last)


@lowers(aten.slice.Tensor)
def slice_(call: Call, x: Array, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Array:
    axis, first, last = _bounds(x, dim, start, end)
    return lax.slice_in_dim(x, first, last, step, axis)


@lowers(aten.select.int)
def select(call: Call, x: Array, dim: int, index: int) -> Array:
    return lax.index_in_dim(x, index, normalise_dim(dim, x.ndim), keepdims=False)


@lowers(aten.split_with_sizes.default)
def split_with_sizes(call: Call, x: Array, sizes: Sequence[int], dim: int = 0) -> list[Array]:
    axis = normalise_dim(dim, x.ndim)
    ends = np.cumsum(sizes)
    return [lax.slice_in_dim(x, int(end - size), int(end), 1, axis) for end, size in zip(ends, sizes, strict=True)]


@lowers(aten.split.Tensor)
def split(call: Call, x: Array, size: int, dim: int = 0) -> list[Array]:
    axis = normalise_dim(dim, x.ndim)
    return split_with_sizes(call, x, [val.shape[axis] for val in call.val], axis)


@lowers(aten.unbind.int)
def unbind(call: Call, x: Array, dim: int = 0) -> list[Array]:
    axis = normalise_dim(dim, x.ndim)
    return [lax.index_in_dim(x, position, axis, keepdims=False) for position in range(x.shape[axis])]


# -- joining and repeating -------------------------------------------------------------------------
@lowers(aten.cat.default)
def cat(call: Call, tensors: Sequence[Array], dim: int = 0) -> Array:
    shape, dtype = out_shape(call), out_dtype(call)
    # PyTorch leaves out 1-D empty tensors whatever the others' shapes are.
    parts = [cast(x, dtype) for x in tensors if x.shape != (0,) or len(shape) == 1]
    return lax.concatenate(parts, normalise_dim(dim, len(shape))) if parts else lax.full(shape, 0, dtype)


@lowers(aten.stack.default)
def stack(call: Call, tensors: Sequence[Array], dim: int = 0) -> Array:
    shape, dtype = out_shape(call), out_dtype(call)
    axis = normalise_dim(dim, len(shape))
    return lax.concatenate([lax.expand_dims(cast(x, dtype), (axis,)) for x in tensors], axis)


@lowers(aten.repeat.default)
def repeat(call: Call, x: Array, repeats: Sequence[int]) -> Array:
    return jnp.tile(x, tuple(repeats))


@lowers(aten.flip.default)
def flip(call: Call, x: Array, dims: Sequence[int]) -> Array:
    return lax.rev(x, normalise_dims(dims, x.ndim) if dims else ())


@lowers(aten.roll.default)
def roll(call: Call, x: Array, shifts: Any, dims: Any = ()) -> Array:
    shifts = tuple(shifts) if isinstance(shifts, (list, tuple)) else (shifts,)
    if not dims:
        return lax.reshape(jnp.roll(lax.reshape(x, (x.size,)), shifts[0]), x.shape)
    return jnp.roll(x, shifts, tuple(dims)) if x.ndim else x


# -- padding ---------------------------------------------------------------------------------------
@lowers(aten.constant_pad_nd.default)
def constant_pad(call: Call, x: Array, pad: Sequence[int], value: Any = 0) -> Array:
    pairs = [(0, 0, 0)] * x.ndim
    for position in range(len(pad) // 2):
        pairs[x.ndim - 1 - position] = (pad[2 * position], pad[2 * position + 1], 0)
    return lax.pad(x, literal(value, x.dtype), pairs)


def _pad_with(call: Call, x: Array, pad: Sequence[int], mode: str) -> Array:
    """Padding by reflection or by the edge; negative padding takes away."""
    for position in range(len(pad) // 2):
        axis = x.ndim - 1 - position
        before, after = pad[2 * position], pad[2 * position + 1]
        size = x.shape[axis]
        places = np.arange(-before, size + after)
        if mode == "reflect":
            places = np.abs(places)
            places = np.where(places >= size, 2 * (size - 1) - places, places)
        else:
            places = np.clip(places, 0, size - 1)
        x = jnp.take(x, places, axis=axis, mode="clip")
    return x


@lowers(aten.reflection_pad1d.default, aten.reflection_pad2d.default, aten.reflection_pad3d.default)
def reflection_pad(call: Call, x: Array, pad: Sequence[int]) -> Array:
    return _pad_with(call, x, pad, "reflect")


@lowers(aten.replication_pad1d.default, aten.replication_pad2d.default, aten.replication_pad3d.default)
def replication_pad(call: Call, x: Array, pad: Sequence[int]) -> Array:
    return _pad_with(call, x, pad, "edge")


# -- triangles -------------------------------------------------------------------------------------
def _triangle(shape: Sequence[int], diagonal: int) -> Array:
    """Where column ≤ row + diagonal, for the last two dimensions."""
    rows = lax.broadcasted_iota(np.dtype(np.int32), shape[-2:], 0)
    columns = lax.broadcasted_iota(np.dtype(np.int32), shape[-2:], 1)
    return columns <= rows + literal(diagonal, rows.dtype)


@lowers(aten.tril.default)
def tril(call: Call, x: Array, diagonal: int = 0) -> Array:
    return lax.select(broadcast(_triangle(x.shape, diagonal), x.shape), x, lax.full_like(x, 0))


@lowers(aten.triu.default)
def triu(call: Call, x: Array, diagonal: int = 0) -> Array:
    return lax.select(broadcast(_triangle(x.shape, diagonal - 1), x.shape), lax.full_like(x, 0), x)


# -- writing into a part ---------------------------------------------------------------------------
@lowers(aten.slice_scatter.default)
def slice_scatter(
    call: Call, x: Array, src: Array, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Array:
    axis, first, last = _bounds(x, dim, start, end)
    source = cast(src, x.dtype)
    if step == 1:
        return lax.dynamic_update_slice_in_dim(x, source, first, axis) if source.size else x
    return x.at[(*[slice(None)] * axis, slice(first, last, step))].set(source)


@lowers(aten.select_scatter.default)
def select_scatter(call: Call, x: Array, src: Array, dim: int, index: int) -> Array:
    axis = normalise_dim(dim, x.ndim)
    source = lax.expand_dims(broadcast(cast(src, x.dtype), [s for d, s in enumerate(x.shape) if d != axis]), (axis,))
    return lax.dynamic_update_slice_in_dim(x, source, index % x.shape[axis], axis)


@lowers(aten.diagonal_scatter.default)
def diagonal_scatter(call: Call, x: Array, src: Array, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Array:
    moved = jnp.moveaxis(x, (dim1, dim2), (-2, -1))
    count = src.shape[-1]
    rows, columns = np.arange(count) + max(-offset, 0), np.arange(count) + max(offset, 0)
    return jnp.moveaxis(moved.at[..., rows, columns].set(cast(src, x.dtype)), (-2, -1), (dim1, dim2))


# -- as_strided: positions in the memory that the argument's strides describe ----------------------
def _memory_order(val: torch.Tensor) -> list[int] | None:
    """The permutation under which a dense tensor is contiguous, or ``None`` where its memory has gaps or overlaps."""
    order = sorted(range(val.dim()), key=lambda d: (-val.stride(d), -val.shape[d], d))
    step = 1
    for dim in reversed(order):
        if val.shape[dim] == 1:
            continue
        if val.stride(dim) != step:
            return None
        step *= val.shape[dim]
    return order


def _refuse_gaps(node: fx.Node) -> str | None:
    source: Any = node.args[0]
    if source.meta["val"].numel() and _memory_order(source.meta["val"]) is None:
        return "as_strided of a tensor whose memory has gaps or overlaps"
    return None


def _positions(size: Sequence[int], stride: Sequence[int], offset: int) -> np.ndarray[Any, Any]:
    places = np.full(tuple(size), offset, np.int64)
    for dim, (count, step) in enumerate(zip(size, stride, strict=True)):
        places += (np.arange(count) * step).reshape(-1, *([1] * (len(size) - dim - 1)))
    return places


def _places(x: Array, size: Sequence[int], stride: Sequence[int], start: int) -> np.ndarray[Any, Any]:
    """The positions, all of them in the memory of ``x``. Raises ``RuntimeError`` in PyTorch's words."""
    places = _positions(size, stride, start)
    if places.size and int(places.max()) >= x.size:
        item = x.dtype.itemsize
        raise RuntimeError(
            f"setStorage: sizes {list(size)}, strides {list(stride)}, storage offset {start}, and itemsize {item} "
            f"requiring a storage size of {(int(places.max()) + 1) * item} are out of bounds for storage of size "
            f"{x.size * item}"
        )
    return places


@lowers(aten.as_strided.default, refuses=_refuse_gaps)
def as_strided(call: Call, x: Array, size: Sequence[int], stride: Sequence[int], offset: Any = None) -> Array:
    val = call.arg(0)
    if not x.size:
        return lax.full(tuple(size), literal(0, x.dtype))
    order = _memory_order(val)
    assert order is not None
    flat = lax.reshape(lax.transpose(x, order), (x.size,))
    start = val.storage_offset() if offset is None else offset
    places = _places(x, size, stride, start)
    if places.size == x.size - start and np.array_equal(places.reshape(-1), np.arange(start, x.size)):
        return lax.reshape(flat[start:], tuple(size))
    return flat[places]


@lowers(aten.as_strided_scatter.default, refuses=_refuse_gaps)
def as_strided_scatter(
    call: Call, x: Array, src: Array, size: Sequence[int], stride: Sequence[int], offset: Any = None
) -> Array:
    val = call.arg(0)
    order = _memory_order(val)
    if not x.size or order is None:
        return x
    turned = lax.transpose(x, order)
    start = val.storage_offset() if offset is None else offset
    written = lax.reshape(turned, (x.size,)).at[_places(x, size, stride, start)].set(cast(src, x.dtype))
    return lax.transpose(lax.reshape(written, turned.shape), [order.index(d) for d in range(len(order))])


@lowers(aten.narrow_copy.default)
def narrow_copy(call: Call, x: Array, dim: int, start: int, length: int) -> Array:
    axis = normalise_dim(dim, x.ndim)
    first = start + x.shape[axis] if start < 0 else start
    return lax.slice_in_dim(x, first, first + length, axis=axis)


def _refuse_other_layouts(node: fx.Node) -> str | None:
    kept = (None, torch.contiguous_format, torch.preserve_format)
    value: Any = node.args[0]
    if node.kwargs.get("memory_format") not in kept or not value.meta["val"].is_contiguous():
        return "resizing memory that is not row-major"
    return None


@lowers(aten.resize.default, aten.resize_as.default, refuses=_refuse_other_layouts)
def resize(call: Call, x: Array, size: Any, **kwargs: Any) -> Array:
    """The first elements in memory, in another shape; zeros where there are none."""
    shape = out_shape(call)
    flat, count = lax.reshape(x, (x.size,)), math.prod(shape)
    flat = jnp.concatenate([flat, jnp.zeros((max(count - x.size, 0),), x.dtype)])
    return lax.reshape(flat[:count], shape)
