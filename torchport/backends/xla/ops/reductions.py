"""Reductions: half precision accumulates in float32, integers sum in int64 as ``meta["val"]`` says."""

from __future__ import annotations

import torch

from .support import (
    Any,
    Array,
    Call,
    Sequence,
    cast,
    compute_dtype,
    jnp,
    lax,
    literal,
    lowers,
    math,
    normalise_dim,
    normalise_dims,
    np,
    operands,
    out_dtype,
    out_shape,
    promoted,
    wide,
    wide_dtype,
)

aten = torch.ops.aten

_BOOL = np.dtype(np.bool_)
Dims = int | Sequence[int] | None


def _sum(x: Array, axes: tuple[int, ...]) -> Array:
    return lax.reduce_sum(x, axes) if axes else x


def _kept(x: Array, axes: tuple[int, ...]) -> Array:
    """A reduced array with the reduced dimensions back, as ones."""
    return lax.expand_dims(x, axes) if axes else x


def _count(shape: Sequence[int], axes: tuple[int, ...]) -> int:
    return math.prod(shape[axis] for axis in axes)


# -- sums and products -----------------------------------------------------------------------------
@lowers(aten.sum.dim_IntList, aten.sum.default)
def sum_(call: Call, x: Array, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Array:
    axes = normalise_dims(dim, x.ndim)
    value = cast(x, compute_dtype(call))
    if value.dtype == _BOOL:
        return lax.reshape(lax.reduce_or(value, axes), out_shape(call))
    return lax.reshape(_sum(value, axes), out_shape(call))


@lowers(aten.nansum.default)
def nansum(call: Call, x: Array, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Array:
    value = cast(x, compute_dtype(call))
    return sum_(call, jnp.where(value != value, 0, value), dim)


@lowers(aten.mean.dim, aten.mean.default)
def mean(call: Call, x: Array, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Array:
    axes = normalise_dims(dim, x.ndim)
    value = cast(x, compute_dtype(call))
    count = literal(_count(x.shape, axes), value.dtype)
    return lax.reshape(lax.div(_sum(value, axes), count), out_shape(call))


@lowers(aten.prod.default, aten.prod.dim_int)
def prod(call: Call, x: Array, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Array:
    axes = normalise_dims(dim, x.ndim)
    value = cast(x, compute_dtype(call))
    if value.dtype == _BOOL:
        return lax.reshape(lax.reduce_and(value, axes), out_shape(call))
    return lax.reshape(lax.reduce_prod(value, axes) if axes else value, out_shape(call))


@lowers(aten.any.default, aten.any.dim, aten.any.dims)
def any_(call: Call, x: Array, dim: Dims = None, keepdim: bool = False) -> Array:
    axes = _listed(dim, x.ndim)
    return lax.reshape(lax.reduce_or(cast(x, _BOOL), axes), out_shape(call))


@lowers(aten.all.default, aten.all.dim, aten.all.dims)
def all_(call: Call, x: Array, dim: Dims = None, keepdim: bool = False) -> Array:
    axes = _listed(dim, x.ndim)
    return lax.reshape(lax.reduce_and(cast(x, _BOOL), axes), out_shape(call))


def _listed(dim: Dims, rank: int) -> tuple[int, ...]:
    """Here an empty list reduces nothing."""
    return () if isinstance(dim, (list, tuple)) and not dim else normalise_dims(dim, rank)


@lowers(aten.count_nonzero.default, aten.count_nonzero.dim_IntList)
def count_nonzero(call: Call, x: Array, dim: Dims = None) -> Array:
    return _sum(cast(cast(x, _BOOL), np.dtype(np.int64)), normalise_dims(dim, x.ndim))


# -- extremes --------------------------------------------------------------------------------------
def _extreme(x: Array, axes: tuple[int, ...], largest: bool) -> Array:
    if not axes:
        return x
    if x.dtype == _BOOL:
        return (lax.reduce_or if largest else lax.reduce_and)(x, axes)
    return (lax.reduce_max if largest else lax.reduce_min)(x, axes)


@lowers(aten.amax.default, aten.max.default)
def amax(call: Call, x: Array, dim: Dims = None, keepdim: bool = False) -> Array:
    return lax.reshape(_extreme(x, normalise_dims(dim, x.ndim), True), out_shape(call))


@lowers(aten.amin.default, aten.min.default)
def amin(call: Call, x: Array, dim: Dims = None, keepdim: bool = False) -> Array:
    return lax.reshape(_extreme(x, normalise_dims(dim, x.ndim), False), out_shape(call))


@lowers(aten.aminmax.default)
def aminmax(call: Call, x: Array, *, dim: int | None = None, keepdim: bool = False) -> tuple[Array, Array]:
    axes = normalise_dims(dim, x.ndim)
    shape = out_shape(call, 0)
    return lax.reshape(_extreme(x, axes, False), shape), lax.reshape(_extreme(x, axes, True), shape)


def position_of_extreme(x: Array, dim: int, largest: bool) -> Array:
    """Where the first extreme (or the first NaN) lies along a dimension, int64."""
    value = cast(x, np.dtype(np.uint8)) if x.dtype == _BOOL else x
    if not value.ndim:
        return jnp.zeros((), np.int64)
    return (lax.argmax if largest else lax.argmin)(value, dim, np.dtype(np.int64))


@lowers(aten.argmax.default, aten.argmin.default)
def argmax(call: Call, x: Array, dim: int | None = None, keepdim: bool = False) -> Array:
    largest = call.node.target is aten.argmax.default
    if dim is None:
        x, dim = lax.reshape(x, (x.size,)), 0
    found = position_of_extreme(x, normalise_dim(dim, x.ndim), largest)
    return lax.reshape(found, out_shape(call))


@lowers(aten.max.dim, aten.min.dim)
def max_dim(call: Call, x: Array, dim: int, keepdim: bool = False) -> tuple[Array, Array]:
    largest = call.node.target is aten.max.dim
    axis = normalise_dim(dim, x.ndim)
    shape = out_shape(call, 0)
    values = _extreme(x, (axis,) if x.ndim else (), largest)
    return lax.reshape(values, shape), lax.reshape(position_of_extreme(x, axis, largest), shape)


# -- variance and norms ----------------------------------------------------------------------------
def variance(x: Array, dim: Dims, correction: Any) -> tuple[Array, Array]:
    """Variance and mean with the reduced dimensions kept as ones; two passes, as numerically safe as PyTorch's."""
    axes = normalise_dims(dim, x.ndim)
    count = _count(x.shape, axes)
    average = _kept(_sum(x, axes), axes) / literal(count, x.dtype)
    centred = x - average
    squares = lax.real(centred * lax.conj(centred)) if x.dtype.kind == "c" else centred * centred
    spread = _kept(_sum(squares, axes), axes)
    freedom = max(count - float(1 if correction is None else correction), 0.0) if count else 0.0
    return spread / literal(freedom, spread.dtype), average


def _correction(given: Any) -> Any:
    return float(given) if isinstance(given, bool) else given


@lowers(aten.var.correction, aten.var.dim, aten.var.default)
def var(call: Call, x: Array, dim: Any = None, unbiased: Any = None, keepdim: bool = False, **kwargs: Any) -> Array:
    dim, correction = _var_arguments(call, dim, unbiased, kwargs)
    return lax.reshape(variance(wide(x), dim, correction)[0], out_shape(call))


@lowers(aten.std.correction, aten.std.dim, aten.std.default)
def std(call: Call, x: Array, dim: Any = None, unbiased: Any = None, keepdim: bool = False, **kwargs: Any) -> Array:
    dim, correction = _var_arguments(call, dim, unbiased, kwargs)
    return lax.sqrt(lax.reshape(variance(wide(x), dim, correction)[0], out_shape(call)))


def _var_arguments(call: Call, dim: Any, unbiased: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Dimensions and correction of the overloads: ``(dim, *, correction)``, ``(dim, unbiased)`` and ``(unbiased)``."""
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    return dim, _correction(kwargs.get("correction", kwargs.get("unbiased", unbiased)))


@lowers(aten.var_mean.correction, aten.std_mean.correction)
def var_mean(
    call: Call, x: Array, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> tuple[Array, Array]:
    spread, average = variance(wide(x), dim, correction)
    if call.node.target is aten.std_mean.correction:
        spread = lax.sqrt(spread)
    return lax.reshape(spread, out_shape(call, 0)), lax.reshape(average, out_shape(call, 1))


@lowers(aten.linalg_vector_norm.default)
def vector_norm(
    call: Call, x: Array, ord: float = 2, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None
) -> Array:
    axes = normalise_dims(dim, x.ndim)
    real = wide_dtype(out_dtype(call))
    size = cast(abs(x) if x.dtype.kind in "cui" else lax.abs(wide(x)), real)
    if ord == 2:
        result = lax.sqrt(_sum(size * size, axes))
    elif ord == 1:
        result = _sum(size, axes)
    elif ord == math.inf:
        result = _extreme(size, axes, True)
    elif ord == -math.inf:
        result = _extreme(size, axes, False)
    elif ord == 0:
        result = _sum(cast(size != 0, real), axes)
    else:
        exponent = literal(ord, real)
        result = lax.pow(_sum(lax.pow(size, lax.full_like(size, exponent)), axes), literal(1 / ord, real))
    return lax.reshape(result, out_shape(call))


@lowers(aten.norm.Scalar, aten.norm.ScalarOpt_dim)
def norm(call: Call, x: Array, p: Any = 2, dim: Dims = None, keepdim: bool = False) -> Array:
    return vector_norm(call, x, 2.0 if p is None else float(p), dim)


@lowers(aten.logsumexp.default)
def logsumexp(call: Call, x: Array, dim: Dims, keepdim: bool = False) -> Array:
    value = cast(x, compute_dtype(call))
    axes = normalise_dims(dim, x.ndim)
    if not value.size:
        return lax.full(out_shape(call), literal(-math.inf, value.dtype))
    if not axes:
        return value
    if value.dtype.kind == "c":
        return lax.reshape(lax.log(_sum(lax.exp(value), axes)), out_shape(call))
    top = _kept(lax.reduce_max(value, axes), axes)
    top = jnp.where(abs(top) == math.inf, jnp.zeros((), value.dtype), top)
    total = lax.log(_sum(lax.exp(value - top), axes)) + lax.reshape(
        top, [s for d, s in enumerate(top.shape) if d not in axes]
    )
    return lax.reshape(total, out_shape(call))


@lowers(aten.dist.default)
def dist(call: Call, x: Array, y: Array, p: Any = 2) -> Array:
    """The ``p``-norm of a difference."""
    dtype = promoted(call, 0, 1)
    sizes = lax.abs(lax.sub(*operands(wide_dtype(dtype), x, y)))
    return (
        jnp.linalg.norm(lax.reshape(sizes, (sizes.size,)), ord=float(p)) if sizes.size else jnp.zeros((), sizes.dtype)
    )


@lowers(aten.hash_tensor.default)
def hash_tensor(call: Call, x: Array, dim: Any = (), *, keepdim: bool = False, mode: int = 0) -> Array:
    """The exclusive or of all elements' bits, as float64 or int64."""
    word = cast(x, np.dtype(np.int64 if x.dtype.kind in "iub" else np.float64))
    bits = lax.bitcast_convert_type(word, np.dtype(np.uint64))
    axes = normalise_dims(dim, x.ndim)
    return lax.reshape(lax.reduce(bits, np.uint64(0), lax.bitwise_xor, axes), out_shape(call))
