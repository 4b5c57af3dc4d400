"""torch.compile before anything is compiled: graphs are interpreted while another process compiles them."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import CountingBackend
from tier_engines import GO, HOW, TierEngine
from torch import nn

import torchport
from torchport import metrics
from torchport.backend.compiler import computations
from torchport.core.config import config
from torchport.worker.service import service

pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.fixture(scope="module", autouse=True)
def _engine() -> Iterator[None]:
    torchport.register(TierEngine)
    yield
    service.stop()
    torchport.use("reference")
    torchport.registry.unregister("tier_engine")


@pytest.fixture(autouse=True)
def _tiers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(HOW, "fine")
    with config.override(tiers="auto", compile_nice=0):
        yield
    service.wait(60)
    computations.clear()


@pytest.fixture(params=["cpu", "port"])
def at(request: pytest.FixtureRequest) -> torch.device:
    """Where the tensors of the compiled model are."""
    torchport.use("tier_engine")
    return torch.device(request.param)


class Gate:
    """A compiler that waits, while this is closed."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def close(self) -> None:
        self.file.unlink(missing_ok=True)

    def open(self) -> None:
        """Let it compile, and wait for that."""
        self.file.touch()
        assert torchport.compiled(wait=True, timeout=300)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Gate]:
    made = Gate(tmp_path / "go")
    made.open()
    monkeypatch.setenv(HOW, "waits")
    monkeypatch.setenv(GO, str(made.file))
    yield made
    made.open()


