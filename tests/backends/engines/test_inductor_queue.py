"""Compiled code on a thread that needs no Python: the same results, errors that come back, and nothing held longer."""

from __future__ import annotations

import random
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from everyday_support import counted
from native_support import COMPILER, compiles
from torch import nn

import torchport
from torchport import native
from torchport.backends.inductor import InductorBackend, caller, machine
from torchport.backends.inductor.queue import SlotData
from torchport.run.future import resolve
from torchport.trace.wrapping import unwrap

pytestmark = [
    pytest.mark.skipif(not InductorBackend().is_available(), reason=InductorBackend().unavailable_reason()),
    compiles,
]


@pytest.fixture(autouse=True)
def device() -> Iterator[torch.device]:
    native.build_all([str(COMPILER)])
    assert caller.load() is not None
    with torchport.config.override(execution="worker"):
        yield torchport.use("inductor")
        torchport.sync()


def data_of(tensor: torch.Tensor) -> Any:
    return resolve(unwrap(tensor))  # type: ignore[arg-type]


def on_the_queue(fn: Callable[[], Any]) -> Any:
    """What a function gives once all it computes has been through ``execute`` before. Some of it was started."""
    fn()
    torchport.sync()
    with counted() as counts:
        found = fn()
    assert counts["AsyncExecute"]
    return found


def started_step(device: torch.device) -> Callable[[], torch.Tensor]:
    """A step of 300 threes, of which each further run is started."""
    x = torch.ones(300).to(device)

    def step() -> torch.Tensor:
        value = x * 2 + 1
        torchport.sync(wait=False)
        return value

    on_the_queue(step)
    return step


def train(device: torch.device, steps: int = 6) -> list[torch.Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1)).to(device)
    opt = torch.optim.AdamW(net.parameters(), lr=0.01)
    kept = []
    for step in range(steps):
        x = (torch.arange(128.0).reshape(16, 8) / 64 - step).to(device)
        loss = (net(x) - x.sum(1, keepdim=True)).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        kept.append(loss.detach())
        if step == 2:
            kept += [p.detach().clone() for p in net.parameters()]  # not to be written over
        if step == 3:
            assert loss.item() > 0
    return [value.cpu() for value in (*kept, *net.state_dict().values())]


def test_training_gives_the_same(device: torch.device) -> None:
    got = on_the_queue(lambda: train(device))
    with torchport.config.override(execution="inline"):
        expected = train(device)
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=pytest.mark.slow) for seed in range(6)])
def test_random_programs_give_the_same(device: torch.device, seed: int) -> None:
    """Writes, views, values that are kept, dropped, read, and started one after the other."""

    def program() -> list[torch.Tensor]:
        pick = random.Random(seed)
        values = [(torch.arange(12.0).reshape(3, 4) * k - 5).to(device) for k in range(3)]
        found = []
        for _ in range(30):
            at, other = pick.randrange(3), pick.randrange(3)
            match pick.randrange(8):
                case 0:
                    values[at] = values[at] * 0.5 + values[other]
                case 1:
                    values[at].add_(values[other], alpha=0.25)
                case 2:
                    values[at][1:].mul_(0.5)
                case 3:
                    values[at] = values[other].t().contiguous().t()
                case 4:
                    values[at] = values[other].clone()
                case 5:
                    found.append(values[at])
                    values[at] = values[at] + 1
                case 6:
                    found.append(values[at].sum().cpu())
                case _:
                    values[at] = values[at].cumsum(pick.randrange(2)) / 4
            if pick.random() < 0.4:
                torchport.sync(wait=False)
        return [value.cpu() for value in (*found, *values)]

    got = on_the_queue(program)
    with torchport.config.override(execution="inline"):
        expected = program()
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


def test_results_go_on_without_python_seeing_them(device: torch.device) -> None:
    def chain() -> torch.Tensor:
        value = torch.ones(4, 4).to(device)
        for _ in range(3):
            value = value * 2
            torchport.sync(wait=False)
        return value

    value = on_the_queue(chain)
    data = data_of(value)
    assert isinstance(data, SlotData)
    assert data._made is None
    assert data.has_value
    assert value.tolist() == [[8.0] * 4] * 4
    assert data.tensor is data.tensor


