"""Lowering: values, partitioners and their rules, methods, buffers, files, reports, errors."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

import torchport
from torchport import aot, runtime
from torchport.aot import DelegationSpec, OpList, Partitioner, PartitionResult, Pattern, Supported, WholeProgram
from torchport.backend.interface import FreeableBuffer, InitContext, Processed, Support
from torchport.backends.add_sub import AddSubBackend
from torchport.backends.reference import ReferenceBackend
from torchport.core.errors import (
    CompileError,
    ConfigError,
    DelegateError,
    ErrorCode,
    GraphError,
    MethodError,
    ProgramError,
    UnsupportedOp,
)
from torchport.core.specs import CompileSpecs

aten = torch.ops.aten
_numbers = itertools.count()


def fresh(**attributes: Any) -> Any:
    """A reference backend under a name of its own, registered."""
    name = f"aot_{next(_numbers)}"
    kind = type("Named", (ReferenceBackend,), {"name": name, **attributes})
    torchport.register(kind)
    return torchport.registry.get(name)


class Net(nn.Module):
    """A layer, a table that is shared, a buffer that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor, scale: float = 2.0, *, extra: dict[str, torch.Tensor]) -> dict[str, Any]:
        self.calls += 1
        hidden = torch.relu(self.first(x)) * scale
        return {"y": self.second(hidden) + extra["b"], "calls": self.calls, "scale": scale}

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.first(x))


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


X = torch.linspace(-1, 1, 8).reshape(2, 4)
EXTRA = {"b": torch.ones(4)}


def test_a_lowered_program_is_called_like_the_model_and_runs_its_delegates(net: Net) -> None:
    backend = fresh()
    lowered = aot.lower(net, (X, 3.0), {"extra": EXTRA}, backend=backend.name)
    expected = net(X, 3.0, extra=EXTRA)
    found = lowered(X, 3.0, extra=EXTRA)
    torch.testing.assert_close(found, expected)
    assert found["scale"] == 3.0
    assert lowered(X, 3.0, extra=EXTRA)["calls"] == 2
    assert lowered.report().startswith("method forward: ")
    assert "0 left" in lowered.report()
    with pytest.raises(MethodError, match=r"'scale' was 3\.0"):
        lowered(X, 4.0, extra=EXTRA)
    with pytest.raises(MethodError, match="keyword arguments"):
        lowered(X, 3.0)
    with pytest.raises(MethodError, match="another structure"):
        lowered(X, 3.0, extra={"c": EXTRA["b"]})


def test_a_process_that_uses_the_device_lowers_just_the_same(net: Net) -> None:
    """``calls += 1`` once became a constant tensor in what ``torch.export`` traces, with the device in use."""
    assert (torch.ones(2, device=torchport.device("reference")) + 1).cpu().tolist() == [2, 2]
    lowered = aot.lower(net, (X, 3.0), {"extra": EXTRA}, backend=fresh().name)
    assert lowered(X, 3.0, extra=EXTRA)["calls"] == 1


def test_training_on_does_not_change_a_lowered_program(net: Net, tmp_path: Path) -> None:
    exported = torch.export.export(net, (X, 3.0), {"extra": EXTRA})
    lowered = aot.lower(exported, backend=fresh().name)
    before = lowered(X, 3.0, extra=EXTRA)["y"].clone()
    with torch.no_grad():
        net.first.weight.add_(1)
    torch.testing.assert_close(lowered(X, 3.0, extra=EXTRA)["y"], before)
    saved = lowered.save(tmp_path / "net.pt2")
    assert saved.weights == sum(value.nbytes for value in net.state_dict().values()), "each once, in both parts"
    torch.testing.assert_close(runtime.load(tmp_path / "net.pt2").load_method()(X, 3.0, EXTRA["b"])[0], before)
    again = torch.export.load(tmp_path / "net.pt2").module()
    torch.testing.assert_close(again(X, 3.0, extra=EXTRA)["y"], before)
    assert {name for name, _ in again.named_parameters()} == {name for name, _ in net.named_parameters()}
    assert not torch.equal(exported.module()(X, 3.0, extra=EXTRA)["y"], before), "what was given is left as it is"