class Net(nn.Module):
    """Dropout, and a buffer that each forward writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.norm = nn.BatchNorm1d(16)
        self.last = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(nn.functional.dropout(self.norm(self.first(x)).relu(), 0.3))


def compiled(fn: Any, backend: str = "tier_engine", **more: Any) -> Any:
    return torch.compile(fn, backend="torchport", options={"backend": backend}, **more)


def train(
    at: torch.device, steps: int, swap: int | None = None, backend: str = "tier_engine", gate: Gate | None = None
) -> list[torch.Tensor]:
    """Losses, and what the model is at the end. Before step ``swap`` the program waits for its compiler."""
    if gate is not None:
        gate.close()
    torch.manual_seed(3)
    net = Net()
    x, y = torch.randn(8, 6), torch.randn(8, 3)
    net, x, y = net.to(at), x.to(at), y.to(at)
    run = compiled(net, backend)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    losses: list[torch.Tensor] = []
    for step in range(steps):
        if step == swap:
            gate.open() if gate is not None else torchport.compiled(wait=True, timeout=300)
        loss = nn.functional.mse_loss(run(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().cpu())
    return [*losses, *(value.detach().cpu() for value in net.state_dict().values())]


def equal(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


# -- values ------------------------------------------------------------------------------------------------------------
def test_forward_and_backward_are_interpreted_and_then_compiled(gate: Gate, at: torch.device) -> None:
    """Bit by bit: random numbers are drawn once each, and buffers are written once per step."""
    with config.override(tiers="off"):
        wanted = train(at, 6)
    for swap in (1, 4):
        torch.compiler.reset()
        computations.clear()
        metrics.reset()
        assert equal(train(at, 6, swap, gate=gate), wanted)
        graphs = [record for record in torchport.tiers() if record.frontend == "torch.compile"]
        assert [record.tier for record in graphs] == ["compiled", "compiled"]
        assert {record.runs for record in graphs} == {swap}
        assert metrics.counter("CompiledApart") >= 2


@pytest.mark.slow
@pytest.mark.parametrize("swap", range(1, 11))
def test_the_compiled_graphs_take_over_at_any_step(gate: Gate, at: torch.device, swap: int) -> None:
    with config.override(tiers="off"):
        wanted = train(at, 12)
    torch.compiler.reset()
    computations.clear()
    assert equal(train(at, 12, swap, gate=gate), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["inductor", "xla"])
@pytest.mark.parametrize("place", ["cpu", "port"])
def test_engines_agree_with_the_interpreter(engine: str, place: str) -> None:
    if not any(row.name == engine and row.available for row in torchport.list_backends()):
        pytest.skip(f"{engine} is not installed")
    torchport.use(engine)
    with config.override(tiers="off"):
        wanted = train(torch.device(place), 6, backend=engine)
    torch.compiler.reset()
    computations.clear()
    metrics.reset()
    with config.override(verify_swap=2):
        found = train(torch.device(place), 6, 2, engine)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert metrics.counter("VerifiedSwap") >= 4
    assert metrics.counter("RefusedSwap") == 0


def test_a_first_call_waits_for_no_compiler(gate: Gate, at: torch.device) -> None:
    gate.close()
    x = torch.randn(5, 7)
    run = compiled(lambda x: (x.sin() * 2).sum(0))
    torch.testing.assert_close(run(x.to(at)).cpu(), (x.sin() * 2).sum(0))
    assert metrics.counter("UncachedCompile") == 0
    assert not torchport.compiled()
    gate.open()
    torch.testing.assert_close(run(x.to(at)).cpu(), (x.sin() * 2).sum(0))
    assert metrics.counter("UncachedCompile") == 1
    assert metrics.counter("InterpretedRun") >= 1


def test_results_do_not_share_memory_that_they_do_not_share_in_eager(at: torch.device) -> None:
    run = compiled(lambda x: (x.reshape(-1), x.clone().view(-1), x + 0))
    x = torch.randn(3, 4).to(at)
    flat, copied, added = run(x)
    x.zero_()
    assert not flat.cpu().any()
    assert copied.cpu().any()
    assert added.cpu().any()


# -- what is asked for, and what is known ------------------------------------------------------------------------------
def test_the_disk_cache_is_asked_first(tmp_path: Path) -> None:
    x = torch.randn(4, 5)
    with config.override(cache="on", cache_dir=str(tmp_path / "cache")):
        fn = lambda x: x.cos() * 3  # noqa: E731
        compiled(fn)(x)
        assert torchport.compiled(wait=True, timeout=300)
        torch.compiler.reset()
        computations.clear()
        metrics.reset()
        torch.testing.assert_close(compiled(fn)(x), fn(x))
    assert metrics.counter("DiskCacheHit") == 1
    assert metrics.counter("InterpretedPlan") == 0


def test_one_shape_among_many_is_compiled_when_it_comes_back() -> None:
    run = compiled(lambda x: (x * 2).sum(0), dynamic=True)
    for rows in range(2, 8):
        x = torch.randn(rows, 3)
        torch.testing.assert_close(run(x), (x * 2).sum(0))
    assert torchport.compiled()  # nothing was asked for
    x = torch.randn(5, 3)
    for _ in range(2):
        run(x)
        assert torchport.compiled(wait=True, timeout=300)
    torch.testing.assert_close(run(x), (x * 2).sum(0))
    assert metrics.counter("TakenOver") == 1


def test_buckets_are_interpreted_too() -> None:
    run = torch.compile(
        lambda x: x.softmax(0).mean(0), backend="torchport", dynamic=True,
        options={"backend": "tier_engine", "buckets": [16]},
    )  # fmt: skip
    for rows in (3, 5, 9, 4, 7):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(run(x), x.softmax(0).mean(0))
        assert torchport.compiled(wait=True, timeout=300)
    assert metrics.counter("BucketCompile") == 1
    assert metrics.counter("TakenOver") == 1


def test_what_no_other_process_can_make_is_compiled_at_once() -> None:
    backend = CountingBackend()
    torchport.register(backend)
    try:
        x = torch.randn(3)
        torch.testing.assert_close(compiled(lambda x: x + 1, backend.name)(x), x + 1)
    finally:
        torchport.registry.unregister(backend.name)
    assert metrics.counter("InterpretedPlan") == 0
    assert metrics.counter("UncachedCompile") == 1


def test_reference_has_nothing_to_compile() -> None:
    x = torch.randn(3)
    torch.testing.assert_close(compiled(lambda x: x + 1, "reference")(x), x + 1)
    assert metrics.counter("InterpretedPlan") == 0
    assert service.idle()


@pytest.mark.parametrize("setting", [{"tiers": "off"}, {"compile_workers": 0}, {"cache": "off", "tiers": "off"}])
def test_switched_off(setting: dict[str, Any]) -> None:
    x = torch.randn(3)
    with config.override(**setting):
        torch.testing.assert_close(compiled(lambda x: x.exp())(x), x.exp())
    assert metrics.counter("InterpretedPlan") == 0
    assert metrics.counter("UncachedCompile") == 1


def test_in_deterministic_mode_nothing_is_interpreted(at: torch.device) -> None:
    x = torch.randn(4, 9)
    torch.use_deterministic_algorithms(True)
    try:
        torch.testing.assert_close(compiled(lambda x: x.exp())(x.to(at)).cpu(), x.exp())
        (x.to(at).cosh() * 7).cpu()
    finally:
        torch.use_deterministic_algorithms(False)
    assert metrics.counter("InterpretedPlan") == metrics.counter("InterpretedOps") == 0


def test_warm_has_all_of_it_compiled(at: torch.device) -> None:
    run = compiled(lambda x: (x.sin() * 5).tanh())
    x = torch.randn(3, 2)
    torch.testing.assert_close(torchport.warm(run, x.to(at)).cpu(), (x.sin() * 5).tanh())
    before = metrics.counter("InterpretedRun"), metrics.counter("UncachedCompile")
    run(x.to(at))
    assert (metrics.counter("InterpretedRun"), metrics.counter("UncachedCompile")) == before


# -- trouble -----------------------------------------------------------------------------------------------------------
def test_what_does_not_compile_stays_interpreted(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], at: torch.device
) -> None:
    monkeypatch.setenv(HOW, "raises")
    x = torch.randn(3, 5 if at.type == "cpu" else 6)
    run = compiled(lambda x: x.sinh() * 3)
    for _ in range(3):
        torch.testing.assert_close(run(x.to(at)).cpu(), x.sinh() * 3)
        assert torchport.compiled(wait=True, timeout=300)
    (record,) = [one for one in torchport.tiers() if one.frontend == "torch.compile"]
    assert record.tier == "stays interpreted"
    assert "divides by nothing" in record.why
    assert capfd.readouterr().err.count("divides by nothing") <= 1  # once for each reason


def test_a_compiled_graph_with_other_values_is_dropped(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], at: torch.device
) -> None:
    monkeypatch.setenv(HOW, "wrong")
    x = torch.randn(4, 3)
    run = compiled(lambda x: (x.sin(), (x * x).exp()))
    with config.override(verify_swap=3):
        for _ in range(4):
            one, other = run(x.to(at))
            torch.testing.assert_close(one.cpu(), x.sin())
            torch.testing.assert_close(other.cpu(), (x * x).exp())
            assert torchport.compiled(wait=True, timeout=300)
    assert metrics.counter("RefusedSwap") == 1
    said = capfd.readouterr().err
    assert said.count("is dropped") == 1
    file = re.search(r"are in (\S+)", said)
    assert file is not None
    text = Path(file[1]).read_text()
    assert "aten.exp" in text
    assert "aten.sin" not in text  # no more than the value needs


@pytest.mark.parametrize("runs", [1, 3])
def test_verified_swaps_draw_the_same_random_numbers(
    gate: Gate, capfd: pytest.CaptureFixture[str], at: torch.device, runs: int
) -> None:
    with config.override(tiers="off"):
        wanted = train(at, 6)
    torch.compiler.reset()
    computations.clear()
    with config.override(verify_swap=runs):
        assert equal(train(at, 6, 2, gate=gate), wanted)
    assert metrics.counter("VerifiedSwap") >= 2 * runs
    assert metrics.counter("RefusedSwap") == 0
    assert "agrees with the interpreter" in capfd.readouterr().err


def test_an_error_of_the_program_is_one_of_the_engines(at: torch.device) -> None:
    run = compiled(lambda x, i: x[i])
    x = torch.randn(3)
    with pytest.raises((torchport.TorchportError, IndexError)):
        run(x.to(at), torch.tensor([7]).to(at)).cpu()
    torch.testing.assert_close(run(x.to(at), torch.tensor([2]).to(at)).cpu(), x[[2]])


# -- what is told ------------------------------------------------------------------------------------------------------
def test_reasons_records_and_report_say_which_tier(gate: Gate, at: torch.device) -> None:
    gate.close()
    run = compiled(lambda x: x.atan() + 1)
    x = torch.randn(2, 9).to(at)
    run(x)
    (record,) = [one for one in torchport.tiers() if one.frontend == "torch.compile"]
    assert record.tier == "compiling"
    assert [reason.kind for reason in torchport.compile_reasons()][-1] == "graph"
    assert "under torch.compile" in str(torchport.compile_reasons()[-1])
    gate.open()
    run(x)
    assert record.tier == "compiled"
    assert record.took_over is not None
    assert record.took_over > 0
    assert "1 compiled" in metrics.report()
    assert "TakeOverTime" in metrics.report()


def test_another_thread_may_call_meanwhile(gate: Gate) -> None:
    gate.close()
    fn: Callable[[torch.Tensor], torch.Tensor] = lambda x: (x.sin() @ x.t()).relu()  # noqa: E731
    run = compiled(fn)
    x = torch.randn(6, 6)
    run(x)
    wrong: list[object] = []

    def work() -> None:
        for _ in range(200):
            try:
                torch.testing.assert_close(run(x), fn(x))
            except BaseException as error:
                wrong.append(error)
                return

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    gate.open()
    for thread in threads:
        thread.join()
    run(x)
    assert wrong == []
    assert metrics.counter("TakenOver") == 1
