"""One process, eight virtual devices: what ``torchport.shard`` takes, refuses and keeps."""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, SequenceParallel, parallelize_module

import torchport
from torchport import ConfigError, UnsupportedOp
from torchport.backends.xla import spread
from torchport.backends.xla.spread import collectives_in

WHOLE = Replicate()
mesh = torchport.mesh((2, 4), ("data", "model"))


def dims(tensor: torch.Tensor) -> Any:
    found = torchport.sharding_of(tensor)
    return None if found is None else found.dims


def refused(kind: type[Exception], words: str, call: Callable[[], Any]) -> None:
    try:
        call()
    except kind as error:
        said = str(error)
    else:
        said = "nothing"
    assert words in said, said


def placements() -> None:
    x = torch.arange(64.0).view(8, 8)
    on = x.to("port")
    assert dims(on) is None
    assert torchport.shard(on, mesh, [Shard(0), Shard(1)]) is on
    assert dims(on) == (("data",), ("model",))
    assert dims(torchport.shard(x, mesh, [Shard(0), Shard(0)])) == (("data", "model"), ())
    assert dims(torchport.shard(x, mesh, [WHOLE, Shard(-1)])) == ((), ("model",))
    assert dims(distribute_tensor(x, mesh["model"], [Shard(0)])) == (("model",), ())
    pending = torchport.shard(on * 2 + 1, mesh["data"], [Shard(1)])
    assert torch.equal(pending.cpu(), x * 2 + 1)
    assert torch.equal(on.cpu(), x)
    # A part of the mesh leaves the other axes as they are.
    torchport.shard(on, mesh["model"], [Shard(0)])
    assert dims(on) == (("data", "model"), ())
    torchport.shard(on, mesh["data"], [WHOLE])
    assert dims(on) == (("model",), ())


def refusals() -> None:
    x = torch.arange(64.0).view(8, 8)
    refused(ConfigError, "has 7 elements", lambda: torchport.shard(x[:7], mesh, [Shard(0), WHOLE]))
    refused(ConfigError, "1 placements, for a mesh of 2", lambda: torchport.shard(x, mesh, [WHOLE]))
    refused(ConfigError, "of a tensor of 2 dimensions", lambda: torchport.shard(x, mesh, [WHOLE, Shard(2)]))
    refused(UnsupportedOp, "takes Shard(dim) and Replicate()", lambda: torchport.shard(x, mesh, [WHOLE, Partial()]))
    refused(ConfigError, "XLA_FLAGS=--xla_force_host_platform_device_count=16", lambda: torchport.mesh((16,)))
    refused(ConfigError, "no part ('pipeline',)", lambda: mesh["pipeline"])
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 6))
    refused(ConfigError, "1.weight: dimension 0", lambda: torchport.shard(net, mesh["model"], [Shard(0)]))
    assert dims(net[0].weight) is None  # nothing was placed
    refused(ConfigError, "no submodule is named 'head'", lambda: parallelize_module(net, mesh["model"], {"head": None}))
    refused(UnsupportedOp, "ColwiseParallel of", lambda: parallelize_module(net, mesh["model"], ColwiseParallel()))
    other = torchport.mesh((4, 2), ("data", "model"))
    a, b = torchport.shard(x, mesh, [Shard(0), WHOLE]), torchport.shard(x, other, [Shard(0), WHOLE])
    refused(torchport.ExecutionError, "lie on two meshes", lambda: (a + b).cpu())
    assert torch.equal(a.cpu(), x)
    torchport.use("reference")
    try:
        refused(UnsupportedOp, "backend 'reference' does not partition", lambda: torchport.mesh((2,)))
    finally:
        torchport.use("xla")


def stored_in_parts() -> None:
    """``fully_shard``: parameters are stored in parts and used whole, also after a step; results as on one device."""
    torch.manual_seed(4)
    net = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 7))
    want, x = copy.deepcopy(net), torch.rand(8, 16)
    net.to("port")
    parallelize_module(net, mesh["model"], {"0": ColwiseParallel()})
    fully_shard(net[0], mesh=mesh["data"])
    fully_shard(net, mesh=mesh["data"])
    assert dims(net[0].weight) == (("model", "data"), ())  # in parts of the parts that it is used in
    assert torchport.sharding_of(net[0].weight).gathered == ("data",)  # pyright: ignore[reportOptionalMemberAccess]
    assert dims(net[1].weight) == ((), ("data",))  # no part of 7 rows is of one size
    assert not any(dims(net[1].bias))
    on = torchport.shard(x, mesh, [Shard(0), WHOLE])
    before = len(torchport.collectives())
    net[0](on).cpu()
    exchanged = [one.name for one in torchport.collectives()[before:]]
    assert "all_gather" in exchanged, exchanged
    assert "collective_permute" not in exchanged, exchanged
    for module, given in ((net, on), (want, x)):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            module(given).square().mean().backward()  # of the sum, it diverges, and rounding errors with it
            optimizer.step()
            optimizer.zero_grad()
    for got, expected in zip(net.parameters(), want.parameters(), strict=True):
        torch.testing.assert_close(got.cpu(), expected, rtol=1e-4, atol=1e-5)
    assert torchport.sharding_of(net[0].weight).gathered == ("data",)  # pyright: ignore[reportOptionalMemberAccess]
    precise = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    refused(UnsupportedOp, "fully_shard(mp_policy=", lambda: fully_shard(net, mesh=mesh["data"], mp_policy=precise))
    refused(UnsupportedOp, "one module at a time", lambda: fully_shard([net[0], net[1]], mesh=mesh["data"]))