def test_the_file_runs_and_is_still_an_exported_program(net: Net, tmp_path: Path) -> None:
    exported = torch.export.export(net, (X, 3.0), {"extra": EXTRA})
    lowered = aot.lower(exported, backend=fresh().name)
    expected = lowered(X, 3.0, extra=EXTRA)
    saved = lowered.save(tmp_path / "net.pt2")
    method = runtime.load(tmp_path / "net.pt2").load_method()
    y, calls, scale = method(X, 3.0, EXTRA["b"])
    torch.testing.assert_close(y, expected["y"])
    assert (calls.item(), scale) == (1, 3.0)
    assert [one.name for one in method.meta.inputs] == ["x", "scale", "extra_b"]
    again = torch.export.load(tmp_path / "net.pt2")
    torch.testing.assert_close(again.module()(X, 3.0, extra=EXTRA)["y"], expected["y"])
    plain = tmp_path / "plain.pt2"
    torch.export.save(exported, plain)
    weights = sum(value.nbytes for value in net.state_dict().values())
    assert saved.weights == weights
    assert saved.total == os.path.getsize(tmp_path / "net.pt2") < os.path.getsize(plain) + saved.delegates + 16_000


def test_leftover_operators_are_reported_with_reason_module_and_line(net: Net) -> None:
    lowered = aot.lower(net, (X, 3.0), {"extra": EXTRA}, backend="add_sub")
    torch.testing.assert_close(lowered(X, 3.0, extra=EXTRA)["y"], net(X, 3.0, extra=EXTRA)["y"])
    linear = next(one for one in lowered.left["forward"] if "linear" in one.op or "addmm" in one.op)
    assert linear.module == "first"
    assert "test_aot.py" in linear.source
    assert "this backend adds and subtracts, nothing else" in linear.reason
    assert "this backend adds and subtracts" in lowered.report()
    assert not lowered.program.meta().delegates, "an add that broadcasts is not for it either"


