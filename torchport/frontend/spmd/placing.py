"""``torchport.shard``: how a tensor lies on the devices of a mesh, in the words of ``torch.distributed.tensor``."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch

from ...core.errors import ConfigError, UnsupportedOp
from ...core.sharding import Sharding, note_partitioned
from ...run.future import resolve
from ...run.values import value_of
from ...trace.handle import DEVICE_TYPE, IndexedLazyTensor, LazyTensor
from ...trace.threads import flush_mine, threads
from ...trace.wrapping import unwrap
from ..device.ready import init
from .mesh import mesh_of, sharding_backend

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement

__all__ = ["replicated", "shard", "shard_module", "sharding_of"]

Placements: TypeAlias = "Sequence[Placement]"
OfModule: TypeAlias = "Placements | Mapping[str, Placements] | Callable[[str, torch.Tensor], Placements | None]"
_T = TypeVar("_T", torch.Tensor, torch.nn.Module)


def shard(what: _T, mesh: DeviceMesh, placements: OfModule) -> _T:
    """Put a tensor, or a module's parameters and buffers, on the devices of a mesh; the engine partitions what follows.

    ``mesh`` is one of :func:`torchport.mesh`, or a part of it such as ``mesh["model"]``. ``placements`` has one entry
    per dimension of the mesh: ``Shard(dim)`` or ``Replicate()`` of :mod:`torch.distributed.tensor`. For a module it may
    be a mapping of patterns of names (``"*.weight"``, the first that fits) to placements, or a function of name and
    tensor; what neither names is replicated.

    Values stay the same, and so do results: placements say where the work is done. A tensor on ``port`` keeps its
    identity, and a pending one is computed first; one on the CPU is copied to ``port``. Gradients and an optimizer's
    state follow the parameters. A module's tensors are placed again after ``load_state_dict``. Raises
    :class:`ConfigError` for parts that would not be of one size, and :class:`UnsupportedOp` for other placements and
    for backends that partition nothing.
    """
    init()
    if isinstance(what, torch.nn.Module):
        return shard_module(what, mesh, placements)
    if callable(placements) or isinstance(placements, Mapping):
        raise ConfigError("a tensor's placements are a sequence, one per dimension of the mesh")
    tensor = what if what.device.type == DEVICE_TYPE else what.to(DEVICE_TYPE)
    _place(tensor, mesh, placements)
    return tensor


def sharding_of(tensor: torch.Tensor) -> Sharding | None:
    """How a tensor's value lies on several devices; ``None`` for one device. A pending value is computed first.

    Raises :class:`UnsupportedOp` for other devices' tensors.
    """
    init()
    index, handle = _handle(tensor)
    data = value_of(handle, threads.of(index))
    return sharding_backend(index).sharding_of(data)


def shard_module(module: Any, mesh: DeviceMesh, placements: OfModule, gathered: bool = False) -> Any:
    """:func:`shard` of a module; ``gathered``: what the mesh splits is brought together before it is used."""
    mesh_of(mesh)
    module.to(DEVICE_TYPE)
    named = [*module.named_parameters(), *module.named_buffers()]
    wanted = {name: _placements_of(name, tensor, mesh, placements) for name, tensor in named}
    for name, tensor in named:  # all of them are looked at before one is placed
        _sharding(tensor, mesh, wanted[name], name)

    def place_again(*_: Any) -> None:
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if name in wanted and tensor.device.type == DEVICE_TYPE:
                _place(tensor, mesh, wanted[name], name, gathered)

    place_again()
    module.register_load_state_dict_post_hook(place_again)
    return module


def _placements_of(name: str, tensor: torch.Tensor, mesh: DeviceMesh, placements: OfModule) -> Placements:
    found: Placements | None
    if callable(placements):
        found = placements(name, tensor)
    elif isinstance(placements, Mapping):
        found = next((value for pattern, value in placements.items() if fnmatch.fnmatchcase(name, pattern)), None)
    else:
        found = placements
    if found is not None:
        return found
    return replicated(mesh)


def replicated(mesh: DeviceMesh) -> Placements:
    """Placements of what every device of a mesh has all of."""
    from torch.distributed.tensor import Replicate  # on demand: the mesh has imported it

    return [Replicate()] * len(mesh.mesh_dim_names or ())


def _sharding(
    tensor: torch.Tensor, mesh: DeviceMesh, placements: Placements, name: str = "", gathered: bool = False
) -> Sharding:
    """How a tensor is to lie. Axes that are not in the part of the mesh split what they did."""
    from torch.distributed.tensor import Replicate, Shard  # on demand: the mesh has imported it

    whole, axes = mesh_of(mesh)
    where = f" for {name!r}" if name else ""
    if len(placements) != len(axes):
        raise ConfigError(f"{len(placements)} placements{where}, for a mesh of {len(axes)} dimensions ({whole})")
    dims: list[tuple[str, ...]] = [()] * tensor.dim()
    for axis, placement in zip(axes, placements, strict=True):
        if type(placement) is Replicate:
            continue
        if type(placement) is not Shard:
            raise UnsupportedOp(f"placement {placement}{where}: shard() takes Shard(dim) and Replicate()")
        if not -tensor.dim() <= placement.dim < tensor.dim():
            raise ConfigError(f"{placement}{where}, of a tensor of {tensor.dim()} dimensions")
        dims[placement.dim % tensor.dim()] += (axis,)
    before = sharding_of(tensor) if len(axes) < len(whole.axes) and tensor.device.type == DEVICE_TYPE else None
    if before is not None and before.mesh == whole:
        for at, split in enumerate(before.dims):
            kept = {*split}.difference(axes).union(dims[at])
            dims[at] = tuple(axis for axis in whole.axes if axis in kept)
    for_use = tuple(axis for split in dims for axis in split if gathered and axis in axes)
    if before is not None and before.mesh == whole:
        for_use += tuple(axis for axis in before.gathered if axis not in axes)
    # Within the parts that it is used in: then what is gathered is where it is used, as in ``fully_shard`` over ranks.
    within = [tuple(sorted(split, key=for_use.__contains__)) for split in dims]
    made = Sharding(whole, tuple(within), for_use)
    try:
        made.check(tensor.shape)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}" if name else str(error)) from None
    return made


def _handle(tensor: torch.Tensor) -> tuple[int, LazyTensor]:
    handle = unwrap(tensor)
    if not isinstance(handle, LazyTensor):
        raise UnsupportedOp(f"this takes tensors on {DEVICE_TYPE}, got one on {handle.device}")
    return handle.get_device() if isinstance(handle, IndexedLazyTensor) else 0, handle


def _place(
    tensor: torch.Tensor, mesh: DeviceMesh, placements: Placements, name: str = "", gathered: bool = False
) -> None:
    sharding = _sharding(tensor, mesh, placements, name, gathered)
    index, handle = _handle(tensor)
    backend = sharding_backend(index)
    if note_partitioned(backend):  # from now on nothing is interpreted on the host
        flush_mine("mesh")
    value_of(handle, threads.of(index))
    backend.shard(resolve(handle), sharding)
