"""Inputs that share memory: AOTAutograd replaces them by one that is all of it (a *synthetic base*).

The base counts as written where autograd looks on if one of the inputs does, and an input that nobody writes to does:
its writes are neither hidden from autograd nor under ``no_grad``. Then AOTAutograd copies the new value to the base
as a write that autograd sees, and the gradient of what was there before is lost. Here inputs without writes have no say.

Private torch API used here: ``torch._functorch._aot_autograd.runtime_wrappers.create_synthetic_base_metadata``.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

__all__ = ["counting_writes_only"]


@contextmanager
def counting_writes_only() -> Iterator[None]:
    """While AOTAutograd compiles a graph, under the lock that Dynamo holds then."""
    from torch._functorch._aot_autograd import runtime_wrappers  # imports Dynamo

    original = runtime_wrappers.create_synthetic_base_metadata

    def create(known: Any, places: Sequence[Any], *args: Any) -> Any:
        return original(_without_a_say(known, places), places, *args)  # type: ignore[arg-type]

    runtime_wrappers.create_synthetic_base_metadata = create
    try:
        yield
    finally:
        runtime_wrappers.create_synthetic_base_metadata = original


def _without_a_say(known: Any, places: Sequence[Any]) -> Any:
    """What is known of the inputs, ``places`` saying which base each is in: those that are not written agree to all."""
    bases = [place[0] if isinstance(place, tuple) else place for place in places]
    shared = Counter(bases)
    mended = copy.copy(known)
    mended.input_info = [
        dataclasses.replace(
            info, mutations_hidden_from_autograd=True, mutations_under_no_grad_or_inference_mode=True
        )
        if shared[base] > 1 and not info.mutates_data
        else info
        for info, base in zip(known.input_info, bases, strict=True)
    ]
    return mended
