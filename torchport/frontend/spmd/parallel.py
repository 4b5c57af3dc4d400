"""``distribute_tensor`` and ``parallelize_module`` over devices of one process.

The program computes with whole tensors, so what a style does to inputs and outputs has nothing to do here: XLA brings
values where they are needed. A plan's style says how parameters lie, which is what it does in ``torch.distributed``.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from ...core.errors import ConfigError, UnsupportedOp
from .mesh import mesh_of
from .placing import replicated, shard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["distribute", "parallelize"]


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


def _replicate(module: Any, mesh: DeviceMesh) -> None:
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        if tensor.device.type != "port":
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
