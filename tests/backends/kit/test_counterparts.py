"""What other projects have and this one has a counterpart of since: each is used here."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fakes import Fake
from torch import fx

import torchport
from torchport import BackendDevice, CompileError, ContractError, Support

aten = torch.ops.aten


# -- GetCompilationDevices, Compile(instances) -------------------------------------------------------------------------
def _on_two_devices(**attributes: Any) -> tuple[Any, torch.device, torch.device]:
    loaded: list[str] = []
    ran: list[str] = []

    def init(self: Any, processed: Any, specs: Any, context: Any) -> Any:
        loaded.append(str(context.device))
        return super(type(fake), fake).init(processed, specs, context)

    def execute(self: Any, handle: Any, args: Any, context: Any) -> Any:
        ran.append(str(context.device))
        return super(type(fake), fake).execute(handle, args, context)

    def devices(self: Any) -> list[BackendDevice]:
        return [BackendDevice("cpu", at) for at in range(2)]

    fake = Fake.install(init=init, execute=execute, devices=devices, loaded=loaded, ran=ran, **attributes)
    return fake, fake.device, torchport.device(fake.name, 1)


@pytest.mark.parametrize("shared", [True, False], ids=["one for both", "one for each"])
def test_one_computation_for_several_devices(shared: bool) -> None:
    more = {"compilation_devices": lambda self, device: self.devices()} if shared else {}
    fake, first, second = _on_two_devices(**more)
    x = torch.arange(5.0)
    torchport.metrics.reset()
    with torchport.config.override(tiers="off", cache="off"):
        for device in (first, second, first, second):
            y = x.to(device).mul(3).sin()
            assert torch.equal(y.cpu(), x.mul(3).sin())
            assert y.device == device
    assert len(fake.loaded) == (1 if shared else 2)
    assert fake.ran == ["cpu:0", "cpu:1"] * 2
    assert torchport.metrics.counter("SharedComputation") == (1 if shared else 0)


def test_a_shared_computation_outlives_the_one_it_came_from() -> None:
    ended: list[Any] = []
    _, first, second = _on_two_devices(
        compilation_devices=lambda self, device: self.devices(), destroy=lambda self, handle: ended.append(handle)
    )
    x = torch.arange(5.0)
    with torchport.config.override(tiers="off", cache="off", max_computations=1):
        for device in (first, second):  # of which the second drops the first from memory
            assert torch.equal(x.to(device).mul(7).cos().cpu(), x.mul(7).cos())
        assert torch.equal(x.to(second).mul(7).cos().cpu(), x.mul(7).cos())
        assert ended == []


def test_wrong_compilation_devices_are_named() -> None:
    _, first, _ = _on_two_devices(compilation_devices=lambda self, device: ["cpu:1"])
    with (
        torchport.config.override(tiers="off"),
        pytest.raises(ContractError, match=r"compilation_devices\(\) returned"),
    ):
        torch.ones(3).to(first).add(1).cpu()


def _several(found: list[int]) -> Any:
    def preprocess_all(self: Any, graphs: Any, specs: Any) -> Any:
        found.append(len(graphs))
        return [self.preprocess(graph, specs) for graph in graphs]

    return preprocess_all


@pytest.mark.parametrize("cache", ["on", "off"])
def test_the_segments_of_a_computation_are_compiled_together(cache: str, tmp_path: Path) -> None:
    calls: list[int] = []
    fake = _counting(supports=_no_exp, preprocess_all=_several(calls))
    x, m = torch.rand(64, 64), torch.rand(64, 64)

    def program(device: Any) -> torch.Tensor:
        a, b = x.to(device), m.to(device)
        return (((a @ b).exp() @ b).exp() @ b * 2).cpu()

    with torchport.config.override(tiers="off", cache=cache, cache_dir=str(tmp_path)):
        for _ in range(3):
            torch.testing.assert_close(program(fake.device), program("cpu"))
    assert calls == [2], "of three segments two are the same product, in one call, once"
    assert len(fake.graphs) == 2


def test_a_wrong_number_of_compiled_graphs_is_named() -> None:
    fake = Fake.install(supports=_no_exp, preprocess_all=lambda self, graphs, specs: [])
    x = torch.rand(64, 64)
    with torchport.config.override(tiers="off", cache="off"):
        on = x.to(fake.device)
        with pytest.raises(CompileError, match=r"preprocess_all\(\) returned 0 results for 2 graphs"):
            (((on @ on).exp() @ on) * 2).cpu()


# -- EagerFallbackDeviceType: one backend as the fallback of another ---------------------------------------------------
def _no_exp(self: Any, node: fx.Node) -> Support:
    return Support.no("no exp today") if node.target in (aten.exp.default, aten.cumsum.default) else Support.yes()


def _ran(kind: Any) -> list[Any]:
    return [node.target for graph in kind.graphs for node in graph.graph.nodes if node.op == "call_function"]


def _counting(**attributes: Any) -> Any:
    graphs: list[Any] = []

    def preprocess(self: Any, graph: fx.GraphModule, specs: Any) -> Any:
        graphs.append(graph)
        return super(type(fake), fake).preprocess(graph, specs)

    fake = Fake.install(preprocess=preprocess, graphs=graphs, **attributes)
    return fake


@pytest.mark.parametrize("mode", ["lazy", "eager"])
def test_another_backend_runs_what_one_refuses(mode: str) -> None:
    other, mine = _counting(), _counting(supports=_no_exp)
    x = torch.arange(6.0).reshape(2, 3)
    torchport.metrics.reset()
    with torchport.mode(mode), torchport.config.override(fallback_backend=other.name):
        given = x.to(mine.device)
        found = (((given * 2).t().exp() + 1).relu().cumsum(0) * 3).cpu()
    torch.testing.assert_close(found, ((x * 2).t().exp() + 1).relu().cumsum(0) * 3)
    assert aten.exp.default in _ran(other)
    assert aten.exp.default not in _ran(mine)
    assert torchport.metrics.counter("aten::exp") == 1  # it is a fallback all the same


def test_the_host_runs_what_both_refuse() -> None:
    other, mine = _counting(supports=_no_exp), _counting(supports=_no_exp)
    x = torch.arange(3.0)
    with torchport.config.override(fallback_backend=other.name):
        torch.testing.assert_close((x.to(mine.device).exp() + 1).cpu(), x.exp() + 1)
    assert _ran(other) == []


def test_training_with_a_fallback_backend() -> None:
    def train(device: Any) -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 3).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.linspace(-1, 1, 20).reshape(5, 4).to(device)
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = F.softmax(model(x).exp(), -1).square().sum()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    mine = Fake.install(supports=_no_exp)
    with torchport.config.override(fallback_backend="inductor"):
        assert train(mine.device) == pytest.approx(train("cpu"), rel=1e-5)


def test_a_fallback_backend_that_is_not_there_is_named() -> None:
    mine = Fake.install(supports=_no_exp)
    named = pytest.raises(torchport.BackendNotFound, match="no backend is called 'no_such'")
    with torchport.config.override(fallback_backend="no_such"), named:
        torch.ones(3).to(mine.device).exp().cpu()


# -- GetComputationDataFromNode: the value behind a tensor, if it is there ---------------------------------------------
def test_the_value_behind_a_tensor() -> None:
    mine = Fake.install()
    x = torch.ones(3).to(mine.device)
    held = torchport.backend_data(x)
    assert held is not None
    assert mine.from_device(held).tolist() == [1.0] * 3
    y = x + 1
    executed = torchport.metrics.counter("Execute")
    assert torchport.backend_data(y) is None
    assert torchport.metrics.counter("Execute") == executed  # asking computes nothing
    torchport.sync()
    data = torchport.backend_data(y)
    assert data is not None
    assert data.spec == torchport.TensorSpec.of(torch.ones(3))
    assert mine.from_device(data).tolist() == [2.0] * 3
    with pytest.raises(torchport.UnsupportedOp, match="takes tensors on port, got one on cpu"):
        torchport.backend_data(torch.ones(3))


def test_a_value_that_was_handed_out_is_never_written() -> None:
    x = torch.ones(1 << 16).to(torchport.device("reference"))
    torchport.sync()
    data = torchport.backend_data(x)
    assert data is not None
    for _ in range(3):
        x = x * 2 + 1
        torchport.sync()
    assert torchport.get_backend("reference").from_device(data).sum().item() == 1 << 16


def test_the_error_of_a_value() -> None:
    def execute(self: Any, *args: Any) -> Any:
        raise ValueError("lost")

    mine = Fake.install(execute=execute)
    y = torch.ones(3).to(mine.device) + 1
    with pytest.raises(torchport.ExecutionError, match="lost"):
        torchport.sync()
    with pytest.raises(torchport.ExecutionError, match="lost"):
        torchport.backend_data(y)


# -- GetDefaultDeviceOrdinal: the default device of the process, and of a thread ---------------------------------------
def test_the_default_device_of_a_thread() -> None:
    mine, others = Fake.install().device, []
    with mine:
        thread = threading.Thread(target=lambda: others.append(torch.ones(2).device.type))
        thread.start()
        thread.join()
        assert torch.ones(2).device == mine
    assert others == ["cpu"]


# -- the page ----------------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_each_line_of_code_on_the_page_runs() -> None:
    """In a process of its own: lines pick backends, devices and fallbacks for the whole process."""
    script = Path(__file__).parents[1] / "support" / "coming_from_lines.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.splitlines()[-1].split()[0]) >= 60
