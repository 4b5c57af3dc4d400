"""What the device is called, and which device a tensor is on. Runs inside ``import torch``."""

from __future__ import annotations

from typing import Any, Final

import torch

__all__ = ["NAME", "device_of", "unheard"]

NAME: Final = "port"


def device_of(tensor: Any) -> torch.device:
    """The device of a tensor or a storage, read without calling any ``__torch_function__``."""
    with unheard():
        return tensor.device


def unheard() -> Any:
    """A context in which no ``__torch_function__`` is called, neither a mode's nor a subclass's."""
    return torch._C.DisableTorchFunction()