def test_the_thread_does_not_wait_for_python(device: torch.device) -> None:
    """A program that never lets go of Python's lock sees its computation end all the same."""
    x = torch.ones(1024, 1024).to(device)  # so large that it is still in flight when the job is looked at

    def step() -> torch.Tensor:
        value = (x @ x).relu() + 1
        torchport.sync(wait=False)
        return value

    on_the_queue(step)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1_000)
    try:
        pending: Any = unwrap(step()).value  # type: ignore[union-attr]
        done = pending.job.started.done
        deadline = time.monotonic() + 60
        while not done() and time.monotonic() < deadline:
            pass
        assert done()
    finally:
        sys.setswitchinterval(before)


@pytest.mark.parametrize("mode", ["autocast", "inference", "device", "functional"])
def test_a_thread_that_waits_computes_in_no_mode_of_its_own(device: torch.device, mode: str) -> None:
    """What the queue has not begun is computed by whoever waits."""
    x = (torch.arange(4096.0).reshape(64, 64) / 512).to(device)

    def step() -> torch.Tensor:
        value = x @ x
        for _ in range(2):
            value = value @ x / 100
            torchport.sync(wait=False)
        return value

    expected = on_the_queue(step).cpu()
    for _ in range(20):
        if mode == "functional":
            found = torch.func.vmap(lambda scale: step() * scale)(torch.ones(1).to(device))[0]
            assert torch.equal(found.cpu(), expected)
            continue
        modes: dict[str, Any] = {
            "autocast": torch.autocast("cpu", torch.bfloat16),
            "inference": torch.inference_mode(),
            "device": torch.device("meta"),
        }
        value = step()
        with modes[mode]:
            found = value.cpu()
        assert torch.equal(found, expected)


# -- failures ------------------------------------------------------------------------------------------------------
def look_up(device: torch.device, index: int) -> tuple[torch.Tensor, ...]:
    """An embedding, what comes of it, and what does not."""
    table = torch.arange(40.0).reshape(10, 4).to(device)
    at = torch.full((3,), index).to(device)
    other = torch.full((3, 4), 2.0).to(device)
    found = nn.functional.embedding(at, table)
    torchport.sync(wait=False)
    found, other = found * 2 + 1, other * 3
    torchport.sync(wait=False)
    return found, other


def test_an_error_of_the_code_comes_to_whoever_uses_the_value(device: torch.device) -> None:
    on_the_queue(lambda: [value.cpu() for value in look_up(device, 1)])
    with counted() as counts:
        found, other = look_up(device, 100)
        assert other.tolist() == [[6.0] * 4] * 3
        with pytest.raises(torchport.ExecutionError, match="index") as caught:
            found.tolist()
        assert "embedding" in str(caught.value)
        assert "test_inductor_queue.py" in str(caught.value)
    assert counts["AsyncExecute"]
    found, other = look_up(device, 2)
    assert found[0].tolist() == [17.0, 19.0, 21.0, 23.0]


# -- memory --------------------------------------------------------------------------------------------------------
def test_what_is_given_away_is_gone_and_what_is_not_is_kept(device: torch.device) -> None:
    def chain(keep: int | None = None) -> tuple[list[Any], list[weakref.ref[SlotData]]]:
        value, kept, seen = torch.ones(4, 4).to(device), [], []
        for at in range(6):
            value = value * 2
            torchport.sync(wait=False)
            place = unwrap(value).value.data  # type: ignore[union-attr]
            if place is not None:  # a computation's first run is the thread's, which may not have begun
                seen.append(weakref.ref(place))
            if at == keep:
                kept.append(value)
        return [*kept, value], seen

    known, _ = chain()
    torchport.sync()
    del known
    for keep in (None, 2):
        values, seen = chain(keep)
        torchport.sync()
        assert [at for at, place in enumerate(seen) if place() is not None] == [*([] if keep is None else [keep]), 5]
        assert [value[0, 0].item() for value in values] == [*([] if keep is None else [8.0]), 64.0]


def test_memory_is_given_back_without_another_flush(device: torch.device) -> None:
    x = torch.ones(64, 64).to(device)

    def step() -> torch.Tensor:
        value = x * 3 + 1
        torchport.sync(wait=False)
        return value

    on_the_queue(step)
    value = step()
    place = weakref.ref(unwrap(value).value.data)  # type: ignore[union-attr]
    del value
    deadline = time.monotonic() + 60
    while place() is not None and time.monotonic() < deadline:
        time.sleep(0.001)
    assert place() is None


