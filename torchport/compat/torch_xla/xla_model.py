"""``torch_xla.core.xla_model``, as far as one process goes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

import torchport

from ...core.errors import UnsupportedOp
from . import runtime

__all__ = [
    "add_step_closure",
    "get_memory_info",
    "get_ordinal",
    "is_master_ordinal",
    "mark_step",
    "master_print",
    "optimizer_step",
    "save",
    "set_rng_state",
    "wait_device_ops",
    "xla_device",
    "xrt_world_size",
]


def xla_device(n: int | None = None, devkind: str | None = None) -> torch.device:
    """The device of an accelerator. Raises :class:`BackendUnavailable`, also for another kind than the backend's."""
    if devkind is not None and devkind.lower() != runtime.device_type().lower():
        raise torchport.BackendUnavailable(f"there is no device of kind {devkind!r}; this is {runtime.device_type()}")
    return torchport.device(runtime.backend().name, n or 0)


def mark_step(wait: bool = False) -> None:
    """End a step: what is pending is computed."""
    torchport.sync(wait=wait)


def optimizer_step(
    optimizer: torch.optim.Optimizer,
    barrier: bool = False,
    optimizer_args: Mapping[str, Any] | None = None,
    groups: Sequence[Sequence[int]] | None = None,
    pin_layout: bool = True,
) -> Any:
    """``optimizer.step()``, which ends a step on the device. Raises :class:`UnsupportedOp` for several processes."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        raise UnsupportedOp("xm.optimizer_step averages gradients over processes; use DistributedDataParallel instead")
    result = optimizer.step(**(optimizer_args or {}))
    if barrier:
        torchport.sync(wait=False)
    return result


def add_step_closure(closure: Callable[..., Any], args: Sequence[Any] = (), run_async: bool = False) -> None:
    """Call ``closure(*args)`` when the step's values are there."""
    torchport.step_closure(closure, *args)


def wait_device_ops(devices: Sequence[str] = ()) -> None:
    """Return when everything that was begun has ended."""
    torchport.sync(wait=True)


def get_ordinal(defval: int = 0) -> int:
    """The rank of this process."""
    return runtime.global_ordinal()


def xrt_world_size(defval: int = 1) -> int:
    """How many processes there are."""
    return runtime.world_size()


def is_master_ordinal(local: bool = True) -> bool:
    """Whether this is the first process."""
    return runtime.global_ordinal() == 0


def master_print(*args: Any, **kwargs: Any) -> None:
    """``print``, in the first process."""
    if is_master_ordinal():
        print(*args, **kwargs)


def save(data: Any, file_or_path: Any, master_only: bool = True, global_master: bool = False) -> None:
    """``torch.save`` of host copies."""
    if not master_only or is_master_ordinal():
        host = tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), data)
        torch.save(host, file_or_path)


def set_rng_state(seed: int, device: str | None = None) -> None:
    """``torch.manual_seed``: the device draws from it."""
    torch.manual_seed(seed)


def get_memory_info(device: torch.device | None = None) -> dict[str, int]:
    """``bytes_used`` and ``bytes_limit`` of the device, as far as the backend knows."""
    free, total = torch.get_device_module("port").mem_get_info(device or xla_device())
    return {"bytes_used": total - free, "bytes_limit": total}
