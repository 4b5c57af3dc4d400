"""What ExecuTorch and TorchScript promise of lowering, as cases here: cycles, buffers, places, availability, maps."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.utils._pytree import register_pytree_node

import torchport
from torchport import aot, runtime
from torchport.aot import DelegationSpec, OpList, Partitioner, PartitionResult, Supported, WholeProgram
from torchport.backend.interface import Processed, Support
from torchport.backend.optional import preprocess_each
from torchport.backends.add_sub import AddSubBackend
from torchport.backends.reference import ReferenceBackend
from torchport.core.errors import (
    BackendUnavailable,
    CompileError,
    ConfigError,
    DelegateError,
    ErrorCode,
    MethodError,
    ProgramError,
    UnsupportedOp,
)
from torchport.core.specs import CompileSpecs

_numbers = itertools.count()


def fresh(**attributes: Any) -> ReferenceBackend:
    """A reference backend under a name of its own, not registered."""
    return type("Named", (ReferenceBackend,), {"name": f"aot_spec_{next(_numbers)}", **attributes})()


class Inner(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.inner(x, y)


X = torch.tensor([1.0, 2.0])


# -- cycles --------------------------------------------------------------------------------------------------------
class Coloured(Partitioner):
    """Takes operators at random."""

    def __init__(self, backend: Any, seed: int, share: float) -> None:
        super().__init__(backend)
        self.random = random.Random(seed)
        self.share = share

    def partition(self, graph: fx.GraphModule, taken: Collection[fx.Node]) -> PartitionResult:
        nodes = [node for node in graph.graph.nodes if node.op == "call_function" and node not in taken]
        tags = {node: f"t{self.random.randrange(2)}" for node in nodes if self.random.random() < self.share}
        return PartitionResult(tags, {tag: DelegationSpec(self.backend) for tag in set(tags.values())}, True)


class Block(nn.Module):
    """Attention with residuals and a gate: ways from everywhere to everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        weights = torch.softmax(q @ k.transpose(-1, -2) / 8**0.5, -1)
        self.seen += x.mean((0, 1))
        gate = torch.sigmoid(q + self.seen)
        return x + self.out(weights @ v) * gate + self.seen


@pytest.mark.parametrize("seed", range(4))
def test_tags_at_random_never_make_a_cycle(seed: int, tmp_path: Path) -> None:
    torch.manual_seed(seed)
    model, x = nn.Sequential(Block(), Block()).eval(), torch.randn(2, 3, 8)
    partitioners = [Coloured(fresh(), seed, 0.4), Coloured(fresh(), -seed, 0.7)]
    exported = torch.export.export(model, (x,))
    lowered = aot.lower(exported, partitioners=partitioners)
    assert len(lowered.pieces["forward"]) > 4
    for _ in range(3):
        torch.testing.assert_close(lowered(x), model(x))
    assert len(lowered.program.load_method().state) == 2


