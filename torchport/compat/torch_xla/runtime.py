"""``torch_xla.runtime``, as far as one process goes."""

from __future__ import annotations

import torch

import torchport

from ...core.frames import warn_user

__all__ = [
    "backend",
    "device_type",
    "global_ordinal",
    "initialize_cache",
    "local_device_count",
    "world_size",
]


def backend() -> torchport.Backend:
    """The backend that stands for PyTorch/XLA's."""
    return torchport.get_backend(torchport.config.backend or "xla")


def device_type() -> str:
    """``"CPU"``, ``"TPU"``, …: the hardware's type."""
    return backend().devices()[0].type.upper()


def local_device_count() -> int:
    """How many devices the backend drives."""
    return len(backend().devices())


def global_ordinal() -> int:
    """The rank of this process."""
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


def world_size() -> int:
    """How many processes there are."""
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def initialize_cache(path: str, readonly: bool = False) -> None:
    """Does nothing, and warns: the disk cache is on by default, and has settings of its own."""
    warn_user(f"torchport has a disk cache of its own; for this folder, set TORCHPORT_CACHE_DIR={path}")
