"""Execution on the device's own thread: order, overlap, errors at first use, backpressure, exit, fork."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import fakes
import pytest
import torch
from everyday_support import counted, needs_counters
from torch import nn

import torchport
from torchport import BackendData, ExecutionContext

pytestmark = needs_counters


class Gated(fakes.Fake):
    """Computations wait for a gate; on the device's own thread, because they leave the interpreter alone."""

    name = "gated"
    capabilities = replace(fakes.Fake.capabilities, releases_gil=True)

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.started = threading.Semaphore(0)
        self.threads: list[str] = []
        self.most = 0
        self._inside = 0

    def execute(self, handle: Any, args: Sequence[BackendData], context: ExecutionContext) -> Sequence[BackendData]:
        self.threads.append(threading.current_thread().name)
        self._inside += 1
        self.most = max(self.most, self._inside)
        self.started.release()
        assert self.gate.wait(60)
        self._inside -= 1
        return super().execute(handle, args, context)


@pytest.fixture
def gated() -> Iterator[Gated]:
    backend = Gated.install()
    with torchport.config.override(execution="worker"):
        yield backend
        backend.gate.set()
        torchport.sync()


def test_tracing_goes_on_while_a_computation_runs(gated: Gated) -> None:
    x = torch.ones(3).to(gated.device)
    gated.gate.clear()
    y = x + 1
    torchport.sync(wait=False)
    assert gated.started.acquire(timeout=60)
    z = y * 2
    assert z.shape == (3,)
    torchport.sync(wait=False)
    w = (z + y).sum()
    assert not gated.gate.is_set()
    gated.gate.set()
    assert w.item() == 18
    assert gated.threads[0] == f"torchport {gated.name} cpu:0"


def test_a_reader_waits_for_its_own_value_only(gated: Gated) -> None:
    x = torch.ones(3).to(gated.device)
    first = x + 1
    torchport.sync()
    gated.gate.clear()
    second = x + 2
    torchport.sync(wait=False)
    assert first.tolist() == [2.0] * 3
    assert not gated.gate.is_set()
    gated.gate.set()
    assert second.tolist() == [3.0] * 3


class GatedWorker(fakes.Fake):
    """Computations on the device's own thread wait for a gate, others do not."""

    name = "gated_worker"
    capabilities = replace(fakes.Fake.capabilities, releases_gil=True)

    def __init__(self) -> None:
        self.gate, self.started = threading.Event(), threading.Event()

    def execute(self, handle: Any, args: Sequence[BackendData], context: ExecutionContext) -> Sequence[BackendData]:
        if threading.current_thread().name.startswith("torchport"):
            self.started.set()
            assert self.gate.wait(60)
        return super().execute(handle, args, context)


@pytest.mark.parametrize("concurrent", [True, False])
def test_a_short_computation_need_not_queue_behind_one_it_does_not_use(concurrent: bool) -> None:
    backend = GatedWorker.install(concurrent=concurrent)
    x, mask = torch.ones(3).to(backend.device), torch.ones(2).to(backend.device)
    assert (mask * 2).sum().item() == 4
    with torchport.config.override(execution="worker"):
        y = x + 1
        torchport.sync(wait=False)
        assert backend.started.wait(60), "else the reader would run it itself"
    opened = threading.Timer(0.2, backend.gate.set)
    if not concurrent:
        opened.start()
    assert (mask * 2).sum().item() == 4
    assert backend.gate.is_set() is not concurrent
    if concurrent:
        opened.start()
    assert (y * mask.sum()).sum().item() == 12
    assert backend.gate.is_set()


