"""Bytes per step of large models over many devices: traced here, by PyTorch's fake process group, against textbooks.

``python -m benchmarks.paper_plan [MODEL ...]`` with models ``gpt2-xl`` and ``llama-8b``, or ``tiny``. Nothing is
computed and no weights are made: forward and backward are traced, and their collectives noted.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleOutput,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import torchport


@dataclass(frozen=True)
class Shape:
    """A transformer's sizes. ``shared``: query heads per head of keys and values; ``gated``: a third matrix."""

    words: int
    width: int
    inner: int
    layers: int
    heads: int
    shared: int
    gated: bool
    length: int
    biased: bool


MODELS = {
    "tiny": Shape(256, 64, 128, 2, 8, 1, True, 32, False),
    "gpt2-xl": Shape(50257, 1600, 6400, 48, 25, 1, False, 1024, True),
    "llama-8b": Shape(128256, 4096, 14336, 32, 32, 4, True, 2048, False),
}
BATCH = 1


class Block(nn.Module):
    """Attention and a perceptron, as wide as the model's; the heads follow from what is here of them."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, inner, bias = shape.width, shape.inner, shape.biased
        self.size, self.shared = width // shape.heads, shape.shared
        make: Callable[[], nn.Module] = lambda: nn.LayerNorm(width) if bias else nn.RMSNorm(width)  # noqa: E731
        self.before, self.after = make(), make()
        self.q, self.out = (nn.Linear(width, width, bias=bias) for _ in range(2))
        self.k, self.v = (nn.Linear(width, width // shape.shared, bias=bias) for _ in range(2))
        self.up, self.down = nn.Linear(width, inner, bias=bias), nn.Linear(inner, width, bias=bias)
        self.gate = nn.Linear(width, inner, bias=False) if shape.gated else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.before(x)
        q, k, v = (part(y).view(*x.shape[:2], -1, self.size).transpose(1, 2) for part in (self.q, self.k, self.v))
        k, v = (one.repeat_interleave(self.shared, 1) for one in (k, v))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(seen)
        y = self.after(x)
        return x + self.down(F.gelu(self.up(y)) if self.gate is None else F.silu(self.gate(y)) * self.up(y))


class Model(nn.Module):
    """Token ids to logits. GPT-2's head is its embeddings; its positions are learned."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.words = nn.Embedding(shape.words, shape.width)
        self.places = nn.Embedding(shape.length, shape.width) if shape.biased else None
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width) if shape.biased else nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.words, bias=False)
        if shape.biased:
            self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        if self.places is not None:
            x = x + self.places.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def weights_of(net: nn.Module) -> int:
    """How many numbers a model has."""
    return sum(p.numel() for p in net.parameters())


def ddp(net: Any, shape: Shape, devices: int) -> tuple[nn.Module, float]:
    """Every gradient is reduced once: ``2 (n - 1) / n`` of the weights' bytes."""
    return DistributedDataParallel(net, init_sync=False), 2 * (devices - 1) / devices * 4 * weights_of(net)


def fsdp(net: Any, shape: Shape, devices: int) -> tuple[nn.Module, float]:
    """Weights are gathered for forward and backward, gradients scattered: ``3 (n - 1) / n``; the root's once less."""
    blocks, whole = weights_of(net.blocks), weights_of(net)
    for block in net.blocks:
        fully_shard(block)
    return fully_shard(net), (devices - 1) / devices * 4 * (2 * whole + blocks)


def tensor_parallel(net: Any, shape: Shape, devices: int) -> tuple[nn.Module, float]:
    """Two all-reduces of the activations per layer forward, and two backward."""
    mesh = init_device_mesh("port", (devices,))
    _split(net, mesh)
    activations = BATCH * shape.length * shape.width * 4
    return net, shape.layers * 4 * 2 * (devices - 1) / devices * activations


def _split(net: Any, mesh: Any) -> None:
    """Split each block's matrices. What the norms give is one replicated tensor to all the matrices that it goes to.

    Its gradients are added up before they are reduced. With ``ColwiseParallel`` alone each matrix reduces its own.
    """
    plan: dict[str, Any] = {name: ColwiseParallel() for name in ("q", "k", "v", "up", "gate")}
    whole = {"output_layouts": Replicate(), "desired_output_layouts": Replicate(), "use_local_output": False}
    plan |= {name: PrepareModuleOutput(**whole) for name in ("before", "after")}
    for block in net.blocks:
        parallelize_module(block, mesh, plan | {name: RowwiseParallel() for name in ("out", "down")})  # type: ignore[arg-type]


WAYS = {"DDP": ddp, "FSDP": fsdp, "TP": tensor_parallel}


def measure(name: str, way: str, devices: int) -> tuple[int, float, int]:
    """Bytes that a device sends in a step as traced, and by the textbook; and the number of collectives."""
    shape = MODELS[name]
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=devices)
    try:
        with torch.device("port"):
            net = Model(shape)
        net, expected = WAYS[way](net, shape, devices)
        before = len(torchport.collectives())
        ids = torch.zeros(BATCH, shape.length, dtype=torch.int64, device="port")
        net(ids).sum().backward()
        records = torchport.collectives()[before:]
        return sum(one.sent for one in records), expected, len(records)
    finally:
        dist.destroy_process_group()


def main(models: list[str]) -> None:
    """Print a table."""
    torchport.config.max_trace_ops = 1_000_000
    print("| model | way | devices | collectives | GB sent, traced | GB sent, textbook | ratio |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for name in models or list(MODELS)[1:]:
        for way, sizes in {"DDP": (8, 64, 512, 4096), "FSDP": (8, 64, 512, 4096), "TP": (2, 4, 5, 8)}.items():
            for devices in sizes:
                if way == "TP" and (MODELS[name].heads // MODELS[name].shared) % devices:
                    continue
                start = time.process_time()
                sent, expected, count = measure(name, way, devices)
                print(
                    f"| {name} | {way} | {devices} | {count} | {sent / 1e9:.3f} | {expected / 1e9:.3f} | "
                    f"{sent / expected:.3f} |",
                    flush=True,
                )
                print(f"{time.process_time() - start:.1f} s", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