def test_two_backends_in_order_of_preference() -> None:
    def forward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.sin(x + y) - y

    class Model(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return forward(x, y)

    second = fresh()
    x, y = torch.rand(3), torch.rand(3)
    lowered = aot.lower(Model(), (x, y), backend=["add_sub", second.name])
    assert [piece.backend.name for piece in lowered.pieces["forward"]] == ["add_sub", second.name, "add_sub"]
    torch.testing.assert_close(lowered(x, y), forward(x, y))
    assert "delegate_2: add_sub" in lowered.graph()
    only = aot.lower(Model(), (x, y), backend=[second.name, "add_sub"])
    assert [piece.backend.name for piece in only.pieces["forward"]] == [second.name]


def test_what_a_backend_wants_whole_is_decomposed_for_the_others_only() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.hardswish(x)

    whole = fresh()
    lowered = aot.lower(Model(), (X,), backend=whole.name)
    assert [str(n.target) for n in lowered.pieces["forward"][0].graph.graph.nodes if n.op == "call_function"] == [
        "aten.hardswish.default"
    ]

    def no_hardswish(self: Any, node: fx.Node) -> Support:
        return Support.no("no hardswish") if "hardswish" in str(node.target) else Support.yes()

    parts = fresh(supports=no_hardswish)
    lowered = aot.lower(Model(), (X,), backend=parts.name)
    ops = [str(n.target) for n in lowered.pieces["forward"][0].graph.graph.nodes if n.op == "call_function"]
    assert len(ops) > 1
    assert "aten.hardswish.default" not in ops
    torch.testing.assert_close(lowered(X), nn.functional.hardswish(X))


# -- partitioners --------------------------------------------------------------------------------------------------
class Chain(nn.Module):
    def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        a = x @ w
        b = torch.relu(a)
        c = torch.sin(b)
        return torch.relu(c @ w) + a


W = torch.eye(4) * 0.5


def delegate_ops(lowered: aot.LoweredProgram) -> list[list[str]]:
    return [
        [str(node.target) for node in piece.graph.graph.nodes if node.op == "call_function"]
        for piece in lowered.pieces["forward"]
    ]


def test_op_list() -> None:
    backend = fresh()
    lowered = aot.lower(Chain(), (X, W), partitioners=[OpList(backend.name, ["aten.matmul", aten.mm.default])])
    assert delegate_ops(lowered) == [["aten.matmul.default"], ["aten.matmul.default"]]
    torch.testing.assert_close(lowered(X, W), Chain()(X, W))
    reasons = {one.op: one.reason for one in lowered.left["forward"]}
    assert "not in the list" in reasons["aten.sin.default"]
    with pytest.raises(ConfigError, match="no operator"):
        OpList(backend.name, ["aten.nothing_like_it"])


def test_pattern() -> None:
    backend = fresh()
    pattern = Pattern(backend.name, lambda a, b: torch.relu(a @ b), (X, W))
    lowered = aot.lower(Chain(), (X, W), partitioners=[pattern])
    assert (
        delegate_ops(lowered) == [["aten.matmul.default", "aten.relu.default"]] * 1 or len(delegate_ops(lowered)) == 2
    )
    torch.testing.assert_close(lowered(X, W), Chain()(X, W))
    for ops in delegate_ops(lowered):
        assert ops == ["aten.matmul.default", "aten.relu.default"]


def test_whole_program() -> None:
    lowered = aot.lower(Chain(), (X, W), partitioners=[WholeProgram(fresh().name)])
    assert len(lowered.pieces["forward"]) == 1
    assert lowered.program.meta().kernels == {}
    with pytest.raises(UnsupportedOp, match="cannot be lowered whole") as caught:
        aot.lower(Chain(), (X, W), partitioners=[WholeProgram("add_sub")])
    assert "test_aot.py" in str(caught.value)


class Scripted(Partitioner):
    """Tags what a function says."""

    def __init__(self, backend: str, tag: Any, bind: bool = False, spoil: Any = None) -> None:
        super().__init__(backend)
        self.tag = tag
        self.bind = bind
        self.spoil = spoil

    def partition(self, graph: fx.GraphModule, taken: Collection[fx.Node]) -> PartitionResult:
        tags = {node: tag for node in graph.graph.nodes if (tag := self.tag(node)) is not None}
        if self.spoil is not None:
            self.spoil(graph)
        delegates = {tag: DelegationSpec(self.backend, CompileSpecs({"tag": tag})) for tag in set(tags.values())}
        return PartitionResult(tags, delegates, self.bind)


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(2, 4))
        self.register_buffer("total", torch.zeros(2, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total += x
        return torch.sin(x + self.w) * torch.cos(x - self.w) + self.total


def lower_tagged(tag: Any, **more: Any) -> aot.LoweredProgram:
    return aot.lower(Weighted(), (X,), partitioners=[Scripted(fresh().name, tag, **more)])


def calls(*names: str) -> Any:
    return lambda node: "t" if any(f"aten.{name}." in str(node.target) for name in names) else None


def test_untagged_constants_are_arguments_and_tagged_ones_belong_to_the_delegate() -> None:
    lowered = lower_tagged(calls("sin", "add", "cos", "sub"))
    (delegate, *_) = lowered.program.meta().delegates
    assert delegate.constants == ()
    expected = Weighted()(X)
    torch.testing.assert_close(lowered(X), expected)

    def with_constant(node: fx.Node) -> str | None:
        return "t" if node.name == "p_w" else calls("sin", "add", "cos", "sub", "mul")(node)

    lowered = lower_tagged(with_constant)
    assert [one.constants for one in lowered.program.meta().delegates] == [("w",)]
    torch.testing.assert_close(lowered(X), expected)


@pytest.mark.parametrize(
    ("tag", "says"),
    [
        (lambda node: "t" if node.op == "output" else None, "tagged the output"),
        (lambda node: "t" if node.name == "x" else None, "an input that the user gives"),
        (lambda node: "t" if node.name == "b_total" else None, "a buffer that the program changes"),
        (lambda node: "t" if node.name == "p_w" or "sub" in node.name else None, "uses it under None"),
        (
            lambda node: "a" if node.name == "p_w" or "sub" in node.name else ("b" if "add" in node.name else None),
            "uses it under 'b'",
        ),
    ],
    ids=["output", "user input", "buffer", "constant with an untagged user", "constant with another tag's user"],
)
def test_what_must_not_be_tagged(tag: Any, says: str) -> None:
    with pytest.raises(GraphError, match=says):
        lower_tagged(tag)


@pytest.mark.parametrize("how", ["target", "argument", "order", "new node", "removed", "meta"])
def test_a_partitioner_must_not_change_the_graph(how: str) -> None:
    def spoil(graph: fx.GraphModule) -> None:
        nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
        if how == "target":
            nodes[0].target = aten.sub.Tensor
        elif how == "argument":
            nodes[-1].args = (nodes[-1].args[1], nodes[-1].args[0])
        elif how == "order":
            nodes[2].append(nodes[1])
        elif how == "new node":
            with graph.graph.inserting_after(nodes[0]):
                graph.graph.call_function(aten.neg.default, (nodes[0],))
        elif how == "removed":
            graph.graph.output_node().args = ((nodes[0], nodes[0]),)
            graph.graph.erase_node(nodes[-1])
        else:
            nodes[0].meta["delegation_tag"] = "t"

    with pytest.raises(GraphError, match="changed the graph"):
        lower_tagged(calls("sin"), spoil=spoil)


def test_tags_that_tempt_a_cycle_become_two_delegates() -> None:
    """``sin`` lies between ``add`` and ``mul`` of one tag: in one delegate they would wait for themselves."""
    lowered = lower_tagged(calls("add", "mul"))
    names = [one.backend for one in lowered.program.meta().delegates]
    assert len(names) >= 2
    torch.testing.assert_close(lowered(X), Weighted()(X))


def test_a_partitioner_that_comes_first_wins() -> None:
    first, second = fresh(), fresh()
    lowered = aot.lower(Chain(), (X, W), partitioners=[OpList(first.name, ["aten.sin"]), Supported(second.name)])
    assert [piece.backend.name for piece in lowered.pieces["forward"]] == [second.name, first.name, second.name]
    torch.testing.assert_close(lowered(X, W), Chain()(X, W))


# -- methods, constants, buffers -------------------------------------------------------------------------------------
class Cache(nn.Module):
    """Two methods on one buffer and one table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.arange(4096.0).reshape(64, 64))
        self.register_buffer("seen", torch.zeros(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(x)
        return x @ self.table

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        return self.seen @ self.table + x


def test_methods_share_constants_and_buffers(tmp_path: Path) -> None:
    given: list[Mapping[str, int]] = []

    def preprocess_methods(self: Any, graphs: Any, specs: Any) -> Any:
        given.append({name: len(found) for name, found in graphs.items()})
        return ReferenceBackend.preprocess_methods(self, graphs, specs)

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
        name = f"aot_{next(_numbers)}"
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


# -- errors ------------------------------------------------------------------------------------------------------------
def test_an_error_in_a_delegate_names_method_delegate_handle_module_and_line(net: Net, tmp_path: Path) -> None:
    class Breaking(ReferenceBackend):
        name = f"aot_{next(_numbers)}"

        def preprocess(self, graph: fx.GraphModule, specs: CompileSpecs) -> Processed:
            made = super().preprocess(graph, specs)
            handles = {
                str(node.target): (node.meta["debug_handle"],)
                for node in graph.graph.nodes
                if node.op == "call_function"
            }
            return Processed(made.data, handles)

        def execute(self, handle: Any, args: Any, context: Any) -> Any:
            raise DelegateError("overflow", code=ErrorCode.NOT_SUPPORTED, ident="aten.relu.default")

    torchport.register(Breaking)
    aot.lower(net, (X, 3.0), {"extra": EXTRA}, backend=Breaking.name).save(tmp_path / "m.pt2")
    method = runtime.load(tmp_path / "m.pt2").load_method()
    with pytest.raises(DelegateError, match="overflow") as caught:
        method(X, 3.0, EXTRA["b"])
    error = caught.value
    line = next(
        n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "hidden = torch.relu(" in text
    )
    assert error.source == f"{__file__}:{line} in forward"
    assert error.code == ErrorCode.NOT_SUPPORTED
    assert (error.method, error.delegate, error.module) == ("forward", f"{Breaking.name} #0", None)
    assert len(error.debug_handles) == 1


def test_a_failing_compiler_is_a_compile_error() -> None:
    def preprocess(self: Any, graph: fx.GraphModule, specs: CompileSpecs) -> Processed:
        raise ValueError("no such instruction")

    with pytest.raises(CompileError, match="no such instruction") as caught:
        aot.lower(Chain(), (X, W), backend=fresh(preprocess=preprocess).name)
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({}, "say who computes"),
        ({"backend": "reference", "partitioners": []}, "say who computes"),
        ({"partitioners": []}, "takes torchport.aot.Partitioner"),
        ({"partitioners": ["reference"]}, "takes torchport.aot.Partitioner"),
        ({"backend": []}, "empty"),
        ({"backend": "reference", "methods": {"not a name": (X,)}}, "identifiers"),
        ({"backend": "reference", "methods": {"model": (X,)}}, "identifiers"),
        ({"backend": "reference", "methods": {"absent": (X,)}}, "no method 'absent'"),
        ({"backend": "reference", "compile_specs": {"a": {"b": "c"}, "d": "e"}}, "not both"),
    ],
)
def test_arguments_that_do_not_fit(more: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        aot.lower(Chain(), (X, W), **more)


def test_compile_specs_reach_the_compiler_and_init() -> None:
    seen: list[dict[str, bytes]] = []

    def preprocess(self: Any, graph: fx.GraphModule, specs: CompileSpecs) -> Processed:
        seen.append(dict(specs))
        return ReferenceBackend.preprocess(self, graph, specs)

    def init(self: Any, processed: FreeableBuffer, specs: CompileSpecs, context: InitContext) -> Any:
        seen.append(dict(specs))
        return ReferenceBackend.init(self, processed, specs, context)

    backend = fresh(preprocess=preprocess, init=init)
    for specs in ({"level": "3"}, {backend.name: {"level": b"3"}, "other": {}}, CompileSpecs({"level": "3"})):
        seen.clear()
        aot.lower(Chain(), (X, W), backend=backend.name, compile_specs=specs)(X, W)
        assert seen == [{"level": b"3"}] * 2


def test_what_a_program_cannot_hold() -> None:
    class Writes(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.add_(1)
            return x * 2

    with pytest.raises(UnsupportedOp, match="writes to its input"):
        aot.lower(Writes(), (X.clone(),), backend="reference")
    batch = torch.export.Dim("batch")
    exported = torch.export.export(nn.Linear(4, 4), (torch.ones(3, 4),), dynamic_shapes=({0: batch},))
    with pytest.raises(UnsupportedOp, match="dynamic sizes"):
        aot.lower(exported, backend="reference")
    with pytest.raises(ProgramError, match=r"ends in \.pt2"):
        aot.lower(Chain(), (X, W), backend="reference").save("program.zip")
    with pytest.raises(ProgramError, match="no folder"):
        aot.lower(Chain(), (X, W), backend="reference").save("/nonexistent/program.pt2")


def test_one_tensor_given_for_two_inputs_is_two_inputs() -> None:
    x = torch.ones(4)
    lowered = aot.lower(Sum(4), (x, x), backend="reference")
    torch.testing.assert_close(lowered(x, x * 3), torch.full((4,), 4.0) - torch.arange(4.0))


def test_outputs_do_not_share_memory() -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("state", torch.zeros(2, 4))

        def forward(self, x: torch.Tensor) -> Any:
            self.state += x
            y = torch.sin(x)
            return x, x.view(-1), y, y.t(), y, self.state, self.state.view(-1)

    for backend in ("reference", "add_sub"):
        lowered = aot.lower(Views(), (X,), backend=backend)
        given = X.clone()
        results = lowered(given)
        torch.testing.assert_close(results, Views()(X))
        addresses = [value.untyped_storage().data_ptr() for value in results]
        assert len(set(addresses)) == len(addresses)
        assert given.untyped_storage().data_ptr() not in addresses
        for value in results:
            value.zero_()
        torch.testing.assert_close(given, X)
        torch.testing.assert_close(lowered(X)[5], X * 2)


# -- a process of its own --------------------------------------------------------------------------------------------
RUN = """
import sys
import numpy
import torchport.runtime as runtime
method = runtime.load({path!r}).load_method()
x = numpy.array([1, 2, 3], numpy.float32)
(result,) = method(x, x)
assert result.tolist() == [1.5, 3.0, 4.5], result
print(sorted(sys.modules))
"""


class Sum(nn.Module):
    def __init__(self, size: int = 0) -> None:
        super().__init__()
        self.register_buffer("amount", torch.arange(float(size)) if size else torch.tensor([0.5, 1.0, 1.5]))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y - self.amount


def test_a_program_that_needs_no_torch_imports_none(tmp_path: Path) -> None:
    x = torch.tensor([1.0, 2.0, 3.0])
    aot.lower(Sum(), (x, x), backend="add_sub").save(tmp_path / "sum.pt2")
    code = RUN.format(path=str(tmp_path / "sum.pt2"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loaded = done.stdout
    for name in ("torch", "torchport.aot", "torchport.frontend", "torchport.lazy", "torchport.backends.reference"):
        assert f"'{name}'" not in loaded


def test_inspect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from torchport.cli import main

    aot.lower(Cache(), (torch.ones(64),), backend="reference").save(tmp_path / "c.pt2")
    assert main(["inspect", str(tmp_path / "c.pt2")]) == 0
    shown = capsys.readouterr().out
    for part in ("all checksums match", "method forward", "input  x: float32[64]", "buffer seen", "delegate #0: refer",
                 "table: float32[64, 64]  16.0 KiB"):  # fmt: skip
        assert part in shown
    (tmp_path / "c.pt2").write_bytes((tmp_path / "c.pt2").read_bytes()[:-1])
    assert main(["inspect", str(tmp_path / "c.pt2")]) == 2
    assert "not a whole program file" in capsys.readouterr().err


def test_add_sub_on_the_lazy_device() -> None:
    device = torchport.device("add_sub")
    x, y = torch.rand(5, device=device), torch.rand(5, device=device)
    torch.testing.assert_close((x + y - 2.0).cpu(), x.cpu() + y.cpu() - 2.0)
    torch.testing.assert_close(torch.sin(x).cpu(), torch.sin(x.cpu()))


def test_add_sub_says_what_it_does_not_take() -> None:
    backend = AddSubBackend()
    from helpers_graphs import build

    graph = build(lambda g, inputs: [g.call_function(aten.mul.Tensor, (inputs[0], inputs[1]))], [X, X])
    with pytest.raises(CompileError, match="adds and subtracts, nothing else"):
        backend.preprocess(graph, CompileSpecs())
