"""Function transforms (``torch.func``): a write to a view is differentiated by the operators that took the view.

PyTorch goes back from such a write by the view's place in its base's memory, or, where a device has no such places, by
taking the view again (``VariableTypeUtils.h``). It knows this of a tensor of this device, but not of the tensor that a
transform wraps it in: all views of that one seemed to begin where the base does, and gradients went there.

Private torch APIs used here: ``torch._C._set_view_replay_enabled`` and ``torch._C._is_view_replay_enabled`` (whether a
thread's views are taken again), ``torch._functorch.eager_transforms._{grad,jvp}_{increment,decrement}_nesting`` (where
a transform begins and ends), ``torch._C._functorch.get_interpreter_stack`` (the transforms that are on).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Final

import torch
from torch._functorch.eager_transforms import (
    _grad_decrement_nesting,
    _grad_increment_nesting,
    _jvp_decrement_nesting,
    _jvp_increment_nesting,
)

from .patches import replace

__all__ = ["install"]

_MODULE: Final = "torch._functorch.eager_transforms"


class _Transforms(threading.local):
    """The transforms of the calling thread that differentiate."""

    on = 0
    before = False
    """Whether views were taken again before the first of them."""


_mine: Final = _Transforms()


def _begin() -> None:
    if not _mine.on:
        _mine.before = torch._C._is_view_replay_enabled()
    _mine.on += 1
    torch._C._set_view_replay_enabled(True)


def _end() -> None:
    if not _mine.on:  # it began in this thread before the device was there
        return
    _mine.on -= 1
    if not _mine.on:
        torch._C._set_view_replay_enabled(_mine.before)


def _followed_by(original: Callable[..., Any], after: Callable[[], None]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        after()
        return result

    return call


@functools.cache  # the device may be made ready a second time, after a failure
def install() -> None:
    """Have views taken again inside of transforms that differentiate. Those that are on already are among them."""
    for begins in (_grad_increment_nesting, _jvp_increment_nesting):
        replace(f"{_MODULE}.{begins.__name__}", _followed_by(begins, _begin))
    for ends in (_grad_decrement_nesting, _jvp_decrement_nesting):
        replace(f"{_MODULE}.{ends.__name__}", _followed_by(ends, _end))
    for transform in torch._C._functorch.get_interpreter_stack() or ():  # type: ignore[attr-defined]
        if transform.key().name in ("Grad", "Jvp"):
            _begin()
