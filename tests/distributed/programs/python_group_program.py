"""Collectives over a process group that is written in Python, on its own tensors: those of two ranks that are alike."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_reduce, reduce_scatter_tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Alike(dist.ProcessGroup):
    """Rank 0 of two; the other one gives the same. It reads and writes tensors as any program does."""

    def getBackendName(self) -> str:
        return "alike"

    @property
    def group_name(self) -> str:
        return "0"

    def allreduce(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Any:
        for one in tensors:
            one.detach().mul_(2)
        return _done(tensors)

    def broadcast(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Any:
        return _done(tensors)

    def all_gather_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> Any:
        output.detach().copy_(torch.cat([given, given]))
        return _done([output])

    def reduce_scatter_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> Any:
        output.detach().copy_(2 * given.chunk(2)[0])
        return _done([output])

    def scatter(self, outputs: Sequence[torch.Tensor], inputs: Sequence[Sequence[torch.Tensor]], opts: Any) -> Any:
        outputs[0].detach().copy_(inputs[0][0])
        return _done(outputs)


def _done(tensors: Sequence[torch.Tensor]) -> Any:
    future: Any = torch.futures.Future()
    future.set_result(list(tensors))
    return torch._C._distributed_c10d._create_work_from_future(future)


def create(store: Any, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    return Alike(rank, size)


def functional() -> None:
    group = dist.group.WORLD
    x = torch.arange(4.0, device="port")
    assert (all_reduce(x, "sum", group) + 1).tolist() == [1.0, 3.0, 5.0, 7.0]
    assert (reduce_scatter_tensor(x, "sum", 0, group) + 0).tolist() == [0.0, 2.0]
    assert x.tolist() == [0.0, 1.0, 2.0, 3.0]


def in_parts() -> None:
    mesh = init_device_mesh("port", (2,))
    row = torch.arange(6.0).reshape(1, 6).to("port")
    parts = distribute_tensor(torch.cat([row, row]), mesh, [Shard(0)])
    assert parts.to_local().tolist() == row.tolist()
    assert parts.full_tensor().tolist() == torch.cat([row, row]).tolist()
    total = parts.sum(0)  # of both ranks' rows
    assert total.placements == (Partial(),)
    assert total.redistribute(placements=[Replicate()]).to_local().tolist() == (2 * row[0]).tolist()
    scaled = parts * torch.tensor(3.0, device="port")  # a plain tensor of one element
    assert scaled.full_tensor()[1].tolist() == (3 * row[0]).tolist()


def trained() -> None:
    """Tensor parallelism, against one process that has both ranks' parts."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 2)).to("port")
    alone = copy.deepcopy(net).cpu()
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(net, init_device_mesh("port", (2,)), plan)
    nets = (net, alone)
    alone.load_state_dict({name: whole(value).cpu() for name, value in net.state_dict().items()})
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.01, fused=one is net) for one in nets]
    for _ in range(3):
        losses: list[torch.Tensor] = []
        for one, optimizer in zip(nets, optimizers, strict=True):
            optimizer.zero_grad()
            losses.append(one(torch.ones(3, 4, device="port" if one is net else "cpu")).square().sum())
            losses[-1].backward()
            optimizer.step()
        torch.testing.assert_close(losses[0].cpu(), losses[1])
    for ours, theirs in zip(net.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(whole(ours.detach()).cpu(), theirs.detach())


def whole(value: Any) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


PROGRAMS: Sequence[Callable[[], None]] = (functional, in_parts, trained)

if __name__ == "__main__":
    dist.Backend.register_backend("alike", create, devices=["cpu", "port"])
    dist.init_process_group("alike", rank=0, world_size=2, store=dist.HashStore())
    for program in PROGRAMS:
        program()
        print(f"{program.__name__}: agrees", flush=True)
