"""Tell PyTorch of every frontend that it has to know before a program begins. Runs inside ``import torch``."""

from __future__ import annotations

from .device.register import register_device
from .distributed.register import register_process_group
from .spmd.register import register_meshes

__all__ = ["register_frontends"]


def register_frontends() -> None:
    """Register the device, a backend for its process groups, and its meshes.

    Raises ``RuntimeError`` if the slot is taken.
    """
    register_device()
    register_process_group()
    register_meshes()