# -- buffers -------------------------------------------------------------------------------------------------------
class Cached(nn.Module):
    """A key-value cache, written at a position."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(4, 3))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, key: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        self.keys.index_copy_(0, at, key)
        self.count += 1
        return torch.sin(self.keys) @ key.t() + self.count


@pytest.mark.parametrize("ops", [["aten.sin"], ["aten.index_copy"], ["aten.add", "aten.matmul"], []])
def test_a_cache_over_delegates_and_leftovers(ops: list[str], tmp_path: Path) -> None:
    """Whoever reads the new value and whoever makes it: one delegate, two, or none."""
    model, first, second = Cached(), fresh(), fresh()
    key = torch.ones(1, 3)
    lowered = aot.lower(
        model, (key, torch.tensor([0])), partitioners=[OpList(first, ops), OpList(second, ["aten.sin"])]
    )
    for backend in (first, second):
        torchport.register(backend)
    lowered.save(tmp_path / "c.pt2")
    method = runtime.load(tmp_path / "c.pt2").load_method()
    for position in range(4):
        args = (key * position, torch.tensor([position]))
        expected = model(*args)
        torch.testing.assert_close(lowered(*args), expected)
        torch.testing.assert_close(method(*args)[0], expected)
    torch.testing.assert_close(method.state["keys"], model.keys)
    method.state.reset()
    torch.testing.assert_close(method.state["keys"], torch.zeros(4, 3))


# -- kept whole ----------------------------------------------------------------------------------------------------
def test_kept_whole_per_backend_in_one_program() -> None:
    """One ``hardswish`` goes whole to a backend that has it; what that one does not take is decomposed for the next."""

    class Two(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return nn.functional.hardswish(x) + nn.functional.hardswish(y)

    def small_only(self: Any, node: fx.Node) -> Support:
        whole = "hardswish" in str(node.target) and node.meta["val"].numel() < 4
        return Support.yes() if whole else Support.no("only a small hardswish")

    def no_hardswish(self: Any, node: fx.Node) -> Support:
        return Support.no("no hardswish") if "hardswish" in str(node.target) else Support.yes()

    first, second = fresh(supports=small_only), fresh(supports=no_hardswish)
    x, y = torch.randn(1), torch.randn(5)
    lowered = aot.lower(Two(), (x, y), backend=[first, second])
    ops = {
        piece.backend.name: {str(n.target) for n in piece.graph.graph.nodes if n.op == "call_function"}
        for piece in lowered.pieces["forward"]
    }
    assert ops[first.name] == {"aten.hardswish.default"}
    assert "aten.hardswish.default" not in ops[second.name]
    assert len(ops[second.name]) > 1
    torch.testing.assert_close(lowered(x, y), Two()(x, y))


# -- weight sharing ------------------------------------------------------------------------------------------------
def test_one_call_for_all_methods_shares_what_it_likes(tmp_path: Path) -> None:
    """``preprocess_methods`` sees every method's graphs and gives them one table, which the file has once."""
    calls: list[Any] = []

    class Sharing(ReferenceBackend):
        name = f"aot_spec_{next(_numbers)}"

        def preprocess_methods(self, graphs: Any, specs: Any) -> Any:
            calls.append({name: len(found) for name, found in graphs.items()})
            made = preprocess_each(self, graphs, specs)
            table = b"".join(one.data for found in made.values() for one in found)
            return {
                name: [Processed(one.data, one.debug_map, {"table": table}) for one in found]
                for name, found in made.items()
            }

        def init(self, processed: Any, specs: Any, context: Any) -> Any:
            assert bytes(processed.data) in bytes(context.named_data["table"])
            return super().init(processed, specs, context)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.arange(1.0, 3.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.w

        def backwards(self, x: torch.Tensor) -> torch.Tensor:
            return x / self.w

    torchport.register(Sharing)
    model = Model()
    lowered = aot.lower(model, (X,), backend=Sharing.name, methods={"backwards": (X,)})
    assert calls == [{"forward": 1, "backwards": 1}]
    saved = lowered.save(tmp_path / "m.pt2")
    assert saved.weights == 8
    program = runtime.load(tmp_path / "m.pt2")
    entries = {tuple(one.named_data.items()) for name in program.methods for one in program._described(name).delegates}
    assert len(entries) == 1
    torch.testing.assert_close(program.load_method("backwards")(X)[0], model.backwards(X))


# -- debug maps ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("debug_map", "says"),
    [
        ({"op": ()}, "stands for no operator"),
        ({1.5: (1,)}, "ids are numbers or text"),
        ({True: (1,)}, "ids are numbers or text"),
        ({"op": (999,)}, "has debug handle 999"),
    ],
    ids=["empty", "float", "bool", "unknown handle"],
)
def test_debug_maps_are_checked(debug_map: Any, says: str) -> None:
    def preprocess(self: Any, graph: fx.GraphModule, specs: CompileSpecs) -> Processed:
        return Processed(b"", debug_map)

    with pytest.raises(CompileError, match=says):
        aot.lower(Outer(), (X, X), backend=fresh(preprocess=preprocess))


