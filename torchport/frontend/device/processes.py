"""Tensors of the device between processes: they travel through host memory that both share.

A worker of a ``DataLoader`` may hold data on the device and send batches of it. PyTorch would send a storage's memory,
and collate a batch into shared memory. Changes modules when they are imported; called when the device is first used.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

from ...trace.handle import DEVICE_TYPE
from .memory import is_ours
from .names import device_of
from .patches import replace, when_imported

__all__ = ["install"]


@functools.cache
def install() -> None:
    """Change the modules when they are imported. Runs once: the device may be made ready again after it failed."""
    when_imported("torch.multiprocessing.reductions", _send_values)
    when_imported("torch.utils.data._utils.collate", _collate_without_memory)


def _is_port(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and device_of(value).type == DEVICE_TYPE and is_ours(value)


def _send_values(module: Any) -> None:
    original = module.reduce_tensor

    @functools.wraps(original)
    def reduce_tensor(tensor: torch.Tensor) -> Any:
        if not _is_port(tensor) or (tensor.requires_grad and not tensor.is_leaf):  # PyTorch refuses the latter
            return original(tensor)
        torch.utils.hooks.warn_if_has_hooks(tensor)
        host = tensor.detach().cpu().clone()
        return _received, (type(tensor), host, tensor.get_device(), tensor.requires_grad)

    replace("torch.multiprocessing.reductions.reduce_tensor", reduce_tensor)
    for kind in (torch.Tensor, torch.nn.Parameter):
        ForkingPickler.register(kind, reduce_tensor)


def _received(kind: type, host: torch.Tensor, index: int, requires_grad: bool) -> torch.Tensor:
    made = host.to(torch.device(DEVICE_TYPE, index))
    return torch.nn.Parameter(made, requires_grad) if kind is torch.nn.Parameter else made.requires_grad_(requires_grad)


def _collate_without_memory(module: Any) -> None:
    """A worker's batch of tensors of the device is stacked on the device, not in memory shared with the program."""
    original = module.collate_tensor_fn

    @functools.wraps(original)
    def collate_tensor_fn(batch: Sequence[torch.Tensor], *, collate_fn_map: Any = None) -> torch.Tensor:
        if _is_port(batch[0]):
            return torch.stack(list(batch), 0)
        return original(batch, collate_fn_map=collate_fn_map)

    replace("torch.utils.data._utils.collate.collate_tensor_fn", collate_tensor_fn)
    if module.default_collate_fn_map.get(torch.Tensor) is original:
        module.default_collate_fn_map[torch.Tensor] = collate_tensor_fn