@pytest.mark.parametrize("concurrent", [True, False])
@pytest.mark.parametrize("shared", [True, False])
def test_a_read_does_not_wait_for_what_only_other_pending_values_need(concurrent: bool, shared: bool) -> None:
    """As where a model looks at its positions in each forward, while the optimizer's step before is still running."""
    backend = GatedWorker.install(concurrent=concurrent)
    weight, lengths = torch.ones(3).to(backend.device), torch.ones(2).to(backend.device)
    compiled: list[int] = []
    torchport.metrics.reset()
    for at in range(4):
        backend.gate.clear()
        backend.started.clear()
        with torchport.config.override(execution="worker"):
            weight = weight + 1
            torchport.sync(wait=False)
            assert backend.started.wait(60), "else the reader would run it itself"
        at_once = concurrent and at > 0  # before, it compiles, and nobody knows how long what it computes takes
        if not at_once:
            threading.Timer(0.2, backend.gate.set).start()
        if shared:
            positions = torch.arange(3, device=backend.device) + 1
            tripled, offset = weight * 3 * positions, positions * 2
        else:
            tripled, offset = weight * 3, lengths + 1
        assert (offset * 2).sum().item() == (24 if shared else 8)
        assert backend.gate.is_set() is not at_once
        tripled = tripled + offset.sum()
        backend.gate.set()
        each = 3.0 * (at + 2)
        assert tripled.tolist() == ([each + 12, 2 * each + 12, 3 * each + 12] if shared else [each + 4] * 3)
        compiled.append(torchport.metrics.counter("UncachedCompile"))
    assert compiled[-1] == compiled[-2]
    apart = [reason for reason in torchport.compile_reasons() if reason.kind == "apart"]
    assert len(apart) == 2 * concurrent
    assert all("does not depend on what is running" in str(reason) for reason in apart)


def test_sync_waits_unless_told_not_to(gated: Gated) -> None:
    gated.gate.clear()
    x = torch.ones(3).to(gated.device) + 1
    torchport.sync(wait=False)
    opened = threading.Timer(0.05, gated.gate.set)
    opened.start()
    with counted() as counts:
        torchport.sync()
        assert gated.gate.is_set()
    assert counts["Flush"] == 0
    assert x.sum().item() == 6


@pytest.mark.parametrize("index", [False, True])
def test_the_accelerator_synchronizes(gated: Gated, index: bool) -> None:
    x = torch.ones(3).to(gated.device) + 1
    torch.accelerator.synchronize(*([gated.device] if index else []))
    with counted() as counts:
        assert x.tolist() == [2.0] * 3
    assert counts["Flush"] == 0


def test_the_program_cannot_run_far_ahead(gated: Gated) -> None:
    gated.gate.clear()
    x = torch.ones(3).to(gated.device)
    done: list[int] = []

    def run() -> None:
        value = x
        for step in range(12):
            value = value + step
            torchport.sync(wait=False)
            done.append(step)
        done.append(int(value[0].item()))

    fakes.stays_near(gated.gate, run, done)
    assert done[-1] == 1 + sum(range(12))


def test_one_computation_at_a_time_from_many_threads(gated: Gated) -> None:
    results: list[float] = []

    def run(number: int) -> None:
        value = torch.full((4,), float(number)).to(gated.device)
        for step in range(6):
            value = value * 1.5 + step
            if step % 2:
                torchport.sync(wait=False)
        results.append(value.sum().item())

    expected = []
    for number in range(4):
        value = torch.full((4,), float(number))
        for step in range(6):
            value = value * 1.5 + step
        expected.append(value.sum().item())
    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert sorted(results) == pytest.approx(sorted(expected))
    assert gated.most == 1


# -- errors --------------------------------------------------------------------------------------------------------
class Breaking(fakes.Failing):
    """Fails on ``sin`` while it runs on its own thread."""

    name = "breaking"
    where: ClassVar[str] = "execute"
    capabilities = replace(fakes.Fake.capabilities, releases_gil=True)


@pytest.fixture
def breaking() -> Iterator[Breaking]:
    backend = Breaking.install()
    with torchport.config.override(execution="worker"):
        yield backend
        with contextlib.suppress(torchport.ExecutionError):
            torchport.sync()


def test_an_error_surfaces_at_first_use_with_op_and_line(breaking: Breaking) -> None:
    x = torch.ones(3).to(breaking.device)
    good = x.cos()
    bad = x.sin()
    torchport.sync(wait=False)
    after = good + 1
    with pytest.raises(torchport.ExecutionError) as caught:
        bad.tolist()
    assert "aten.sin" in str(caught.value)
    assert "test_lazy_async.py" in str(caught.value)
    assert good.tolist() == pytest.approx([0.5403023] * 3)
    assert after.tolist() == pytest.approx([1.5403023] * 3)
    with pytest.raises(torchport.ExecutionError):
        bad.tolist()


