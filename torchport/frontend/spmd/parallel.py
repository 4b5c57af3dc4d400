"""``distribute_tensor``, ``parallelize_module`` and ``fully_shard`` over devices of one process.

The program computes with whole tensors, so what a style does to inputs and outputs has nothing to do here: XLA brings
values where they are needed. A plan's style says how parameters lie, which is what it does in ``torch.distributed``.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ...core.errors import ConfigError, UnsupportedOp
from ...core.sharding import Sharding
from ...trace.handle import DEVICE_TYPE
from .mesh import mesh_of
from .placing import replicated, shard, shard_module, sharding_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["distribute", "fully", "parallelize"]


def distribute(tensor: torch.Tensor, mesh: DeviceMesh, placements: Any) -> torch.Tensor:
    """``distribute_tensor``: :func:`shard`, replicated where no placements are given."""
    return shard(tensor, mesh, placements or replicated(mesh))


def parallelize(module: torch.nn.Module, mesh: DeviceMesh, plan: Any) -> torch.nn.Module:
    """Place a module's parameters by a plan: a style, or a mapping of patterns of submodules' names to styles.

    ``mesh`` has one dimension: a part such as ``mesh["model"]``. Raises :class:`UnsupportedOp` for a style of another
    kind than PyTorch's ``ColwiseParallel``, ``RowwiseParallel``, ``SequenceParallel`` and ``PrepareModule...``, and
    :class:`ConfigError` for a pattern that no submodule has.
    """
    _, axes = mesh_of(mesh)
    if len(axes) != 1:
        raise ConfigError(f'parallelize_module takes a mesh of one dimension, got {axes}; give it mesh["{axes[-1]}"]')
    if plan is None:
        return module
    found: list[tuple[str, torch.nn.Module, Any]] = []
    for pattern, style in plan.items() if isinstance(plan, Mapping) else [("", plan)]:
        chosen = [(name, sub) for name, sub in module.named_modules() if fnmatch.fnmatchcase(name, pattern)]
        if not chosen:
            raise ConfigError(f"no submodule is named {pattern!r}")
        found += [(name, sub, style) for name, sub in chosen]
    styled = [(name, sub, _placements(name, sub, style, mesh)) for name, sub, style in found]
    for _, sub, placements in styled:
        if placements:
            shard(sub, mesh, placements)
    for name, sub in module.named_modules():  # what the plan does not name is on every device
        if not any(name == other or name.startswith(f"{other}.") for other, _, _ in styled):
            _replicate(sub, mesh)
    return module


def fully(module: Any, mesh: DeviceMesh, chosen: Any, ignored: Any, options: Mapping[str, Any]) -> Any:
    """``fully_shard``: parameters are stored in parts, over all dimensions of ``mesh``, and used as a whole.

    XLA gathers a parameter where it is used, and reduces its gradient. Parts are of the dimension that ``chosen``
    (``shard_placement_fn``) gives; else of the first dimension of which all devices get as much, and a parameter that
    has none is on every device. Parameters that were given to it before, with a submodule, stay as they are.
    ``reshard_after_forward`` is XLA's to decide. Raises :class:`UnsupportedOp` for policies of precision and
    offloading other than PyTorch's own, and for lists of modules.
    """
    if not isinstance(module, torch.nn.Module):
        raise UnsupportedOp("fully_shard() over the devices of torchport.mesh takes one module at a time")
    _refuse_policies(options)
    whole, axes = mesh_of(mesh)
    ignored = set(ignored or ())

    def placements(_: str, tensor: torch.Tensor) -> Any:
        if tensor in ignored or not isinstance(tensor, torch.nn.Parameter):
            return None
        before = sharding_of(tensor) if tensor.device.type == DEVICE_TYPE else None
        if before is None or before.mesh != whole:
            before = Sharding(whole, ())
        return [_part_of(tensor, before, axes, chosen)] * len(axes)

    return shard_module(module, mesh, placements, gathered=True)


def _refuse_policies(options: Mapping[str, Any]) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy  # on demand: the caller has imported it

    usual: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(), "offload_policy": OffloadPolicy()}
    for name, value in options.items():
        if name != "reshard_after_forward" and value is not None and value != usual.get(name):
            raise UnsupportedOp(f"fully_shard({name}={value!r}) over the devices of torchport.mesh: nothing does that")


def _part_of(tensor: torch.Tensor, before: Sharding, axes: Sequence[str], chosen: Any) -> Any:
    """The placement of a parameter for every dimension of the mesh that ``fully_shard`` got."""
    from torch.distributed.tensor import Replicate, Shard  # on demand: the mesh has imported it

    if set(axes) <= set(before.gathered):
        return Shard(next(at for at, split in enumerate(before.dims) if axes[0] in split))
    placement = None if chosen is None else chosen(tensor)
    if placement is not None:
        return placement
    for at, size in enumerate(tensor.shape):
        others = [axis for axis in (before.dims[at] if at < len(before.dims) else ()) if axis not in axes]
        if size and size % before.mesh.parts([*others, *axes]) == 0:
            return Shard(at)
    return Replicate()


def _replicate(module: Any, mesh: DeviceMesh) -> None:
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        if tensor.device.type != DEVICE_TYPE:
            raise ConfigError('move the module to "port" before you parallelize it')
        shard(tensor, mesh, replicated(mesh))


def _placements(name: str, module: torch.nn.Module, style: Any, mesh: DeviceMesh) -> dict[str, Any]:
    """Placements of a submodule's own parameters by name; empty where the style has none for them."""
    from torch.distributed.tensor import Replicate, Shard  # on demand: the plan's styles are from there
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel
    from torch.distributed.tensor.parallel import style as styles

    whole = [Replicate()]
    linear, embedding = isinstance(module, torch.nn.Linear), isinstance(module, torch.nn.Embedding)
    if isinstance(style, (ColwiseParallel, RowwiseParallel)) and not (linear or embedding):
        raise UnsupportedOp(
            f"{type(style).__name__} of {name!r}, a {type(module).__name__}: it takes Linear, Embedding"
        )
    if isinstance(style, ColwiseParallel):
        return {"weight": [Shard(0 if linear else 1)], "bias": [Shard(0)]}
    if isinstance(style, RowwiseParallel):
        return {"weight": [Shard(1 if linear else 0)], "bias": whole}
    if isinstance(style, SequenceParallel):
        return {"*": whole}
    if isinstance(style, tuple(getattr(styles, kind) for kind in styles.__all__ if kind.startswith("PrepareModule"))):
        return {}
    raise UnsupportedOp(
        f"parallel style {type(style).__name__} of {name!r}: give placements to torchport.shard instead"
    )
