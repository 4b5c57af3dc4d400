"""Reading volumes at the places that a grid gives, forward and backward."""

from __future__ import annotations

import itertools

import torch

from .support import Any, Array, Call, Sequence, cast, fx, jax, jnp, lax, lowers, math, np, wide

aten = torch.ops.aten

_BILINEAR, _NEAREST = 0, 1
_ZEROS, _BORDER = 0, 1


def _coordinate(place: Array, size: int, padding: int, align: bool) -> Array:
    """A coordinate from -1 to 1 as an index, brought inside as the padding says.

    Follows ``aten/src/ATen/native/GridSamplerUtils.h``; at a border the gradient is zero.
    """
    index = (place + 1) / 2 * (size - 1) if align else ((place + 1) * size - 1) / 2
    if padding == _ZEROS:
        return index
    if padding != _BORDER:
        low, span = (0.0, float(size - 1)) if align else (-0.5, float(size))
        if not span:
            return jnp.zeros_like(index)
        distance = lax.abs(index - low)
        times = lax.stop_gradient(jnp.floor(distance / span))
        extra = distance - times * span
        index = jnp.where(times % 2 == 0, extra + low, span - extra + low)
    return jnp.where(index <= 0, 0.0, jnp.where(index >= size - 1, size - 1.0, index))


def _read(volume: Array, corner: Sequence[Array]) -> Array:
    """``[channels, points]`` of a volume at whole coordinates (float); zeros outside."""
    sizes = volume.shape[1:]
    inside = jnp.ones(corner[0].shape, np.bool_)
    flat = jnp.zeros(corner[0].shape, np.int64)
    for place, size in zip(corner, sizes, strict=True):
        inside = inside & (place >= 0) & (place <= size - 1)
        flat = flat * size + cast(jnp.where(inside, place, 0), np.dtype(np.int64))
    values = lax.reshape(volume, (volume.shape[0], math.prod(sizes)))[:, jnp.where(inside, flat, 0)]
    return jnp.where(inside, values, 0)


def _sampled(x: Array, grid: Array, mode: int, padding: int, align: bool) -> Array:
    """``x`` ``[n, channels, depth, height, width]`` at ``grid`` ``[n, ..., 3]``, whose last coordinate is the depth."""
    rank = grid.shape[-1]

    def one(volume: Array, points: Array) -> Array:
        places = [_coordinate(points[:, rank - 1 - d], volume.shape[1 + d], padding, align) for d in range(rank)]
        if mode == _NEAREST:
            return _read(volume, [lax.round(place, lax.RoundingMethod.TO_NEAREST_EVEN) for place in places])
        low = [lax.stop_gradient(jnp.floor(place)) for place in places]
        total = jnp.zeros((volume.shape[0], points.shape[0]), volume.dtype)
        for ends in itertools.product((0, 1), repeat=rank):
            share: Any = 1
            for place, first, end in zip(places, low, ends, strict=True):
                share = share * (place - first if end else first + 1 - place)
            total = total + _read(volume, [first + end for first, end in zip(low, ends, strict=True)]) * share
        return total

    n, shape = grid.shape[0], grid.shape[1:-1]
    found = jax.vmap(one)(x, lax.reshape(grid, (n, math.prod(shape), rank)))
    return lax.reshape(found, (n, x.shape[1], *shape))


def _refuse_halves(node: fx.Node) -> str | None:
    inputs = [source.meta["val"].dtype for source in node.all_input_nodes]
    half = next((dtype for dtype in inputs if dtype.itemsize < 4), None)
    return None if half is None else f"the nearest place of coordinates in {half} depends on how every step rounds"


@lowers(aten.grid_sampler_3d.default, refuses=_refuse_halves)
def grid_sampler_3d(call: Call, x: Array, grid: Array, mode: int, padding: int, align: bool) -> Array:
    return _sampled(wide(x), wide(grid), mode, padding, align)


@lowers(aten.grid_sampler_3d_backward.default, refuses=_refuse_halves)
def grid_sampler_3d_backward(
    call: Call, grad: Array, x: Array, grid: Array, mode: int, padding: int, align: bool, mask: Sequence[bool]
) -> tuple[Array | None, Array]:
    _, pull = jax.vjp(lambda x, grid: _sampled(x, grid, mode, padding, align), wide(x), wide(grid))
    gx, ggrid = pull(wide(grad))
    return gx if mask[0] else None, ggrid
