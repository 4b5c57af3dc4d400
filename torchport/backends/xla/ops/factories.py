"""Tensors out of nothing."""

from __future__ import annotations

import torch

from .support import Any, Array, Call, broadcast, cast, jnp, lax, literal, lowers, np, out_dtype, out_shape

aten = torch.ops.aten


def _filled(call: Call, value: Any) -> Array:
    return lax.full(out_shape(call), literal(value, out_dtype(call)))


@lowers(aten.full.default)
def full(call: Call, size: Any, value: Any, **kwargs: Any) -> Array:
    return _filled(call, value)


@lowers(aten.full_like.default, aten.fill.Scalar)
def full_like(call: Call, x: Array, value: Any, **kwargs: Any) -> Array:
    return _filled(call, value)


@lowers(aten.fill.Tensor)
def fill(call: Call, x: Array, value: Any) -> Array:
    return broadcast(jnp.asarray(cast(value, out_dtype(call))), out_shape(call))


@lowers(aten.copy.default)
def copy(call: Call, x: Array, source: Array, non_blocking: bool = False) -> Array:
    return broadcast(cast(source, out_dtype(call)), out_shape(call))


@lowers(aten.new_full.default)
def new_full(call: Call, x: Array, size: Any, value: Any, **kwargs: Any) -> Array:
    return _filled(call, value)


@lowers(aten.scalar_tensor.default)
def scalar_tensor(call: Call, value: Any, **kwargs: Any) -> Array:
    return _filled(call, value)


@lowers(
    aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default, aten.zero.default,
    aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default, aten.empty_permuted.default,
    aten.new_empty.default, aten.new_empty_strided.default,
)  # fmt: skip
def zeros(call: Call, *args: Any, **kwargs: Any) -> Array:
    return _filled(call, 0)


@lowers(aten.ones.default, aten.ones_like.default, aten.new_ones.default)
def ones(call: Call, *args: Any, **kwargs: Any) -> Array:
    return _filled(call, 1)


def _counted(call: Call, start: Any, step: Any) -> Array:
    dtype = out_dtype(call)
    (count,) = out_shape(call)
    if dtype.kind in "iu":
        places = lax.iota(dtype, count)
        if step != 1:
            places = lax.mul(places, lax.full_like(places, literal(int(step), dtype)))
        return lax.add(places, lax.full_like(places, literal(int(start), dtype))) if start else places
    # PyTorch computes in double precision (or int64) and rounds once.
    return jnp.asarray((np.arange(count) * step + start).astype(dtype))


@lowers(aten.arange.default)
def arange(call: Call, end: Any, **kwargs: Any) -> Array:
    return _counted(call, 0, 1)


@lowers(aten.arange.start)
def arange_start(call: Call, start: Any, end: Any, **kwargs: Any) -> Array:
    return _counted(call, start, 1)


@lowers(aten.arange.start_step)
def arange_step(call: Call, start: Any, end: Any, step: Any = 1, **kwargs: Any) -> Array:
    return _counted(call, start, step)


@lowers(aten.linspace.default)
def linspace(call: Call, start: Any, end: Any, steps: int, **kwargs: Any) -> Array:
    return jnp.asarray(_line(start, end, steps, out_dtype(call)))


def _line(start: Any, end: Any, steps: int, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """As PyTorch: counted up from the start in the first half, down from the end in the second."""
    if steps == 0:
        return np.zeros(0, dtype)
    exact = np.dtype(np.float64) if dtype.kind != "c" else np.dtype(np.complex128)
    step = (end - start) / (steps - 1) if steps > 1 else 0.0
    place = np.arange(steps)
    line = np.where(place < steps // 2, start + step * place, end - step * (steps - 1 - place)).astype(exact)
    if steps == 1:
        line = np.full(1, start, exact)
    return (np.trunc(line) if dtype.kind in "iu" else line).astype(dtype)


@lowers(aten.linspace.Tensor_Tensor, aten.linspace.Tensor_Scalar, aten.linspace.Scalar_Tensor)
def linspace_tensor(call: Call, start: Any, end: Any, steps: int, **kwargs: Any) -> Array:
    dtype = out_dtype(call)
    exact = np.dtype(np.float64) if dtype.kind in "iu" or dtype == np.float64 else np.dtype(np.float32)
    first, last = (jnp.asarray(cast(bound, exact if dtype.kind != "c" else dtype)) for bound in (start, end))
    places = lax.iota(np.dtype(np.int64), steps)
    step = (last - first) / max(steps - 1, 1)
    line = jnp.where(places < max(steps // 2, 1), first + step * places, last - step * (steps - 1 - places))
    return jnp.trunc(line) if dtype.kind in "iu" else line


@lowers(aten.logspace.default)
def logspace(call: Call, start: Any, end: Any, steps: int, base: float = 10.0, **kwargs: Any) -> Array:
    dtype = out_dtype(call)
    line = np.power(float(base), _line(start, end, steps, np.dtype(np.float64)))
    return jnp.asarray((np.trunc(line) if dtype.kind in "iu" else line).astype(dtype))


@lowers(aten.eye.default, aten.eye.m)
def eye(call: Call, *args: Any, **kwargs: Any) -> Array:
    return jnp.eye(*out_shape(call), dtype=out_dtype(call))


@lowers(aten.tril_indices.default, aten.triu_indices.default)
def triangle_indices(call: Call, rows: int, columns: int, offset: int = 0, **kwargs: Any) -> Array:
    find = np.tril_indices if call.node.target is aten.tril_indices.default else np.triu_indices
    return jnp.asarray(np.stack(find(rows, offset, columns)).astype(out_dtype(call)))