def test_what_depends_on_a_failed_value_of_an_earlier_computation_fails_alone(breaking: Breaking) -> None:
    x = torch.ones(3).to(breaking.device)
    bad = x.sin()
    torchport.sync(wait=False)
    dependent, other = bad + 1, x + 1
    torchport.sync(wait=False)
    third = dependent * 2
    torchport.sync(wait=False)
    assert other.tolist() == [2.0] * 3
    for value in (dependent, third, bad):
        with pytest.raises(torchport.ExecutionError, match="sin"):
            value.tolist()


def test_sync_raises_what_nobody_has_seen_and_only_once(breaking: Breaking) -> None:
    x = torch.ones(3).to(breaking.device)
    bad = x.sin()
    torchport.sync(wait=False)
    with pytest.raises(torchport.ExecutionError, match="sin"):
        torchport.sync()
    torchport.sync()
    with pytest.raises(torchport.ExecutionError, match="sin"):
        bad.tolist()
    seen = x.sin()
    torchport.sync(wait=False)
    with pytest.raises(torchport.ExecutionError, match="sin"):
        seen.tolist()
    torchport.sync()


def test_tracing_with_a_value_known_to_have_failed_raises(breaking: Breaking) -> None:
    x = torch.ones(3).to(breaking.device)
    bad = x.sin()
    with pytest.raises(torchport.ExecutionError):
        torchport.sync()
    with pytest.raises(torchport.ExecutionError, match="sin"):
        bad + 1
    assert (x + 1).tolist() == [2.0] * 3


def test_a_training_loop_after_an_error(breaking: Breaking) -> None:
    net = nn.Linear(3, 1).to(breaking.device)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    kept = [p.clone() for p in net.parameters()]
    for step in range(5):
        opt.zero_grad()
        x = torch.ones(2, 3).to(breaking.device)
        (net(x.sin() if step == 2 else x)).sum().backward()
        try:
            opt.step()
        except torchport.ExecutionError:
            assert step > 2
            break
    with pytest.raises(torchport.ExecutionError, match="sin"):
        net.weight.tolist()
    net.load_state_dict({"weight": kept[0], "bias": kept[1]})
    assert len(net(torch.ones(2, 3).to(breaking.device)).tolist()) == 2


# -- inline or not -------------------------------------------------------------------------------------------------
class Timed(fakes.Fake):
    """Takes as long as it is told to."""

    name = "timed"
    capabilities = replace(fakes.Fake.capabilities, releases_gil=True)
    seconds = 0.0

    def execute(self, handle: Any, args: Sequence[BackendData], context: ExecutionContext) -> Sequence[BackendData]:
        self.thread = threading.current_thread()
        self.seen = [*getattr(self, "seen", ()), self.thread]
        time.sleep(self.seconds)
        return super().execute(handle, args, context)


@pytest.mark.parametrize("long", [False, True], ids=["short", "long"])
def test_only_long_computations_are_worth_a_thread(monkeypatch: pytest.MonkeyPatch, long: bool) -> None:
    from torchport.run import queue as worker

    monkeypatch.setattr(worker, "SHORT", 0.001 if long else 1e9)
    backend = Timed.install(seconds=0.01)
    net = nn.Linear(3, 1).to(backend.device)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(5):
        opt.zero_grad()
        net(torch.ones(2, 3).to(backend.device)).sum().backward()
        opt.step()
    torchport.sync(wait=False)
    assert any(thread is not threading.current_thread() for thread in backend.seen) == long
    torchport.sync()


def test_a_value_that_is_wanted_now_is_computed_on_the_spot() -> None:
    backend = Timed.install(seconds=0.01)
    x = torch.ones(3).to(backend.device)
    for _ in range(3):
        assert (x + 1).sum().item() == 6
        assert backend.thread is threading.current_thread()


def test_backends_that_hold_the_interpreter_run_inline() -> None:
    backend = Timed.install(seconds=0.01, releases_gil=False)
    x = torch.ones(3).to(backend.device)
    for _ in range(3):
        y = x + 1
        torchport.sync(wait=False)
        assert backend.thread is threading.current_thread()
    assert y.sum().item() == 6


