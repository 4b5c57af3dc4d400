"""Up- and downsampling of any rank, forward and backward.

Every mode is linear and works on one dimension after the other, so each dimension is one constant: the matrix of its
weights, or for nearest neighbours the index of each. The backward pass is the same with the matrix transposed. Weights
follow ``aten/src/ATen/native/UpSample.h``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .support import Any, Array, Call, Sequence, cast, compute_dtype, jax, jnp, lax, lowers, np, wide

aten = torch.ops.aten
Weights = np.ndarray[Any, Any]
Plan = Callable[[int, int, bool, "float | None"], Weights]


# -- where each element of the result comes from -----------------------------------------------------
def _step(size: int, out: int, align: bool, scale: float | None) -> float:
    """How far apart the sources of two neighbours are."""
    if align:
        return (size - 1) / (out - 1) if out > 1 else 0.0
    return 1 / scale if scale is not None and scale > 0 else size / out


def _source(size: int, out: int, align: bool, scale: float | None) -> Weights:
    step = np.float32(_step(size, out, align, scale))
    places = np.arange(out, dtype=np.float32)
    return step * places if align else step * (places + np.float32(0.5)) - np.float32(0.5)


def _linear(size: int, out: int, align: bool, scale: float | None) -> Weights:
    """``[out, size]``: the weights of the two neighbours of each element."""
    source = np.maximum(_source(size, out, align, scale), 0)
    low = np.minimum(source.astype(np.int64), size - 1)
    high = np.minimum(low + 1, size - 1)
    share = np.clip(source - low, 0, 1)
    weights = np.zeros((out, size))
    np.add.at(weights, (np.arange(out), low), 1 - share)
    np.add.at(weights, (np.arange(out), high), share)
    return weights


def _cubic(size: int, out: int, align: bool, scale: float | None) -> Weights:
    """``[out, size]``: the weights of four neighbours (Keys 1981, a = -0.75), those outside clamped to the edge."""
    source = _source(size, out, align, scale)
    low = np.floor(source).astype(np.int64)
    share = (source - low).astype(np.float64)
    a = -0.75
    weights = np.zeros((out, size))
    for tap in range(-1, 3):
        distance = np.abs(tap - share)
        near = ((a + 2) * distance - (a + 3)) * distance * distance + 1
        far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
        np.add.at(weights, (np.arange(out), np.clip(low + tap, 0, size - 1)), np.where(distance <= 1, near, far))
    return weights


def _antialiased(kernel: Callable[[Weights], Weights], reach: float) -> Plan:
    """``[out, size]``: a kernel that is as wide as the step where the result is the smaller one, each row summing to 1.

    Follows ``HelperInterpBase::_compute_indices_min_size_weights_aa`` of ``UpSampleKernel.cpp``.
    """

    def weights(size: int, out: int, align: bool, scale: float | None) -> Weights:
        step = _step(size, out, align, scale)
        wide_step = max(step, 1.0)
        centre = step * (np.arange(out) + 0.5)
        first = np.maximum((centre - reach * wide_step + 0.5).astype(np.int64), 0)[:, None]
        last = np.minimum((centre + reach * wide_step + 0.5).astype(np.int64), size)[:, None]
        places = np.arange(size)[None]
        found = kernel(np.abs((places - centre[:, None] + 0.5) / wide_step))
        found = np.where((places >= first) & (places < last), found, 0)
        total = found.sum(1, keepdims=True)
        return found / np.where(total == 0, 1, total)

    return weights


def _hat(distance: Weights) -> Weights:
    return np.maximum(1 - distance, 0)


def _keys(distance: Weights) -> Weights:
    """Keys 1981 with a = -0.5."""
    near = (1.5 * distance - 2.5) * distance * distance + 1
    far = -0.5 * (((distance - 5) * distance + 8) * distance - 4)
    return np.where(distance < 1, near, np.where(distance < 2, far, 0))


def _nearest(size: int, out: int, exact: bool, scale: float | None) -> Weights:
    """``[out]``: the index of each element."""
    step = np.float32(_step(size, out, False, scale))
    places = np.arange(out, dtype=np.float32) + np.float32(0.5 if exact else 0)
    return np.minimum(np.floor(places * step).astype(np.int64), size - 1)


# -- applying it ----------------------------------------------------------------------------------------
def _weighted(x: Array, matrices: Sequence[Weights]) -> Array:
    """The last dimensions of ``x``, each multiplied with its matrix ``[to, from]``."""
    for offset, matrix in enumerate(matrices):
        axis = x.ndim - len(matrices) + offset
        product = lax.dot_general(x, jnp.asarray(matrix, x.dtype), (((axis,), (1,)), ((), ())))
        x = jnp.moveaxis(product, -1, axis)
    return x


def _picked(x: Array, indices: Sequence[Weights]) -> Array:
    for offset, index in enumerate(indices):
        x = jnp.take(x, index, axis=x.ndim - len(indices) + offset, mode="clip")
    return x


def _scales(given: Sequence[Any], rank: int) -> list[float | None]:
    """Scale factors per dimension: ``None``, a list (the ``vec`` overloads) or one argument each."""
    listed = list(given[0]) if given and isinstance(given[0], (list, tuple)) else list(given)
    return [*listed, *([None] * rank)][:rank]


def _plans(plan: Plan, sizes: Sequence[int], outs: Sequence[int], flag: bool, given: Sequence[Any]) -> list[Weights]:
    scales = _scales(given, len(sizes))
    return [plan(size, out, flag, scale) for size, out, scale in zip(sizes, outs, scales, strict=True)]


def _enter_weighted(name: str, rank: int, plan: Plan) -> None:
    packet, back = getattr(aten, name), getattr(aten, f"{name}_backward")

    @lowers(packet.default, packet.vec)
    def forward(call: Call, x: Array, size: Any, align: bool, *scales: Any) -> Array:
        matrices = _plans(plan, x.shape[-rank:], call.val.shape[-rank:], align, scales)
        return _weighted(cast(x, compute_dtype(call)), matrices)

    @lowers(back.default)
    def backward(call: Call, grad: Array, out: Any, size: Sequence[int], align: bool, *scales: Any) -> Array:
        matrices = _plans(plan, size[-rank:], out, align, scales)
        return _weighted(wide(grad), [matrix.T for matrix in matrices])


def _enter_nearest(name: str, rank: int, exact: bool) -> None:
    packet, back = getattr(aten, name), getattr(aten, f"{name}_backward")

    @lowers(packet.default, packet.vec)
    def forward(call: Call, x: Array, size: Any, *scales: Any) -> Array:
        return _picked(x, _plans(_nearest, x.shape[-rank:], call.val.shape[-rank:], exact, scales))

    @lowers(back.default)
    def backward(call: Call, grad: Array, out: Any, size: Sequence[int], *scales: Any) -> Array:
        g = wide(grad)
        indices = _plans(_nearest, size[-rank:], out, exact, scales)
        shape = jax.ShapeDtypeStruct(tuple(size), g.dtype)
        (result,) = jax.linear_transpose(lambda x: _picked(x, indices), shape)(g)
        return result


for _name, _rank, _plan in (
    ("upsample_linear1d", 1, _linear),
    ("upsample_bilinear2d", 2, _linear),
    ("upsample_trilinear3d", 3, _linear),
    ("upsample_bicubic2d", 2, _cubic),
    ("_upsample_bilinear2d_aa", 2, _antialiased(_hat, 1)),
    ("_upsample_bicubic2d_aa", 2, _antialiased(_keys, 2)),
):
    _enter_weighted(_name, _rank, _plan)
for _rank in (1, 2, 3):
    _enter_nearest(f"upsample_nearest{_rank}d", _rank, False)
    _enter_nearest(f"_upsample_nearest_exact{_rank}d", _rank, True)
