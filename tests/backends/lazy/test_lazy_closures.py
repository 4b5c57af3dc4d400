"""``torchport.step_closure``: after the step, in order, on the spot or on a thread of its own, exceptions deferred."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
import torch
from everyday_support import counted, needs_counters, ramp
from torch import nn

import torchport

pytestmark = needs_counters


def steps(device: torch.device, count: int) -> list[torch.optim.Optimizer]:
    net = nn.Linear(2, 1).to(device)
    return [torch.optim.SGD(net.parameters(), lr=0.1)] * count


@pytest.mark.parametrize("run_async", [False, True], ids=["sync", "async"])
def test_closures_run_in_order_when_the_step_ends(device: torch.device, run_async: bool) -> None:
    seen: list[object] = []
    x = ramp(3, device=device)
    for number in range(3):
        torchport.step_closure(
            lambda value, n: seen.append((n, value.sum().item())), x + number, number, run_async=run_async
        )
    assert seen == []
    torchport.sync()
    assert seen == [(0, 3.0), (1, 6.0), (2, 9.0)]
    torchport.sync()
    assert len(seen) == 3


def test_an_optimizers_step_ends_the_step(device: torch.device) -> None:
    seen: list[float] = []
    (opt, *_) = steps(device, 1)
    x = ramp(3, device=device)
    torchport.step_closure(lambda v: seen.append(v.sum().item()), x * 2)
    (x * 1.5).sum().item()
    assert seen == [], "a read ends no step"
    opt.step()
    assert seen == [6.0]


def test_values_of_closures_are_computed_with_the_step(device: torch.device) -> None:
    net = nn.Linear(2, 1).to(device)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    losses: list[float] = []

    def step(run_async: bool) -> None:
        opt.zero_grad()
        loss = net(torch.ones(4, 2).to(device)).square().mean()
        loss.backward()
        torchport.step_closure(lambda v: losses.append(v.item()), loss.detach(), run_async=run_async)
        opt.step()

    for number in range(8):
        step(number % 2 == 0)
        if number == 3:
            torchport.sync()
            before = torchport.metrics.counter("Execute"), torchport.metrics.counter("UncachedCompile")
    torchport.sync()
    assert torchport.metrics.counter("Execute") - before[0] == 4
    assert torchport.metrics.counter("UncachedCompile") == before[1]
    assert len(losses) == 8
    assert sorted(losses, reverse=True)[0] == max(losses)


def fail(name: str) -> None:
    raise ValueError(name)


def test_an_exception_is_raised_by_the_step_and_the_others_run(device: torch.device) -> None:
    seen: list[int] = []
    torchport.step_closure(seen.append, 1)
    torchport.step_closure(fail, "first")
    torchport.step_closure(fail, "second")
    torchport.step_closure(seen.append, 2)
    with pytest.raises(ValueError, match="first") as caught:
        torchport.sync()
    assert seen == [1, 2]
    assert any("second" in note for note in caught.value.__notes__)
    torchport.sync()


def test_an_asynchronous_exception_is_raised_by_a_later_step(device: torch.device) -> None:
    (opt, *_) = steps(device, 1)
    done = threading.Event()
    torchport.step_closure(fail, "deferred", run_async=True)
    torchport.step_closure(done.set, run_async=True)
    opt.step()
    assert done.wait(60)
    with pytest.raises(ValueError, match="deferred"):
        opt.step()
    opt.step()
    torchport.step_closure(fail, "waited for", run_async=True)
    with pytest.raises(ValueError, match="waited for"):
        torchport.sync()
    torchport.sync()


def test_asynchronous_closures_do_not_hold_up_the_program(device: torch.device) -> None:
    (opt, *_) = steps(device, 1)
    gate, seen = threading.Event(), []
    x = ramp(3, device=device)
    torchport.step_closure(lambda: gate.wait(60), run_async=True)
    for number in range(5):
        torchport.step_closure(lambda v: seen.append(v[0].item()), x + number, run_async=True)
        opt.step()
    assert seen == []
    gate.set()
    torchport.sync()
    assert seen == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_a_closure_may_give_another(device: torch.device) -> None:
    seen: list[str] = []

    def outer() -> None:
        seen.append("outer")
        torchport.step_closure(seen.append, "inner")

    torchport.step_closure(outer)
    torchport.sync()
    assert seen == ["outer"]
    torchport.sync()
    assert seen == ["outer", "inner"]


def test_closures_are_the_threads_own(device: torch.device) -> None:
    seen: list[str] = []
    torchport.step_closure(seen.append, "mine")
    thread = threading.Thread(target=torchport.sync)
    thread.start()
    thread.join()
    assert seen == []
    torchport.sync()
    assert seen == ["mine"]


def test_what_cannot_be_called_is_refused(device: torch.device) -> None:
    with pytest.raises(torchport.TorchportError, match="int"):
        torchport.step_closure(3)  # type: ignore[arg-type]


def test_a_value_is_computed_once_with_closures(device: torch.device) -> None:
    with counted() as counts:
        y = ramp(3, device=device).exp()
        torchport.step_closure(lambda v: v.sum().item(), y)
        torchport.sync()
    assert counts["Execute"] == 2, "the value, and the sum that the closure asks for"


def test_closures_run_before_the_process_ends() -> None:
    program = (
        "import time, torch, torchport\n"
        "x = torch.ones(3, device='port') + 1\n"
        "torchport.step_closure(lambda v: (time.sleep(0.2), print('async', v.sum().item())), x, run_async=True)\n"
        "torchport.step_closure(lambda v: print('sync', v.sum().item()), x)\n"
        "torchport.step_closure(lambda: 1 / 0)\n"
    )
    environment = {**os.environ, "TORCHPORT_BACKEND": "reference"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=240, env=environment
    )
    assert done.returncode == 0
    assert sorted(done.stdout.split("\n")) == ["", "async 6.0", "sync 6.0"]
    assert "ZeroDivisionError" in done.stderr
