"""Conditions on sizes, as PyTorch's shape environment writes them, for values of the symbols."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

__all__ = ["Bounds", "NotSymbolic", "hold", "within"]

Bounds: TypeAlias = Sequence[tuple[int | None, int | None]]
"""Smallest and largest value of each symbol, where they are given."""

_PLAIN: Final[dict[str, Any]] = {"__builtins__": {"max": max, "min": min, "abs": abs}, "math": math}


class NotSymbolic(Exception):
    """A graph has no form whose sizes are symbols; the text says why."""


def hold(guards: str, values: Sequence[int]) -> bool:
    """Whether a condition (:meth:`.symbolic.SymbolicGraph.guards`) holds for these values of the symbols.

    It is Python that torchport's own process wrote: with the code that it belongs to, out of the same file.
    """
    given = {"L": {f"t{at}": value for at, value in enumerate(values)}}
    try:
        return bool(eval(guards, dict(_PLAIN), given))
    except NameError:  # a function of PyTorch's, which takes long to import
        from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP

        return bool(eval(guards, SYMPY_INTERP, given))


def within(guards: str, bounds: Bounds) -> str:
    """The condition with bounds that the program gave."""
    conditions = [
        f"L['t{at}'] {relation} {bound}"
        for at, (low, high) in enumerate(bounds)
        for relation, bound in ((">=", low), ("<=", high))
        if bound is not None
    ]
    return " and ".join([f"({guards})", *conditions]) if conditions else guards
