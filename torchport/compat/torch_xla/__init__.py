"""What training scripts call of PyTorch/XLA, over torchport: ``from torchport.compat import torch_xla``.

The device is that of ``torchport.config.backend``, or of ``xla`` where that is empty.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Final

import torch

import torchport

from . import parallel_loader, xla_model
from . import runtime as runtime

__all__ = ["core", "device", "device_count", "distributed", "runtime", "step", "sync"]

core: Final = SimpleNamespace(xla_model=xla_model)
distributed: Final = SimpleNamespace(parallel_loader=parallel_loader)


def device(index: int | None = None) -> torch.device:
    """The device that stands for an accelerator (``torch_xla.device``)."""
    return xla_model.xla_device(index)


def device_count() -> int:
    """How many devices the backend drives."""
    return runtime.local_device_count()


def sync(wait: bool = False) -> None:
    """Have what is pending computed (``torch_xla.sync``)."""
    torchport.sync(wait=wait)


@contextmanager
def step() -> Iterator[None]:
    """A training step: what is pending at its end is computed (``torch_xla.step``)."""
    try:
        yield
    finally:
        torchport.sync(wait=False)
