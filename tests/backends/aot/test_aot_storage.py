"""What a saved program stores: methods, constants, buffers, named data, external weights, each once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from aot_support import Cache, Chain, W, X, fresh
from torch import fx, nn

import torchport
from torchport import aot, runtime
from torchport.aot import OpList, Partitioner
from torchport.backend.interface import FreeableBuffer, InitContext, Processed
from torchport.backend.optional import preprocess_each
from torchport.backends.reference import ReferenceBackend
from torchport.core.errors import CompileError, ErrorCode, ProgramError
from torchport.core.specs import CompileSpecs

aten = torch.ops.aten


def test_methods_share_constants_and_buffers(tmp_path: Path) -> None:
    given: list[Mapping[str, int]] = []

    def preprocess_methods(self: Any, graphs: Any, specs: Any) -> Any:
        given.append({name: len(found) for name, found in graphs.items()})
        return preprocess_each(self, graphs, specs)

    backend = fresh(preprocess_methods=preprocess_methods)
    x = torch.ones(64)
    lowered = aot.lower(Cache(), (x,), backend=backend.name, methods={"decode": (x,)})
    assert lowered.methods == ("forward", "decode")
    assert given == [{"forward": 1, "decode": 1}]
    model = Cache()
    torch.testing.assert_close(lowered(x), model(x))
    torch.testing.assert_close(lowered.run("decode", x), model.decode(x))
    saved = lowered.save(tmp_path / "m.pt2")
    assert saved.weights == 64 * 64 * 4 + 64 * 4
    assert saved.total < saved.weights + 60_000
    program = runtime.load(tmp_path / "m.pt2")
    forward = program.load_method("forward")
    decode = program.load_method("decode", state=forward.state)
    alone = program.load_method("decode")
    model = Cache()
    torch.testing.assert_close(forward(x)[0], model(x))
    torch.testing.assert_close(decode(x)[0], model.decode(x))
    torch.testing.assert_close(alone(x)[0], x)
    assert program.constant(0, forward._host) is program.constant(0, forward._host)
    torch.testing.assert_close(torch.export.load(tmp_path / "m.pt2").module()(x), Cache()(x))


def test_external_weights_are_shared_by_several_programs(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    x = torch.ones(64)
    model = Cache()
    lowered = aot.lower(model, (x,), backend=fresh().name)
    weights = tmp_path / "weights.safetensors"
    first = lowered.save(tmp_path / "a.pt2", external_weights=weights)
    assert first.external == 64 * 64 * 4 + 64 * 4
    assert first.total < 30_000
    torch.testing.assert_close(load_file(weights)["table"], model.table.detach())
    written = weights.stat().st_mtime_ns
    other = aot.lower(nn.Linear(64, 64, bias=False), (x,), backend=fresh().name)
    other._memory  # noqa: B018
    lowered.save(tmp_path / "b.pt2", external_weights=weights)
    assert weights.stat().st_mtime_ns == written
    for name in ("a", "b"):
        torch.testing.assert_close(runtime.load(tmp_path / f"{name}.pt2").load_method()(x)[0], x @ model.table)
        assert torch.export.load(tmp_path / f"{name}.pt2").module()(x).shape == (64,)
    # A checkpoint with other names, somewhere else.
    (tmp_path / "far").mkdir()
    save_file({"model.table": model.table.detach(), "other": torch.zeros(3)}, tmp_path / "far" / "ckpt.safetensors")
    third = lowered.save(tmp_path / "c.pt2", external_weights=tmp_path / "far" / "ckpt.safetensors")
    assert third.external == 64 * 64 * 4
    with pytest.raises(ProgramError) as caught:
        runtime.load(tmp_path / "c.pt2").load_method()
    assert caught.value.code == ErrorCode.ACCESS_FAILED
    place = {"ckpt.safetensors": tmp_path / "far" / "ckpt.safetensors"}
    torch.testing.assert_close(
        runtime.load(tmp_path / "c.pt2", external_data=place).load_method()(x)[0], x @ model.table
    )
    with pytest.raises(ProgramError, match="none of the program's weights") as caught:
        other.save(tmp_path / "d.pt2", external_weights=weights)
    assert caught.value.code == ErrorCode.INVALID_EXTERNAL_DATA
    save_file({"model.table": model.table.detach() + 1}, place["ckpt.safetensors"])
    with pytest.raises(ProgramError, match="other values") as caught:
        runtime.load(tmp_path / "c.pt2", external_data=place).load_method()
    assert caught.value.code == ErrorCode.INVALID_EXTERNAL_DATA
    save_file({"model.table": torch.zeros(3)}, place["ckpt.safetensors"])
    with pytest.raises(ProgramError, match=r"is float32\[3\]"):
        runtime.load(tmp_path / "c.pt2", external_data=place).load_method()
    place["ckpt.safetensors"].write_bytes(b"\xff" * 100)
    with pytest.raises(ProgramError, match="not a safetensors file"):
        runtime.load(tmp_path / "c.pt2", external_data=place).load_method()


def test_views_of_one_weight_and_tied_weights_are_stored_once(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(100, 32)
            self.head = nn.Linear(32, 100, bias=False)
            self.head.weight = self.embed.weight
            self.register_buffer("transposed", self.embed.weight.detach().t())

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(ids)) @ self.transposed.t()

    model, ids = Tied(), torch.tensor([1, 2, 99])
    lowered = aot.lower(model, (ids,), backend=fresh().name)
    saved = lowered.save(tmp_path / "t.pt2")
    assert saved.weights == 100 * 32 * 4
    torch.testing.assert_close(runtime.load(tmp_path / "t.pt2").load_method()(ids)[0], model(ids))


def test_named_data_is_stored_once_and_names_must_not_clash(tmp_path: Path) -> None:
    seen: list[bytes] = []

    class Naming(ReferenceBackend):
        name = "aot_naming"
        clash = False

        def preprocess(self, graph: fx.GraphModule, specs: CompileSpecs) -> Processed:
            made = super().preprocess(graph, specs)
            data = made.data if self.clash else b"table" * 1000
            return Processed(made.data, named_data={"table": data})

        def init(self, processed: FreeableBuffer, specs: CompileSpecs, context: InitContext) -> Any:
            seen.append(bytes(context.named_data["table"]))
            return super().init(processed, specs, context)

    torchport.register(Naming)
    partitioner = OpList(Naming.name, ["aten.matmul"])
    lowered = aot.lower(Chain(), (X, W), partitioners=[partitioner])
    lowered.save(tmp_path / "n.pt2")
    data = (tmp_path / "n.pt2").read_bytes()
    assert data.count(b"table" * 1000) == 1
    runtime.load(data).load_method()
    assert seen == [b"table" * 1000] * 2
    Naming.clash = True
    with pytest.raises(CompileError, match="names are unique"):
        aot.lower(Cache(), (torch.ones(64),), backend=Naming.name, methods={"decode": (torch.ones(64),)})


def test_identical_delegates_are_one_entry(tmp_path: Path) -> None:
    class Twice(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sin(torch.cos(torch.sin(x)))

    lowered = aot.lower(Twice(), (X,), partitioners=[_same_bytes()])
    entries = [one.entry for one in lowered._document.methods["forward"].delegates]
    assert len(entries) == 2
    assert len(set(entries)) == 1
    torch.testing.assert_close(lowered(X), Twice()(X))


def _same_bytes() -> Partitioner:
    from torchport.backend.serialize import encode

    def preprocess(self: Any, graph: fx.GraphModule, specs: CompileSpecs) -> Processed:
        for node in graph.graph.nodes:
            node.meta["debug_handle"], node.meta["source"] = 0, None
        return Processed(encode(graph))

    return OpList(fresh(preprocess=preprocess).name, ["aten.sin"])
