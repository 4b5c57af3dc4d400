"""Backends with a queue of their own: what they have begun, what it brings, and what happens when it fails."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import fakes
import pytest
import torch
from everyday_support import counted, needs_counters
from torch import nn

import torchport
from torchport import BackendData, Capabilities, ExecutionContext, Started, TensorData
from torchport.backends.inductor import InductorBackend
from torchport.trace.wrapping import unwrap

pytestmark = needs_counters


class Queued(fakes.Failing):
    """Has a queue: computations wait for a gate there. Those with ``sin`` fail once :attr:`fails` is set."""

    name = "queued"
    where = "never"
    capabilities = Capabilities(donation=True, restores_donated=True, concurrent=True)

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()
        self.pool = ThreadPoolExecutor(1)
        self.begun = self.skipped = 0
        self.refuses = self.raises = self.fails = False
        self.aside = True
        self.donated: list[int] = []

    def should_overlap(self) -> bool:
        return self.aside

    def start(self, handle: Any, args: Sequence[BackendData], context: ExecutionContext) -> Started | None:
        if self.raises:
            raise RuntimeError("the queue is closed")
        if self.refuses:
            return None
        self.begun += 1
        self.donated.append(len(context.donated))
        results = [TensorData(context.device, spec, None) for spec in context.outputs]
        given = list(args)
        places = [weakref.ref(result) for result in results]  # what the queue held could not be donated

        def run() -> float:
            assert self.gate.wait(60)
            if not all(value.has_value for value in given):
                self.skipped += 1
                raise RuntimeError("an argument has no value")
            if self.fails and handle[1]:
                raise RuntimeError("the queue cannot compute sin")
            for place, value in zip(places, self.execute(handle, given, context), strict=True):
                result = place()
                if result is not None:
                    result.assign(value)
            given.clear()
            return 0.25

        future = self.pool.submit(run)
        return Started(results, future.done, future.result)


@pytest.fixture
def queued() -> Iterator[Queued]:
    backend = Queued.install()
    with torchport.config.override(execution="worker"):
        yield backend
        backend.gate.set()
        backend.fails = False
        with contextlib.suppress(torchport.ExecutionError):
            torchport.sync()


def known(fn: Callable[[], object]) -> None:
    """Have the computations of a function run once: only what was executed before is started."""
    kept = fn()
    torchport.sync()
    del kept


def test_tracing_goes_on_and_results_are_arguments_before_they_are_there(queued: Queued) -> None:
    x = torch.ones(3).to(queued.device)

    def chain() -> torch.Tensor:
        value = x
        for step in range(3):
            value = value * 2 + step
            torchport.sync(wait=False)
        return value

    known(chain)
    begun = queued.begun
    queued.gate.clear()
    with counted() as counts:
        value = chain()
        assert value.shape == (3,)
        assert queued.begun == begun + 3
        assert not queued.gate.is_set()
        queued.gate.set()
    assert counts["AsyncExecute"] == 3
    assert counts["UncachedCompile"] == 0
    assert value.tolist() == [12.0] * 3


def test_a_computation_runs_at_once_the_first_time(queued: Queued) -> None:
    x = torch.ones(3).to(queued.device)
    for step in range(3):
        y = x + 1
        torchport.sync()
        assert queued.begun == step
    assert y.tolist() == [2.0] * 3


def test_the_time_is_the_backends_own(queued: Queued) -> None:
    x = torch.ones(3).to(queued.device)
    known(lambda: x + 1)
    torchport.metrics.reset()
    y = x + 1
    torchport.sync()
    assert torchport.metrics.snapshot()["seconds"]["AsyncExecuteTime"] == 0.25
    assert y.tolist() == [2.0] * 3


@pytest.mark.parametrize("how", ["refuses", "elsewhere", "inline"])
def test_what_is_not_started_is_computed_all_the_same(queued: Queued, how: str) -> None:
    x = torch.ones(3).to(queued.device)

    def chain() -> torch.Tensor:
        value = x + 1
        torchport.sync(wait=False)
        return value * 3

    known(chain)
    known(chain)
    begun = queued.begun
    assert begun
    queued.refuses = how == "refuses"
    queued.aside = False
    execution = {"refuses": "worker", "elsewhere": "auto", "inline": "inline"}[how]
    with torchport.config.override(execution=execution):
        assert chain().tolist() == [6.0] * 3
    assert queued.begun == begun


def test_only_computations_that_take_a_while_are_started(queued: Queued, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchport.run import queue as worker

    x = torch.ones(3).to(queued.device)
    for least, begun in ((1e9, 0), (0.0, 2)):
        monkeypatch.setattr(worker, "LITTLE", least)
        with torchport.config.override(execution="auto"):
            for _ in range(3):
                y = x + 1
                torchport.sync()
        assert queued.begun == (begun and begun + 1)  # the plan was known the second time
        assert y.tolist() == [2.0] * 3


def test_a_value_that_is_wanted_now_is_computed_on_the_spot(queued: Queued, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchport.run import queue as worker

    monkeypatch.setattr(worker, "LITTLE", 0.0)
    x = torch.ones(3).to(queued.device)
    with torchport.config.override(execution="auto"):
        for _ in range(3):
            assert (x + 1).sum().item() == 6
    assert not queued.begun


def test_a_short_computation_need_not_queue_behind_one_it_does_not_use(queued: Queued) -> None:
    x, mask = torch.ones(3).to(queued.device), torch.ones(2).to(queued.device)

    def long() -> torch.Tensor:
        value = x + 1
        torchport.sync(wait=False)
        return value

    known(long)
    assert (mask * 2).sum().item() == 4
    queued.gate.clear()
    y = long()
    with torchport.config.override(execution="auto"):
        assert (mask * 2).sum().item() == 4
        assert not queued.gate.is_set()
        threading.Timer(0.2, queued.gate.set).start()
        assert (y * mask.sum()).sum().item() == 12
    assert queued.gate.is_set()


def test_a_backend_may_say_that_something_has_ended(queued: Queued) -> None:
    from torchport.backend.optional import ended

    x = torch.ones(3).to(queued.device)
    known(lambda: x + 1)
    y = x + 1
    torchport.sync(wait=False)
    promise: Any = unwrap(y).value  # type: ignore[union-attr]
    queued.pool.submit(lambda: None).result()
    assert not promise.has_value
    ended()
    assert promise.has_value
    assert y.tolist() == [2.0] * 3


def test_the_program_cannot_run_far_ahead(queued: Queued) -> None:
    x = torch.ones(3).to(queued.device)
    done: list[int] = []

    def ahead() -> torch.Tensor:
        value = x
        for step in range(8):
            value = value + step
            torchport.sync(wait=False)
            done.append(step)
        return value

    def run() -> None:
        known(ahead)
        done.clear()
        queued.gate.clear()
        done.append(int(ahead()[0].item()))

    fakes.stays_near(queued.gate, run, done)
    assert done[-1] == 1 + sum(range(8))


def test_what_nobody_holds_is_donated_before_it_is_there(queued: Queued) -> None:
    def chain(kept: list[torch.Tensor] | None = None) -> torch.Tensor:
        value = torch.ones(3).to(queued.device)
        for step in range(3):
            value = value * 2 + step
            torchport.sync(wait=False)
            if kept is not None:
                kept.append(value)
        return value

    known(chain)
    queued.donated.clear()
    queued.gate.clear()
    value = chain()
    queued.gate.set()
    assert value.tolist() == [12.0] * 3
    given_up = queued.donated.copy()
    queued.donated.clear()
    queued.gate.clear()
    kept: list[torch.Tensor] = []
    chain(kept)
    queued.gate.set()
    assert [value.tolist() for value in kept] == [[2.0] * 3, [5.0] * 3, [12.0] * 3]
    # Numbers that vary are donated always.
    assert [more - fewer for more, fewer in zip(given_up, queued.donated, strict=True)] == [0, 1, 1]


def test_an_error_surfaces_at_first_use_and_takes_only_what_depends_on_it(queued: Queued) -> None:
    x = torch.ones(3).to(queued.device)

    def program() -> tuple[torch.Tensor, ...]:
        good, bad = x.cos(), x.sin()
        torchport.sync(wait=False)
        dependent, other = bad + 1, good + 1
        torchport.sync(wait=False)
        third = dependent * 2
        torchport.sync(wait=False)
        return good, other, bad, dependent, third

    known(program)
    queued.fails, queued.where = True, "execute"
    good, other, *failed = program()
    assert queued.begun
    assert other.tolist() == pytest.approx([1.5403023] * 3)
    assert good.tolist() == pytest.approx([0.5403023] * 3)
    for value in failed:
        with pytest.raises(torchport.ExecutionError, match=r"sin") as caught:
            value.tolist()
        assert "test_started.py" in str(caught.value)
    assert queued.skipped
    torchport.sync()
    with pytest.raises(torchport.ExecutionError, match="sin"):
        failed[0] + 1


def test_sync_raises_what_nobody_has_seen_and_only_once(queued: Queued) -> None:
    x = torch.ones(3).to(queued.device)
    known(x.sin)
    queued.fails, queued.where = True, "execute"
    bad = x.sin()
    torchport.sync(wait=False)
    with pytest.raises(torchport.ExecutionError, match="sin"):
        torchport.sync()
    torchport.sync()
    with pytest.raises(torchport.ExecutionError, match="sin"):
        bad.tolist()


def test_a_failure_of_the_whole_alone_is_told_and_loses_nothing(queued: Queued) -> None:
    """What was donated to a computation that was not run, because another had failed, has its value."""

    def program() -> torch.Tensor:
        value = torch.ones(3).to(queued.device).sin()
        torchport.sync(wait=False)
        value = value + torch.full((3,), 2.0).to(queued.device) * 3
        torchport.sync(wait=False)
        return value

    known(program)
    queued.fails = True
    with pytest.warns(RuntimeWarning, match="run op by op"):
        assert program().tolist() == pytest.approx([6.841471] * 3)
    assert queued.skipped == 1
    assert queued.donated[-1] == 2


def test_a_queue_that_does_not_take_it(queued: Queued) -> None:
    x = torch.ones(3).to(queued.device)
    known(lambda: x + 1)
    queued.raises = True
    y = x + 1
    with pytest.warns(RuntimeWarning, match="the queue is closed"):
        torchport.sync()
    assert y.tolist() == [2.0] * 3


def test_an_interrupt_while_waiting_loses_nothing(queued: Queued) -> None:
    x = torch.ones(3).to(queued.device)
    known(lambda: x + 1)
    queued.gate.clear()
    y = x + 1
    torchport.sync(wait=False)
    opened = threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT))
    opened.start()
    with pytest.raises(KeyboardInterrupt):
        y.tolist()
    queued.gate.set()
    assert y.tolist() == [2.0] * 3
    assert (y + 1).tolist() == [3.0] * 3


def test_many_threads_wait_for_the_same_values(queued: Queued) -> None:
    x = torch.ones(3).to(queued.device)
    known(lambda: x + 1)
    for _ in range(20):
        queued.gate.clear()
        y = x + 1
        torchport.sync(wait=False)
        with ThreadPoolExecutor(4) as readers:
            found = [readers.submit(y.tolist) for _ in range(4)]
            queued.gate.set()
        assert [reader.result() for reader in found] == [[2.0] * 3] * 4


def test_a_training_loop_is_the_same(queued: Queued) -> None:
    def train(device: torch.device) -> list[list[float]]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)).to(device)
        opt = torch.optim.AdamW(net.parameters(), lr=0.01)
        losses = []
        for step in range(8):
            x = torch.linspace(0, 1, 20).reshape(5, 4).to(device) * (1.0 + step)
            loss = net(x).pow(2).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            if step % 3 == 2:
                losses.append(loss.item())
        return [losses, *(p.flatten().tolist() for p in net.parameters())]

    got, expected = train(queued.device), train(torch.device("cpu"))
    assert queued.begun
    for a, b in zip(got, expected, strict=True):
        assert a == pytest.approx(b, rel=1e-5)


# -- exit and fork -------------------------------------------------------------------------------------------------
PROGRAM = """
import os, sys, torch, torchport
torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
torchport.use("inductor")
torchport.config.execution = "worker"
x = torch.ones(300, 300).to("port")
def step(value):
    for _ in range(3):
        value = value @ x / 300
    torchport.sync(wait=False)
    return value
step(step(x)).sum().item()
torchport.metrics.reset()
y = step(step(step(x)))
assert torchport.metrics.snapshot()["counters"]["AsyncExecute"] == 3
"""
FORKED = """
pid = os.fork()
if pid == 0:
    with torchport.config.override(execution="inline"):
        ok = y.sum().item() == 90_000
    z = step(step(y))
    os._exit(0 if ok and z.sum().item() == 90_000 else 1)
_, status = os.waitpid(pid, 0)
assert os.waitstatus_to_exitcode(status) == 0
assert step(y).sum().item() == 90_000
print("done")
"""


@pytest.mark.parametrize("what", ["exit", pytest.param("fork", marks=pytest.mark.slow)])
def test_a_process_ends_or_forks_with_work_in_flight(what: str) -> None:
    if not InductorBackend().is_available():
        pytest.skip(InductorBackend().unavailable_reason())
    program = PROGRAM + ("print('done')" if what == "exit" else FORKED)
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
