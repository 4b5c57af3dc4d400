"""What PyTorch calls to make a process group's backend for the device."""

from __future__ import annotations

from typing import Any

from ..device.patches import when_imported
from . import batch_norm, communicator, functional, kernels, reducer, sharding

__all__ = ["create", "sharding"]


def create(options: Any) -> Any:
    """The gloo that carries a group's bytes; the first call registers the kernels."""
    kernels.install()
    functional.install()
    reducer.install()
    batch_norm.install()
    when_imported("torch.distributed.fsdp._fully_shard._fsdp_collectives", sharding.install)
    return communicator.create_gloo(options)
