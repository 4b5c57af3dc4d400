"""Donation: which inputs of a computation nobody else holds, so that the backend may have their memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from ..core import metrics
from ..core.errors import ExecutionError
from ..core.references import holders
from ..core.specs import TensorSpec
from ..native.twins import twins
from ..trace.handle import LazyTensor, make_handle
from ..trace.pool import release
from ..trace.trace import Trace, lock
from ..trace.trie import NONE
from .future import Future

__all__ = ["give_up", "likely_donated", "take_place", "unshared"]


@twins.python
def unshared(given: Sequence[Any], args: Sequence[Any]) -> frozenset[int]:
    """Positions of the arguments that nobody but a job holds, whose memory the backend may have.

    ``given`` are the values of its leaves, which may be futures; ``args`` what ``execute`` gets for them, and packs of
    scalar inputs. Nothing else of the job may hold them meanwhile.
    """
    counts, held = holders(args), holders(given)
    # Besides ``args``, the job's own list holds a leaf, or a future does that only that list holds and the job that is
    # to settle it; packs are its own.
    leaves = [
        counts[at] == 1 and not data.exported and (mine is data or held[at] == (mine.job is not None))
        for at, (mine, data) in enumerate(zip(given, args, strict=False))
    ]
    packs = [counts[at] == 0 for at in range(len(leaves), len(args))]
    return frozenset(at for at, alone in enumerate(leaves + packs) if alone)


LARGE: Final = 1 << 20
"""Bytes from which on it matters whether a computation can write over an input."""


def likely_donated(trace: Trace) -> frozenset[int]:
    """The positions of a trace's leaves that a flush would give away now: large, and held by nobody but the trace.

    It is a guess that a compiler may act on: each run finds out by itself (:func:`unshared`).
    """
    if not trace.runtime.backend.capabilities.donation:
        return frozenset()
    held = set(map(id, twins.alive(trace.leaves)))
    counts = holders([leaf.value for leaf in trace.leaves])
    found: list[int] = []
    for position, (leaf, count) in enumerate(zip(trace.leaves, counts, strict=True)):
        spec, value = leaf.spec, leaf.value
        if id(leaf) in held or value is None or spec is None or not spec.is_contiguous:
            continue
        if math.prod(spec.shape) * spec.dtype.itemsize < LARGE:
            continue
        # Besides the handle the job that brings a value holds its future.
        in_flight = value.__class__ is Future and count <= 2
        if in_flight or (count == 1 and not value.exported):
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