def test_what_the_host_has_is_never_memory_that_the_code_uses(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled code makes copies on write real; two threads that do so at once would free the memory twice."""
    from torchport.run import queue as worker

    monkeypatch.setattr(worker, "LITTLE", 0.0)
    monkeypatch.setattr(machine, "_cores", lambda: 64)
    is_cow: Any = torch._C._is_cow_tensor  # type: ignore[attr-defined]
    source = torch.arange(200_000.0)
    expected, x = source + 1, source.to(device)
    with torchport.config.override(execution="auto"):
        for at in range(100):
            value = x + 1
            held = value.cpu()
            assert is_cow(held)
            summed = (value * 2 + 1).sum()
            torchport.sync(wait=False)  # on the queue
            assert not is_cow(data_of(value).tensor)
            again = value.cpu()
            assert value[:8].sum().item() == 36  # at once, beside it
            if at % 2:
                assert summed.item() == pytest.approx((expected * 2 + 1).sum().item(), rel=1e-5)
            junk = [torch.full((200_000,), 7.0) for _ in range(2)]
            assert torch.equal(held, expected)
            held.add_(1)
            again.add_(1)
            assert torch.equal(value.cpu(), expected)
            del junk


@pytest.mark.slow
def test_threads_with_hooks_wait(device: torch.device) -> None:
    """A thread's hooks are Python objects: they must not be touched with the queue's lock held."""
    ended = []

    def loop(number: int) -> None:
        x = torch.ones(300).to(device)
        for _ in range(150):
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
                first, second = x * number, x + number
                torchport.sync(wait=False)
                first, second = first * second, second * 2
                torchport.sync(wait=False)
                assert (first + second)[0].item() == number * (1 + number) + (1 + number) * 2
        ended.append(number)

    threads = [threading.Thread(target=loop, args=(number,), daemon=True) for number in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert sorted(ended) == [1, 2, 3]


def test_a_read_leaves_the_number_of_threads_alone(device: torch.device) -> None:
    step = started_step(device)
    before = torch.get_num_threads()
    try:
        for _ in range(50):
            torch.set_num_threads(2)
            value = step()
            torch.set_num_threads(1)
            assert value[0].item() == 3
            assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


# -- where it pays -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("cores", [1, 64])
def test_computations_that_use_every_core_are_not_started(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, cores: int
) -> None:
    from torchport.run import queue as worker

    monkeypatch.setattr(worker, "LITTLE", 0.0)
    monkeypatch.setattr(worker, "SHORT", 0.0)
    monkeypatch.setattr(machine, "_cores", lambda: cores)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    x = torch.ones(3).to(device)

    def step() -> torch.Tensor:
        value = x + 1
        torchport.sync(wait=False)
        return value

    step()
    with torchport.config.override(execution="auto"), counted() as counts:
        assert step().tolist() == [2.0] * 3
    assert counts["AsyncExecute"] == (1 if cores == 64 else 0)


def _two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchport.run import overlap_trial
    from torchport.run import queue as worker

    monkeypatch.setattr(worker, "LITTLE", 0.0)
    monkeypatch.setattr(overlap_trial, "LEAST", 0.0)
    monkeypatch.setattr(overlap_trial, "SHARE", -1.0)  # however short it is
    monkeypatch.setattr(machine, "_cores", lambda: 2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)


def test_where_it_takes_a_core_from_the_program_both_ways_are_tried(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    _two_cores(monkeypatch)
    x, host, kept = torch.ones(300).to(device), torch.ones(300), []
    with torchport.config.override(execution="auto"), counted() as counts:
        for _ in range(40):
            x, host = (x * 1.5 + 1).fmod(7), (host * 1.5 + 1).fmod(7)
            kept.append((x, host))
            torchport.sync(wait=False)
    assert 3 <= counts["AsyncExecute"] <= 34
    for given, expected in kept:
        assert given.tolist() == expected.tolist()


def test_a_thread_that_begins_later_has_the_programs_number_of_threads(device: torch.device) -> None:
    """The thread that computes has fewer in some runs; PyTorch's number is for the whole process."""
    step = started_step(device)
    before, found = torch.get_num_threads(), []
    try:
        torch.set_num_threads(3)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(machine, "threads_beside", lambda: 1)
            step().tolist()
        thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        thread.start()
        thread.join()
    finally:
        torch.set_num_threads(before)
    assert found == [3]


def test_the_order_of_sums_does_not_depend_on_the_clock_in_deterministic_mode(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    _two_cores(monkeypatch)
    x = torch.ones(300).to(device)
    torch.use_deterministic_algorithms(True)
    try:
        with torchport.config.override(execution="auto"), counted() as counts:
            for _ in range(40):
                x = x / 2 + 1
                torchport.sync(wait=False)
    finally:
        torch.use_deterministic_algorithms(False)
    assert counts["AsyncExecute"] == 0
