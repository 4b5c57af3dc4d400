"""A process's tensors on a second device, ``port:1`` or above, in collectives and in ``DTensor``s: as on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import torchport
from torchport.run.device_runtime import runtimes


def gradient(parts: Any) -> torch.Tensor:
    weight: Any = nn.Parameter(parts.clone())
    (weight * weight).sum().backward()
    return weight.grad.full_tensor()


def written(parts: Any) -> torch.Tensor:
    copy: Any = parts.clone()
    copy.add_(1)
    copy.t().mul_(2)
    return copy.full_tensor()


def trained(parts: Any) -> torch.Tensor:
    weight: Any = nn.Parameter(parts.clone())
    rate = torch.tensor(0.1, device=parts.to_local().device)
    optimizer = torch.optim.AdamW([weight], lr=rate, fused=True)
    for _ in range(2):
        optimizer.zero_grad()
        (weight * weight).sum().backward()
        optimizer.step()
    return weight.detach().full_tensor()


PROGRAMS: Mapping[str, Callable[[Any], torch.Tensor]] = {
    "whole": lambda parts: parts.full_tensor(),
    "parts": lambda parts: (parts + 1).to_local(),
    "sum": lambda parts: parts.sum(0).redistribute(placements=[Replicate()]).to_local(),
    "columns": lambda parts: parts.redistribute(placements=[Shard(1)]).to_local(),
    "plain": lambda parts: (parts * torch.tensor(3.0, device=parts.to_local().device)).full_tensor(),
    "product": lambda parts: (parts @ parts.redistribute(placements=[Replicate()]).t()).full_tensor(),
    "distributed": lambda parts: distribute_tensor(
        torch.arange(8.0, device=parts.to_local().device).reshape(4, 2), parts.device_mesh, [Shard(0)]
    ).to_local(),
    "partial": lambda parts: (
        DTensor.from_local(parts.to_local(), parts.device_mesh, [Partial()])
        .redistribute(placements=[Shard(1)])
        .to_local()
    ),
    "gradient": gradient,
    "written": written,
    "trained": trained,
}


def main() -> None:
    torchport.use("reference")
    second = torch.device("port", runtimes.bind(torchport.get_backend("reference"), least=1))
    assert second.index, second
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    places = (torch.device("cpu"), second)
    meshes = [init_device_mesh(place.type, (size,)) for place in places]
    for name, program in PROGRAMS.items():
        found: list[torch.Tensor] = []
        for place, mesh in zip(places, meshes, strict=True):
            local = torch.arange(4.0, device=place).reshape(1, 4) + rank
            found.append(program(DTensor.from_local(local, mesh, [Shard(0)])))
        assert found[1].device == second, (name, found[1].device)
        torch.testing.assert_close(found[1].cpu(), found[0].detach())
        print(f"{name}: agrees", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
