"""Which bucket sizes are padded to, and whether a computation for a larger one serves them.

Padding costs time in each call, one more bucket costs compiling it. The first buckets are the next powers of two;
further ones are larger than their sizes ask for, and the more there are, the more padding is put up with. So a program
whose batch and length vary independently ends with some eight computations, not with one for each pair of buckets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from ...core.config import config
from ..buckets import Buckets

__all__ = ["bucket_for", "is_padded_little", "next_power", "padding_of"]

_BUCKETS: Final = Buckets(())
_GROWTH: Final = (1, 1, 1, 2, 2, 4, 4, 64)
"""How many times the next power of two a bucket's size is, by the number of buckets that there are; it stays within
what was seen of late."""
_PADDING: Final = (2.0, 4.0, 4.0, 8.0, 8.0, 16.0, 32.0, 64.0)
"""How many times as large as they are sizes become by padding to another bucket than their own, by the same number."""
_MOST_BESIDE_INTERPRETER: Final = 1.5
"""The same where what is not compiled is interpreted."""


def next_power(values: Sequence[int]) -> tuple[int, ...]:
    """Powers of two, from 8 on."""
    return tuple(_BUCKETS.of(value) or value for value in values)


def padding_of(values: Sequence[int], bucket: Sequence[int]) -> float:
    """How many times as large sizes become; infinite where they do not fit."""
    if any(value > size for value, size in zip(values, bucket, strict=True)):
        return math.inf
    return math.prod(bucket) / math.prod(values)


def is_padded_little(values: Sequence[int], bucket: Sequence[int], made: int) -> bool:
    """Whether computing with this padding costs less than what else there is: interpreting, or compiling once more.

    ``made``: how many buckets have a computation.
    """
    padding = padding_of(values, bucket)
    if config.tiers != "off":
        return padding <= _MOST_BESIDE_INTERPRETER
    return padding <= _PADDING[min(made, len(_PADDING) - 1)] or tuple(bucket) == next_power(values)


def bucket_for(
    values: Sequence[int], seen: Sequence[Sequence[int]], made: int, most: Sequence[int | None] = ()
) -> tuple[int, ...]:
    """The bucket of a new computation.

    ``seen``: the symbols' values in the graphs that came last. ``most``: the largest value of each, where it is known.
    """
    found = next_power(values)
    if config.tiers == "off":
        growth = _GROWTH[min(made, len(_GROWTH) - 1)]
        largest = next_power([max(column) for column in zip(values, *seen, strict=True)])
        found = tuple(min(one, size * growth) for size, one in zip(found, largest, strict=True))
    bounds = [*most, *[None] * (len(found) - len(most))]
    return tuple(size if bound is None else min(size, bound) for size, bound in zip(found, bounds, strict=True))
