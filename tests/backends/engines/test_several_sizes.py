"""One computation for several sizes, behind every frontend: how often is compiled, and that values are the CPU's."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from padding_engine import Padding
from symbolic_engine import Symbolic
from torch import nn

import torchport
from torchport import metrics
from torchport.backend.compiler import computations
from torchport.backend.prepare import describe
from torchport.backend.registry import registry
from torchport.backend.serialize import fingerprint
from torchport.backend.sizes import families as known
from torchport.backends.inductor import InductorBackend
from torchport.core.config import config
from torchport.core.specs import CompileSpecs
from torchport.run import flush, worth
from torchport.run import sizes as run_sizes

REAL = ("inductor", "xla", "openvino")
COUNTERS = ("UncachedCompile", "ForSeveralSizes", "OtherSizes", "NotSymbolic")


class Mixed(nn.Module):
    """Attention over the second dimension, a layer norm, and a mean over it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, length, 6] to [batch, 3]."""
        h = self.norm(self.first(x)).relu()
        weights = (h @ h.transpose(-1, -2) / 3.0).softmax(-1)
        return self.last(weights @ h).mean(1)


def _model() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(1)
    host = Mixed().eval()
    return host, copy.deepcopy(host).to("port")


def _counted() -> dict[str, int]:
    return {name: metrics.counter(name) for name in COUNTERS}


def _forwards(shapes: Sequence[tuple[int, int]]) -> dict[str, int]:
    """Run shapes through a model and compare with the CPU; what was counted."""
    host, device = _model()
    before = _counted()
    for batch, length in shapes:
        x = torch.randn(batch, length, 6)
        with torch.no_grad():
            torch.testing.assert_close(device(x.to("port")).cpu(), host(x), rtol=1e-4, atol=1e-5)
    return {name: after - before[name] for name, after in _counted().items()}


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No sizes are known, and the disk cache is empty."""
    monkeypatch.setattr(known, "families", type(known.families)())
    monkeypatch.setattr(known, "_bodies", type(known._bodies)())
    monkeypatch.setattr(run_sizes, "families", type(run_sizes.families)())
    monkeypatch.setattr(run_sizes.Family, "any_shared", False)
    with config.override(cache="on", cache_dir=str(tmp_path / "cache"), tiers="off"):
        computations.clear()
        yield
    torchport.use("reference")


@pytest.fixture
def symbolic(fresh: None) -> Iterator[type[Symbolic]]:
    """The backend that keeps graphs with symbols as they are, on ``port:0``."""
    for kept in (Symbolic.graphs, Symbolic.exact, Symbolic.destroyed):
        kept.clear()
    Symbolic.limit, Symbolic.refuses, Symbolic.loads_none = 0, "", False
    torchport.register(Symbolic)
    torchport.use("symbolic")
    yield Symbolic
    torchport.sync()
    torchport.use("reference")
    registry.unregister("symbolic")


@pytest.fixture
def padding(fresh: None) -> Iterator[None]:
    """The backend that is given padded graphs, registered."""
    torchport.register(Padding)
    yield
    torchport.use("reference")
    registry.unregister(Padding.name)


# -- the rules, by a backend that computes as the CPU does ------------------------------------------------------------
def test_the_second_size_leads_to_a_computation_that_serves_every_further_one(symbolic: type[Symbolic]) -> None:
    found = _forwards([(2, 5), (2, 7), (2, 9), (2, 31), (2, 5), (2, 64)])
    assert found == {"UncachedCompile": 2, "ForSeveralSizes": 1, "OtherSizes": 3, "NotSymbolic": 0}
    assert (len(symbolic.exact), len(symbolic.graphs)) == (1, 1)


def test_what_varies_later_is_no_constant_any_more(symbolic: type[Symbolic]) -> None:
    found = _forwards([(2, 5), (2, 7), (3, 7), (4, 9), (9, 12)])
    assert found == {"UncachedCompile": 3, "ForSeveralSizes": 2, "OtherSizes": 2, "NotSymbolic": 0}


