"""Layers and contexts that know of ranks, each against one process or against tensors of the CPU."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

import torchport


def net_of(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), *layers, nn.Flatten(), nn.Linear(4 * 6 * 6, 5))


def images(step: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(step)
    return torch.randn(count, 3, 8, 8, generator=draw), torch.randint(5, (count,), generator=draw)


def sync_batch_norm() -> None:
    """Over ranks with unequal shares of a batch as in one process with the whole of it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    bounds = [0, *(3 * n + 2 for n in range(size))]
    torch.manual_seed(0)
    alone = net_of(nn.BatchNorm2d(4), nn.ReLU())
    torch.manual_seed(0)
    mine = nn.SyncBatchNorm.convert_sync_batchnorm(net_of(nn.BatchNorm2d(4), nn.ReLU())).to("port")
    for step in range(3):
        x, y = images(step, bounds[-1])
        whole = F.cross_entropy(alone(x), y, reduction="sum")
        own = slice(bounds[rank], bounds[rank + 1])
        part = F.cross_entropy(mine(x[own].to("port")), y[own].to("port"), reduction="sum")
        alone.zero_grad()
        mine.zero_grad()
        whole.backward()
        part.backward()
        for ours, theirs in zip(mine.parameters(), alone.parameters(), strict=True):
            dist.all_reduce(ours.grad)
            torch.testing.assert_close(ours.grad.cpu(), theirs.grad, rtol=1e-3, atol=1e-4)
    for ours, theirs in zip(mine.buffers(), alone.buffers(), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-4, atol=1e-5)
    mine.eval()
    alone.eval()
    x, _ = images(9, 2)
    torch.testing.assert_close(mine(x.to("port")).cpu(), alone(x), rtol=1e-3, atol=1e-4)


def _trained(device: str, make: Any, join: bool) -> list[torch.Tensor]:
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = DistributedDataParallel(net_of(nn.ReLU()).to(device), gradient_as_bucket_view=True)
    optimizer = make(net.parameters())
    with Join([net], enable=join):
        for step in range(3 + (2 * rank if join else 0)):
            x, y = images(10 * rank + step, 4)
            optimizer.zero_grad()
            F.cross_entropy(net(x.to(device)), y.to(device)).backward()
            optimizer.step()
    return [p.detach().cpu() for p in net.parameters()]