@pytest.mark.parametrize("generated", [True, False], ids=["numbers", "names"])
def test_debug_maps_lead_from_the_engines_ids_to_the_users_line(generated: bool, tmp_path: Path) -> None:
    class Engine(ReferenceBackend):
        name = f"aot_spec_{next(_numbers)}"

        def preprocess(self, graph: fx.GraphModule, specs: CompileSpecs) -> Processed:
            made = super().preprocess(graph, specs)
            calls = [node for node in graph.graph.nodes if node.op == "call_function"]
            ids = range(100, 100 + len(calls)) if generated else [f"kernel_{n}" for n in range(len(calls))]
            return Processed(made.data, {at: (node.meta["debug_handle"],) for at, node in zip(ids, calls, strict=True)})

        def execute(self, handle: Any, args: Any, context: Any) -> Any:
            raise DelegateError("overflow", code=ErrorCode.OUT_OF_RESOURCES, ident=100 if generated else "kernel_0")

    torchport.register(Engine)
    aot.lower(Outer(), (X, X), backend=Engine.name).save(tmp_path / "m.pt2")
    with pytest.raises(DelegateError, match="overflow") as caught:
        runtime.load(tmp_path / "m.pt2").load_method()(X, X)
    error = caught.value
    text = Path(__file__).read_text().splitlines()
    line, call = (
        next(n for n, line in enumerate(text, 1) if part in line) for part in ("return x + y", "self.inner(x")
    )
    assert error.source == f"{__file__}:{line} in forward"
    assert (error.op, error.module, error.hierarchy) == ("aten.add.Tensor", "inner", "Outer > inner: Inner")
    assert error.stack is not None
    assert error.stack.splitlines() == [
        f"{__file__}:{call} in forward",
        "  return self.inner(x, y)",
        f"{__file__}:{line} in forward",
        "  return x + y",
    ]


def test_what_cannot_be_lowered_is_shown_with_its_text() -> None:
    class Multiplying(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x * y - y

    with pytest.raises(UnsupportedOp, match="1 operator of method 'forward' is not supported") as caught:
        aot.lower(Multiplying(), (X, X), partitioners=[WholeProgram("add_sub")])
    assert "      return x * y - y" in str(caught.value).splitlines()


# -- available, and not --------------------------------------------------------------------------------------------
class Elsewhere(AddSubBackend):
    """Compiles here, runs where the chip is."""

    name = "aot_spec_elsewhere"
    here = False

    def is_available(self) -> bool:
        return self.here

    def unavailable_reason(self) -> str:
        return "" if self.here else "there is no such chip in this machine"


def test_a_backend_that_cannot_run_here_is_lowered_for_with_a_warning(tmp_path: Path) -> None:
    """TorchScript's demonstration warns when lowering, saves, and raises when the module runs and when it is loaded."""
    torchport.register(Elsewhere)
    backend = torchport.registry.find(Elsewhere.name)
    with pytest.raises(BackendUnavailable, match="no such chip"):
        torchport.get_backend(Elsewhere.name)
    with pytest.warns(UserWarning, match=r"no such chip.*can be compiled and saved here") as noted:
        lowered = aot.lower(Outer(), (X, X), backend=Elsewhere.name)
    assert [Path(one.filename).name for one in noted] == [Path(__file__).name]
    lowered.save(tmp_path / "m.pt2")
    with pytest.raises(DelegateError, match="no such chip") as caught:
        lowered(X, X)
    assert caught.value.code == ErrorCode.NOT_FOUND
    with pytest.raises(DelegateError, match="no such chip"):
        runtime.load(tmp_path / "m.pt2").load_method()
    backend.here = True  # type: ignore[attr-defined]
    torch.testing.assert_close(runtime.load(tmp_path / "m.pt2").load_method()(X, X)[0], X + X)


def test_a_compiler_that_is_not_installed_is_said_to_be() -> None:
    def preprocess(self: Any, graph: fx.GraphModule, specs: CompileSpecs) -> Processed:
        import no_such_compiler  # noqa: F401  # pyright: ignore

        raise AssertionError

    def reason(self: Any) -> str:
        return "pip install no-such-compiler"

    backend = fresh(preprocess=preprocess, unavailable_reason=reason)
    with pytest.raises(BackendUnavailable, match="pip install no-such-compiler"):
        aot.lower(Outer(), (X, X), backend=backend)


# -- arguments, files ------------------------------------------------------------------------------------------------
def test_example_inputs_are_a_tuple() -> None:
    with pytest.raises(ConfigError, match=r"args is a Tensor; give a tuple"):
        aot.lower(nn.ReLU(), X, backend="reference")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"methods\['more'\] is a Tensor"):
        aot.lower(nn.ReLU(), (X,), backend="reference", methods={"more": X})  # type: ignore[dict-item]
    lowered = aot.lower(nn.ReLU(), (X,), backend="reference")
    for call in (lowered.graph, lowered.run, lowered.graph_module):
        with pytest.raises(MethodError, match="no method 'absent'"):
            call("absent")


