"""Lowering: values, partitioners and their rules, methods, buffers, files, reports, errors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import aot_support
import pytest
import torch
from aot_support import EXTRA, Cache, Chain, Net, W, X, fresh
from torch import fx, nn
from torch.overrides import TorchFunctionMode

import torchport
from torchport import aot, runtime
from torchport.backend.interface import FreeableBuffer, InitContext, Processed, Support
from torchport.backends.add_sub import AddSubBackend
from torchport.backends.reference import ReferenceBackend
from torchport.core.errors import (
    CompileError,
    ConfigError,
    DelegateError,
    ErrorCode,
    MethodError,
    ProgramError,
    UnsupportedOp,
)
from torchport.core.specs import CompileSpecs

aten = torch.ops.aten


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


class _Spy(TorchFunctionMode):
    """Notes every function that it hears of."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.heard.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("whole", [True, False])
def test_a_program_runs_in_the_default_state_whatever_the_caller_has_on(whole: bool, tmp_path: Path) -> None:
    """As one delegate, and with operators that no delegate took."""
    backend = fresh() if whole else fresh(supports=lambda self, node: Support(node.target is aten.mm.default, "no"))
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU(), nn.Linear(4, 2, bias=False)).eval()
    x = torch.randn(3, 4)
    expected = model(x).detach()
    aot.lower(model, (x,), backend=backend.name).save(tmp_path / "model.pt2")
    method = runtime.load(tmp_path / "model.pt2").load_method()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(method(x)[0], expected)
    with torch.inference_mode():
        result = method(x)[0]
    assert not result.is_inference()
    with _Spy() as spy:
        result = method(x)[0]
        method.set_inputs(x)
        while method.step():
            pass
        method.outputs()
    torch.testing.assert_close(result, expected)
    computed = [func for func in spy.heard if "relu" in str(func) or "mm" in str(func) or "linear" in str(func)]
    assert not computed, "what the program computes is not the caller's business"
    assert torch.is_grad_enabled()


def test_delegates_are_counted_and_checked_as_computations_are_elsewhere(tmp_path: Path) -> None:
    def execute(self: Any, handle: Any, args: Any, context: Any) -> Any:
        results = ReferenceBackend.execute(self, handle, args, context)
        return results[:-1] if self.wrong else results

    backend, x = fresh(execute=execute, wrong=False), torch.randn(2)
    aot.lower(nn.ReLU(), (x,), backend=backend.name).save(tmp_path / "model.pt2")
    method = runtime.load(tmp_path / "model.pt2").load_method()
    torchport.metrics.reset()
    for _ in range(3):
        method(x)
    assert torchport.metrics.counter("Execute") == 3
    assert torchport.metrics.snapshot()["samples"]["ExecuteTime"] == 3
    backend.wrong = True
    with pytest.raises(DelegateError, match="0 values for 1 outputs"):
        method(x)


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
    assert "aot_support.py" in linear.source
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


# -- errors ------------------------------------------------------------------------------------------------------------
def test_an_error_in_a_delegate_names_method_delegate_handle_module_and_line(net: Net, tmp_path: Path) -> None:
    class Breaking(ReferenceBackend):
        name = "aot_breaking"

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
        n
        for n, text in enumerate(Path(aot_support.__file__).read_text().splitlines(), 1)
        if "hidden = torch.relu(" in text
    )
    assert error.source == f"{aot_support.__file__}:{line} in forward"
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
    with pytest.raises(ProgramError, match=r"ends in \.pt2"):
        aot.lower(Chain(), (X, W), backend="reference").save("program.zip")
    with pytest.raises(ProgramError, match="no folder"):
        aot.lower(Chain(), (X, W), backend="reference").save("/nonexistent/program.pt2")


def test_results_that_are_no_tensors_are_refused() -> None:
    class Number(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return x.sum().item()

    class Nested(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            counts, edges = torch.histogramdd(x, [3, 2])
            return [counts, *edges]

    with pytest.raises(UnsupportedOp, match="depends on a tensor's values; return the tensor"):
        aot.lower(Number(), (X,), backend="reference")
    with pytest.raises(UnsupportedOp, match="a list among its results"):
        aot.lower(Nested(), (torch.randn(5, 2),), backend="add_sub")


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
    for name in (
        "torch",
        "torchport.aot",
        "torchport.frontend",
        "torchport.trace",
        "torchport.run",
        "torchport.backends.reference",
    ):
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
