"""For programs that measure: have compiled what is going to be, and know when that is done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, ParamSpec, TypeVar

from ..core import metrics
from ..worker.service import service
from .sync import compute_pending
from .worth import costs

__all__ = ["compiled", "warm"]

_P = ParamSpec("_P")
_R = TypeVar("_R")

_CALLS_AT_MOST: Final = 10
_INTERPRETED: Final = ("InterpretedOps", "InterpretedPlan", "InterpretedRun", "TakenOver", "UncachedCompile")
"""Counters that stand still once everything that a call computes is compiled."""


def compiled(wait: bool = False, timeout: float | None = None) -> bool:
    """Whether nothing is being compiled beside the program; what was takes over at the next flush that needs it.

    ``wait``: return once that is so, or after ``timeout`` seconds. What has not come often enough to be worth compiling
    is not compiled: :func:`warm` has it compiled whatever it costs.
    """
    return service.wait(timeout) if wait else service.idle()


def warm(fn: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
    """Call a function until everything that it computes on the device runs compiled; returns the last call's result.

    Each call has its effects: a function that trains takes several steps. It returns after ten calls also where
    something is new in each, or does not compile. Raises what the function raises.
    """
    with costs.ignored():
        for left in reversed(range(_CALLS_AT_MOST)):
            before = _figures()
            result = fn(*args, **kwargs)
            compute_pending()
            service.wait()
            if left == 0 or _figures() == before:
                return result
    raise AssertionError("the last call returns")


def _figures() -> list[int]:
    return [metrics.counter(name) for name in _INTERPRETED]
