"""Donation: which inputs of a computation nobody else holds, so that the backend may have their memory."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

from ..core import metrics
from ..core.errors import ExecutionError
from ..core.specs import TensorSpec
from ..trace.handle import LazyTensor, make_handle
from ..trace.pool import alive, release
from ..trace.trace import Trace, lock
from ..trace.trie import NONE
from .future import Future

__all__ = ["find_unshared", "give_up", "likely_donated", "take_place", "unshared", "use_native"]


def _make_reference_counts() -> tuple[Callable[[Sequence[Any]], list[int]], int]:
    """A function that counts the holders of a list's items, and what it says of items that only the list holds."""
    count = sys.getrefcount

    def counts(values: Sequence[Any]) -> list[int]:
        return [count(value) for value in values]

    (alone,) = counts([object()])
    return counts, alone


_counts, _ALONE = _make_reference_counts()


def unshared(given: Sequence[Any], args: Sequence[Any]) -> frozenset[int]:
    """Positions of the arguments that nobody but a job holds, whose memory the backend may have.

    ``given`` are the values of its leaves, which may be futures; ``args`` what ``execute`` gets for them, and packs of
    scalar inputs. Nothing else of the job may hold them meanwhile.
    """
    counts, held = _counts(args), _counts(given)
    # Besides ``args``, the job's own list holds a leaf, or a future does that only that list holds and the job that is
    # to settle it; packs are its own.
    leaves = [
        counts[at] == _ALONE + 1 and not data.exported and (mine is data or held[at] == _ALONE + (mine.job is not None))
        for at, (mine, data) in enumerate(zip(given, args, strict=False))
    ]
    packs = [counts[at] == _ALONE for at in range(len(leaves), len(args))]
    return frozenset(at for at, alone in enumerate(leaves + packs) if alone)


_unshared = unshared


def find_unshared(given: Sequence[Any], args: Sequence[Any]) -> frozenset[int]:
    """:func:`unshared`, or what stands in its place."""
    return _unshared(given, args)


def use_native(form: Callable[[Sequence[Any], Sequence[Any]], frozenset[int]]) -> None:
    """Find what nobody else holds by this function from now on (:data:`torchport.native.flush`)."""
    global _unshared
    _unshared = form


LARGE: Final = 1 << 20
"""Bytes from which on it matters whether a computation can write over an input."""


def likely_donated(trace: Trace) -> frozenset[int]:
    """The positions of a trace's leaves that a flush would give away now: large, and held by nobody but the trace.

    It is a guess that a compiler may act on: each run finds out by itself (:func:`unshared`).
    """
    if not trace.runtime.backend.capabilities.donation:
        return frozenset()
    held = set(map(id, alive(trace.leaves)))
    counts = _counts([leaf.value for leaf in trace.leaves])
    found: list[int] = []
    for position, (leaf, count) in enumerate(zip(trace.leaves, counts, strict=True)):
        spec, value = leaf.spec, leaf.value
        if id(leaf) in held or value is None or spec is None or not spec.is_contiguous:
            continue
        if math.prod(spec.shape) * spec.dtype.itemsize < LARGE:
            continue
        # Besides the handle the job that brings a value holds its future.
        in_flight = value.__class__ is Future and count <= _ALONE + 2
        if in_flight or (count == _ALONE + 1 and not value.exported):
            found.append(position)
    return frozenset(found)


# -- by hand: ``torchport.donate``
def give_up(trace: Trace, handle: Any, line: str | None) -> None:
    """Let go of a handle's value, as if its last reference were gone; ``line`` is the user's that said so."""
    with lock:
        release(handle)
        take_place(trace, handle)
        handle.value, handle.value_id = None, NONE
        handle.failure = ExecutionError("the tensor was given to donate(), so its value is gone", source=line)
    metrics.count("DonatedByHand")


def take_place(trace: Trace, handle: LazyTensor) -> None:
    """Where the trace uses a handle, have it use another one of the same value: this one is about to get another."""
    if trace.leaf_ids.pop(id(handle), None) is None:
        return
    former = make_handle(handle.spec or TensorSpec.of(handle), trace.index)
    former.value_id, former.value = handle.value_id, handle.value
    position = next(place for place, held in enumerate(trace.leaves) if held is handle)
    trace.leaves[position] = former
    trace.leaf_ids[id(former)] = former.value_id
