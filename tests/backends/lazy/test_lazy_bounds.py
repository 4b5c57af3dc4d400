"""What long-running programs may count on: bounded memory when nothing repeats, and many threads, none wrong."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable
from typing import Any

import fakes
import pytest
import torch
from everyday_support import needs_counters
from test_property_aliasing import in_threads
from torch import nn

import torchport
from torchport.backend import infer
from torchport.backend.compiler import computations
from torchport.run.history import history
from torchport.trace import handle as tensor
from torchport.trace.threads import ThreadTraces, threads

pytestmark = needs_counters


# -- memory ----------------------------------------------------------------------------------------------------------
class Counted(fakes.Fake):
    """Counts the handles that are alive."""

    name = "counted"
    alive = 0

    def init(self, *args: Any) -> Any:
        self.alive += 1
        return super().init(*args)

    def destroy(self, handle: Any) -> None:
        self.alive -= 1


@pytest.mark.parametrize(
    ("traces", "nodes"), [(600, 100), pytest.param(100_000, 20_000, marks=pytest.mark.slow)], ids=["some", "100,000"]
)
def test_a_program_that_never_repeats_a_trace(monkeypatch: pytest.MonkeyPatch, traces: int, nodes: int) -> None:
    monkeypatch.setattr(tensor, "_MOST_SPECS", 200)
    monkeypatch.setattr(infer, "_REMEMBER", 100)
    monkeypatch.setattr(history, "SITES", 50)
    infer._remembered.clear()
    backend = Counted.install()
    trace = threads.of(backend.device.index)
    with torchport.config.override(max_trace_nodes=nodes, max_computations=32):
        for number in range(traces):
            x = torch.ones(number % 150 + 1, device=backend.device)
            y = x * (number + 2)
            torchport.sync()
            del x, y
            assert trace.nodes <= nodes + 2
        gc.collect()
        assert len(computations) <= 32
        assert backend.alive <= 32 + 2, "computations that were dropped are destroyed, also where a trie had them"
        assert len(infer._remembered) <= 101
        assert type(infer.fake_mode()).cache_info().size <= 100 + 64
        assert len(tensor._specs) <= 202
        assert len(history.reasons) <= history.REASONS


def test_the_cache_in_memory_is_least_recently_used() -> None:
    backend = Counted.install()
    x = torch.ones(3, device=backend.device)
    torchport.sync()

    def run(factor: int) -> int:
        before = torchport.metrics.counter("UncachedCompile")
        assert (x * factor).tolist() == [factor] * 3
        return torchport.metrics.counter("UncachedCompile") - before

    with torchport.config.override(max_computations=4):
        assert run(2) == 1
        assert run(3) == 1
        assert run(2) == 0, "used again, so 3 is the older one"
        for factor in (4, 5, 6):
            run(factor)
        assert run(2) == 0
        assert run(3) == 1


def test_keeping_other_values_each_time_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchport.run import flush as executor

    monkeypatch.setattr(executor, "PLANS_AT_MOST", 5)
    backend = Counted.install()
    x = torch.ones(3, device=backend.device)
    draw = random.Random(0)
    for _ in range(30):
        values = [x + 1.5]
        for _ in range(6):
            values.append(values[-1] * 0.5)
        values = [value for value in values if draw.random() < 0.5]
        place = threads.of(backend.device.index).cursor
        torchport.sync()
        assert all(value.tolist() for value in values)
        assert place.plans is None or len(place.plans) <= 5


# -- threads -----------------------------------------------------------------------------------------------------------
def losses(device: torch.device | str, seed: int, steps: int, read: bool) -> list[float]:
    generator = torch.Generator().manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    net.to(device)
    opt = torch.optim.AdamW(net.parameters(), lr=0.05)
    found: list[Any] = []
    for _ in range(steps):
        x = torch.randn(6, 4, generator=generator).to(device)
        opt.zero_grad()
        loss = (net(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        opt.step()
        found.append(loss.item() if read else loss.detach())
    return [float(value) for value in found]


def agrees(device: torch.device | str, seed: int, steps: int) -> Callable[[], None]:
    expected = losses("cpu", seed, steps, True)

    def run() -> None:
        assert losses(device, seed, steps, seed % 2 == 0) == pytest.approx(expected, rel=1e-3, abs=1e-5)

    return run


@pytest.mark.parametrize("execution", ["inline", "worker"])
@pytest.mark.parametrize("devices", [1, 2])
def test_two_threads_train_two_models(execution: str, devices: int) -> None:
    used = [fakes.Fake.install().device for _ in range(devices)]
    with torchport.config.override(execution=execution):
        in_threads([agrees(used[seed % devices], seed, 6) for seed in range(2)])


@pytest.mark.parametrize("execution", ["inline", "worker"])
def test_a_tensor_made_in_one_thread_and_used_in_another(execution: str) -> None:
    backend = fakes.Fake.install()
    shared: list[torch.Tensor] = []
    made, used = threading.Barrier(2), threading.Barrier(2)

    def one() -> None:
        x = torch.arange(4.0).to(backend.device)
        shared.extend([x * 2, (x + 1)[1:], nn.Parameter(x.clone())])
        made.wait(60)
        used.wait(60)
        assert shared[0].tolist() == [0, 2, 4, 6]
        assert shared[2].grad is not None
        assert shared[2].grad.tolist() == [0, 2, 4, 6]

    def other() -> None:
        made.wait(60)
        assert (shared[0] + 1).tolist() == [1, 3, 5, 7]
        (shared[2] * shared[0]).sum().backward()
        shared[1].add_(1)
        assert shared[1].tolist() == [3, 4, 5]
        used.wait(60)

    with torchport.config.override(execution=execution):
        in_threads([one, other])


def soak(seconds_of_steps: int, workers: int) -> None:
    devices = [fakes.Fake.install(releases_gil=True).device for _ in range(2)]

    def mixed(seed: int) -> Callable[[], None]:
        train = agrees(devices[seed % 2], seed, seconds_of_steps)

        def run() -> None:
            if seed % 4 == 3:
                with torchport.mode("eager"):
                    train()
            else:
                train()
            torchport.sync(devices[seed % 2])

        return run

    in_threads([mixed(seed) for seed in range(workers)])


@pytest.mark.parametrize("execution", ["inline", "worker"])
def test_many_threads_in_both_modes_on_two_devices(execution: str) -> None:
    with torchport.config.override(execution=execution):
        soak(3, 6)


@pytest.mark.slow
@pytest.mark.parametrize("execution", ["inline", "worker"])
def test_many_threads_for_long(execution: str) -> None:
    with torchport.config.override(execution=execution):
        for _ in range(5):
            soak(12, 16)


def test_a_collection_in_the_middle_of_a_threads_first_use() -> None:
    begun = ThreadTraces.__new__(ThreadTraces)  # what the collector's callback finds while __init__ runs
    begun.set_aside()
    begun.take_up()
    assert vars(begun) == {}


def test_random_numbers_of_threads_are_all_different(device: torch.device) -> None:
    torch.manual_seed(3)
    drawn: list[float] = []

    def draw() -> None:
        values = [torch.rand(2, device=device, dtype=torch.float64) for _ in range(50)]
        drawn.extend(torch.cat(values).tolist())

    before = torch.port.get_rng_state()  # type: ignore[attr-defined]
    in_threads([draw] * 4)
    after = torch.port.get_rng_state()  # type: ignore[attr-defined]
    counts = [int.from_bytes(bytes(state.tolist())[8:], "little") for state in (before, after)]
    assert counts[1] - counts[0] == 4 * 50
    assert len(set(drawn)) == 4 * 100
