"""Loops whose sizes grow: what comes back in each round becomes one computation, and values are as on the CPU."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import torchport
from torchport import metrics
from torchport.core.config import config
from torchport.run import regions, worth
from torchport.trace.threads import threads


@pytest.fixture(autouse=True)
def _compiled_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tiers without another process; what is to be compiled is compiled at once."""
    torchport.use("reference")
    runtime: Any = threads.of(0).runtime
    runtime.forget_decisions()  # the rounds that other tests ran count, too
    monkeypatch.setattr(regions, "SHORTEST", 24)  # of small models
    monkeypatch.setattr(worth, "WORTH_WAITING", 0.0)
    monkeypatch.setattr(worth, "RECORDING", 1e-9)
    monkeypatch.setattr(worth, "WORTH_A_PROCESS", 1e-9)
    with config.override(tiers="auto", compile_workers=0):
        yield
    torchport.use("reference")


class Layers(nn.Module):
    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()) for _ in range(layers))
        self.drop = nn.Dropout(0.0)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, last: torch.Tensor) -> torch.Tensor:
        x = self.embedding(last)
        for layer in self.layers:
            x = x + self.drop(layer(x)) * 0.5
        self.calls += 1
        return x @ self.embedding.weight.t()


def _generate(model: nn.Module, tokens: int, start: int) -> tuple[list[int], torch.Tensor]:
    """Greedy, from the last token and the mean of all of them: both the ids and a mask grow by one per token."""
    device = next(model.parameters()).device
    ids = torch.arange(start, device=device)[None] % 11
    mask = torch.ones(1, start, device=device)
    with torch.no_grad():
        for _ in range(tokens):
            shift = (ids * mask).sum() / mask.sum()
            logits = model(ids[:, -1:])[:, -1] + shift * 1e-3
            ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
            mask = torch.cat([mask, torch.ones(1, 1, device=device)], 1)
            if ids[0, -1].item() > 99:
                break
    return ids[0].tolist(), model.calls.cpu()  # type: ignore[union-attr]


def _models(seed: int = 0) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(seed)
    model = Layers().eval()
    return model, copy.deepcopy(model).to("port")


def _counts(*names: str) -> tuple[int, ...]:
    return tuple(int(metrics.counter(name)) for name in names)


def test_a_loop_that_grows_is_compiled_once_whatever_it_begins_with() -> None:
    cpu, port = _models()
    found = metrics.counter("RegionsFound")
    assert _generate(port, 60, 3) == _generate(cpu, 60, 3)
    assert metrics.counter("RegionsFound") > found
    before = _counts("UncachedCompile", "InterpretedOps", "RegionEntered")
    for start in (70, 71, 200):  # sizes that were never seen
        assert _generate(port, 30, start) == _generate(cpu, 30, start)
    compiled, interpreted, entered = (b - a for a, b in zip(before, _counts(
        "UncachedCompile", "InterpretedOps", "RegionEntered"), strict=True))  # fmt: skip
    assert compiled <= 2
    assert entered >= 85
    assert interpreted < 90 * 30  # of some 80 per round


def test_writes_and_random_numbers_in_a_region_happen_once() -> None:
    def run(size: int) -> list[float]:
        torch.manual_seed(5)
        state, grown, values = torch.zeros(4, device="port"), torch.zeros(size, device="port"), []
        grown[-1] = 1.0
        for _ in range(70):
            grown = torch.cat([grown, grown[-1:] * 0.5])
            x = torch.rand(4, device="port") + grown.sum()
            for _ in range(12):
                x = (x + state).tanh() * 0.7
                state.add_(x)
            values.append(x.sum().item() + state.mean().item())
        return values

    with config.override(tiers="off"):
        expected = run(3)
    entered = metrics.counter("RegionEntered")
    assert run(103) == expected  # other sizes: those above are known to the trie
    assert metrics.counter("RegionEntered") > entered


def test_a_path_that_is_recorded_is_cut_where_a_region_begins() -> None:
    cpu, port = _models(1)
    assert _generate(port, 60, 3) == _generate(cpu, 60, 3)
    before = metrics.counter("UncachedCompile")
    for _ in range(6):  # the same sizes again and again: what is around the forward pass is worth compiling now
        assert _generate(port, 5, 3) == _generate(cpu, 5, 3)
    nodes = metrics.counter("TracedOps")
    assert _generate(port, 5, 3) == _generate(cpu, 5, 3)
    assert metrics.counter("TracedOps") - nodes < 5 * 200  # never two forward passes in one path
    assert metrics.counter("UncachedCompile") - before < 40


def test_other_numbers_and_a_read_in_the_middle_of_a_region_are_right() -> None:
    def run(device: str) -> list[float]:
        grown, values = torch.ones(3, device=device), []
        for number in range(80):
            grown = torch.cat([grown, grown[-1:] * 0.5])
            x = grown.sum() + torch.arange(4.0, device=device)
            for step in range(30):
                x = (x * 0.9 + 0.01 * number).sin()
                if number % 9 == 8 and step == 15:
                    values.append(x.sum().item())
            values.append(x.sum().item())
        return values

    torch.testing.assert_close(run("port"), run("cpu"))


def test_training_with_a_batch_that_grows() -> None:
    def run(device: str) -> list[float]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)).to(device)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        losses = []
        for size in range(2, 60):
            x = torch.linspace(-1, 1, size * 4).reshape(size, 4).to(device)
            loss = (net(x) - x.sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    torch.testing.assert_close(run("port"), run("cpu"), rtol=1e-4, atol=1e-5)


def test_what_a_backend_has_kernels_for_is_forgotten_with_its_decisions() -> None:
    cpu, port = _models(2)
    _generate(port, 60, 3)
    from torchport.trace.threads import threads

    runtime: Any = threads.of(0).runtime
    assert runtime.regions.serials
    runtime.forget_decisions()
    assert not runtime.regions.serials
    assert _generate(port, 20, 5)[0] == _generate(cpu, 20, 5)[0]


def test_regions_are_entered_in_almost_every_round() -> None:
    """With C++, which is told of what they begin with, and without."""
    cpu, port = _models(3)
    expected = _generate(cpu, 70, 4)
    entered = metrics.counter("RegionEntered")
    assert _generate(port, 70, 4) == expected
    assert metrics.counter("RegionEntered") - entered >= 30


LATER = """
import torch, torchport
from torchport import metrics, native
from torchport.run import regions, worth
regions.SHORTEST = 24
torchport.config.native = False
torchport.config.tiers, torchport.config.compile_workers = "auto", 0
worth.WORTH_WAITING = worth.RECORDING = worth.WORTH_A_PROCESS = 1e-9
torchport.use("reference")
def loop(rounds, size):
    grown, sums = torch.ones(size, device="port"), []
    for _ in range(rounds):
        grown = torch.cat([grown, grown[-1:] * 0.5])
        x = grown.sum() * 0 + torch.arange(4.0, device="port")
        for _ in range(30):
            x = (x * 0.9 + 0.1).sin()
        sums.append(x.sum().item())
    assert len(set(sums)) == 1, sums
    return metrics.counter("RegionEntered")
before = loop(60, 3)
torchport.config.native = True
native.announce()
print(before > 20, loop(30, 200) - before >= 25, native.follow.load() is not None)
"""


def test_a_library_that_is_built_later_hears_of_regions_that_are_known() -> None:
    """In a process of its own: where nothing was ever built, the C++ functions come in the middle of a program."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", LATER], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("True True"), done.stdout + done.stderr[-2000:]