def _as_on_cpu(make: Any, join: bool = False) -> None:
    for ours, theirs in zip(_trained("port", make, join), _trained("cpu", make, join), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def uneven_inputs() -> None:
    """``join``: ranks with more batches go on after the others."""
    _as_on_cpu(lambda parameters: torch.optim.SGD(parameters, lr=0.1), join=True)


def uneven_parts() -> None:
    """One tensor per rank has to be of one size, though their sum fits: refused before anything is exchanged."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.full((3,), float(rank), device="port")
    parts = [torch.zeros(2 if not n else 4 if n == 1 else 3, device="port") for n in range(size)]
    calls = (
        lambda: dist.all_gather(parts, x),
        lambda: dist.reduce_scatter(x, parts),
        lambda: dist.gather(x, parts if not rank else None, dst=0),
        lambda: dist.scatter(x, parts if not rank else None, src=0),
    )
    for n, call in enumerate(calls):
        if n < 2 or not rank:  # the others would wait for rank 0
            with pytest.raises(ValueError, match=r"all of one size.*float32\[2\], float32\[4\].*all_to_all"):
                call()
    dist.all_reduce(x)
    assert x.tolist() == [size * (size - 1) / 2] * 3


def sharded_optimizer() -> None:
    _as_on_cpu(lambda parameters: ZeroRedundancyOptimizer(parameters, torch.optim.Adam, lr=0.01))


def split_groups() -> None:
    """A group per parity, and a timeout of a group's own."""
    rank, size = dist.get_rank(), dist.get_world_size()
    parts = [list(range(size))[n::2] for n in range(2)]
    groups = [dist.new_group(part) for part in parts]
    x = torch.full((3,), float(rank), device="port")
    dist.all_reduce(x, group=groups[rank % 2])
    assert x.tolist() == [float(sum(parts[rank % 2]))] * 3
    dist.monitored_barrier(group=dist.new_group(backend="gloo"))


def own_number() -> None:
    """A script that writes ``f"port:{local_rank}"`` where no launcher has set ``LOCAL_RANK``."""
    os.environ.pop("LOCAL_RANK", None)
    rank, size = dist.get_rank(), dist.get_world_size()
    device = torch.device(f"port:{rank}")
    torch.port.set_device(rank)
    with pytest.raises(RuntimeError, match="cannot be made the current device"):
        torch.port.set_device(size + 1)
    mixed = torch.ones(2, device=device) + torch.ones(2, device="port").to(device)
    assert mixed.device == torch.zeros_like(mixed, device=device).device == torch.device("port:0"), mixed.device
    dist.barrier(device_ids=[rank])
    losses: list[list[float]] = []
    for place in (device, torch.device("cpu")):
        torch.manual_seed(0)
        net = net_of(nn.ReLU()).to(place.type)  # on "port" without a number, and batches with one
        net = DistributedDataParallel(net, device_ids=[rank] if place is device else None)
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        found: list[float] = []
        for step in range(3):
            x, y = (one.to(place) for one in images(10 * rank + step, 4))
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
            whole = loss.detach().clone()
            dist.all_reduce(whole)
            found.append(whole.item() / size)
        losses.append(found)
    torch.testing.assert_close(*losses, rtol=1e-4, atol=0)
    with pytest.raises(RuntimeError, match="no backend is bound"):
        torch.zeros(1, device=f"port:{size + 1}")  # no rank's number


def deferred_weights() -> None:
    """A module of ``meta``, sharded, then given memory and weights: as large models are made."""
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    fully_shard(net, mesh=init_device_mesh("port", (dist.get_world_size(),)))
    net.to_empty(device="port")
    for parameter in net.parameters():
        nn.init.constant_(parameter, 0.5)
    y = net(torch.ones(2, 4, device="port"))
    y.sum().backward()
    assert y.tolist() == [[8.0, 8.0], [8.0, 8.0]]
    gradient: Any = net[1].weight.grad
    assert gradient.full_tensor().tolist() == [[5.0] * 6] * 2


def divided_gradients() -> None:
    """``fully_shard`` divides gradients by a factor of the program's own."""
    rank, size = dist.get_rank(), dist.get_world_size()
    net: Any = nn.Linear(4, 2, bias=False).to("port")
    fully_shard(net, mesh=init_device_mesh("port", (size,)))
    net.set_gradient_divide_factor(8.0)
    net(torch.full((1, 4), float(rank), device="port")).sum().backward()
    assert net.weight.grad.full_tensor().tolist() == [[sum(range(size)) / 8] * 4] * 2


def freed_views() -> None:
    """A parameter subclass whose ``fsdp_post_all_gather`` gives a view of what was gathered, freed after it."""
    net: Any = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 2, bias=False)).to("port")
    with torch.no_grad():
        for layer in net:
            layer.weight = nn.Parameter(Gathered(layer.weight.fill_(0.5)))
    for module in (*net, net):
        fully_shard(module, mesh=init_device_mesh("port", (dist.get_world_size(),)))
    y = net(torch.ones(1, 4, device="port"))
    y.sum().backward()
    assert y.tolist() == [[4.0, 4.0]]
    gradient: Any = net[0].weight.grad
    assert gradient.full_tensor().tolist() == [[1.0] * 4] * 4


