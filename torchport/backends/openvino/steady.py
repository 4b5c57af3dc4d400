"""Arguments that stay the same from call to call, such as weights: bound as constants, so that they are packed once.

On a device a model's weights are arguments like any others, and OpenVINO packs what it is given anew in each call. A
value never changes once it is handed out, so an argument that is the same object again has the same contents. When
calls have cost as much as compiling did, the model is compiled again with such arguments as constants. Where one of
them is another value later (a step of an optimizer), the model with constants goes, and the next one has to be earned
by twice as much. A small argument that has changed once is never bound again: it is a number or an input, which had
stayed the same for a while; a small one that does not change may be what a batch norm scales by, and then goes into the
weights before it.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

from torchport.backend.interface import BackendData

__all__ = ["SteadyArguments"]

SMALL: Final = 1 << 16
"""Bytes under which an argument that has changed is no constant again, and alone no reason for constants."""


class SteadyArguments:
    """Watches the arguments of one compiled model.

    ``bind`` makes what runs with some arguments, by position, as constants, and says which of them it took; ``cost`` is
    what that takes, in seconds.
    """

    def __init__(self, bind: Callable[[Mapping[int, BackendData]], tuple[Any, Collection[int]]], cost: float) -> None:
        self._bind = bind
        self._price = cost
        self._spent = 0.0
        self._seen: dict[int, weakref.ref[BackendData]] | None = None
        self._bound: tuple[dict[int, weakref.ref[BackendData]], Any] | None = None
        self._small: set[int] | None = None
        """Positions of small arguments that have never changed."""

    def bound(self, args: Sequence[BackendData]) -> tuple[Any, list[BackendData]] | None:
        """What runs with constants in place of some of these arguments, and the others; ``None`` if nothing does."""
        known = self._bound
        if known is None:
            return None
        held, made = known
        if all(args[at] is ref() for at, ref in held.items()):
            return made, [arg for at, arg in enumerate(args) if at not in held]
        self._forget()
        return None

    def _forget(self, *_: object) -> None:
        """One of the values is gone, or another one came: what was bound holds memory for nothing."""
        if self._bound is not None:
            # ``_seen`` stays: the next call finds out from it what has changed.
            self._bound = None
            self._price, self._spent = 2 * self._price, 0.0

    def ran(self, args: Sequence[BackendData], seconds: float) -> None:
        """Note a call that was made without constants."""
        small = self._small
        if small is None:
            small = self._small = {at for at, arg in enumerate(args) if _bytes(arg) < SMALL}
        seen = self._seen
        if seen is None:
            self._seen = self._watched(args)
            return
        gone = [at for at, ref in seen.items() if args[at] is not ref()]
        small.difference_update(gone)
        if gone and self._spent == 0.0:  # what was bound has gone: all large ones are watched anew
            self._seen = seen = self._watched(args)
            gone = []
        for at in gone:
            del seen[at]
        self._spent += seconds
        if self._spent >= self._price and any(_bytes(args[at]) >= SMALL for at in seen):
            made, taken = self._bind({at: args[at] for at in seen})
            if taken:
                self._bound = {at: weakref.ref(args[at], self._forget) for at in taken}, made
            else:
                self._price = math.inf

    def _watched(self, args: Sequence[BackendData]) -> dict[int, weakref.ref[BackendData]]:
        small = self._small
        assert small is not None
        return {at: weakref.ref(arg) for at, arg in enumerate(args) if at in small or _bytes(arg) >= SMALL}


def _bytes(data: BackendData) -> int:
    array: Any = getattr(data, "array", None)
    return 0 if array is None else array.nbytes
