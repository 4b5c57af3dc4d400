"""Functionalization's wrappers: what the user holds of a handle."""

from __future__ import annotations

from typing import Final

import torch

__all__ = ["unwrap", "wrap"]


def unwrap(tensor: torch.Tensor) -> torch.Tensor:
    """The inner tensor of a functionalization wrapper, brought up to date; any other tensor unchanged."""
    if torch._is_functional_tensor(tensor):
        torch._functionalize_sync(tensor)  # what ``torch._sync`` comes to for a wrapper, 3 µs later
        return torch._from_functional_tensor(tensor)
    return tensor


_FUNCTIONALIZE: Final = torch._C.DispatchKey.Functionalize


def wrap(tensor: torch.Tensor) -> torch.Tensor:
    """A new value as the user gets it: in a functionalization wrapper, unless functionalization itself asked for it."""
    if torch._C._dispatch_tls_is_dispatch_key_excluded(_FUNCTIONALIZE):
        return tensor
    return torch._to_functional_tensor(tensor)
