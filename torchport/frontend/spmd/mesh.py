"""Meshes of the devices of one process, as :class:`torch.distributed.device_mesh.DeviceMesh`.

A mesh of ``torch.distributed`` has a process per device. Here one process has them all, so the mesh has no process
groups: it says how devices are named and grouped, and nothing is sent through it.

Private torch APIs used here: ``DeviceMesh``'s arguments ``_init_backend`` and ``_rank``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from ...backend.optional import SupportsSharding, optional_of
from ...core.errors import ConfigError, UnsupportedOp
from ...core.sharding import Mesh
from ...run.device_runtime import runtimes
from ...trace.handle import DEVICE_TYPE
from ..device.ready import init

__all__ = ["DevicesMesh", "mesh", "mesh_of", "sharding_backend"]


class DevicesMesh(DeviceMesh):
    """A mesh of devices of one process, or the part of it that some of its dimensions are; see :func:`mesh`."""

    whole: Mesh

    def __init__(self, whole: Mesh, axes: tuple[str, ...]) -> None:
        numbers = torch.arange(whole.size, device="cpu").view(whole.shape)
        for at, axis in reversed(list(enumerate(whole.axes))):
            numbers = numbers if axis in axes else numbers.select(at, 0)
        super().__init__(DEVICE_TYPE, numbers, mesh_dim_names=axes, _init_backend=False, _rank=0)
        self.whole = whole

    def __getitem__(self, mesh_dim_names: str | tuple[str, ...]) -> DevicesMesh:
        """A part of the mesh: one dimension or several, in the mesh's order. Raises :class:`ConfigError`."""
        wanted = (mesh_dim_names,) if isinstance(mesh_dim_names, str) else tuple(mesh_dim_names)
        axes = tuple(axis for axis in self.mesh_dim_names or () if axis in wanted)
        if axes != wanted:
            raise ConfigError(f"no part {wanted} of a mesh whose dimensions are {self.mesh_dim_names}, in this order")
        return DevicesMesh(self.whole, axes)


def sharding_backend(index: int) -> SupportsSharding:
    """The backend of a device index, as one that partitions. Raises :class:`UnsupportedOp` for one that does not."""
    backend = runtimes.get(index).backend
    found = optional_of(backend).sharding
    if found is None:
        raise UnsupportedOp(
            f"backend {backend.name!r} does not partition computations over several devices; 'xla' does: "
            'torchport.use("xla"). With torch.distributed every backend runs on one device per process'
        )
    return found


def mesh(shape: Sequence[int], names: Sequence[str] | None = None) -> DevicesMesh:
    """A mesh of so many of the current backend's devices, for :func:`shard`: ``mesh((2, 4), ("data", "model"))``.

    Needs no process group. Names are ``dim0``, ``dim1``, ... where none are given. Raises :class:`ConfigError` where
    there are fewer devices, and :class:`UnsupportedOp` for a backend that partitions nothing.
    """
    init()
    sizes = tuple(shape)
    axes = tuple(names) if names is not None else tuple(f"dim{at}" for at in range(len(sizes)))
    if not sizes or len(axes) != len(sizes) or len(set(axes)) != len(axes) or any(size < 1 for size in sizes):
        raise ConfigError(f"a mesh of shape {sizes} with the names {axes}: give one name, each another, per dimension")
    available = sharding_backend(torch.port.current_device()).mesh_devices()  # type: ignore[attr-defined]
    needed = math.prod(sizes)
    if needed > available:
        raise ConfigError(
            f"a mesh of shape {sizes} needs {needed} devices, and there are {available}; for virtual devices of the "
            f"CPU set XLA_FLAGS=--xla_force_host_platform_device_count={needed} before JAX starts"
        )
    return DevicesMesh(Mesh(axes, sizes), axes)


def mesh_of(given: Any) -> tuple[Mesh, tuple[str, ...]]:
    """The whole mesh of one made by :func:`mesh` or a part of it, and the axes that the part has.

    Raises :class:`ConfigError` for a mesh of ``torch.distributed``.
    """
    if not isinstance(given, DevicesMesh):
        raise ConfigError(
            "this mesh is one of processes, which torch.distributed sends tensors through; for devices of this process "
            "make one with torchport.mesh(shape, names)"
        )
    return given.whole, tuple(given.mesh_dim_names or ())
