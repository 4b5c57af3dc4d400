"""Functions of PyTorch that pick the accelerator for a program that names no device, and would not work with this one.

Without a device most of PyTorch stays on the CPU. A few functions pick the accelerator, and then need something that
this device does not have: ``torch._C._scatter``, masks for CPU tensors. A program for the CPU could call them before
torchport was installed, so these functions pick the CPU. A program that names ``port`` gets it. Runs inside ``import
torch``.

Private torch APIs used here: ``torch._utils._get_available_device_type`` (as ``torch.nn.parallel.data_parallel``
imports it), ``torch._C._get_accelerator``.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch

from .names import NAME
from .patches import replace, when_imported

__all__ = ["install"]


def install() -> None:
    """Change the functions of modules that are imported already, and the others when their modules are imported."""
    _data_parallel(sys.modules["torch.nn.parallel.data_parallel"])
    when_imported("torch.nn.attention.flex_attention", _block_masks)
    if torch.distributed.is_available():
        when_imported("torch.distributed.run", _processes_of_torchrun)


def _is_ours() -> bool:
    return torch._C._get_accelerator().type == NAME


def _data_parallel(module: Any) -> None:
    """``DataParallel`` calls its module as it is, as on ``mps``: there is one current device to scatter to."""
    original = module._get_available_device_type

    @functools.wraps(original)
    def available() -> str | None:
        found = original()
        return None if found == NAME else found

    replace("torch.nn.parallel.data_parallel._get_available_device_type", available)


def _block_masks(module: Any) -> None:
    """``create_block_mask`` makes a mask for tensors of the CPU unless it is told a device."""
    original = module.create_block_mask

    @functools.wraps(original)
    def create_block_mask(*args: Any, **kwargs: Any) -> Any:
        if len(args) < 6 and kwargs.get("device") is None and _is_ours():
            kwargs["device"] = "cpu"
        return original(*args, **kwargs)

    replace("torch.nn.attention.flex_attention.create_block_mask", create_block_mask)


def _processes_of_torchrun(module: Any) -> None:
    """``torchrun --nproc-per-node=auto`` starts a process per core, not one for the only device there is."""
    original = module.determine_local_world_size

    @functools.wraps(original)
    def determine_local_world_size(nproc_per_node: str) -> int:
        return original("cpu" if nproc_per_node == "auto" and _is_ours() else nproc_per_node)

    replace("torch.distributed.run.determine_local_world_size", determine_local_world_size)
