"""Inputs that share memory: AOTAutograd replaces them by one that is all of it (a *synthetic base*).

The base counts as written where autograd looks on if one of the inputs does, and an input that nobody writes to does:
its writes are neither hidden from autograd nor under ``no_grad``. Then AOTAutograd copies the new value to the base
as a write that autograd sees, and the gradient of what was there before is lost. Here inputs without writes have no
say.

The inputs are taken of the base by size, strides and storage offset. Here they are conjugate and negative views, too,
where they were.

Private torch APIs used here: ``torch._functorch._aot_autograd.runtime_wrappers.create_synthetic_base_metadata`` and
``gen_alias_from_base``.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch._guards import TracingContext

from ...core.errors import UnsupportedOp
from ...trace.handle import DEVICE_TYPE
from ..device.fake import saw_conjugate_views

__all__ = ["mended_bases"]


@contextmanager
def mended_bases() -> Iterator[None]:
    """While AOTAutograd compiles a graph, under the lock that Dynamo holds then."""
    from torch._functorch._aot_autograd import runtime_wrappers  # imports Dynamo

    compiling = True
    metadata, alias = runtime_wrappers.create_synthetic_base_metadata, runtime_wrappers.gen_alias_from_base

    def create(known: Any, places: Sequence[Any], *args: Any) -> Any:
        _refuse_conjugate_views(places, args[0])
        return metadata(_without_a_say(known, places), places, *args)  # type: ignore[arg-type]

    def taken(base: torch.Tensor, like: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        made = alias(base, like, *args, **kwargs)
        if not compiling:  # what is compiled holds on to this function, for its results
            return made
        made = made.conj() if made.is_conj() != like.is_conj() else made
        return torch._neg_view(made) if made.is_neg() != like.is_neg() else made

    with patch.multiple(runtime_wrappers, create_synthetic_base_metadata=create, gen_alias_from_base=taken):
        try:
            yield
        finally:
            compiling = False


def _refuse_conjugate_views(places: Sequence[Any], inputs: Sequence[Any]) -> None:
    """Raise :class:`UnsupportedOp` where an input of the device may be a conjugate view of a base.

    On the device such a view has the conjugated values, and nothing says of which input it is one.
    """
    tracing = TracingContext.try_get()
    ours = [
        value
        for value, place in zip(inputs, places, strict=True)
        if isinstance(place, tuple) and value.device.type == DEVICE_TYPE and value.dtype.is_complex
    ]
    if ours and tracing is not None and tracing.fake_mode is not None and saw_conjugate_views(tracing.fake_mode):
        raise UnsupportedOp(
            "inputs of the compiled function share memory, one of them is written, and one may be a conjugate view, "
            "which this device does not tell from its base; take x.conj() inside the function, or pass a clone of it",
            op="aten._conj.default",
        )


def _without_a_say(known: Any, places: Sequence[Any]) -> Any:
    """What is known of the inputs, ``places`` saying which base each is in: those that are not written agree to all."""
    bases = [place[0] if isinstance(place, tuple) else place for place in places]
    shared = Counter(bases)
    mended = copy.copy(known)
    mended.input_info = [
        dataclasses.replace(info, mutations_hidden_from_autograd=True, mutations_under_no_grad_or_inference_mode=True)
        if shared[base] > 1 and not info.mutates_data
        else info
        for info, base in zip(known.input_info, bases, strict=True)
    ]
    return mended