def test_what_varied_is_known_whichever_values_are_wanted(symbolic: type[Symbolic]) -> None:
    """A training step wants other values when something still holds a gradient: the operators are the same."""
    from helpers_graphs import normal_form  # a process of one of the tests imports this module without that folder

    def prepared(length: int, both: bool) -> bool:
        def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            h = x.sin() * 2.0
            return (h.cos(), h) if both else (h.cos(),)

        graph, _ = normal_form(fn, [torch.randn(2, length)])
        about = describe(graph, fingerprint(graph), None)
        found = known.compiled_for_several(registry.get("symbolic"), CompileSpecs(), graph, about)
        return found is not None

    assert [prepared(5, False), prepared(7, False)] == [False, True]
    assert prepared(9, True)  # at first sight
    graphs = len(symbolic.graphs)
    graph, _ = normal_form(lambda x: ((x.sin() * 2.0).cos(), x.sin() * 3.0), [torch.randn(2, 9)])
    about = describe(graph, fingerprint(graph), None)
    assert known.compiled_for_several(registry.get("symbolic"), CompileSpecs(), graph, about) is None
    assert len(symbolic.graphs) == graphs == 2


def test_a_size_of_one_has_a_computation_of_its_own(symbolic: type[Symbolic]) -> None:
    found = _forwards([(2, 5), (1, 5), (2, 1), (3, 5), (1, 1)])
    assert found["ForSeveralSizes"] == 1
    assert len(symbolic.exact) == 4


def test_what_the_compiler_asks_of_a_size_limits_the_computation(symbolic: type[Symbolic]) -> None:
    symbolic.limit = 20
    found = _forwards([(2, 5), (2, 7), (2, 19), (2, 21), (2, 40), (2, 8)])
    # 21 is on the other side: the graph for it is the third, and what is compiled for it serves 40.
    assert found["OtherSizes"] == 3
    assert len(symbolic.graphs) == 2


def test_what_cannot_have_symbols_is_compiled_for_each_size(symbolic: type[Symbolic]) -> None:
    symbolic.refuses = "not today"
    found = _forwards([(2, 5), (2, 7), (2, 9), (2, 11), (2, 13), (2, 15), (2, 17)])
    assert (found["ForSeveralSizes"], found["OtherSizes"]) == (0, 0)
    assert len(symbolic.exact) == 7
    assert found["NotSymbolic"] == known.TRIES  # and is not tried for ever


def test_what_the_engine_does_not_load_is_compiled_for_each_size(symbolic: type[Symbolic]) -> None:
    symbolic.loads_none = True
    found = _forwards([(2, 5), (2, 7), (2, 9), (2, 11)])
    assert found["OtherSizes"] == 0
    assert len(symbolic.exact) == 4


def test_whatever_goes_wrong_with_symbols_each_size_by_itself_is_compiled(
    symbolic: type[Symbolic], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any) -> Any:
        raise SyntaxError("a graph whose code cannot be written")

    monkeypatch.setattr(known, "_compiled", broken)
    found = _forwards([(2, 5), (2, 7), (2, 9)])
    assert (found["UncachedCompile"], found["NotSymbolic"]) == (3, 2)


def test_what_is_padded_to_buckets_is_not_padded_again(fresh: None) -> None:
    """By torch.compile's option: its graphs for several buckets are equal but for sizes, too."""
    host, _ = _model()
    torch._dynamo.reset()
    made = torch.compile(host, backend="torchport", options={"backend": "xla", "buckets": True})
    before = _counted()
    with torch.no_grad():
        for length in (5, 7, 12, 30, 13):
            x = torch.randn(2, length, 6)
            torch._dynamo.mark_dynamic(x, 1)
            torch.testing.assert_close(made(x), host(x), rtol=1e-4, atol=1e-5)
    found = {name: after - before[name] for name, after in _counted().items()}
    assert (found["UncachedCompile"], found["ForSeveralSizes"], found["OtherSizes"]) == (3, 0, 0)