def test_configuration_forbids_threads() -> None:
    backend = Timed.install(seconds=0.01)
    x = torch.ones(3).to(backend.device)
    with torchport.config.override(execution="inline"):
        for _ in range(3):
            y = x + 1
            torchport.sync(wait=False)
            assert backend.thread is threading.current_thread()
    assert y.sum().item() == 6


# -- exit and fork -------------------------------------------------------------------------------------------------
def in_new_process(program: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TORCHPORT_EXECUTION": "worker", "TORCHPORT_BACKEND": "reference"}
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=environment,
    )


SLOW = """
import os, time, torch, torchport
from torchport.backends.reference import ReferenceBackend
class Slow(ReferenceBackend):
    name = "slow"
    def execute(self, *args):
        time.sleep(0.3)
        result = super().execute(*args)
        print("executed", flush=True)
        return result
    def shutdown(self):
        print("shut down", flush=True)
torchport.register(Slow)
torchport.use("slow")
"""


def test_exit_with_work_in_flight_is_clean() -> None:
    done = in_new_process(SLOW + "x = torch.ones(3, device='port') + 1\ntorchport.sync(wait=False)\nprint('end')")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split("\n")[:3] == ["end", "executed", "shut down"]


def test_an_error_that_nobody_has_seen_is_told_at_exit() -> None:
    program = SLOW + (
        "def fail(*args): raise ValueError('the engine broke')\n"
        "Slow.execute = fail\n"
        "x = torch.ones(3, device='port') + 1\ntorchport.sync(wait=False)\n"
    )
    done = in_new_process(program)
    assert done.returncode == 0
    assert "never used" in done.stderr
    assert "the engine broke" in done.stderr


FORK = (
    SLOW
    + """
x = torch.ones(3, device='port') + 1
torchport.sync(wait=False)
y = x * 2
child = os.fork()
if child == 0:
    ok = x.tolist() == [2.0] * 3 and y.tolist() == [4.0] * 3 and (y + x).sum().item() == 18
    os._exit(0 if ok else 3)
status = os.waitpid(child, 0)[1]
assert os.waitstatus_to_exitcode(status) == 0, status
assert y.tolist() == [4.0] * 3
"""
)


def test_a_forked_child_has_the_values_that_were_in_flight() -> None:
    done = in_new_process(FORK)
    assert done.returncode == 0, done.stderr


FORK_BESIDE_THREADS = """
import os, threading, time
import torch, torchport
from torchport.trace.trace import lock
ready, done = threading.Event(), threading.Event()
def other():
    kept = torch.ones(3, device="port") + 1
    with lock:  # as while it computes
        ready.set()
        done.wait()
torch.ones(3, device="port").sum().item()
thread = threading.Thread(target=other)
thread.start()
ready.wait()
child = os.fork()
if child == 0:
    os._exit(0)
for _ in range(300):
    gone, status = os.waitpid(child, os.WNOHANG)
    if gone:
        break
    time.sleep(0.1)
else:
    os.kill(child, 9)
done.set()
thread.join()
assert gone and status == 0, (gone, status)
"""


def test_a_forked_child_leaves_alone_what_other_threads_had_pending() -> None:
    done = in_new_process(FORK_BESIDE_THREADS)
    assert done.returncode == 0, done.stderr


LOADER = """
import torch, torchport
from torch.utils.data import DataLoader, Dataset
class Data(Dataset):
    def __init__(self): self.x = torch.arange(8.0).to("port") * 2
    def __len__(self): return 8
    def __getitem__(self, i): return self.x[i].item() + torch.rand(1, device="port").item() * 0
if __name__ == "__main__":
    net = torch.nn.Linear(1, 1).to("port")
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    data = Data()
    torchport.sync(wait=False)
    for epoch in range(2):
        seen = []
        for batch in DataLoader(data, batch_size=2, num_workers=2, multiprocessing_context="fork"):
            seen += batch.tolist()
            opt.zero_grad()
            net(batch[:, None].float().to("port")).sum().backward()
            opt.step()
        assert seen == [2.0 * i for i in range(8)], seen
"""


def test_data_loader_workers_forked_while_the_device_works() -> None:
    done = in_new_process(LOADER)
    assert done.returncode == 0, done.stderr
