"""Computations on a thread that needs no Python: what is traced meanwhile and what is computed do not wait for a lock.

The thread is in ``queue.h``. Results stay where it has put them, in slots, and go from there to the next computation;
Python's tensors are made of those that somebody looks at.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchport.backend.interface import BackendData, ExecutionContext, TensorData
from torchport.backend.optional import Started
from torchport.core.errors import ExecutionError
from torchport.native.twins import twins

from . import caller
from .library import Library, plain_message

__all__ = ["SlotData", "on_host", "start"]


class SlotData(TensorData):
    """A value in a slot of ``caller.cpp``'s; ``tensor`` makes a tensor of it."""

    __slots__ = ("_made", "slot")

    slot: Any
    _made: torch.Tensor | None

    @property
    def tensor(self) -> torch.Tensor | None:  # type: ignore[override]
        """The value as a tensor; ``None`` before it is there, and once it was donated."""
        if self._made is None and self.slot is not None:
            self._made = self.slot.tensor()
        return self._made

    @tensor.setter
    def tensor(self, tensor: torch.Tensor | None) -> None:
        self._made, self.slot = tensor, None

    @property
    def has_value(self) -> bool:
        return self._made is not None or (self.slot is not None and self.slot.has_tensor())


def on_host(data: TensorData) -> torch.Tensor | None:
    """A value for the host, which no computation's memory changes under and that changes no computation's memory."""
    functions = caller.load()
    if functions is None:  # nobody says which memory is in use
        return None if data.tensor is None else data.tensor.clone()
    place = data.slot if data.__class__ is SlotData else None  # type: ignore[attr-defined]
    if place is None and (place := data.tensor) is None:
        return None
    return functions.host_copy(place)


def start(handle: Library, args: Sequence[BackendData], context: ExecutionContext) -> Started:
    """What :meth:`InductorBackend.start` does for a library. Raises :class:`ExecutionError`, with nothing done."""
    given: list[Any] = []
    for data in args:
        place = data.slot if data.__class__ is SlotData else None  # type: ignore[attr-defined]
        if place is None and (place := data.tensor) is None:  # type: ignore[attr-defined]
            raise ExecutionError("an argument has no value: it was donated")
        given.append(place)
    running, slots = handle.start(given, context.donated)
    donated = [(at, args[at]) for at in context.donated]
    for _, data in donated:
        data.tensor = None  # type: ignore[attr-defined]
    device = context.device
    shared = {"device": device, "info": None, "exported": False, "_made": None}
    results = twins.make_each(SlotData, shared, {"spec": handle.outputs, "slot": slots})

    def wait() -> float:
        said = running.wait()
        if said.__class__ is float:
            return said
        for at, data in donated:
            if data.tensor is None:  # type: ignore[attr-defined]
                data.tensor = running.not_given(at)  # type: ignore[attr-defined]
        raise ExecutionError(f"the compiled computation failed: {plain_message(said)}")

    return Started(results, running.done, wait)
