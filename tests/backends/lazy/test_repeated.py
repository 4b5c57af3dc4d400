"""A large expanded value that is held where a computation is cut: what it repeats is kept instead of it."""

from __future__ import annotations

import gc
import threading
from typing import Any

import fakes
import pytest
import torch
from everyday_support import needs_counters

import torchport
from torchport.backend.normal_form import output_specs
from torchport.core.config import config
from torchport.run.jobs import Job

pytestmark = needs_counters
ROWS, WIDTH = 1024, 32


class Watching(fakes.Fake):
    """Notes the shapes of what computations give."""

    name = "watching"

    def __init__(self) -> None:
        self.given: list[tuple[int, ...]] = []

    def preprocess(self, graph: Any, specs: Any) -> Any:
        self.given += [spec.shape for spec in output_specs(graph)]
        return super().preprocess(graph, specs)


@pytest.fixture
def watching(monkeypatch: pytest.MonkeyPatch) -> Watching:
    monkeypatch.setattr(config, "tiers", "off")
    return Watching.install()


def _given(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, WIDTH, generator=generator)
    return x, torch.randint(ROWS, (2, ROWS), generator=generator), torch.rand(50, generator=generator) > 0.5


def _program(x: torch.Tensor, edges: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
    index, other = (row.view(-1, 1).expand(ROWS, WIDTH) for row in edges)
    found = mask.nonzero()  # its shape depends on values: what is pending is computed here
    y = torch.zeros_like(x).scatter_add(0, index, x) + x.gather(0, other)
    return [y, found, (y > 0).nonzero(), index, other, y.gather(0, index)]


def test_values_and_strides_are_the_cpus_and_the_large_one_is_not_written(watching: Watching) -> None:
    for seed in range(4):
        expected = _program(*_given(seed))
        found = _program(*(one.to(watching.device) for one in _given(seed)))
        cut = list(watching.given)
        for mine, cpu in zip(found, expected, strict=True):
            assert mine.stride() == cpu.stride()
            torch.testing.assert_close(mine.cpu(), cpu)
        if seed == 0:
            assert (ROWS, 1) in cut or (2, ROWS) in cut
            # Of that size are y and what it is compared with: the indices would be two more at each of two cuts.
            assert cut.count((ROWS, WIDTH)) == 2, cut


def test_a_training_step_compiles_once(watching: Watching) -> None:
    x, edges, mask = (one.to(watching.device) for one in _given(0))
    weight = torch.ones(WIDTH, device=watching.device, requires_grad=True)

    def step() -> torch.Tensor:
        index = edges[0].view(-1, 1).expand(ROWS, WIDTH)
        y = torch.zeros_like(x).scatter_add(0, index, x * weight)
        found = mask.nonzero()
        (y.square().sum() + found.sum()).backward()
        gradient, weight.grad = weight.grad, None
        assert gradient is not None
        return gradient.cpu()

    first = step()
    step()
    compiled = torchport.metrics.counter("UncachedCompile")
    for _ in range(3):
        assert torch.equal(step(), first)
    assert torchport.metrics.counter("UncachedCompile") == compiled


def test_the_barrier_itself_may_take_it(watching: Watching) -> None:
    mask = (torch.arange(ROWS) % 3 == 0).view(-1, 1)
    expected = mask.expand(ROWS, WIDTH * 4).nonzero()
    on_device = (mask.to(watching.device) & True).expand(ROWS, WIDTH * 4)
    assert torch.equal(on_device.nonzero().cpu(), expected)
    assert torch.equal(on_device.cpu(), mask.expand(ROWS, WIDTH * 4))


def test_others_may_read_it_and_let_go_of_it(watching: Watching) -> None:
    x, edges, mask = (one.to(watching.device) for one in _given(0))
    held = (edges[0] + 1).view(-1, 1).expand(ROWS, WIDTH)
    dropped = (edges[1] + 1).view(-1, 1).expand(ROWS, WIDTH)
    mask.nonzero()
    del dropped
    gc.collect()
    read: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: read.append(held.cpu()))
    thread.start()
    thread.join()
    expected = (_given(0)[1][0] + 1).view(-1, 1).expand(ROWS, WIDTH)
    assert torch.equal(read[0], expected)
    assert torch.equal((held + 1).cpu(), expected + 1)
    torchport.sync(wait=True)
    assert torch.equal(held.cpu(), expected)
    assert torch.equal(x.gather(0, held - 1).cpu(), _given(0)[0].gather(0, expected - 1))


def test_a_write_to_it_writes_to_what_it_was_made_of(watching: Watching) -> None:
    base = torch.arange(ROWS, device=watching.device).view(-1, 1) * 2
    wide = base.expand(ROWS, WIDTH)
    torch.ones(3, device=watching.device).nonzero()
    base += 1
    assert torch.equal(wide.cpu(), (torch.arange(ROWS).view(-1, 1) * 2 + 1).expand(ROWS, WIDTH))


def test_what_failed_fails_for_it_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "tiers", "off")
    backend = fakes.Failing.install(where="execute")
    wide = torch.ones(ROWS, 1, device=backend.device).sin().expand(ROWS, WIDTH)
    other = torch.ones(ROWS, 1, device=backend.device).cos().expand(ROWS, WIDTH)
    torch.ones(3, device=backend.device).nonzero()
    with pytest.raises(torchport.ExecutionError, match="broke in execute"):
        wide.cpu()
    assert torch.equal(other.cpu(), torch.ones(ROWS, 1).cos().expand(ROWS, WIDTH))


def test_after_an_interrupt_it_is_expanded_all_the_same(watching: Watching, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = (torch.ones(ROWS, 1, device=watching.device) * 3).expand(ROWS, WIDTH)
    run = Job.run

    def interrupted(job: Job) -> Any:
        monkeypatch.setattr(Job, "run", run)
        raise KeyboardInterrupt

    monkeypatch.setattr(Job, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        torch.ones(3, device=watching.device).nonzero()
    assert torch.equal(wide.cpu(), torch.full((ROWS, WIDTH), 3.0))
