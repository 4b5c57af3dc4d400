"""Eight virtual devices: training over a mesh gives the losses of one device, and compiles as often.

They are one process's, or shared by the processes that ``WORLD_SIZE`` says, each of which runs the whole program.
``python spmd_program.py STEPS MODEL WAY...``; prints a line per way, and ends with an error where something differs.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tiny_models import batch, loss_of, model
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import torchport

WHOLE = Replicate()


def _plan(net: torch.nn.Module) -> dict[str, Any]:
    """Columns where attention and perceptrons begin, rows where they end."""
    plan: dict[str, Any] = {}
    for name, sub in net.named_modules():
        last = name.rpartition(".")[2]
        if isinstance(sub, torch.nn.Linear) and last in ("q", "k", "v", "up", "gate"):
            plan[name] = ColwiseParallel()
        if isinstance(sub, torch.nn.Linear) and last in ("out", "down"):
            plan[name] = RowwiseParallel()
    return plan


def _in_rows(mesh: Any, axis: str) -> Callable[[str, torch.Tensor], list[Any]]:
    size = mesh[axis].mesh.numel()
    return lambda _, p: [Shard(0) if p.dim() and p.shape[0] % size == 0 else WHOLE]


def data_parallel(net: torch.nn.Module) -> tuple[Any, list[Any]]:
    mesh = torchport.mesh((8,), ("data",))
    torchport.shard(net, mesh, [WHOLE])
    return mesh, [Shard(0)]


def fsdp(net: torch.nn.Module) -> tuple[Any, list[Any]]:
    mesh = torchport.mesh((8,), ("data",))
    torchport.shard(net, mesh, _in_rows(mesh, "data"))
    return mesh, [Shard(0)]


def tensor_parallel(net: torch.nn.Module) -> tuple[Any, list[Any]]:
    mesh = torchport.mesh((8,), ("model",))
    parallelize_module(net, mesh, _plan(net))
    return mesh, [WHOLE]


def two_dimensional(net: torch.nn.Module) -> tuple[Any, list[Any]]:
    mesh = torchport.mesh((2, 4), ("data", "model"))
    parallelize_module(net, mesh["model"], _plan(net))
    torchport.shard(net, mesh["data"], _in_rows(mesh, "data"))
    return mesh, [Shard(0), WHOLE]


WAYS = {way.__name__: way for way in (data_parallel, fsdp, tensor_parallel, two_dimensional)}


def train(net: torch.nn.Module, steps: int, put: Callable[[torch.Tensor], torch.Tensor]) -> tuple[list[float], int]:
    """The losses of AdamW steps, and how many computations were compiled after the second step."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    losses: list[float] = []
    before = 0
    for step in range(steps):
        ids, targets = (torch.cat(halves) for halves in zip(batch(2 * step), batch(2 * step + 1), strict=True))
        loss = loss_of(net, put(ids), put(targets))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step == 1:
            before = _compiles()
    return losses, _compiles() - before


def _compiles() -> int:
    return sum(torchport.metrics.counter(name) for name in ("UncachedCompile", "ShardedCompile", "ShardedOtherwise"))


def run(kind: str, way: str, steps: int, want: Sequence[float]) -> None:
    net = model(kind, 2).to("port")
    mesh, placements = WAYS[way](net)
    losses, compiled = train(net, steps, lambda one: distribute_tensor(one, mesh, placements))
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(want), rtol=1e-4, atol=1e-5)
    print(f"{way}: {len(losses)} losses as on one device, compiled after the second step: {compiled}", flush=True)
    assert compiled == 0
    split = [name for name, p in net.named_parameters() if any((torchport.sharding_of(p) or _NONE).dims)]
    assert bool(split) == (way != "data_parallel"), split
    saved = {name: value.cpu() for name, value in net.state_dict().items()}
    net.load_state_dict(saved)
    assert split == [name for name, p in net.named_parameters() if any((torchport.sharding_of(p) or _NONE).dims)]
    assert all(torch.equal(value.cpu(), saved[name]) for name, value in net.state_dict().items())


class _NONE:
    dims: tuple[tuple[str, ...], ...] = ()


def join_processes() -> None:
    """Where there are several: JAX's coordinator makes one set of devices of theirs."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes > 1:
        import jax
        from jax._src.lib import _jax

        # JAX has no setting for the interface.
        _jax.make_gloo_tcp_collectives = functools.partial(_jax.make_gloo_tcp_collectives, hostname="127.0.0.1")
        jax.distributed.initialize(
            f"127.0.0.1:{os.environ['MASTER_PORT']}",
            num_processes=processes,
            process_id=int(os.environ["RANK"]),
            coordinator_bind_address=f"127.0.0.1:{os.environ['MASTER_PORT']}",
        )


def main() -> None:
    join_processes()
    steps, kind, ways = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    want, _ = train(model(kind, 2), steps, lambda one: one)
    for way in ways:
        run(kind, way, steps, want)


if __name__ == "__main__":
    main()
