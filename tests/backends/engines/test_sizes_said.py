"""Sizes that a program says in advance will vary, and batch normalisation, whose statistics are over what varies."""

from __future__ import annotations

import copy
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchport
from torchport import metrics
from torchport.backend.compiler import computations
from torchport.backend.registry import registry
from torchport.backend.sizes import families as known
from torchport.backends.inductor import InductorBackend
from torchport.core import varying
from torchport.core.config import config

ENGINES = ("inductor", "xla", "openvino")


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An engine to which no sizes are known, and no marks."""
    if not registry.get(request.param).is_available():
        pytest.skip(f"{request.param} is not installed")
    monkeypatch.setattr(known, "families", type(known.families)())
    monkeypatch.setattr(varying, "_marks", type(varying._marks)())
    with config.override(cache="off", tiers="off"):
        computations.clear()
        torchport.use(request.param)
        yield request.param
    torchport.use("reference")


class Scores(nn.Module):
    """Products of all pairs along the length, put together and taken apart again."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(6, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, length, 6] to [batch, length]."""
        batch, length, _ = x.shape
        heads = self.into(x).view(batch, length, 3, 4).transpose(1, 2).reshape(batch * 3, length, 4)
        places = torch.arange(length, device=x.device).view(1, length) / 7.0
        weights = (torch.bmm(heads, heads.transpose(1, 2)) + places).softmax(-1)
        return weights.sum(1).view(batch, 3, length).amax(1)


def _counts(sizes: Sequence[tuple[int, int]], dims: Sequence[int], **bounds: Any) -> list[tuple[int, int]]:
    """Per size, what was compiled and what was served by something for several."""
    torch.manual_seed(3)
    host = Scores()
    device = copy.deepcopy(host).to("port")
    found: list[tuple[int, int]] = []
    for batch, length in sizes:
        x = torch.randn(batch, length, 6)
        moved = x.to("port")
        for dim in dims:
            torchport.mark_dynamic(moved, dim, **bounds)
        before = metrics.counter("UncachedCompile"), metrics.counter("OtherSizes")
        with torch.no_grad():
            torch.testing.assert_close(device(moved).cpu(), host(x), rtol=1e-4, atol=1e-5)
        found.append((metrics.counter("UncachedCompile") - before[0], metrics.counter("OtherSizes") - before[1]))
    return found


def test_a_marked_dimension_is_compiled_for_once(engine: str) -> None:
    assert _counts([(2, 24), (2, 30), (2, 17)], [1]) == [(1, 0), (0, 1), (0, 1)]


def test_two_marked_dimensions_are_compiled_for_once(engine: str) -> None:
    assert _counts([(5, 24), (7, 30), (6, 17)], [0, 1]) == [(1, 0), (0, 1), (0, 1)]


def test_sizes_beyond_what_was_said_are_compiled_for_themselves(engine: str) -> None:
    assert _counts([(2, 24), (2, 30), (2, 28)], [1], min=20, max=30) == [(1, 0), (0, 1), (0, 1)]
    device = Scores().to("port")
    before = metrics.counter("OtherSizes")
    with torch.no_grad():
        device(torch.randn(2, 31, 6).to("port")).cpu()
    assert metrics.counter("OtherSizes") == before


@pytest.mark.parametrize("engine", ["xla"], indirect=True)
def test_no_bucket_is_larger_than_what_was_said(engine: str) -> None:
    """Nor is that of the second computation; and whichever of several inputs was marked."""
    for length in (24, 100, 290):
        x, weights = torch.randn(5, length), torch.rand(length)
        moved = x.to("port")
        torchport.mark_dynamic(moved, 1, max=300)
        found = (weights.to("port").sqrt() * moved.softmax(1)).sum(1)
        torch.testing.assert_close(found.cpu(), (weights.sqrt() * x.softmax(1)).sum(1))
    made = [one.padding for family in known.families.values() for one in family.made]
    assert [one.bucket for one in made if one is not None] == [(300,), (128,), (32,)]


