"""Ways to train over ranks, each against one process: ``python training_program.py MODEL LAYERS STEPS KIND...``."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from tiny_models import BATCH, LENGTH, WIDTH, batch, loss_of, losses_alone, model, untied
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import torchport

DEVICE = "port"
STEADY = 4
"""Steps after which nothing new may be compiled: DDP makes its buckets anew after the first, AdamW its states."""


class Training:
    """One model in each way; ``losses`` are of the whole batch."""

    def __init__(self, kind: str, layers: int, steps: int) -> None:
        self.kind, self.layers, self.steps = kind, layers, steps
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def model(self) -> Any:
        return model(self.kind, self.layers).to(DEVICE)

    def train(self, net: nn.Module, parts: int, part: int, first: int = 0, optimizer: Any = None) -> list[float]:
        optimizer = optimizer or torch.optim.AdamW(net.parameters(), lr=1e-3)
        losses: list[float] = []
        steady = 0
        for step in range(first, self.steps):
            ids, targets = batch(step, part, parts)
            loss = loss_of(net, ids.to(DEVICE), targets.to(DEVICE))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            whole = loss.detach().clone()
            if parts > 1:
                dist.all_reduce(whole, op=dist.ReduceOp.AVG)
            losses.append(whole.item())
            if step - first < STEADY:
                steady = computations()
        assert computations() == steady, f"{computations() - steady} computations are new after {STEADY} steps"
        return losses

    def over_ranks(self, net: nn.Module) -> list[float]:
        return self.train(net, self.size, self.rank)

    # -- DDP ---------------------------------------------------------------------------------------------------------
    def ddp(self, **options: Any) -> list[float]:
        return self.over_ranks(DistributedDataParallel(self.model(), **options))

    def ddp_views(self) -> list[float]:
        return self.ddp(gradient_as_bucket_view=True, bucket_cap_mb=0.02)

    def ddp_unused(self) -> list[float]:
        return self.over_ranks(DistributedDataParallel(WithUnused(self.model()), find_unused_parameters=True))

    def ddp_static(self) -> list[float]:
        return self.over_ranks(DistributedDataParallel(WithUnused(self.model()), static_graph=True))

    def ddp_hook(self) -> list[float]:
        net = DistributedDataParallel(self.model())
        net.register_comm_hook(None, default_hooks.allreduce_hook)
        return self.over_ranks(net)

    def ddp_power(self) -> list[float]:
        """PowerSGD, in its first steps, which are plain; it compresses nothing of a model so small."""
        net = DistributedDataParallel(self.model())
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=WIDTH, start_powerSGD_iter=self.steps + 1)
        net.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return self.over_ranks(net)

    def ddp_accumulated(self) -> list[float]:
        """Two halves of a rank's part, the first without communication."""
        net = DistributedDataParallel(self.model())
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        losses: list[float] = []
        for step in range(self.steps):
            optimizer.zero_grad()
            whole = torch.zeros((), device=DEVICE)
            with net.no_sync():
                first = loss_of(net, *(one.to(DEVICE) for one in batch(step, 2 * self.rank, 2 * self.size))) / 2
                first.backward()
            second = loss_of(net, *(one.to(DEVICE) for one in batch(step, 2 * self.rank + 1, 2 * self.size))) / 2
            second.backward()
            optimizer.step()
            whole += (first + second).detach()
            dist.all_reduce(whole, op=dist.ReduceOp.AVG)
            losses.append(whole.item())
        return losses

    # -- tensors in parts ----------------------------------------------------------------------------------------------
    def tensor_parallel(self) -> list[float]:
        mesh = init_device_mesh(DEVICE, (self.size,))
        net = self.model()
        for block in net.blocks:
            split(block, mesh)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, foreach=False)  # DTensors and plain tensors mixed
        return self.train(net, 1, 0, optimizer=optimizer)

    def fsdp(self) -> list[float]:
        return self.over_ranks(self.sharded())

    def sharded(self) -> nn.Module:
        net = self.model()
        for block in net.blocks:
            fully_shard(block)
        fully_shard(net)
        return net

    def simple_fsdp(self) -> list[float]:
        return self.over_ranks(gathered(self.model(), init_device_mesh(DEVICE, (self.size,))))

    def two_dimensional(self) -> list[float]:
        """Tensor parallel in pairs, sharded over the pairs; two ranks are one pair."""
        mesh = init_device_mesh(DEVICE, (self.size // 2, 2), mesh_dim_names=("data", "model"))
        net = self.model()
        for block in net.blocks:
            split(block, mesh["model"])
            fully_shard(block, mesh=mesh["data"])
        fully_shard(net, mesh=mesh["data"])
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, foreach=False)
        return self.train(net, self.size // 2, self.rank // 2, optimizer=optimizer)

    # -- layers in parts -----------------------------------------------------------------------------------------------
    def pipeline(self) -> list[float]:
        """The first rank has the first half, the last rank the second; activations and gradients go to and fro."""
        net = untied(self.kind, self.layers).to(DEVICE)
        half = self.layers // 2
        mine = (
            [net.words, net.places, *net.blocks[:half]] if not self.rank else [*net.blocks[half:], net.norm, net.head]
        )
        parameters = [p for part in mine if part is not None for p in part.parameters()]
        optimizer = torch.optim.AdamW(parameters, lr=1e-3)
        losses, shape = list[float](), (BATCH, LENGTH, WIDTH)
        for step in range(self.steps):
            ids, targets = (one.to(DEVICE) for one in batch(step))
            optimizer.zero_grad()
            loss = torch.zeros((), device=DEVICE)
            if self.rank == 0:
                x = net.embed(ids)
                for block in net.blocks[:half]:
                    x = block(x)
                dist.send(x.detach(), 1)
                gradient = torch.empty(shape, device=DEVICE)
                dist.recv(gradient, 1)
                x.backward(gradient)
            else:
                x = torch.empty(shape, device=DEVICE)
                dist.recv(x, 0)
                x.requires_grad_()
                y = x
                for block in net.blocks[half:]:
                    y = block(y)
                loss = nn.functional.cross_entropy(net.head(net.norm(y)).flatten(0, 1), targets.flatten())
                loss.backward()
                dist.send(x.grad, 0)
            optimizer.step()
            loss = loss.detach().clone()
            dist.broadcast(loss, 1)
            losses.append(loss.item())
        return losses

    def schedule(self) -> list[float]:
        """PyTorch's own pipeline: a stage of layers per rank, and as many parts of the batch in flight."""
        net = untied(self.kind, self.layers).to(DEVICE)
        stage_module = Stage(net, self.rank, self.size)
        stage = PipelineStage(stage_module, self.rank, self.size, torch.device(DEVICE))
        loss_fn = lambda y, targets: nn.functional.cross_entropy(y.flatten(0, 1), targets.flatten())  # noqa: E731
        schedule = ScheduleGPipe(stage, n_microbatches=BATCH // 2, loss_fn=loss_fn)
        optimizer = torch.optim.AdamW(stage_module.parameters(), lr=1e-3)
        losses: list[float] = []
        for step in range(self.steps):
            ids, targets = (one.to(DEVICE) for one in batch(step))
            optimizer.zero_grad()
            parts: list[torch.Tensor] = []
            if self.rank == 0:
                schedule.step(ids)
            elif self.rank == self.size - 1:
                schedule.step(target=targets, losses=parts)
            else:
                schedule.step()
            optimizer.step()
            loss = torch.stack(parts).mean().detach() if parts else torch.zeros((), device=DEVICE)
            dist.broadcast(loss, self.size - 1)
            losses.append(loss.item())
        return losses

    # -- saved and loaded ----------------------------------------------------------------------------------------------
    def checkpointed(self) -> list[float]:
        """Sharded; saved after the first half, and loaded into a model and optimizer made anew."""
        folder = os.path.join(os.environ["TEST_FOLDER"], "checkpoint")
        net, all_steps = self.sharded(), self.steps
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        self.steps = all_steps // 2
        losses = self.train(net, self.size, self.rank, optimizer=optimizer)
        checkpoint.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=folder)
        fresh = self.sharded()
        other = torch.optim.AdamW(fresh.parameters(), lr=1e-3)
        for parameter in fresh.parameters():
            with torch.no_grad():
                parameter.mul_(0)
            parameter.grad = torch.zeros_like(parameter)
        other.step()  # the optimizer has states, to load into
        states = {"net": fresh.state_dict(), "optimizer": other.state_dict()}
        checkpoint.load(states, checkpoint_id=folder)
        fresh.load_state_dict(states["net"])
        other.load_state_dict(states["optimizer"])
        self.steps = all_steps
        return losses + self.train(fresh, self.size, self.rank, first=all_steps // 2, optimizer=other)


def computations() -> int:
    """How many computations this process has compiled, or found on disk."""
    return torchport.metrics.counter("UncachedCompile") + torchport.metrics.counter("DiskCacheHit")


class WithUnused(nn.Module):
    """A model, and a layer that no step uses."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.idle = net, nn.Linear(3, 3).to(DEVICE)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.net(ids)


class Stage(nn.Module):
    """What one of several ranks has of a model: its share of the blocks, and what comes before or after them."""

    def __init__(self, net: Any, rank: int, size: int) -> None:
        super().__init__()
        share = len(net.blocks) // size
        self.net = net if rank in (0, size - 1) else None
        self.blocks = nn.ModuleList(net.blocks[rank * share : (rank + 1) * share])
        self.first, self.last = rank == 0, rank == size - 1
        if self.net is not None:
            keep = (net.words, net.places) if self.first else (net.norm, net.head)
            self.net = nn.ModuleList(part for part in keep if part is not None)
            self.embed = net.embed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.first:
            x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        if self.last:
            assert self.net is not None
            x = self.net[1](self.net[0](x))
        return x


def split(block: Any, mesh: DeviceMesh) -> None:
    """Split a block's matrices over the ranks of a mesh."""
    plan: dict[str, Any] = {}
    for name, part in block.named_modules():
        if isinstance(part, nn.Linear) and not name.endswith("router"):
            plan[name] = RowwiseParallel() if name.endswith(("out", "down")) else ColwiseParallel()
    parallelize_module(block, mesh, plan)


def gathered(net: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Parameters in shards that functional collectives gather where they are used: fully_shard without its storages."""
    shards: dict[nn.Parameter, nn.Parameter] = {}
    for part in net.modules():
        own = dict(part.named_parameters(recurse=False))
        for name, parameter in own.items():
            if parameter not in shards:
                shards[parameter] = nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)]))
            part.register_parameter(name, shards[parameter])
        if own:
            part.__class__ = type(type(part).__name__, (type(part),), {name: _whole(name) for name in own})
    return net


def _whole(name: str) -> property:
    def whole(self: nn.Module) -> torch.Tensor:
        shard: Any = self._parameters[name]
        return shard.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial("avg")])

    return property(whole)


def main(kind: str, layers: int, steps: int, ways: list[str]) -> None:
    """Train in each way and compare the losses."""
    dist.init_process_group()
    torch.port.set_device(int(os.environ["LOCAL_RANK"]))  # type: ignore[attr-defined]
    alone: dict[bool, list[float]] = {}
    for way in ways:
        own_head = way in ("pipeline", "schedule")
        if own_head not in alone:
            alone[own_head] = losses_alone((untied if own_head else model)(kind, layers), steps)
        losses = getattr(Training(kind, layers, steps), way)()
        torch.testing.assert_close(
            torch.tensor(losses), torch.tensor(alone[own_head]), rtol=1e-4, atol=0, msg=f"{way}: {losses}"
        )
        print(f"{way}: losses agree", flush=True)
    count = torchport.metrics.counter
    print(
        f"compiled {count('UncachedCompile')}, from disk {count('DiskCacheHit')}, in all {computations()}", flush=True
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
