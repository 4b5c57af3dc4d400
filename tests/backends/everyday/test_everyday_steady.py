"""What a program costs on the lazy device: computations per step, values read once, memory given back."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import fakes
import pytest
import torch
from everyday_support import Counts, counted, everywhere, needs_counters, ramp, randn
from torch import nn

pytestmark = [needs_counters, pytest.mark.compiled]
WARM_UP = 4
STEPS = 6


def make_net(device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 2)).to(device)


def steady(step: Callable[[int], Any], warm_up: int = WARM_UP, steps: int = STEPS) -> Counts:
    """The counts of ``steps`` calls after a warm-up."""
    for number in range(warm_up):
        step(number)
    with counted() as counts:
        for number in range(warm_up, warm_up + steps):
            step(number)
    return counts


def trainer(device: torch.device, **options: Any) -> Callable[[int], torch.Tensor]:
    """A training step as people write it, with a new batch from the host each time."""
    net = make_net(device)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-2, **options)

    def step(number: int) -> torch.Tensor:
        x = torch.randn(8, 4).to(device)
        y = torch.randint(0, 2, (8,)).to(device)
        opt.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        return loss

    return step


@everywhere
@pytest.mark.parametrize("foreach", [True, False], ids=["foreach", "for-loop"])
def test_one_computation_per_training_step(device: torch.device, foreach: bool) -> None:
    counts = steady(trainer(device, foreach=foreach))
    assert counts["UncachedCompile"] == 0
    assert counts["Execute"] == STEPS
    assert counts["Fallback"] == 0


@pytest.mark.parametrize("every", [1, 2, 3])
def test_logging_every_nth_loss_costs_nothing_more(device: torch.device, every: int) -> None:
    run = trainer(device)
    logged: list[float] = []

    def step(number: int) -> None:
        loss = run(number)
        if number % every == 0:
            logged.append(loss.item())

    counts = steady(step, warm_up=2 * every + 2, steps=6)
    assert counts["UncachedCompile"] == 0
    assert counts["Execute"] == 6
    assert len(set(logged)) == len(logged) > 3


def test_labels_copied_after_the_forward_do_not_split_the_step(device: torch.device) -> None:
    net = make_net(device)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(number: int) -> None:
        opt.zero_grad()
        nn.functional.cross_entropy(net(torch.randn(8, 4).to(device)), torch.randint(0, 2, (8,)).to(device)).backward()
        opt.step()

    counts = steady(step)
    assert counts["UncachedCompile"] == 0
    assert counts["Execute"] == STEPS


def test_losses_kept_and_read_at_the_end(device: torch.device) -> None:
    run = trainer(device)
    losses: list[torch.Tensor] = []
    counts = steady(lambda number: losses.append(run(number).detach()))
    assert counts["UncachedCompile"] == 0
    assert counts["Execute"] == STEPS
    assert all(loss.item() > 0 for loss in losses)


def test_a_running_sum_of_losses(device: torch.device) -> None:
    run = trainer(device)
    total = torch.zeros((), device=device)

    def step(number: int) -> None:
        nonlocal total
        total = total + run(number).detach()

    counts = steady(step, warm_up=6)
    assert counts["UncachedCompile"] == 0
    assert counts["Execute"] <= STEPS + 1, "the last addition is computed when the block ends"
    assert total.item() > 0


def test_gradient_accumulation(device: torch.device) -> None:
    net = make_net(device)
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    def step(number: int) -> None:
        opt.zero_grad()
        for _ in range(3):
            x = torch.randn(4, 4).to(device)
            (net(x).square().mean() / 3).backward()
        opt.step()

    counts = steady(step)
    assert counts["UncachedCompile"] == 0
    assert counts["Execute"] <= 3 * STEPS


@everywhere
def test_one_computation_per_evaluation_step(device: torch.device) -> None:
    net = make_net(device).eval()
    hits = []

    def step(number: int) -> None:
        x = torch.randn(8, 4).to(device)
        with torch.no_grad():
            hits.append((net(x).argmax(1) == 0).sum().item())

    counts = steady(step)
    assert counts["UncachedCompile"] == 0
    assert counts["Execute"] == STEPS
    assert len(hits) == WARM_UP + STEPS


def test_evaluation_that_only_keeps_results(device: torch.device) -> None:
    net = make_net(device).eval()
    kept: list[torch.Tensor] = []

    def step(number: int) -> None:
        with torch.inference_mode():
            kept.append(net(torch.randn(8, 4).to(device)))

    counts = steady(step)
    assert counts["UncachedCompile"] == 0
    assert counts["Execute"] == STEPS
    assert torch.cat(kept).shape == (8 * (WARM_UP + STEPS), 2)


def test_training_and_evaluation_by_turns(device: torch.device) -> None:
    net = make_net(device)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)

    def epoch(number: int) -> None:
        net.train()
        for _ in range(2):
            opt.zero_grad()
            net(torch.randn(8, 4).to(device)).square().mean().backward()
            opt.step()
        net.eval()
        with torch.no_grad():
            for _ in range(2):
                net(torch.randn(8, 4).to(device)).sum().item()

    counts = steady(epoch, warm_up=3, steps=4)
    assert counts["UncachedCompile"] == 0
    assert counts["Execute"] == 4 * 4


def test_a_last_batch_of_another_size_compiles_once(device: torch.device) -> None:
    net = make_net(device)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)

    def epoch(number: int) -> None:
        for size in (8, 8, 5):
            opt.zero_grad()
            net(torch.randn(size, 4).to(device)).square().mean().backward()
            opt.step()

    counts = steady(epoch, warm_up=3, steps=3)
    assert counts["UncachedCompile"] == 0
    assert counts["Execute"] == 9


@everywhere
def test_a_value_read_twice_is_computed_once(device: torch.device) -> None:
    x = ramp(8, device=device)
    with counted() as first:
        y = (x * 2).exp().sum()
        value = y.item()
    with counted() as again:
        assert y.item() == value
        assert float(y) == value
        assert y.cpu().item() == value
        print(y)
    assert first["Execute"] == 1
    assert again["Execute"] == 0


def test_a_value_read_is_not_computed_again_by_what_uses_it() -> None:
    runs = fakes.CountingBackend.install()
    x = torch.ones(4, device=runs.device)
    y = x.exp()
    y.sum().item()
    before = runs.count("aten.exp.default")
    z = (y * 2).sum().item()
    assert before == 1
    assert runs.count("aten.exp.default") == 1
    assert z == pytest.approx(8 * 2.718281828, rel=1e-5)


def test_work_nobody_reads_is_not_computed() -> None:
    runs = fakes.CountingBackend.install()
    x = torch.ones(4, device=runs.device)
    dead = x.sin()
    del dead
    (x + 1).sum().item()
    assert runs.count("aten.sin.default") == 0


@everywhere
def test_python_numbers_that_change_cause_no_compile(device: torch.device) -> None:
    x = ramp(4, device=device)

    def step(number: int) -> None:
        value = ((x * (0.5 + number)) / (1.0 + 0.37 * number) + 0.01 * number).sum().item()
        assert value == pytest.approx(6 * (0.5 + number) / (1.0 + 0.37 * number) + 0.04 * number, rel=1e-5)

    assert steady(step, warm_up=4, steps=20)["UncachedCompile"] == 0


def test_a_new_seed_causes_no_compile(device: torch.device) -> None:
    def step(number: int) -> None:
        torch.manual_seed(number)
        (torch.rand(4, device=device) + torch.ones(4, device=device)).sum().item()

    assert steady(step)["UncachedCompile"] == 0


def test_sync_executes_what_is_pending(device: torch.device) -> None:
    import torchport

    torchport.sync()
    x = ramp(4, device=device) + 1
    before = torchport.metrics.counter("Execute")
    torchport.sync()
    assert torchport.metrics.counter("Execute") == before + 1
    with counted() as counts:
        assert x.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert counts["Execute"] == 0


# -- memory ------------------------------------------------------------------------------------------------------------
def test_memory_is_freed_when_the_last_reference_goes() -> None:
    live = fakes.CountingBackend.install()
    x = torch.ones(1_000, device=live.device) * 2
    y = x + 1
    y.sum().item()
    assert live.bytes >= 8_000
    view = y[10:]
    del x, y
    _settle(live)
    assert view.sum().item() == 2_970
    del view
    _settle(live)
    assert live.bytes <= 64


def test_a_gigabyte_passes_through_a_loop_that_stays_flat() -> None:
    live = fakes.CountingBackend.install()
    mib = 256 * 1_024
    x = torch.zeros(mib, device=live.device)
    most = 0
    for _ in range(256):
        x = x + 1
        y = x * 2
        assert y[0].item() > 0
        most = max(most, live.bytes)
    assert x[0].item() == 256
    assert live.passed >= 2**29
    assert most <= 8 * 2**20
    del x, y
    _settle(live)
    assert live.bytes <= 64


def test_a_training_loop_keeps_no_old_values() -> None:
    live = fakes.CountingBackend.install()
    step = trainer(live.device)
    for number in range(4):
        step(number)
    _settle(live)
    before = live.bytes
    for number in range(10):
        step(number)
    _settle(live)
    assert live.bytes <= before * 1.2
    del step
    _settle(live)
    assert live.bytes < before


def test_the_host_to_device_copy_does_not_keep_the_host_tensor(device: torch.device) -> None:
    import weakref

    host = torch.zeros(100)
    watch = weakref.ref(host)
    x = host.to(device) + 1
    del host
    x.sum().item()
    del x
    gc.collect()
    assert watch() is None


def _settle(live: fakes.CountingBackend) -> None:
    import torchport

    torchport.sync()
    gc.collect()
    (torch.zeros(1, device=live.device) + 1).item()


def test_results_do_not_depend_on_when_values_are_read(device: torch.device) -> None:
    def run(read: bool) -> list[float]:
        torch.manual_seed(0)
        x = randn(4, 4, device=device)
        trail = []
        for _ in range(5):
            x = x @ x / x.norm()
            x[0] += 1
            if read:
                trail.append(x.sum().item())
        return [*trail[:0], *x.flatten().tolist()]

    assert run(True) == pytest.approx(run(False), rel=1e-5)
