"""``distribute_tensor`` and ``parallelize_module`` take meshes of one process's devices, too. Imports little.

Private torch APIs used here: ``torch.distributed.tensor._api.distribute_tensor``,
``torch.distributed.tensor.parallel.api.parallelize_module``.
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
    """Have both functions look at their mesh once they are imported, if PyTorch has them at all."""
    if torch.distributed.is_available():
        when_imported("torch.distributed.tensor._api", _tensors)
        when_imported("torch.distributed.tensor.parallel.api", _modules)


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
