"""PyTorch's functions that place tensors and modules take meshes of one process's devices, too. Imports little.

Private torch APIs used here: ``torch.distributed.tensor._api.distribute_tensor``,
``torch.distributed.tensor.parallel.api.parallelize_module``,
``torch.distributed.fsdp._fully_shard._fully_shard.fully_shard``.
"""

from __future__ import annotations

import functools
import sys
from typing import Any, Final

import torch

from ..device.patches import replace, when_imported

__all__ = ["register_meshes"]

_MESHES: Final = "torchport.frontend.spmd.mesh"


def register_meshes() -> None:
    """Have the three functions look at their mesh once they are imported, if PyTorch has them at all."""
    if torch.distributed.is_available():
        when_imported("torch.distributed.tensor._api", _tensors)
        when_imported("torch.distributed.tensor.parallel.api", _modules)
        when_imported("torch.distributed.fsdp._fully_shard._fully_shard", _fully)


def _is_local(mesh: Any) -> bool:
    meshes = sys.modules.get(_MESHES)  # before somebody has made one there is none
    return meshes is not None and isinstance(mesh, meshes.DevicesMesh)


def _room() -> Any:
    from . import parallel  # on demand: ``import torch`` must stay light

    return parallel


def _tensors(module: Any) -> None:
    original = module.distribute_tensor

    @functools.wraps(original)
    def distribute_tensor(tensor: Any, device_mesh: Any = None, placements: Any = None, **options: Any) -> Any:
        if not _is_local(device_mesh):
            return original(tensor, device_mesh, placements, **options)
        return _room().distribute(tensor, device_mesh, placements)

    replace("torch.distributed.tensor._api.distribute_tensor", distribute_tensor)


def _modules(module: Any) -> None:
    original = module.parallelize_module

    @functools.wraps(original)
    def parallelize_module(root: Any, device_mesh: Any = None, parallelize_plan: Any = None, **options: Any) -> Any:
        if not _is_local(device_mesh):
            return original(root, device_mesh, parallelize_plan, **options)
        return _room().parallelize(root, device_mesh, parallelize_plan)

    replace("torch.distributed.tensor.parallel.api.parallelize_module", parallelize_module)


def _fully(module: Any) -> None:
    original = module.fully_shard

    @functools.wraps(original)
    def fully_shard(
        root: Any, *, mesh: Any = None, shard_placement_fn: Any = None, ignored_params: Any = None, **options: Any
    ) -> Any:
        if _is_local(mesh):
            return _room().fully(root, mesh, shard_placement_fn, ignored_params, options)
        return original(
            root, mesh=mesh, shard_placement_fn=shard_placement_fn, ignored_params=ignored_params, **options
        )

    replace("torch.distributed.fsdp._fully_shard._fully_shard.fully_shard", fully_shard)