def updated_in_parts() -> None:
    """An optimizer's step takes the stored part of a parameter: no part is cut from what was gathered."""
    all_devices = torchport.mesh((8,), ("data",))
    layer = nn.Linear(16, 32, bias=False).to("port")
    fully_shard(layer, mesh=all_devices)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, weight_decay=0.1)
    on = torchport.shard(torch.rand(8, 16), all_devices, [Shard(0)])
    texts: list[str] = []
    noted = spread.collectives_in
    spread.collectives_in = lambda text: (texts.append(text), noted(text))[1]
    try:
        layer(on).square().mean().backward()
        optimizer.step()
        torchport.sync()
    finally:
        spread.collectives_in = noted
    (text,) = texts
    assert text.count(" all-gather(") == 1, text
    assert len(re.findall(r"%all-gather[),]", text)) == 1, text  # by the product alone


def operators() -> None:
    """Results equal, whether the engine partitions an operator, or the host runs it."""
    x = torch.rand(8, 16, generator=torch.Generator().manual_seed(0))
    on = torchport.shard(x, mesh, [Shard(0), Shard(1)])
    both: list[Callable[[torch.Tensor], Any]] = [
        lambda v: torch.cat([v, v[:1]]),
        lambda v: v @ v.T,
        lambda v: v[v > 0.5].sum(),
        lambda v: v.sort(0).values,
        lambda v: v.unique(),
        lambda v: v.view(4, 2, 16).transpose(0, 2)[1:].flatten(),
        lambda v: torch.linalg.inv(v @ v.T + torch.eye(8, device=v.device)),
        lambda v: v.clone().t().add_(1).t()[::2],
        lambda v: v.cumsum(1).to(torch.bfloat16),
        lambda v: nn.functional.pad(v, (1, 2)).unfold(0, 3, 2),
    ]
    for fn in both:
        torch.testing.assert_close(fn(on).cpu(), fn(x), rtol=1e-4, atol=1e-4)


def embeddings() -> None:
    """Gradients of an embedding whose rows, or columns, lie on several devices, for indices that repeat."""
    ids = torch.randint(0, 16, (8, 12), generator=torch.Generator().manual_seed(1))
    table = torch.rand(16, 8, generator=torch.Generator().manual_seed(2))
    grads: list[torch.Tensor] = []
    for split in (None, [WHOLE, Shard(0)], [WHOLE, Shard(1)], [Shard(1), Shard(0)]):
        layer = nn.Embedding(16, 8, _weight=table.clone()).to("port")
        given = ids.to("port")
        if split is not None:
            torchport.shard(layer, mesh, split)
            torchport.shard(given, mesh, [Shard(0), WHOLE])
        (layer(given) ** 2).sum().backward()
        assert layer.weight.grad is not None
        grads.append(layer.weight.grad.cpu())
    for grad in grads[1:]:
        torch.testing.assert_close(grad, grads[0])


def dropout() -> None:
    """The same numbers are drawn, however values lie."""
    drawn: list[torch.Tensor] = []
    for split in (False, True):
        torch.manual_seed(3)
        x = torch.ones(8, 16, device="port")
        if split:
            torchport.shard(x, mesh, [Shard(0), Shard(1)])
        drawn += [nn.functional.dropout(x, 0.5).cpu()]
    assert torch.equal(*drawn)


def copies() -> None:
    """deepcopy, state_dict and torch.save hold whole values; a module's are placed again when they are loaded."""
    net = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8))
    want = copy.deepcopy(net)
    net.to("port")
    parallelize_module(net, mesh["model"], {"0": ColwiseParallel(), "1": SequenceParallel()})
    assert dims(net[0].weight) == (("model",), ())
    assert torchport.sharding_of(net[2].weight) is not None
    file = io.BytesIO()
    torch.save(net.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, map_location="cpu")
    for name, value in want.state_dict().items():
        assert torch.equal(saved[name], value)
    x = torch.rand(4, 8)
    torch.testing.assert_close(copy.deepcopy(net)(x.to("port")).cpu(), want(x))
    placed = torchport.shard(net, mesh, {"*.weight": [WHOLE, Shard(0)]})
    placed.load_state_dict(saved)
    assert dims(placed[2].weight) == (("model",), ())


def exchanged() -> None:
    """What XLA has the devices exchange is listed: its bytes, and how many devices take part."""
    x = torchport.shard(torch.rand(8, 64), mesh, [WHOLE, Shard(1)])
    w = torchport.shard(torch.rand(64, 16), mesh, [WHOLE, Shard(0)])
    (x @ w).cpu()
    (one,) = torchport.collectives()[-1:]
    assert (one.name, one.ranks, one.nbytes) == ("all_reduce", 4, 8 * 16 * 4), one
    assert one.sent == 2 * 8 * 16 * 4 * 3 // 4
    assert "all_reduce of f32[8,16]" in str(torchport.explain(lambda: (x @ w).cpu()))
    moved = "%p = f32[4,2]{1,0} collective-permute(%a), channel_id=1, source_target_pairs={{0,0},{1,4},{4,1}}"
    assert [one[-2:] for one in collectives_in(moved)] == [(2, 32)]  # a device that keeps its part sends nothing
    assert [one[-2:] for one in collectives_in(moved.replace("{1,4},{4,1}", "{1,1},{4,4}"))] == [(1, 32)]


if __name__ == "__main__":
    for check in (
        placements,
        refusals,
        stored_in_parts,
        updated_in_parts,
        operators,
        embeddings,
        dropout,
        copies,
        exchanged,
    ):
        check()
        print(f"{check.__name__}: as it should be", flush=True)
