"""Pooling of any rank, forward and backward."""

from __future__ import annotations

import torch

from .support import (
    Any,
    Array,
    Call,
    Sequence,
    cast,
    compute_dtype,
    jax,
    jnp,
    lax,
    literal,
    lowers,
    math,
    np,
    out_shape,
    wide,
)

aten = torch.ops.aten


def _spread(values: Any, rank: int, default: Any = None) -> tuple[int, ...]:
    if isinstance(values, int):
        values = (values,)
    values = values or default
    return tuple(values) * rank if len(values) == 1 else tuple(values)


def _lowest(dtype: np.dtype[Any]) -> Any:
    return np.iinfo(dtype).min if dtype.kind in "iu" else -np.inf


def _pads(x: Array, out: Sequence[int], kernel: Any, stride: Any, padding: Any, dilation: Any) -> list[tuple[int, int]]:
    """Padding in front as asked, behind as far as the last window reaches (``ceil_mode``) or less."""
    rank = len(kernel)
    pads = [(0, 0)] * (x.ndim - rank)
    for d in range(rank):
        reach = (out[len(out) - rank + d] - 1) * stride[d] + dilation[d] * (kernel[d] - 1) + 1
        pads.append((padding[d], reach - padding[d] - x.shape[x.ndim - rank + d]))
    return pads


def _windows(x: Array, kernel: Any, stride: Any, dilation: Any) -> tuple[Any, Any, Any]:
    lead = (1,) * (x.ndim - len(kernel))
    return (*lead, *kernel), (*lead, *stride), (*lead, *dilation)


# -- max -------------------------------------------------------------------------------------------
@lowers(aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default)
def max_pool(
    call: Call, x: Array, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
) -> tuple[Array, Array]:
    rank = 3 if call.node.target is aten.max_pool3d_with_indices.default else 2
    kernel = _spread(kernel, rank)
    stride, padding, dilation = _spread(stride, rank, kernel), _spread(padding, rank), _spread(dilation, rank)
    shape = out_shape(call, 0)
    if not math.prod(shape):
        return jnp.zeros(shape, x.dtype), jnp.zeros(shape, np.int64)
    pads = _pads(x, shape, kernel, stride, padding, dilation)
    lowest = literal(_lowest(x.dtype), x.dtype)
    sizes, steps, spread = _windows(x, kernel, stride, dilation)
    used: list[Any] = [node.args[1] for node in call.node.users if node.users]
    values = lax.reduce_window(x, lowest, lax.max, sizes, steps, [_at_least(p) for p in pads], None, spread)
    values = _cropped(values, shape)
    if 1 not in used and call.node.users:
        return values, jnp.zeros(shape, np.int64)
    return values, _max_positions(x, values, kernel, stride, padding, dilation)


def _at_least(pad: tuple[int, int]) -> tuple[int, int]:
    """A window that ends before the last element needs no padding there."""
    return pad[0], max(pad[1], 0)


def _cropped(x: Array, shape: Sequence[int]) -> Array:
    return x if x.shape == tuple(shape) else x[tuple(slice(size) for size in shape)]


def _max_positions(x: Array, values: Array, kernel: Any, stride: Any, padding: Any, dilation: Any) -> Array:
    """Where each maximum lies in its plane: the first of equals, and the last NaN, as CPU's kernel finds them."""
    rank = len(kernel)
    plane = x.shape[x.ndim - rank :]
    pads = _pads(x, values.shape, kernel, stride, padding, dilation)
    padded = lax.pad(x, literal(_lowest(x.dtype), x.dtype), [(*_at_least(p), 0) for p in pads])
    best = jnp.full(values.shape, math.prod(plane), np.int64)
    for offsets in reversed(list(np.ndindex(*kernel))):
        window = padded
        place = jnp.zeros((1,) * rank, np.int64)
        for d in range(rank):
            axis = x.ndim - rank + d
            first, count = offsets[d] * dilation[d], values.shape[values.ndim - rank + d]
            window = lax.slice_in_dim(window, first, first + (count - 1) * stride[d] + 1, stride[d], axis)
            along = np.arange(count) * stride[d] + first - padding[d]
            place = place * plane[d] + along.reshape([-1 if e == d else 1 for e in range(rank)])
        inside = jnp.broadcast_to(place, values.shape)
        equal = (window == values) | ((window != window) & (values != values))
        best = jnp.where(equal & (_inside(offsets, values, plane, stride, padding, dilation)), inside, best)
    return best


