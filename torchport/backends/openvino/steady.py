"""Arguments that stay the same from call to call, such as weights: bound as constants, so that they are packed once.

On a device a model's weights are arguments like any others, and OpenVINO packs what it is given anew in each call. A
value never changes once it is handed out, so an argument that is the same object again has the same contents. When
calls have cost as much as compiling did, the model is compiled again with such arguments as constants. Where one of
them is another value later (a step of an optimizer), the model with constants goes, and the next one has to be earned
by twice as much.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from torchport.backend.interface import BackendData

__all__ = ["SteadyArguments"]

SMALL: Final = 1 << 16
"""Bytes under which it does not matter whether an argument is a constant."""


class SteadyArguments:
    """Watches the arguments of one compiled model.

    ``bind`` makes what runs with some arguments, by position, as constants; ``cost`` is what that takes, in seconds.
    """

    def __init__(self, bind: Callable[[Mapping[int, BackendData]], Any], cost: float) -> None:
        self._bind = bind
        self._price = cost
        self._spent = 0.0
        self._seen: dict[int, weakref.ref[BackendData]] | None = None
        self._bound: tuple[dict[int, weakref.ref[BackendData]], Any] | None = None

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
            self._bound, self._seen = None, None
            self._price, self._spent = 2 * self._price, 0.0

    def ran(self, args: Sequence[BackendData], seconds: float) -> None:
        """Note a call that was made without constants."""
        if self._seen is None:
            self._seen = {at: weakref.ref(arg) for at, arg in enumerate(args) if _bytes(arg) >= SMALL}
            return
        gone = [at for at, ref in self._seen.items() if args[at] is not ref()]
        for at in gone:
            del self._seen[at]
        self._spent += seconds
        if self._seen and self._spent >= self._price:
            held = {at: weakref.ref(args[at], self._forget) for at in self._seen}
            self._bound = held, self._bind({at: args[at] for at in held})


def _bytes(data: BackendData) -> int:
    array: Any = getattr(data, "array", None)
    return 0 if array is None else array.nbytes
