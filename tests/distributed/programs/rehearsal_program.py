"""A rank of many by PyTorch's fake process group: a model too large for any machine is traced, and not computed."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

import torchport

WIDTH, INNER, RANKS, BATCH = 1 << 16, 1 << 18, 256, 4
"""Each of two matrices takes 64 GiB."""


def sent(way: str) -> float:
    """Bytes that a step sends."""
    with torch.device("port"):
        net = nn.Sequential(nn.Linear(WIDTH, INNER, bias=False), nn.ReLU(), nn.Linear(INNER, WIDTH, bias=False))
    if way == "tensor parallel":
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(net, init_device_mesh("port", (RANKS,)), plan)
    else:
        for layer in (net[0], net[2]):
            fully_shard(layer)
        fully_shard(net)
    before = len(torchport.collectives())
    x = torch.zeros(BATCH, WIDTH, device="port", requires_grad=way == "tensor parallel")
    net(x).sum().backward()
    return sum(one.sent for one in torchport.collectives()[before:])


if __name__ == "__main__":
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    share = (RANKS - 1) / RANKS
    activations, weights = BATCH * WIDTH * 4, 2 * WIDTH * INNER * 4
    for way, textbook in {"tensor parallel": 4 * share * activations, "fully_shard": 3 * share * weights}.items():
        found = sent(way)
        assert abs(found / textbook - 1) < 0.01, (way, found, textbook)
        print(f"{way}: {found / 1e9:.3f} GB", flush=True)
