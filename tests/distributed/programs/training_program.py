"""Ways to train over ranks, each against one process: ``python training_program.py LAYERS STEPS KIND...``."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from tiny_gpt2 import BATCH, batch, loss_of, losses_alone, model
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

DEVICE = "port"


class Training:
    """One model in each way; ``losses`` are of the whole batch."""

    def __init__(self, layers: int, steps: int) -> None:
        self.layers, self.steps = layers, steps
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def train(self, net: nn.Module, parts: int, part: int, first: int = 0, optimizer: Any = None) -> list[float]:
        optimizer = optimizer or torch.optim.AdamW(net.parameters(), lr=1e-3)
        losses: list[float] = []
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
        return losses

    def over_ranks(self, net: nn.Module) -> list[float]:
        return self.train(net, self.size, self.rank)

    def ddp(self, hook: Any = None, **options: Any) -> list[float]:
        net = DistributedDataParallel(model(self.layers).to(DEVICE), **options)
        if hook is not None:
            net.register_comm_hook(None, hook)
        return self.over_ranks(net)

    def ddp_views(self) -> list[float]:
        return self.ddp(gradient_as_bucket_view=True, bucket_cap_mb=0.02)

    def ddp_hook(self) -> list[float]:
        return self.ddp(hook=default_hooks.allreduce_hook)

    def ddp_accumulated(self) -> list[float]:
        """Two halves of a rank's part, the first without communication."""
        net = DistributedDataParallel(model(self.layers).to(DEVICE))
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

    def tensor_parallel(self) -> list[float]:
        mesh = init_device_mesh(DEVICE, (self.size,))
        net = model(self.layers).to(DEVICE)
        for block in net.blocks:
            plan = {name: ColwiseParallel() for name in ("q", "k", "v", "up")}
            parallelize_module(block, mesh, plan | {name: RowwiseParallel() for name in ("out", "down")})  # type: ignore[arg-type]
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, foreach=False)  # DTensors and plain tensors mixed
        return self.train(net, 1, 0, optimizer=optimizer)

    def fsdp(self) -> list[float]:
        return self.over_ranks(self.sharded())

    def sharded(self) -> nn.Module:
        net = model(self.layers).to(DEVICE)
        for block in net.blocks:
            fully_shard(block)
        fully_shard(net)
        return net

    def two_dimensional(self) -> list[float]:
        """Tensor parallel in pairs, sharded over the pairs."""
        mesh = init_device_mesh(DEVICE, (self.size // 2, 2), mesh_dim_names=("data", "model"))
        net = model(self.layers).to(DEVICE)
        for block in net.blocks:
            plan = {name: ColwiseParallel() for name in ("q", "k", "v", "up")}
            parallelize_module(block, mesh["model"], plan | {name: RowwiseParallel() for name in ("out", "down")})  # type: ignore[arg-type]
            fully_shard(block, mesh=mesh["data"])
        fully_shard(net, mesh=mesh["data"])
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, foreach=False)
        return self.train(net, self.size // 2, self.rank // 2, optimizer=optimizer)

    def pipeline(self) -> list[float]:
        """The first rank has the first half, the last rank the second; activations and gradients go to and fro."""
        net = model(self.layers).to(DEVICE)
        net.head = nn.Linear(net.head.in_features, net.head.out_features, bias=False).to(DEVICE)
        with torch.no_grad():
            net.head.weight.copy_(net.words.weight)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        half, losses = self.layers // 2, list[float]()
        shape = (BATCH, 16, net.words.embedding_dim)
        for step in range(self.steps):
            ids, targets = (one.to(DEVICE) for one in batch(step))
            optimizer.zero_grad()
            loss = torch.zeros((), device=DEVICE)
            if self.rank == 0:
                x = net.words(ids) + net.places(torch.arange(ids.shape[1], device=DEVICE))
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


def pipeline_alone(layers: int, steps: int) -> list[float]:
    """What :meth:`Training.pipeline` computes, in one process."""
    net = model(layers)
    net.head = nn.Linear(net.head.in_features, net.head.out_features, bias=False)
    with torch.no_grad():
        net.head.weight.copy_(net.words.weight)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses: list[float] = []
    for step in range(steps):
        loss = loss_of(net, *batch(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main(layers: int, steps: int, kinds: list[str]) -> None:
    """Train in each way and compare the losses."""
    dist.init_process_group()
    torch.port.set_device(int(os.environ["LOCAL_RANK"]))  # type: ignore[attr-defined]
    for kind in kinds:
        losses = getattr(Training(layers, steps), kind)()
        alone = pipeline_alone(layers, steps) if kind == "pipeline" else losses_alone(layers, steps)
        torch.testing.assert_close(
            torch.tensor(losses), torch.tensor(alone), rtol=1e-4, atol=0, msg=f"{kind}: {losses}"
        )
        print(f"{kind}: losses agree", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