def test_alignment_as_asked_and_torch_reads_it(tmp_path: Path) -> None:
    layer = nn.Linear(2, 2)
    lowered = aot.lower(layer, (X,), backend="reference")
    with pytest.raises(ProgramError, match="power of two"):
        lowered.save(tmp_path / "m.pt2", alignment=100)
    assert os.listdir(tmp_path) == []
    lowered.save(tmp_path / "m.pt2", alignment=4096)
    program = runtime.load(tmp_path / "m.pt2")
    method = program.load_method()
    assert all(value.data_ptr() % 4096 == 0 for value in (program.constant(n, method._host) for n in (0, 1)))
    torch.testing.assert_close(method(X)[0], layer(X).detach())
    torch.testing.assert_close(torch.export.load(tmp_path / "m.pt2").module()(X), layer(X))


NO_TORCH = """
import sys, numpy
import torchport.runtime as runtime
(result,) = runtime.load({path!r}).load_method()(numpy.ones(2, numpy.float32))
assert result.tolist() == {expected!r}, result
print(sorted(name for name in sys.modules if name in ("torch", "torchport.aot", "torchport.frontend", "openvino")))
"""


@pytest.mark.skipif(find_spec("openvino") is None, reason="openvino is not installed")
def test_openvino_runs_without_torch(tmp_path: Path) -> None:
    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x * 2 - 1)

    aot.lower(Net(), (X,), backend="openvino").save(tmp_path / "n.pt2")
    code = NO_TORCH.format(path=str(tmp_path / "n.pt2"), expected=[1.0, 1.0])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["['openvino']"]


def test_partitioners_in_order_and_purity_on_real_backends() -> None:
    """``add_sub`` first, a real engine for the rest; the exported program is as it was."""
    exported = torch.export.export(Block().eval(), (torch.randn(2, 3, 8),))
    before = exported.graph_module.print_readable(print_output=False)
    lowered = aot.lower(exported, partitioners=[Supported("add_sub"), Supported("reference")])
    assert exported.graph_module.print_readable(print_output=False) == before
    x = torch.randn(2, 3, 8)
    torch.testing.assert_close(lowered(x), exported.module()(x))


def test_what_neither_a_backend_nor_the_file_takes_is_said() -> None:
    class Branching(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (x,))

    with pytest.raises(UnsupportedOp, match="cond cannot be part of a program") as caught:
        aot.lower(Branching(), (X,), backend="add_sub")
    assert "test_aot_spec.py" in str(caught.value)


class Found:
    def __init__(self, value: torch.Tensor, index: torch.Tensor) -> None:
        self.value, self.index = value, index


def test_what_torch_cannot_save_is_said(tmp_path: Path) -> None:
    class Finding(nn.Module):
        def forward(self, x: torch.Tensor) -> Found:
            return Found(*x.max(0))

    # Registered without the name that a file would have it under. (Up to 2.14 ``x.max(0)`` itself could not be saved.)
    register_pytree_node(Found, lambda found: ([found.value, found.index], None), lambda parts, _: Found(*parts))
    lowered = aot.lower(Finding(), (X,), backend="reference")
    assert lowered(X).index == 1
    with pytest.raises(ProgramError, match="plain tuples, lists and dicts") as caught:
        lowered.save(tmp_path / "m.pt2")
    assert caught.value.code == ErrorCode.NOT_SUPPORTED
    assert os.listdir(tmp_path) == []


def test_a_model_without_inputs_gives_tensors() -> None:
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("value", torch.tensor([1.0, 2.0]))

        def forward(self) -> tuple[torch.Tensor, int]:
            return self.value + self.value, 3

    lowered = aot.lower(Constant(), backend="add_sub")
    assert not lowered.left["forward"]
    torch.testing.assert_close(lowered(), (torch.tensor([2.0, 4.0]), 3))