def test_another_thread_may_mark_meanwhile(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    is_of = varying.VaryingDim.is_of

    def looked_at(one: varying.VaryingDim, dtype: str, shape: Sequence[int]) -> bool:
        thread = threading.Thread(target=torchport.mark_dynamic, args=(torch.ones(2, len(varying.marks()) + 2), 0))
        thread.start()
        thread.join()
        return is_of(one, dtype, shape)

    for size in (3, 4):
        torchport.mark_dynamic(torch.ones(size, 24), 1)
    monkeypatch.setattr(varying.VaryingDim, "is_of", looked_at)
    x = torch.randn(3, 24)
    torch.testing.assert_close(x.to("port").softmax(1).cpu(), x.softmax(1))
    assert len(varying.marks()) > 2


class Wrong(nn.Module):
    """As many numbers as the first tensor was long, whatever comes afterwards."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[length] to [24]."""
        return x.sum() + torch.arange(24, device=x.device, dtype=torch.float32)


def test_what_does_not_vary_with_a_marked_dimension_is_found_out(engine: str) -> None:
    """Twenty-four is the marked size, and a constant of the program besides."""
    for length in (24, 30, 17):
        x = torch.randn(length)
        moved = x.to("port")
        torchport.mark_dynamic(moved, 0)
        torch.testing.assert_close(Wrong()(moved).cpu(), Wrong()(x))


def test_what_is_marked_has_to_be_there(engine: str) -> None:
    x = torch.ones(2, 3, device="port")
    with pytest.raises(IndexError, match=r"no dimension 2 to vary: the tensor has 2, shape \[2, 3\]"):
        torchport.mark_dynamic(x, 2)
    with pytest.raises(torchport.ConfigError, match="from 4 to any size, but has 3 now"):
        torchport.mark_dynamic(x, -1, min=4)
    with pytest.raises(torchport.ConfigError, match="from 0 to 2, but has 3 now"):
        torchport.mark_dynamic(x, 1, max=2)


def test_torch_compile_is_told(engine: str) -> None:
    compiled = torch.compile(lambda x: (x * 2).softmax(0), backend="torchport", fullgraph=True)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    frames = torch._dynamo.utils.counters["stats"]
    for length in (24, 30, 17):
        x = torch.randn(length)
        torchport.mark_dynamic(x, 0)
        torch.testing.assert_close(compiled(x), (x * 2).softmax(0))
    assert frames["unique_graphs"] == 1


_BEFORE_DYNAMO = """
import sys, torch, torchport
torchport.config.override(tiers="off", cache="off").__enter__()
x = torch.randn(2, 24)
torchport.mark_dynamic(x, {dim})
assert "torch._dynamo" not in sys.modules
compiled = torch.compile(lambda x: (x * 2).softmax(1), backend="torchport", options={{"backend": "reference"}})
for given in (x, torch.randn(2, 30)):
    torch.testing.assert_close(compiled(given), (given * 2).softmax(1))
print(torch._dynamo.utils.counters["stats"]["unique_graphs"])
"""


@pytest.mark.parametrize("dim", [1, -1])
def test_torch_compile_is_told_of_what_was_marked_before_it(dim: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _BEFORE_DYNAMO.format(dim=dim)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout.strip() == "1", done.stdout + done.stderr


# -- batch normalisation ----------------------------------------------------------------------------------------------
def _net(rank: int) -> nn.Module:
    torch.manual_seed(5)
    if rank == 2:
        return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))
    return nn.Sequential(
        nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6, affine=False), nn.Tanh(), nn.Conv2d(6, 3, 1),
        nn.BatchNorm2d(3, track_running_stats=False), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    )  # fmt: skip


@pytest.mark.parametrize("rank", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_batch_norm_trains_on_batches_of_many_sizes(engine: str, rank: int) -> None:
    host = _net(rank)
    device = copy.deepcopy(host).to("port")
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (host, device)]
    counters = "UncachedCompile", "OtherSizes"
    before = [metrics.counter(name) for name in counters]
    sizes = [12, 9, 14, 11, 15, 13, 10, 16]
    for batch in sizes:
        x = torch.randn(batch, 4) if rank == 2 else torch.randn(batch, 4, 5, 5)
        labels = torch.randint(3, (batch,))
        losses: list[torch.Tensor] = []
        for model, optimizer, place in zip((host, device), optimizers, ("cpu", "port"), strict=True):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x.to(place)), labels.to(place))
            loss.backward()
            optimizer.step()
            losses.append(loss.detach().cpu())
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-5)
    for name, buffer in host.named_buffers():
        torch.testing.assert_close(device.get_buffer(name).cpu(), buffer, rtol=1e-4, atol=1e-5)
    compiled, served = (metrics.counter(name) - was for name, was in zip(counters, before, strict=True))
    assert served >= 3, f"compiled {compiled} for {len(sizes)} batch sizes, and {served} were served by these"


# -- with tiers, in a process of its own ------------------------------------------------------------------------------
_PROGRAM = """
import torch, torchport
from torchport.run import worth
worth.costs._per_operator["inductor"], worth.FEW, worth.RECORDING = 1e-6, 0, 0.0
type(worth.costs).note = lambda *args: None
torchport.use("inductor")
layer = torch.nn.Linear(8, 8).to("port")
host = torch.nn.Linear(8, 8)
host.load_state_dict({name: value.cpu() for name, value in layer.state_dict().items()})

def run(length):
    x = torch.randn(length, 8)
    moved = x.to("port")
    torchport.mark_dynamic(moved, 0)
    with torch.no_grad():
        torch.testing.assert_close(layer(moved).softmax(0).cpu(), host(x).softmax(0), rtol=1e-4, atol=1e-5)

torchport.warm(run, 24)
torchport.compiled(wait=True)
counter = torchport.metrics.counter
before = counter("OtherSizes")
for length in (30, 17, 40):
    for _ in range(300):  # until its path is recorded
        served = counter("OtherSizes")
        run(length)
        torchport.compiled(wait=True)
        if counter("OtherSizes") > served:
            break
assert counter("OtherSizes") == before + 3, (counter("OtherSizes"), before)
print("served")
"""


@pytest.mark.slow
def test_the_compilers_process_is_told(tmp_path: Path) -> None:
    if reason := InductorBackend().unavailable_reason():
        pytest.skip(reason)
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=300, check=False,
        env={"TORCHPORT_CACHE_DIR": str(tmp_path), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
    )  # fmt: skip
    assert done.stdout.strip() == "served", done.stdout + done.stderr
