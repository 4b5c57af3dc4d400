"""Counting operators with a fixed number of bins."""

from __future__ import annotations

import torch

from .support import Any, Array, Call, cast, jnp, lax, lowers, np, out_dtype, wide

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
