"""Conditions on sizes, as PyTorch's shape environment writes them, for values of the symbols."""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP

__all__ = ["hold"]


def hold(guards: str, values: Sequence[int]) -> bool:
    """Whether a condition (:meth:`.symbolic.SymbolicGraph.guards`) holds for these values of the symbols.

    It is Python that torchport's own process wrote: with the code that it belongs to, out of the same file.
    """
    return bool(eval(guards, SYMPY_INTERP, {"L": {f"t{at}": value for at, value in enumerate(values)}}))
