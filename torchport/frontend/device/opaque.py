"""Keep Dynamo out of the device. Between graphs Dynamo looks at every Python function that runs, kernels included.

Private torch APIs used here: ``torch._C._dynamo.eval_frame.set_code_exec_strategy``, which costs nothing where Dynamo
is not in use and does not import it.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, TypeVar

import torch

__all__ = ["opaque"]

_Function = TypeVar("_Function", bound=Callable[..., Any])

_C: Any = torch._C


@functools.cache
def _skip() -> Any:
    """Skip the frame, and every frame below it."""
    action = _C._dynamo.eval_frame._FrameAction.SKIP
    return _C._dynamo.eval_frame._FrameExecStrategy(action, action)


def opaque(fn: _Function) -> _Function:
    """The function, marked: Dynamo compiles neither it nor anything it calls."""
    code = getattr(fn, "__code__", None)
    if isinstance(code, types.CodeType):
        _C._dynamo.eval_frame.set_code_exec_strategy(code, _skip())
    return fn