def _inside(offsets: Any, values: Array, plane: Any, stride: Any, padding: Any, dilation: Any) -> np.ndarray[Any, Any]:
    """Which windows have the element at these offsets inside the plane, not in the padding."""
    rank = len(plane)
    inside = np.ones((1,) * rank, np.bool_)
    for d in range(rank):
        along = np.arange(values.shape[values.ndim - rank + d]) * stride[d] + offsets[d] * dilation[d] - padding[d]
        fits = (along >= 0) & (along < plane[d])
        inside = inside & fits.reshape([-1 if e == d else 1 for e in range(rank)])
    return np.broadcast_to(inside, values.shape[values.ndim - rank :])


_BACKWARD: dict[Any, int] = {
    aten.max_pool2d_with_indices_backward.default: 2,
    aten.max_pool3d_with_indices_backward.default: 3,
    aten.adaptive_max_pool2d_backward.default: 2,
    aten.adaptive_max_pool3d_backward.default: 3,
    aten.fractional_max_pool2d_backward.default: 2,
    aten.fractional_max_pool3d_backward.default: 3,
}


@lowers(*_BACKWARD)
def max_pool_backward(call: Call, grad: Array, x: Array, *rest: Any) -> Array:
    indices: Array = rest[-1]
    rank = _BACKWARD[call.node.target]
    if not x.size or not grad.size:
        return jnp.zeros_like(x)
    lead, plane = x.shape[: x.ndim - rank], math.prod(x.shape[x.ndim - rank :])
    rows = math.prod(lead)
    count = grad.size // rows
    values, places = lax.reshape(wide(grad), (rows, count)), lax.reshape(indices, (rows, count))
    flat = jnp.zeros((rows, plane), values.dtype)
    flat = flat.at[np.arange(rows)[:, None], places].add(values, mode="drop")
    return lax.reshape(flat, x.shape)


def _max_at(x: Array, windows: Array, outs: Sequence[int]) -> tuple[Array, Array]:
    """The largest of each window and its place in the plane: the first of equals, the last NaN.

    ``x`` is ``[rows, plane]``, ``windows`` the places as ``[rows or 1, windows, elements]``.
    """
    rows, shape = x.shape[0], windows.shape[1:]
    places = jnp.broadcast_to(windows, (rows, *shape))
    values = jnp.take_along_axis(x, lax.reshape(places, (rows, math.prod(shape))), axis=1).reshape(rows, *shape)
    largest = jnp.max(values, axis=-1, keepdims=True)
    missing = values != values
    first = jnp.argmax(values == largest, axis=-1, keepdims=True)
    last = shape[-1] - 1 - jnp.argmax(lax.rev(missing, (2,)), axis=-1, keepdims=True)
    chosen = jnp.where(jnp.any(missing, axis=-1, keepdims=True), last, first)
    return largest.reshape(rows, *outs), jnp.take_along_axis(places, chosen, axis=-1).reshape(rows, *outs)


def _places(along: Sequence[Array], plane: Sequence[int]) -> Array:
    """Places in the plane from places per dimension, each ``[rows or 1, windows, elements]``."""
    rank, total = len(along), jnp.zeros((1,) * (2 * len(along) + 1), np.int64)
    for d, place in enumerate(along):
        shape = [place.shape[0], *([1] * (2 * rank))]
        shape[1 + d], shape[1 + rank + d] = place.shape[1:]
        total = total * plane[d] + lax.reshape(cast(place, np.dtype(np.int64)), shape)
    return lax.reshape(
        total, (total.shape[0], math.prod(total.shape[1 : rank + 1]), math.prod(total.shape[rank + 1 :]))
    )


