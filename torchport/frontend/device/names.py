"""What the device is called, and which device a tensor is on. Runs inside ``import torch``."""

from __future__ import annotations

from typing import Any, Final

import torch

__all__ = ["NAME", "device_of", "unheard"]

NAME: Final = "port"


def device_of(tensor: Any) -> torch.device:
    """The device of a tensor or a storage, asked where a program's function modes do not hear of it."""
    with unheard():
        return tensor.device


def unheard() -> Any:
    """A context in which a program's function modes do not hear of calls."""
    return torch._C.DisableTorchFunction()
