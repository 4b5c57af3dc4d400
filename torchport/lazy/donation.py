"""Giving values up: ``torchport.donate``.

Inputs of a computation that nobody holds any more are donated by themselves (:meth:`.jobs.Job._unshared`). What a
program still holds but no longer needs it can give up by hand; that is all that happens here.
"""

from __future__ import annotations

from typing import Any

import torch

from ..core import metrics
from ..core.errors import ExecutionError, UnsupportedOp
from ..core.specs import TensorSpec
from .record import user_line
from .runtime import threads
from .tensor import IndexedLazyTensor, LazyTensor, make_handle
from .trace import NONE, Trace, lock, release, unwrap

__all__ = ["donate"]


def donate(*tensors: torch.Tensor) -> None:
    """Give up the tensors' values, as if their last references were gone: their memory may be used for others.

    What was traced with a tensor before still gets its value; afterwards any use of the tensor raises
    :class:`ExecutionError`. Views and aliases of it keep their values. Raises :class:`UnsupportedOp` for a tensor that
    is not on this device.
    """
    line = user_line()
    handles = [unwrap(tensor) for tensor in tensors]
    for handle in handles:
        if not isinstance(handle, LazyTensor):
            raise UnsupportedOp(f"donate() takes tensors on port, got one on {handle.device}", source=line)
    for handle in handles:
        index = handle.get_device() if isinstance(handle, IndexedLazyTensor) else 0
        _give_up(threads.of(index), handle, line)


def _give_up(trace: Trace, handle: Any, line: str | None) -> None:
    with lock:
        release(handle)
        take_place(trace, handle)
        handle.value, handle.number = None, NONE
        handle.failure = ExecutionError("the tensor was given to donate(), so its value is gone", source=line)
    metrics.count("DonatedByHand")


def take_place(trace: Trace, handle: LazyTensor) -> None:
    """Where the trace uses a handle, have it use another one of the same value: this one is about to get another."""
    if trace.leaf_numbers.pop(id(handle), None) is None:
        return
    former = make_handle(handle.spec or TensorSpec.of(handle), trace.index)
    former.number, former.value = handle.number, handle.value
    position = next(place for place, held in enumerate(trace.leaves) if held is handle)
    trace.leaves[position] = former
    trace.leaf_numbers[id(former)] = former.number