# -- random numbers of padded tensors ---------------------------------------------------------------------------------
SHAPES = ((2, 5), (2, 6), (3, 7), (4, 9), (5, 8), (3, 11), (4, 10), (2, 15), (7, 12), (5, 16), (6, 9))


def _drawn(batch: int, length: int) -> list[torch.Tensor]:
    """A step of training whose random numbers stand in tensors of one, two and three sizes, in both orders."""
    torch.manual_seed(batch * 100 + length)
    x = torch.linspace(-2, 2, batch * length * 6).reshape(batch, length, 6).to("port")
    weight = torch.linspace(-1, 1, 36).reshape(6, 6).to("port").requires_grad_()
    hidden = nn.functional.dropout(torch.tanh(x @ weight), 0.3)
    noisy = hidden + torch.randn_like(hidden) * 0.1 + torch.rand_like(hidden, dtype=torch.float64).float()
    kept = noisy * torch.bernoulli(torch.full_like(noisy, 0.5))
    rows = nn.functional.dropout(kept.transpose(0, 1).reshape(length * batch, 6), 0.2)  # sizes multiplied, reversed
    whole = torch.randint(0, 5, (batch, length), device="port")
    places = torch.empty_like(x[0, :, 0]).uniform_(-1, 1)
    loss = (rows * rows).sum() / (batch * length) + (whole * kept.sum(-1) * places).mean()
    loss.backward()
    assert weight.grad is not None
    return [value.detach().cpu() for value in (loss, weight.grad, kept, rows, whole, places)]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["padding", "xla"])
def test_random_numbers_of_padded_tensors_are_those_of_the_true_sizes(engine: str, padding: None) -> None:
    if engine != Padding.name and not registry.get(engine).is_available():
        pytest.skip(f"{engine} is not installed")
    torchport.use("reference")
    wanted = [_drawn(*shape) for shape in SHAPES]
    torchport.use(engine)
    before = _counted()
    for shape, of_reference in zip(SHAPES, wanted, strict=True):
        for value, expected in zip(_drawn(*shape), of_reference, strict=True):
            torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5)
    found = {name: after - before[name] for name, after in _counted().items()}
    assert found["NotSymbolic"] == 0
    assert found["ForSeveralSizes"] <= 4
    assert found["OtherSizes"] >= len(SHAPES) - 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.int8])
def test_numbers_computed_from_sizes_are_as_exact_as_the_programs(dtype: torch.dtype, padding: None) -> None:
    """301 is no bfloat16, and no int8: what is added to them is a number all the same, and is compared as theirs is."""
    torchport.use(Padding.name)
    before = _counted()
    for length in (300, 301, 310, 457, 302):
        x = (torch.arange(2 * length).reshape(2, length) % 100).to(dtype)
        for value, expected in zip(_of_sizes(x.to("port")), _of_sizes(x), strict=True):
            torch.testing.assert_close(value.cpu(), expected, rtol=0, atol=0)
    assert _counted()["OtherSizes"] > before["OtherSizes"] or dtype is torch.int8


def _of_sizes(x: torch.Tensor) -> list[torch.Tensor]:
    length = x.shape[1]
    if x.dtype is torch.int8:
        return [x + (length - 290) % 2]
    return [x + length, x - length, x * length, x == length, x.sum(1) > length, x + (length - 1)]