class Gathered(torch.Tensor):
    """A tensor that ``fully_shard`` gathers by the tensor's own hooks."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Gathered:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.shape, inner.stride(), 0, dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        bare = tree_map_only(cls, lambda one: one.inner, (args, kwargs or {}))
        result = func(*bare[0], **bare[1])
        kept = func not in (torch.ops.aten.copy_.default,) and isinstance(result, torch.Tensor)
        return args[0] if func is torch.ops.aten.copy_.default else cls(result) if kept else result

    def __tensor_flatten__(self) -> Any:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, meta: Any, size: Any, stride: Any) -> Any:
        return Gathered(inner["inner"])

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self.inner,), None

    def fsdp_post_all_gather(self, gathered: Any, metadata: Any, dtype: Any, *, out: Any = None) -> Any:
        if out is not None:
            return None
        return gathered[0].view(gathered[0].shape), gathered


def counted_collectives() -> None:
    """PyTorch's ``CommDebugMode`` counts collectives of tensors of the device, as it does the CPU's."""
    found: list[Any] = []
    for place in ("port", "cpu"):
        rank, size = dist.get_rank(), dist.get_world_size()
        x, whole = torch.full((3,), float(rank), device=place), torch.empty(3 * size, device=place)
        parts = [torch.empty(3, device=place) for _ in range(size)]
        mesh = init_device_mesh(place, (size,))
        rows: Any = distribute_tensor(torch.arange(float(4 * size)).reshape(size, 4).to(place), mesh, [Shard(0)])
        with CommDebugMode() as mode:
            dist.all_gather_into_tensor(whole, x)
            dist.all_reduce(x)
            dist.broadcast(x[:1], 1, async_op=True).wait()
            dist.all_gather(parts, x)
            columns = rows.redistribute(placements=[Shard(1)])
        values = [one.tolist() for one in (x, whole, *parts, columns.to_local())]
        found.append((mode.get_total_counts(), values))
    assert found[0] == found[1], found
    assert found[0][0] == 5, found


def fused_rates() -> None:
    """Fused Adam on ``DTensor``s, with a rate that is a plain tensor, as it is on the CPU."""
    for kind in (torch.optim.Adam, torch.optim.AdamW):
        found: list[Any] = []
        for place in ("port", "cpu"):
            mesh = init_device_mesh(place, (dist.get_world_size(),))
            start = torch.arange(24.0).reshape(4, 6).to(place)
            weights = [nn.Parameter(distribute_tensor(start, mesh, [where])) for where in (Shard(0), Replicate())]
            optimizer = kind(weights, lr=torch.tensor(0.1, device=place), amsgrad=True, fused=True)
            for _ in range(2):
                optimizer.zero_grad()
                sum((one * one).sum() for one in weights).backward()
                optimizer.step()
            found.append([one.detach().full_tensor().cpu() for one in weights])
        torch.testing.assert_close(found[0], found[1])


def mixed_lists() -> None:
    """An optimizer over plain parameters and ``DTensor``s, whose list operators write to both: as on the CPU."""
    found: list[Any] = []
    for place in ("port", "cpu"):
        mesh = init_device_mesh(place, (dist.get_world_size(),))
        start = torch.arange(24.0).reshape(4, 6).to(place)
        weights = [nn.Parameter(start.clone()), nn.Parameter(distribute_tensor(start, mesh, [Shard(0)]))]
        optimizer = torch.optim.AdamW(weights, lr=0.1, foreach=True)
        for one in weights:
            one.grad = one.detach() * 2 + 1
        with implicit_replication():
            optimizer.step()
            optimizer.step()
        with pytest.raises(RuntimeError, match="got mixed torch"):
            torch._foreach_mul_([one.detach() for one in weights], 3.0)
        found.append([one.detach().full_tensor().cpu() if isinstance(one, DTensor) else one.cpu() for one in weights])
    torch.testing.assert_close(found[0], found[1])


def views_of_parts() -> None:
    """Writes through views of a ``DTensor``, gradients added up over two passes, and plain tensors beside parts."""
    found: list[list[Any]] = []
    for place in ("port", "cpu"):
        mesh = init_device_mesh(place, (dist.get_world_size(),))
        d: Any = distribute_tensor(torch.arange(32.0).reshape(4, 8).to(place), mesh, [Shard(0)])
        for view in (d.detach(), d.t()[1:3], d.unsqueeze(1), d.chunk(2, 1)[1], d.split(3, 1)[0]):
            view.add_(1)
        with torch.inference_mode():
            whole = (d.relu() @ distribute_tensor(torch.ones(8, 4).to(place), mesh, [Shard(0)])).full_tensor()
            assert type(d.relu().to_local()) is torch.Tensor
        weight = nn.Parameter(d.clone())
        for _ in range(2):
            (weight.t() @ distribute_tensor(torch.ones(4, 3).to(place), mesh, [Replicate()])).sum().backward()
        accumulated: Any = weight.grad
        before = accumulated.full_tensor().tolist()
        accumulated.zero_()
        factor = torch.tensor(2.0, device=place, requires_grad=True)
        scaled = d * factor
        scaled.sum().backward()
        summed: Any = factor.grad  # on the CPU a DTensor, to be summed
        summed = summed.full_tensor() if type(summed) is DTensor else summed
        both = torch.where(d > 20, factor, d)
        assert type(scaled) is type(both) is DTensor
        values = [one.detach().full_tensor().tolist() for one in (d, scaled, both)]
        logits = distribute_tensor(torch.arange(32.0).reshape(4, 8).to(place) / 10, mesh, [Shard(1)]).requires_grad_()
        with loss_parallel():
            loss: Any = F.cross_entropy(logits, torch.arange(4).to(place))  # the targets are plain
            loss.backward()
        gradient: Any = logits.grad
        values.append([loss.detach().full_tensor().item(), gradient.full_tensor().tolist()])
        found.append([values, whole.tolist(), before, accumulated.full_tensor().tolist(), float(summed)])
        with pytest.raises(RuntimeError, match=r"mixed torch.Tensor and DTensor"):
            _ = d + torch.ones(4, 8).to(place)
    assert found[0] == found[1], found


def default_device() -> None:
    """Under a default device a group is made, and collectives are as without."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.set_default_device("port")
    try:
        group = dist.new_group(backend="cpu:gloo,port:port")
        x = torch.full((3,), float(rank))
        dist.all_reduce(x, group=group)
        assert x.tolist() == [float(sum(range(size)))] * 3
        parts = [torch.empty(2) for _ in range(size)]
        dist.all_gather(parts, torch.full((2,), float(rank)), group=group)
        assert [part[0].item() for part in parts] == list(range(size))
        mine = torch.empty(1)
        dist.reduce_scatter(mine, [torch.ones(1) * n for n in range(size)], group=group)
        assert mine.item() == rank * size
        swapped = torch.empty(size)
        dist.all_to_all_single(swapped, torch.full((size,), float(rank)), group=group)
        assert swapped.tolist() == list(range(size))
        y = torch.full((2,), float(rank))
        dist.broadcast(y, 1, group=group)
        assert y.tolist() == [1.0, 1.0]
        if rank == 0:
            dist.send(x, 1)
        elif rank == 1:
            dist.recv(y := torch.empty(3), 0)
            assert y.tolist() == x.tolist()
    finally:
        torch.set_default_device(None)


