"""Run our own work in PyTorch's default state, whatever the caller of an operator has on.

A flush can happen anywhere: inside an operator's dispatch with keys excluded, under autocast, in inference mode, under
a function or dispatch mode such as ``with torch.device("port")``. Compilers and CPU kernels must see none of it.

Private torch APIs used here: ``torch._C._ForceDispatchKeyGuard``, ``torch._C.{_len,_pop,_push}_*torch_function_stack``,
``torch.utils._python_dispatch._disable_current_modes``.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["default_state", "is_default", "modes_are_on"]

_KEYS: Final = torch._C.DispatchKey
_functorch: Any = torch._C._functorch  # type: ignore[attr-defined]


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


def is_default() -> bool:
    """Whether a kernel of the device may call the CPU's as things are: nothing is on that would see the call."""
    return not (
        torch._C._len_torch_function_stack()
        or torch._C._len_torch_dispatch_stack()
        or torch.is_inference_mode_enabled()
        or torch._C._is_any_autocast_enabled()
        or _functorch.peek_interpreter_stack() is not None
    )


class default_state:
    """No modes, no autocast, no inference mode, no gradients, and the dispatch keys every thread starts with.

    A flush of a few operators would spend a third of its time in generators and guards that change nothing.
    """

    __slots__ = ("_disabled", "_gradients", "_inference", "_keys", "_popped")

    def __enter__(self) -> None:
        self._popped: list[Any] = []
        while torch._C._len_torch_function_stack():
            self._popped.append(torch._C._pop_torch_function_stack())
        self._keys: Any = torch._C._ForceDispatchKeyGuard(_INCLUDED, _EXCLUDED)
        self._keys.__enter__()
        self._inference = torch.inference_mode(False) if torch.is_inference_mode_enabled() else None
        if self._inference is not None:
            self._inference.__enter__()
        self._gradients = torch.is_grad_enabled()
        if self._gradients:
            torch.set_grad_enabled(False)
        self._disabled: Any = _disable_current_modes() if torch._C._len_torch_dispatch_stack() else None
        if self._disabled is not None:
            self._disabled.__enter__()

    def __exit__(self, *error: object) -> None:
        if self._disabled is not None:
            self._disabled.__exit__(*error)
        if self._gradients:
            torch.set_grad_enabled(True)
        if self._inference is not None:
            self._inference.__exit__(*error)
        self._keys.__exit__(*error)
        for mode in reversed(self._popped):
            torch._C._push_on_torch_function_stack(mode)
