"""Code of ``inductor`` that writes over inputs which are given away: only those, and never a wrong result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers_graphs import CPU, normal_form
from torch import nn

import torchport
from torchport.backend.interface import BackendData, ExecutionContext, FreeableBuffer, InitContext, TensorData
from torchport.backend.serialize import decode, encode, fingerprint
from torchport.backends.inductor import InductorBackend, container
from torchport.core.specs import CompileSpecs, TensorSpec
from torchport.run import donation

backend = InductorBackend()
pytestmark = pytest.mark.skipif(not backend.is_available(), reason=backend.unavailable_reason())
Tensors = tuple[torch.Tensor, ...]


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def donating(fn: Callable[..., Any], *args: torch.Tensor, donated: tuple[int, ...]) -> Any:
    """The compiled function, told that these inputs will probably be donated."""
    graph, _ = normal_form(fn, args)
    for position, node in enumerate(graph.graph.find_nodes(op="placeholder")):
        if position in donated:
            node.meta["donated"] = True
    processed = backend.preprocess(graph, CompileSpecs())
    assert container.decode(processed.data).overwritten == donated
    return backend.init(FreeableBuffer(processed.data), CompileSpecs(), InitContext(CPU))


def run(handle: Any, args: Tensors, donated: tuple[int, ...]) -> list[torch.Tensor]:
    data: list[BackendData] = [TensorData(CPU, TensorSpec.of(arg), arg) for arg in args]
    results = backend.execute(handle, data, ExecutionContext(CPU, donated=frozenset(donated)))
    return [result.tensor for result in results if isinstance(result, TensorData) and result.tensor is not None]


def test_the_guess_is_part_of_the_computation() -> None:
    graph, _ = normal_form(lambda x, y: x + y, [noise(2), noise(2)])
    plain = fingerprint(graph)
    next(iter(graph.graph.find_nodes(op="placeholder"))).meta["donated"] = True
    assert fingerprint(graph) != plain
    again = decode(encode(graph))
    assert [bool(n.meta.get("donated")) for n in again.graph.find_nodes(op="placeholder")] == [True, False]


def test_results_are_written_over_what_is_given_away() -> None:
    def update(p: torch.Tensor, g: torch.Tensor, m: torch.Tensor) -> Tensors:
        m = m * 0.9 + g
        return p - 0.1 * m, m

    args = (noise(64, 33), noise(64, 33) * 2, noise(64, 33) * 3)
    expected = update(*args)
    handle = donating(update, *args, donated=(0, 2))
    for _ in range(3):
        given = tuple(arg.clone() for arg in args)
        places = [arg.data_ptr() for arg in given]
        results = run(handle, given, (0, 2))
        for result, want in zip(results, expected, strict=True):
            torch.testing.assert_close(result, want)
        assert {result.data_ptr() for result in results} == {places[0], places[2]}
        torch.testing.assert_close(given[1], args[1], rtol=0, atol=0)


@pytest.mark.parametrize("donated", [(), (0,), (2,)])
def test_what_is_not_given_away_after_all_is_left_alone(donated: tuple[int, ...]) -> None:
    def update(p: torch.Tensor, g: torch.Tensor, m: torch.Tensor) -> Tensors:
        m = m * 0.9 + g
        return p - 0.1 * m, m

    args = (noise(40, 5), noise(40, 5) * 2, noise(40, 5) * 3)
    handle = donating(update, *args, donated=(0, 2))
    for _ in range(3):
        given = tuple(arg.clone() for arg in args)
        for result, want in zip(run(handle, given, donated), update(*args), strict=True):
            torch.testing.assert_close(result, want)
        for position, (arg, before) in enumerate(zip(given, args, strict=True)):
            if position not in donated:
                torch.testing.assert_close(arg, before, rtol=0, atol=0)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, y: (x + 1, x.t() * 2, x @ y),
        lambda x, y: (x + x.t(), y.flip(0) + y),
        lambda x, y: (x.softmax(0) + x, y - y.mean(0, keepdim=True)),
        lambda x, y: (x.clone(), x * 2, y.t().contiguous() + x),
        lambda x, y: (x[1:] + x[:-1], torch.roll(y, 1, 0) + y),
        lambda x, y: (torch.cat([x, y]), x.cumsum(0) + x, (y @ y).relu() + y),
        lambda x, y: (x.reshape(-1)[::2] * 2, y.view(-1).flip(0).view(32, 32) + y, x),
        lambda x, y: (x.index_select(0, torch.arange(31, -1, -1)) + x, y.sum() + y),
    ],
)
def test_what_reads_an_element_elsewhere_reads_it_before_it_is_overwritten(fn: Any) -> None:
    args = (noise(32, 32), noise(32, 32) * 2)
    graph, inputs = normal_form(fn, args)
    expected = graph(*[arg.clone() for arg in inputs])
    handle = donating(fn, *args, donated=(0, 1))
    for _ in range(2):
        given = tuple(arg.clone() for arg in inputs)
        for result, want in zip(run(handle, given, (0, 1)), expected, strict=True):
            torch.testing.assert_close(result, want)


# -- on the device -----------------------------------------------------------------------------------------------------
@pytest.fixture
def everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(donation, "LARGE", 0)
    torchport.use("inductor")


@pytest.mark.usefixtures("everything_is_large")
def test_a_training_loop_whose_values_somebody_keeps_now_and_then() -> None:
    def trained(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 6)).to(device)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
        x, kept = torch.ones(3, 6).to(device), list[torch.Tensor]()
        for at in range(8):
            optimizer.zero_grad()
            loss = (net(x) - x).square().mean()
            loss.backward()
            if at % 3 == 2:
                kept += [net[0].weight.detach().clone(), net[2].weight.grad, net[0].weight * 1]
            if at == 6:
                kept.append(optimizer.state[net[0].weight]["exp_avg"].data)
            optimizer.step()
        return [value.detach().cpu() for value in (*kept, *net.parameters())]

    for got, expected in zip(trained("port"), trained("cpu"), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("everything_is_large")
def test_a_value_is_given_away_in_one_step_and_kept_in_the_next() -> None:
    x = torch.arange(6.0).to("port")
    kept: list[torch.Tensor] = []
    for at in range(6):
        y = x * 2 + 1
        if at % 2:
            kept.append(x)
        x = y
        torchport.sync()
    expected, seen = torch.arange(6.0), list[torch.Tensor]()
    for at in range(6):
        if at % 2:
            seen.append(expected)
        expected = expected * 2 + 1
    assert [value.tolist() for value in (*kept, x)] == [value.tolist() for value in (*seen, expected)]


def test_only_large_values_that_nobody_holds_are_guessed() -> None:
    torchport.use("inductor")
    small, large, held = torch.ones(4).to("port"), torch.ones(1024, 512).to("port"), torch.ones(1024, 512).to("port")
    guesses: list[frozenset[int]] = []
    original = donation.likely_donated

    def noted(trace: Any) -> frozenset[int]:
        guesses.append(original(trace))
        return guesses[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchport.run.flush.likely_donated", noted)
        small, large, result = small + 1, large + 1, held * 2
        torchport.sync()
        small, large, result = small * 3, large * 3, held * 3
        torchport.sync()
    assert [len(guess) for guess in guesses] == [1, 1]
    assert (small[0].item(), large[0, 0].item(), result[0, 0].item(), held[0, 0].item()) == (6, 6, 3, 1)