def test_with_the_setting_off_each_size_is_compiled(symbolic: type[Symbolic]) -> None:
    with config.override(sizes="off"):
        found = _forwards([(2, 5), (2, 7), (2, 9)])
    assert found["UncachedCompile"] == 3
    torch.use_deterministic_algorithms(True)
    try:
        assert _forwards([(2, 15), (2, 17)])["ForSeveralSizes"] == 0
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_computation_lives_as_long_as_one_that_runs_it(symbolic: type[Symbolic]) -> None:
    _forwards([(2, 5), (2, 7), (2, 9)])
    torchport.sync()
    computations.clear()
    assert not any(handle[0] == "base" for handle in symbolic.destroyed if isinstance(handle, tuple))
    found = _forwards([(2, 7), (2, 9)])  # plans hold them
    assert found["UncachedCompile"] == 0


def test_training_steps_of_several_sizes_are_the_cpus(symbolic: type[Symbolic]) -> None:
    before = _counted()
    _train(steps=[4, 6, 9, 4, 13, 2, 6], tolerance=1e-5)
    assert metrics.counter("OtherSizes") > before["OtherSizes"]


def _train(steps: Sequence[int], tolerance: float) -> None:
    host, device = _model()
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (host, device)]
    lost: list[Any] = []
    for length in steps:
        x = torch.randn(2, length, 6)
        for model, optimizer, given in ((host, optimizers[0], x), (device, optimizers[1], x.to("port"))):
            optimizer.zero_grad()
            loss = model(given).square().mean()
            loss.backward()
            optimizer.step()
            lost.append(loss.detach())
    for want, got in zip(lost[::2], lost[1::2], strict=True):
        torch.testing.assert_close(got.cpu(), want, rtol=tolerance, atol=tolerance)
    for want, got in zip(host.parameters(), device.parameters(), strict=True):
        torch.testing.assert_close(got.detach().cpu(), want, rtol=10 * tolerance, atol=10 * tolerance)


def test_with_tiers_a_later_size_is_served_when_it_has_cost_enough(
    symbolic: type[Symbolic], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worth.costs, "_per_operator", {"symbolic": 2e-5})
    monkeypatch.setattr(worth.costs, "note", lambda *args: None)
    monkeypatch.setattr(worth.CompileCosts, "FIXED", 0)
    monkeypatch.setattr(worth, "FEW", 0)
    monkeypatch.setattr(worth, "RECORDING", 0.0)
    with config.override(tiers="on", compile_workers=0):
        torchport.use("reference")
        torchport.use("symbolic")
        _forwards([(2, 5), (2, 7)] * 12)
        assert len(symbolic.graphs) == 1
        found = _forwards([(2, 9)] * 12)
    assert found["OtherSizes"] == 1
    assert len(symbolic.exact) == 1


def test_torch_compile_has_one_computation_for_several_sizes(symbolic: type[Symbolic]) -> None:
    host, _ = _model()
    torch._dynamo.reset()
    made = torch.compile(host, backend="torchport", dynamic=True, options={"backend": "symbolic"})
    before = _counted()
    with torch.no_grad():
        for length in (5, 7, 9, 30):
            x = torch.randn(2, length, 6)
            torch.testing.assert_close(made(x), host(x), rtol=1e-4, atol=1e-5)
    assert metrics.counter("OtherSizes") - before["OtherSizes"] == 2
    assert len(symbolic.graphs) == 1


# -- the engines ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("engine", REAL)
def test_an_engine_computes_many_sizes_with_few_computations(engine: str, fresh: None) -> None:
    if not registry.get(engine).is_available():
        pytest.skip(f"{engine} is not installed")
    torchport.use(engine)
    found = _forwards([(2, 9), (2, 11), (2, 10), (2, 16), (5, 12), (3, 14), (7, 9), (2, 13), (8, 16)])
    assert found["UncachedCompile"] <= 4
    assert found["OtherSizes"] >= 5
    assert not found["NotSymbolic"]


