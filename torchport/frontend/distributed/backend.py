"""What PyTorch calls to make a process group's backend for the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...core import traffic
from ...core.metrics import metrics
from ..device.patches import when_imported
from . import batch_norm, communicator, functional, kernels, mixed, reducer, sharding

__all__ = ["create", "install", "rehearse", "sharding"]


def create(options: Any) -> Any:
    """The gloo that carries a group's bytes; the first call registers the kernels."""
    install()
    return communicator.create_gloo(options)


def rehearse(asked: Callable[[], bool]) -> None:
    """Register the kernels for a group that only rehearses; ``asked``: whether the program's group is such a one."""
    install()
    if asked not in traffic.rehearsals:
        traffic.rehearsals.append(asked)


def install() -> None:
    """Register the kernels, once in a process."""
    if traffic.notes not in metrics.notes:
        metrics.notes.append(traffic.notes)
    kernels.install()
    functional.install()
    reducer.install()
    batch_norm.install()
    when_imported("torch.distributed.tensor", mixed.install)