def one_bucket() -> None:
    """Gradients up to DDP's limit are exchanged at once on ``port``, without its small first bucket; not so if told."""
    for told, expected in (({}, 1), ({"bucket_cap_mb": 1}, 3)):
        net = DistributedDataParallel(nn.Sequential(*(nn.Linear(512, 512) for _ in range(3))).to("port"), **told)
        for _ in range(3):  # buckets are made anew after the first
            torchport.sync()
            before = len(torchport.collectives())
            net(torch.ones(1, 512, device="port")).sum().backward()
            reduced = [one for one in torchport.collectives()[before:] if one.name == "all_reduce"]
        assert len(reduced) == expected, reduced


def values_beside() -> None:
    """An exchange writes over nothing that the program still has: gloo's memory is a copy."""
    size = dist.get_world_size()
    old = torch.arange(6.0, device="port").reshape(2, 3).clone()
    later = old * 3  # pending, and reads the old value
    dist.all_reduce(old)
    x = old * 2
    same, view, plus = x.detach(), x[1:], x + 1
    held = torch.ops.aten.view_copy.default(old, [3, 2])
    dist.all_reduce(x)
    dist.all_reduce(held)
    start = torch.arange(6.0).reshape(2, 3)
    assert torch.equal(later.cpu(), start * 3)
    assert torch.equal(old.cpu(), start * size)
    assert torch.equal(x.cpu(), start * 2 * size * size)
    assert torch.equal(same.cpu(), x.cpu())
    assert torch.equal(view.cpu(), x.cpu()[1:])
    assert torch.equal(plus.cpu(), start * 2 * size + 1)
    assert torch.equal(held.cpu(), (start * size * size).reshape(3, 2))
    given = torch.arange(float(size * size)) * 2
    for writes, exchange in (
        (False, lambda x: funcol.all_reduce(x, "sum", dist.group.WORLD)),
        (False, lambda x: funcol.reduce_scatter_tensor(x, "sum", 0, dist.group.WORLD)),
        (False, lambda x: dist.reduce_scatter_tensor(torch.empty(size, device="port"), x)),
        (dist.get_rank() == 0, lambda x: dist.reduce(x, 0)),
    ):
        x = torch.arange(float(size * size), device="port") * 2  # pending
        exchange(x)
        assert torch.equal((x + 0).cpu(), given * size if writes else given), exchange


if __name__ == "__main__":
    dist.init_process_group()
    for name in sys.argv[1:]:
        globals()[name]()
        print(f"{name}: agrees", flush=True)
    dist.destroy_process_group()