@pytest.mark.parametrize("engine", [pytest.param("inductor", marks=pytest.mark.slow), "xla", "openvino"])
def test_an_engine_trains_on_many_sizes(engine: str, fresh: None) -> None:
    """Sizes come in turns, so that one library's runs for several sizes follow each other on the engine's own queue."""
    torchport.use(engine)
    before = _counted()
    _train(steps=[9, 11, 14, 9, 12, 14, 11, 10, 16, 12, 9], tolerance=1e-4)
    assert metrics.counter("OtherSizes") - before["OtherSizes"] >= 2


@pytest.mark.parametrize("engine", ["xla", "openvino"])
def test_losses_of_classes_are_exact_at_every_size(engine: str, fresh: None) -> None:
    """On ``openvino`` they are written by places, with symbols; on ``xla`` they are an operator, and padded."""
    torchport.use(engine)
    torch.manual_seed(2)
    host = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 5))
    device = copy.deepcopy(host).to("port")
    optimizers = [torch.optim.SGD(one.parameters(), lr=1e-1, momentum=0.9) for one in (host, device)]
    before = _counted()
    for rows in (9, 12, 15, 9, 10, 16, 13):
        x, y = torch.randn(rows, 4), torch.randint(0, 5, (rows,))
        found: list[torch.Tensor] = []
        for model, optimizer, place in zip((host, device), optimizers, ("cpu", "port"), strict=True):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x.to(place)), y.to(place))
            loss.backward()
            optimizer.step()
            found.append(loss.detach().cpu())
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
    after = _counted()
    assert after["OtherSizes"] - before["OtherSizes"] >= 3
    assert after["NotSymbolic"] == before["NotSymbolic"]


_TIERED = """
import sys, torch, torchport
sys.path[:0] = {paths!r}
torchport.config.tiers, torchport.config.cache = "on", "off"
torchport.use("inductor")
import test_several_sizes as own
for length in (11, 14):
    for _ in range(600):  # until it has cost enough, which takes as long as the machine is quick
        own._forwards([(2, length)] * 10)
        torchport.compiled(wait=True)
        if torchport.metrics.counter("TakenOver") >= 1 + (length == 14):
            break
before = own._counted()
for length in (13, 15, 40):
    taken = torchport.metrics.counter("TakenOver")
    for _ in range(100):
        own._forwards([(2, length)] * 6)
        torchport.compiled(wait=True)
        if torchport.metrics.counter("TakenOver") > taken:
            break
after = own._counted()
print(after["UncachedCompile"] - before["UncachedCompile"], after["OtherSizes"] - before["OtherSizes"])
print([record.sizes for record in torchport.tiers() if "several" in record.sizes])
"""


@pytest.mark.slow
def test_with_tiers_the_compilers_process_serves_further_sizes() -> None:
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "support")]
    program = _TIERED.format(paths=paths)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    compiled, told = done.stdout.splitlines()
    assert compiled == "0 3"
    assert told.count("served by a computation for several sizes") >= 3


_NEXT = """
import sys, copy, torch, torchport
sys.path[:0] = {paths!r}
torchport.config.tiers = "off"
torchport.config.cache, torchport.config.cache_dir = "on", {folder!r}
torchport.use({engine!r})
import test_several_sizes as own
found = own._forwards({shapes!r})
print(found["UncachedCompile"], found["OtherSizes"])
"""


@pytest.mark.parametrize("engine", ["inductor", "openvino", pytest.param("xla", marks=pytest.mark.slow)])
def test_another_process_compiles_nothing_for_sizes_that_nobody_has_met(engine: str, tmp_path: Path) -> None:
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "support")]

    def run(shapes: list[tuple[int, int]]) -> list[str]:
        program = _NEXT.format(paths=paths, folder=str(tmp_path), engine=engine, shapes=shapes)
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    assert run([(2, 9), (2, 12)])[0] == "2"
    assert run([(2, 10), (2, 15)]) == ["0", "2"]