def _planes(call: Call, x: Array, rank: int, along: Sequence[Array]) -> tuple[Array, Array]:
    plane, shape = x.shape[x.ndim - rank :], out_shape(call, 0)
    rows = math.prod(x.shape[: x.ndim - rank])
    flat = lax.reshape(x, (rows, math.prod(plane)))
    values, places = _max_at(flat, _places(along, plane), shape[len(shape) - rank :])
    return lax.reshape(values, shape), lax.reshape(places, shape)


@lowers(aten.adaptive_max_pool2d.default, aten.adaptive_max_pool3d.default)
def adaptive_max_pool(call: Call, x: Array, out: Sequence[int]) -> tuple[Array, Array]:
    """Window *i* has elements ``floor(i·size/out)`` to ``ceil((i+1)·size/out)``; shorter ones repeat their last."""
    rank, shape = len(out), out_shape(call, 0)
    if not math.prod(shape) or not x.size:
        return jnp.zeros(shape, x.dtype), jnp.zeros(shape, np.int64)
    along: list[Array] = []
    for d in range(rank):
        size = x.shape[x.ndim - rank + d]
        first = np.arange(out[d]) * size // out[d]
        last = -(-(np.arange(out[d]) + 1) * size // out[d])
        steps = np.arange((last - first).max())
        along.append(jnp.asarray(np.minimum(first[:, None] + steps, last[:, None] - 1)[None]))
    return _planes(call, x, rank, along)


@lowers(aten.fractional_max_pool2d.default, aten.fractional_max_pool3d.default)
def fractional_max_pool(
    call: Call, x: Array, kernel: Sequence[int], out: Sequence[int], samples: Array
) -> tuple[Array, Array]:
    """Windows at pseudo-random steps (Graham 2014), one sample per plane and dimension: in 2-d the last one first."""
    rank, shape = len(out), out_shape(call, 0)
    if not math.prod(shape):
        return jnp.zeros(shape, x.dtype), jnp.zeros(shape, np.int64)
    drawn = lax.reshape(samples, (samples.size // rank, rank))
    along: list[Array] = []
    for d in range(rank):
        size = x.shape[x.ndim - rank + d]
        sample = drawn[:, rank - 1 - d if rank == 2 else d, None]
        last = jnp.full((drawn.shape[0], 1), size - kernel[d], np.int64)
        if out[d] > 1:
            step = literal((size - kernel[d]) / (out[d] - 1), np.dtype(samples.dtype))
            number = jnp.arange(out[d] - 1, dtype=samples.dtype)
            first = cast(jnp.trunc((number + sample) * step) - jnp.trunc(sample * step), np.dtype(np.int64))
            last = jnp.concatenate([first, last], axis=1)
        along.append(last[:, :, None] + jnp.arange(kernel[d]))
    return _planes(call, x, rank, along)


# -- average ---------------------------------------------------------------------------------------
def _average(
    x: Array,
    shape: Sequence[int],
    kernel: Any,
    stride: Any,
    padding: Any,
    include_pad: bool,
    divisor: int | None,
) -> Array:
    """The forward of average pooling, linear in ``x`` (computed in its dtype)."""
    ones = (1,) * len(kernel)
    pads = _pads(x, shape, kernel, stride, padding, ones)
    sizes, steps, _ = _windows(x, kernel, stride, ones)
    total = lax.reduce_window(x, literal(0, x.dtype), lax.add, sizes, steps, [_at_least(p) for p in pads])
    counts = _counts(x, shape, kernel, stride, padding, include_pad) if divisor is None else divisor
    return _cropped(total, shape) / np.asarray(counts, x.dtype)


def _counts(
    x: Array, shape: Sequence[int], kernel: Any, stride: Any, padding: Any, include_pad: bool
) -> np.ndarray[Any, Any]:
    """How many elements each window averages over."""
    rank = len(kernel)
    counts = np.ones((1,) * rank)
    for d in range(rank):
        size = x.shape[x.ndim - rank + d]
        starts = np.arange(shape[len(shape) - rank + d]) * stride[d] - padding[d]
        if include_pad:
            along = np.minimum(starts + kernel[d], size + padding[d]) - starts
        else:
            along = np.minimum(starts + kernel[d], size) - np.maximum(starts, 0)
        counts = counts * along.reshape([-1 if e == d else 1 for e in range(rank)])
    return counts


_AVERAGE: dict[Any, int] = {
    aten.avg_pool1d.default: 1,
    aten.avg_pool2d.default: 2,
    aten.avg_pool3d.default: 3,
    aten.avg_pool2d_backward.default: 2,
    aten.avg_pool3d_backward.default: 3,
}


@lowers(aten.avg_pool1d.default, aten.avg_pool2d.default, aten.avg_pool3d.default)
def avg_pool(
    call: Call,
    x: Array,
    kernel: Any,
    stride: Any = (),
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Array:
    rank, shape = _AVERAGE[call.node.target], out_shape(call)
    kernel = _spread(kernel, rank)
    value = cast(x, compute_dtype(call))
    if not math.prod(shape):
        return jnp.zeros(shape, value.dtype)
    steps, pads = _spread(stride, rank, kernel), _spread(padding, rank)
    return _average(value, shape, kernel, steps, pads, count_include_pad, divisor_override)


@lowers(aten.avg_pool2d_backward.default, aten.avg_pool3d_backward.default)
def avg_pool_backward(
    call: Call,
    grad: Array,
    x: Array,
    kernel: Any,
    stride: Any,
    padding: Any,
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Array:
    rank = _AVERAGE[call.node.target]
    kernel = _spread(kernel, rank)
    steps, pads = _spread(stride, rank, kernel), _spread(padding, rank)
    g = wide(grad)
    if not x.size or not grad.size:
        return jnp.zeros_like(x)

    def forward(value: Array) -> Array:
        return _average(value, grad.shape, kernel, steps, pads, count_include_pad, divisor_override)

    (result,) = jax.linear_transpose(forward, jax.ShapeDtypeStruct(x.shape, g.dtype))(g)
    return result


# -- adaptive: windows of varying size, as a product with one averaging matrix per dimension -------
def _averaging(size: int, out: int) -> np.ndarray[Any, Any]:
    """``[out, size]``: row *i* averages elements ``floor(i·size/out)`` to ``ceil((i+1)·size/out)``."""
    matrix = np.zeros((out, size))
    for i in range(out):
        first, last = i * size // out, -(-(i + 1) * size // out)
        matrix[i, first:last] = 1 / (last - first)
    return matrix


_ADAPTIVE: dict[Any, int] = {
    aten.adaptive_avg_pool1d.default: 1,
    aten._adaptive_avg_pool2d.default: 2,
    aten._adaptive_avg_pool3d.default: 3,
    aten._adaptive_avg_pool2d_backward.default: 2,
    aten._adaptive_avg_pool3d_backward.default: 3,
}


def _contract(x: Array, matrix: np.ndarray[Any, Any], axis: int) -> Array:
    product = lax.dot_general(x, jnp.asarray(matrix, x.dtype), (((axis,), (1,)), ((), ())))
    return jnp.moveaxis(product, -1, axis)


@lowers(aten.adaptive_avg_pool1d.default, aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool3d.default)
def adaptive_avg_pool(call: Call, x: Array, out: Sequence[int]) -> Array:
    value, rank = cast(x, compute_dtype(call)), _ADAPTIVE[call.node.target]
    if all(size == 1 for size in out) and value.size:
        return jnp.mean(value, axis=tuple(range(x.ndim - rank, x.ndim)), keepdims=True)
    for d in range(rank):
        axis = x.ndim - rank + d
        value = _contract(value, _averaging(x.shape[axis], out[d]), axis)
    return value


@lowers(aten._adaptive_avg_pool2d_backward.default, aten._adaptive_avg_pool3d_backward.default)
def adaptive_avg_pool_backward(call: Call, grad: Array, x: Array) -> Array:
    value, rank = wide(grad), _ADAPTIVE[call.node.target]
    for d in range(rank):
        axis = x.ndim - rank + d
        value = _contract(value, _averaging(x.shape[axis], grad.shape[axis]).T, axis)
    return value
