"""Counting operators with a fixed number of bins."""

from __future__ import annotations

import torch

from .support import Any, Array, Call, Sequence, cast, jnp, lax, lowers, math, np, out_dtype, wide

aten = torch.ops.aten


def _refuse_halves(node: Any) -> str | None:
    dtype = node.args[0].meta["val"].dtype
    return (
        f"bins of {dtype} depend on how every step rounds" if dtype.itemsize < 4 and dtype.is_floating_point else None
    )


@lowers(aten.histc.default, refuses=_refuse_halves)
def histc(call: Call, x: Array, bins: int = 100, low: Any = 0, high: Any = 0) -> Array:
    """Equal bins from ``low`` to ``high`` (of the values, where those are equal); what is outside is not counted."""
    value = lax.reshape(wide(x), (x.size,))
    first, last = (jnp.asarray(cast(bound, value.dtype)) for bound in (low, high))
    if low == high and value.size:
        first, last = jnp.min(value), jnp.max(value)
    same = first == last
    first, last = jnp.where(same, first - 1, first), jnp.where(same, last + 1, last)
    place = cast((value - first) * (bins / (last - first)), np.dtype(np.int64))
    place = jnp.where(value == last, bins - 1, place)
    inside = (value >= first) & (value <= last)
    counts = jnp.zeros((bins,), np.int64).at[jnp.where(inside, place, bins)].add(1, mode="drop")
    return cast(counts, out_dtype(call))


# -- with edges as a result --------------------------------------------------------------------------
def _edges(column: Array, bins: int, bounds: Any) -> Array:
    """``bins + 1`` equal steps between the bounds, or the extremes of the values (0 and 1 without any)."""
    if bounds is not None:
        first, last = (jnp.asarray(cast(float(bound), column.dtype)) for bound in bounds)
    elif column.size:
        first, last = jnp.min(column), jnp.max(column)
    else:
        first, last = jnp.zeros((), column.dtype), jnp.ones((), column.dtype)
    half = cast(0.5, column.dtype)
    first, last = jnp.where(first == last, first - half, first), jnp.where(first == last, last + half, last)
    number = jnp.arange(bins + 1, dtype=column.dtype)
    step = (last - first) / cast(bins, column.dtype)
    return jnp.where(number < (bins + 1) // 2, first + step * number, last - step * (bins - number))


def _counted(points: Array, edges: Sequence[Array], weight: Array | None, density: bool) -> Array:
    """How many points ``[n, dimensions]`` are between edges, each counted by its weight; the last edge belongs."""
    shape = tuple(edge.shape[0] - 1 for edge in edges)
    inside = jnp.ones((points.shape[0],), np.bool_)
    places: list[Array] = []
    for d, edge in enumerate(edges):
        column = points[:, d]
        inside = inside & (column >= edge[0]) & (column <= edge[-1])
        place = jnp.searchsorted(edge, column, side="right", method="scan_unrolled") - 1
        places.append(jnp.minimum(place, shape[d] - 1))
    places[0] = jnp.where(inside, places[0], shape[0])
    weights = jnp.ones((points.shape[0],), points.dtype) if weight is None else lax.reshape(weight, (weight.size,))
    counts = jnp.zeros(shape, points.dtype).at[tuple(places)].add(weights, mode="drop")
    if density:
        counts = counts / jnp.sum(counts)
        for d, edge in enumerate(edges):
            counts = counts / lax.reshape(jnp.diff(edge), [shape[d] if e == d else 1 for e in range(len(shape))])
    return counts


def _points(x: Array) -> Array:
    return lax.reshape(x, (math.prod(x.shape[:-1]), x.shape[-1]))


@lowers(aten.histogram.bins_tensor, aten.histogram.bin_ct, refuses=_refuse_halves)
def histogram(
    call: Call, x: Array, bins: Any = 100, *, range: Any = None, weight: Array | None = None, density: bool = False
) -> tuple[Array, Array]:
    points = lax.reshape(x, (x.size, 1))
    edges = _edges(points, bins, range) if isinstance(bins, int) else bins
    return _counted(points, [edges], weight, density), edges


def _range_of(bounds: Any, dimension: int) -> Any:
    return None if bounds is None else bounds[2 * dimension : 2 * dimension + 2]


@lowers(aten._histogramdd_bin_edges.default, refuses=_refuse_halves)
def histogramdd_edges(
    call: Call, x: Array, bins: Sequence[int], *, range: Any = None, weight: Any = None, density: bool = False
) -> list[Array]:
    points = _points(x)
    return [_edges(points[:, d], count, _range_of(range, d)) for d, count in enumerate(bins)]


@lowers(aten._histogramdd_from_bin_cts.default, refuses=_refuse_halves)
def histogramdd_counts(
    call: Call, x: Array, bins: Sequence[int], *, range: Any = None, weight: Array | None = None, density: bool = False
) -> Array:
    edges = histogramdd_edges(call, x, bins, range=range)
    return _counted(_points(x), edges, weight, density)


@lowers(aten._histogramdd_from_bin_tensors.default, refuses=_refuse_halves)
def histogramdd(
    call: Call, x: Array, bins: Sequence[Array], *, weight: Array | None = None, density: bool = False
) -> Array:
    return _counted(_points(x), bins, weight, density)