@pytest.mark.parametrize(
    "step",
    [
        lambda x: x.lerp(x.cos(), torch.tensor(0.3, device=x.device)),
        lambda x: torch.addcmul(x, x.sin(), torch.tensor([[2.0]], device=x.device), value=0.5),
        lambda x: torch.addcdiv(torch.tensor(1.0, device=x.device), x.sin(), x.cos() + 3.0, value=2.0),
    ],
)
def test_averages_and_products_broadcast_in_several_sizes(
    symbolic: type[Symbolic], step: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """PyTorch's shape rules of these three fail for a size that is a symbol, with a traceback on standard error."""
    before = _counted()
    for length in (5, 7, 9, 12):
        x = torch.randn(2, length)
        torch.testing.assert_close(step(x.to("port")).cpu(), step(x))
    found = {name: after - before[name] for name, after in _counted().items()}
    assert found == {"UncachedCompile": 2, "ForSeveralSizes": 1, "OtherSizes": 2, "NotSymbolic": 0}
    assert "failed while" not in capfd.readouterr().err


def test_what_is_wanted_is_not_taken_for_what_other_sizes_have_more_of(
    symbolic: type[Symbolic], recwarn: pytest.WarningsRecorder
) -> None:
    """Where ``unbind`` has five results, two more than at another size, the value after it has another number."""
    for count, kept in ((5, 5), (3, 0), (4, 0)):
        x = torch.arange(count * 4.0).view(count, 4)
        parts = x.to("port").unbind(0)
        joined, parts = torch.cat([parts[0], parts[1]]), parts[count - kept + 2 :]
        torchport.sync()
        assert torch.equal(joined.cpu(), x[:2].reshape(-1))
    assert not [one for one in recwarn if "run op by op" in str(one.message)]


def test_what_nobody_wants_any_more_may_not_compile(
    symbolic: type[Symbolic], monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    def made(*args: Any, **kwargs: Any) -> Any:
        if len(args[2]) > 1 and args[3][0].shape != (3,):
            raise torchport.CompileError("too much at once")
        return make_plan(*args, **kwargs)

    make_plan = flush.make_plan
    monkeypatch.setattr(flush, "make_plan", made)
    for length in (3, 4):
        x = torch.rand(length)
        root = x.to("port").sqrt()
        found = root * 2
        if length == 4:
            del root
        torchport.sync()
        torch.testing.assert_close(found.cpu(), x.sqrt() * 2)
    assert not [one for one in recwarn if "run op by op" in str(one.message)]


_LOADS_NONE = """
import sys, torch, torchport
sys.path[:0] = {paths!r}
torchport.config.tiers, torchport.config.cache = "on", "off"
torchport.use("inductor")
from torchport.backend import compiler
import test_several_sizes as own

def refused(*args):
    raise compiler.SizesRefused("no memory for as much")

compiler.make_sized = refused
from torchport.run import worth
worth.costs._per_operator["inductor"], worth.FEW, worth.RECORDING = 1e-6, 0, 0.0
type(worth.costs).note = lambda *args: None
if {compiled}:
    made = torch.compile(own.Mixed().eval(), backend="torchport", dynamic=True, options={{"backend": "inductor"}})
    run = lambda length: made(torch.randn(2, length, 6))
else:
    run = lambda length: own._forwards([(2, length)])
with torch.no_grad():
    for length in (11, 14, 17):
        for _ in range(300):  # until it has cost enough
            taken = torchport.metrics.counter("TakenOver")
            run(length)
            torchport.compiled(wait=True)
            if torchport.metrics.counter("TakenOver") > taken:
                break
print(torchport.metrics.counter("TakenOver"), torchport.metrics.counter("StaysInterpreted"))
"""


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
def test_with_tiers_what_the_engine_does_not_load_is_compiled_for_each_size(compiled: bool) -> None:
    if reason := InductorBackend().unavailable_reason():
        pytest.skip(reason)
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "support")]
    program = _LOADS_NONE.format(paths=paths, compiled=compiled)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=400, check=False
    )
    assert (done.stdout.strip(), done.stderr) == ("3 0", "")
