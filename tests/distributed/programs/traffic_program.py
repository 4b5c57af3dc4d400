"""What is noted of collectives: names, bytes and lines, against what the step must exchange."""

from __future__ import annotations

import torch
import torch.distributed as dist
from tiny_models import batch, loss_of, model
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import torchport
from torchport.core import traffic


def step(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    ids, targets = batch(0, rank, size)
    loss_of(net, ids.to("port"), targets.to("port")).backward()
    optimizer.step()
    optimizer.zero_grad()


def given(records: list[torchport.Collective], name: str) -> int:
    return sum(one.nbytes for one in records if one.name.startswith(name))


def main() -> None:
    dist.init_process_group()
    size = dist.get_world_size()
    net = model("gpt2", 2).to("port")
    weights = 4 * sum(p.numel() for p in net.parameters())
    blocks = 4 * sum(p.numel() for p in net.blocks.parameters())

    # DDP: every gradient is reduced once.
    ddp = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for _ in range(3):
        step(ddp, optimizer)
    last = torchport.collectives(-1)
    assert {one.name for one in last} == {"all_reduce"}, last
    assert given(last, "all_reduce") == weights, (last, weights)
    assert sum(one.sent for one in last) == 2 * weights * (size - 1) // size
    assert all("traffic_program.py" in one.line and one.arrived for one in last), last
    report = torchport.collective_report()
    assert f"rank {dist.get_rank()}" in report, report
    assert "all_reduce(SUM) of float32" in report, report
    assert "by step" in torchport.metrics.report()
    print(report)

    # FSDP: blocks are gathered for forward and for backward, the root's own once; gradients are scattered once.
    for block in net.blocks:
        fully_shard(block)
    fully_shard(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        step(net, optimizer)
    last = torchport.collectives(-1)
    gathered, scattered = given(last, "all_gather") * size, given(last, "reduce_scatter")
    assert gathered == weights + blocks, (gathered, weights, blocks)
    assert scattered == weights, (scattered, weights)
    print(torchport.collective_report())

    x = torch.ones(5, device="port")
    explained = torchport.explain(lambda: dist.all_reduce(x))
    assert [one.nbytes for one in explained.collectives] == [20], explained
    assert "all_reduce(SUM) of float32[5]" in str(explained), explained
    # A step of next to nothing is counted in KB, and a barrier is over once it has been agreed on.
    torchport.sync()
    dist.barrier()
    (barrier,) = torchport.collectives(-1)
    assert barrier.name == "barrier"
    assert barrier.arrived
    assert "in flight" not in str(barrier), barrier
    assert "MB given" in torchport.collective_report()
    assert "KB given" in traffic.table([barrier, *explained.collectives])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
