"""Donated inputs: the flags are exact, memory that is given away is never read again, and aliases keep their values."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import fakes
import pytest
import torch
from everyday_support import needs_counters
from test_property_aliasing import Program, random_program, run_often
from torch import nn

import torchport
from torchport import BackendData, Capabilities, ExecutionContext, TensorData

pytestmark = needs_counters


class Recording(fakes.Fake):
    """Notes for each execution which arguments were donated, by the first element of each."""

    name = "recording"

    def __init__(self) -> None:
        self.donated: list[list[float]] = []
        self.kept: list[list[float]] = []

    def execute(self, handle: Any, args: Sequence[BackendData], context: ExecutionContext) -> Sequence[BackendData]:
        firsts = [
            arg.tensor.flatten()[0].item() for arg in args if isinstance(arg, TensorData) and arg.tensor is not None
        ]
        self.donated.append([value for at, value in enumerate(firsts) if at in context.donated])
        self.kept.append([value for at, value in enumerate(firsts) if at not in context.donated])
        return super().execute(handle, args, context)


class Poisoning(fakes.Fake):
    """Overwrites whatever it is given, through the memory itself, as an engine would that computes in place."""

    name = "poisoning"
    poisoned = 0

    def execute(self, handle: Any, args: Sequence[BackendData], context: ExecutionContext) -> Sequence[BackendData]:
        memory: list[torch.Tensor] = []
        for at in context.donated:
            data = args[at]
            assert isinstance(data, TensorData)
            assert data.tensor is not None
            assert not torch._C._is_cow_tensor(data.tensor), "somebody else sees this memory"
            memory.append(data.tensor)
        results = super().execute(handle, args, context)
        with torch.no_grad():
            for tensor in memory:
                tensor.fill_(77 if tensor.dtype is not torch.bool else 1)
        self.poisoned += len(memory)
        return results


@pytest.fixture(params=["inline", "worker"])
def recording(request: pytest.FixtureRequest) -> Iterator[Recording]:
    backend = Recording.install()
    with torchport.config.override(execution=request.param):
        yield backend
        torchport.sync()


def make(recording: Recording, value: float) -> torch.Tensor:
    return torch.full((3,), float(value)).to(recording.device)


def test_an_input_that_nobody_holds_is_donated(recording: Recording) -> None:
    x, y = make(recording, 1), make(recording, 2)
    z = x + y
    del x
    torchport.sync()
    assert (recording.donated, recording.kept) == ([[1]], [[2]])
    assert z.tolist() == [3] * 3
    assert y.tolist() == [2] * 3


def keep_detached(x: torch.Tensor) -> Any:
    return x.detach()


def keep_view(x: torch.Tensor) -> Any:
    return x.view(3, 1)


def keep_graph(x: torch.Tensor) -> Any:
    return (nn.Parameter(torch.ones(3).to(x.device)) * x).sum()


def keep_host_copy(x: torch.Tensor) -> Any:
    return x.cpu()


def keep_in_a_list(x: torch.Tensor) -> Any:
    return [x]


@pytest.mark.parametrize("keep", [keep_detached, keep_graph, keep_host_copy, keep_in_a_list])
def test_what_somebody_can_still_see_is_not_donated(recording: Recording, keep: Callable[[torch.Tensor], Any]) -> None:
    x = make(recording, 5)
    held = keep(x)
    recording.donated.clear()
    y = x + 1
    del x
    torchport.sync()
    assert 5 not in [value for values in recording.donated for value in values]
    assert y.tolist() == [6] * 3
    del held


def test_a_view_taken_before_has_a_value_of_its_own(recording: Recording) -> None:
    x = make(recording, 5)
    view = keep_view(x)
    torchport.sync()
    recording.donated.clear()
    y = x + 1
    del x
    torchport.sync()
    assert y.tolist() == [6] * 3
    view += 1
    assert view.tolist() == [[6]] * 3


def test_parameters_and_optimizer_state_are_donated_in_every_step(recording: Recording) -> None:
    net = nn.Linear(3, 2).to(recording.device)
    opt = torch.optim.Adam(net.parameters(), lr=0.1, foreach=False)
    frozen = make(recording, 9)
    for _ in range(4):
        opt.zero_grad()
        batch = make(recording, 4)
        (net(batch) * frozen[0]).sum().backward()
        del batch
        opt.step()
    torchport.sync()
    last, kept = recording.donated[-1], recording.kept[-1]
    assert 4 in last, "the batch"
    assert kept == [9], "the frozen factor alone"
    assert len(last) == 2 + 4 + 1 + 1, "weight and bias, two moments of each, the batch, and the numbers that vary"


def test_the_same_value_twice_is_not_donated(recording: Recording) -> None:
    x = make(recording, 3)
    alias = x.detach()
    y = x * 2 + alias
    del x, alias
    torchport.sync()
    assert y.tolist() == [9] * 3


def test_results_of_a_running_computation_are_donated_to_the_next(recording: Recording) -> None:
    value = make(recording, 1)
    for _ in range(5):
        value = value * 2
        torchport.sync(wait=False)
    assert value.tolist() == [32] * 3
    assert recording.donated == [[1], [2], [4], [8], [16]]


def test_backends_that_do_not_ask_are_told_nothing() -> None:
    backend = Recording.install(donation=False, restores_donated=False)
    x = make(backend, 1)
    y = x + 1
    del x
    torchport.sync()
    assert backend.donated == [[]]
    assert y.tolist() == [2] * 3


# -- by hand -------------------------------------------------------------------------------------------------------
def test_donate_gives_up_a_tensor_that_is_still_held(recording: Recording) -> None:
    x = make(recording, 5)
    view = x[1:]
    y = x + 1
    torchport.donate(x)
    torchport.sync()
    assert 5 in recording.donated[-1]
    assert y.tolist() == [6] * 3
    assert view.tolist() == [5] * 2
    for use in (lambda: x.tolist(), lambda: x + 1, lambda: x.sum().item()):
        with pytest.raises(torchport.ExecutionError, match="donate"):
            use()
    x.copy_(torch.ones(3))
    assert x.tolist() == [1] * 3


def test_donate_a_pending_tensor_and_an_unused_one(recording: Recording) -> None:
    x = make(recording, 5)
    pending = x * 2
    y = pending + 1
    torchport.donate(pending, x)
    assert y.tolist() == [11] * 3
    for gone in (pending, x):
        with pytest.raises(torchport.ExecutionError, match=r"test_lazy_donation\.py"):
            gone.tolist()
        with pytest.raises(torchport.ExecutionError, match="donate"):
            gone * 2
    assert (y + 1).tolist() == [12] * 3


def test_donate_refuses_tensors_of_other_devices(recording: Recording) -> None:
    x = make(recording, 5)
    with pytest.raises(torchport.UnsupportedOp, match="cpu"):
        torchport.donate(x, torch.ones(3))
    assert x.tolist() == [5] * 3


# -- never a wrong result --------------------------------------------------------------------------------------------
@pytest.fixture
def poisoning() -> Iterator[Poisoning]:
    backend = Poisoning.install()
    torchport.use(backend.name)
    yield backend
    torchport.use("reference")


def forgetful_program(seed: int) -> Program:
    """A program that lets go of much and computes often."""
    draw = random.Random(seed)
    kinds = ["new", "view", "write", "make", "drop", "drop", "sync", "sync", "keep", "to host and back"]
    return [(draw.choice(kinds), draw.randrange(24), draw.randrange(24), draw.randrange(24)) for _ in range(25)]


@pytest.mark.parametrize("execution", ["inline", "worker"])
def test_programs_with_aliases_on_a_backend_that_computes_in_place(poisoning: Poisoning, execution: str) -> None:
    with torchport.config.override(execution=execution):
        for seed in range(25):
            run_often(forgetful_program(seed), seed % 2 == 0)
    assert poisoning.poisoned > 50


@pytest.mark.slow
@pytest.mark.parametrize("execution", ["inline", "worker"])
def test_many_programs_on_a_backend_that_computes_in_place(poisoning: Poisoning, execution: str) -> None:
    with torchport.config.override(execution=execution):
        for seed in range(100, 500):
            run_often(forgetful_program(seed), seed % 2 == 0)
            run_often(random_program(seed), seed % 2 == 0)


def test_training_on_a_backend_that_computes_in_place(poisoning: Poisoning) -> None:
    def train(device: str) -> list[float]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)).to(device)
        opt = torch.optim.AdamW(net.parameters(), lr=0.05)
        averaged = torch.optim.swa_utils.AveragedModel(net)
        losses = []
        for step in range(6):
            x = torch.randn(5, 4, generator=torch.Generator().manual_seed(step)).to(device)
            opt.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            opt.step()
            averaged.update_parameters(net)
            losses.append(loss.detach())
        return [*(loss.item() for loss in losses), *averaged(x).flatten().tolist()]

    assert train("port") == pytest.approx(train("cpu"), rel=1e-4, abs=1e-5)
    assert poisoning.poisoned > 50


# -- failures --------------------------------------------------------------------------------------------------------
class Consuming(fakes.Failing):
    """Fails after it has used up what it was given."""

    name = "consuming"
    where: ClassVar[str] = "execute"
    capabilities = Capabilities(donation=True)


def test_values_that_need_a_donated_input_of_a_failed_computation_say_so() -> None:
    backend = Consuming.install()
    x, held = torch.ones(3).to(backend.device), torch.ones(3).to(backend.device)
    bad, lost, fine = x.sin(), x + 1, held + 1
    del x
    with pytest.raises(torchport.ExecutionError):
        torchport.sync()
    assert fine.tolist() == [2.0] * 3
    with pytest.raises(torchport.ExecutionError, match="donated"):
        lost.tolist()
    with pytest.raises(torchport.ExecutionError):
        bad.tolist()
