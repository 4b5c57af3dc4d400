"""Run our own work in PyTorch's default state, whatever the caller of an operator has on.

A flush can happen anywhere: inside an operator's dispatch with keys excluded, under autocast, in inference mode, under
a function or dispatch mode such as ``with torch.device("port")``. Compilers and CPU kernels must see none of it.

Private torch APIs used here: ``torch._C._ForceDispatchKeyGuard``, ``torch._C.{_len,_pop,_push}_*torch_function_stack``,
``torch.utils._python_dispatch._disable_current_modes``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["default_state", "modes_are_on"]

_KEYS: Final = torch._C.DispatchKey


def _set_of(*keys: Any) -> Any:
    made = torch._C.DispatchKeySet(keys[0])
    for key in keys[1:]:
        made = made | torch._C.DispatchKeySet(key)
    return made


_INCLUDED: Final = _set_of(_KEYS.BackendSelect, _KEYS.ADInplaceOrView)
_EXCLUDED: Final = _set_of(*(key for name, key in _KEYS.__members__.items() if name.startswith("Autocast")))


def modes_are_on() -> bool:
    """Whether the calling thread has a function or dispatch mode on."""
    return bool(torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack())


@contextmanager
def default_state() -> Iterator[None]:
    """No modes, no autocast, no inference mode, no gradients, and the dispatch keys every thread starts with."""
    popped: list[Any] = []
    while torch._C._len_torch_function_stack():
        popped.append(torch._C._pop_torch_function_stack())
    try:
        with (
            torch._C._ForceDispatchKeyGuard(_INCLUDED, _EXCLUDED),
            torch.inference_mode(False),
            torch.no_grad(),
        ):
            if torch._C._len_torch_dispatch_stack():
                with _disable_current_modes():
                    yield
            else:
                yield
    finally:
        for mode in reversed(popped):
            torch._C._push_on_torch_function_stack(mode)
