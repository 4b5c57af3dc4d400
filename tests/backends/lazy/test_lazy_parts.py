"""A read that computes its own part of a trace, and the rest apart: failures, interrupts, threads, what is dropped."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import fakes
import pytest
import torch
from everyday_support import needs_counters

import torchport
from torchport import BackendData, ExecutionContext

pytestmark = needs_counters


class GatedWorker(fakes.Fake):
    """Computations on the device's own thread wait for a gate; others do first what a test wants."""

    name = "gated_parts"
    capabilities = replace(fakes.Fake.capabilities, releases_gil=True, concurrent=True)

    def __init__(self) -> None:
        self.gate, self.started = threading.Event(), threading.Event()
        self.first: Callable[[], None] = lambda: None

    def execute(self, handle: Any, args: Sequence[BackendData], context: ExecutionContext) -> Sequence[BackendData]:
        if threading.current_thread().name.startswith("torchport"):
            self.started.set()
            assert self.gate.wait(60)
        else:
            self.first()
        return super().execute(handle, args, context)


class Program:
    """``weight`` is on its way, and what is read does not need it: taken apart from the first round on."""

    def __init__(self) -> None:
        self.backend = GatedWorker.install()
        self.weight = torch.ones(3).to(self.backend.device)
        self.other = torch.ones(2).to(self.backend.device)
        self.round()

    def pending(self) -> tuple[torch.Tensor, torch.Tensor]:
        """A value that waits for the weight, and one that does not, with the worker busy."""
        self.backend.gate.clear()
        self.backend.started.clear()
        with torchport.config.override(execution="worker"):
            self.weight = self.weight + 1
            torchport.sync(wait=False)
            assert self.backend.started.wait(60)
        return self.weight * 3, self.other + 1

    def round(self) -> None:
        """Let the parts be compiled and run once."""
        waits, free = self.pending()
        threading.Timer(0.1, self.backend.gate.set).start()
        assert free.tolist() == [2.0, 2.0]
        assert waits.tolist() == [6.0] * 3


def test_an_interrupt_loses_no_value() -> None:
    program = Program()
    waits, free = program.pending()

    def interrupt() -> None:
        program.backend.first = lambda: None
        raise KeyboardInterrupt

    program.backend.first = interrupt
    with pytest.raises(KeyboardInterrupt):
        free.tolist()
    program.backend.gate.set()
    assert free.tolist() == [2.0, 2.0]
    assert waits.tolist() == [9.0] * 3


def test_another_thread_asks_for_the_rest_meanwhile() -> None:
    program = Program()
    waits, free = program.pending()
    seen: list[Any] = []

    def ask() -> None:
        try:
            seen.append(waits.tolist())
        except BaseException as error:
            seen.append(error)

    thread = threading.Thread(target=ask)

    def slowly() -> None:
        program.backend.first = lambda: None
        thread.start()
        time.sleep(0.2)

    program.backend.first = slowly
    assert free.tolist() == [2.0, 2.0]
    program.backend.gate.set()
    thread.join(60)
    assert seen == [[9.0] * 3]


def test_computations_that_do_not_fit_in_memory_together() -> None:
    with torchport.config.override(max_computations=1):
        program = Program()
        for at in range(2, 5):
            waits, free = program.pending()
            program.backend.gate.set()
            assert free.tolist() == [2.0, 2.0]
            assert waits.tolist() == [3.0 * (at + 1)] * 3


@pytest.mark.parametrize("fails", ["the part that is read", "the rest"])
def test_one_part_fails(fails: str) -> None:
    program = Program()
    waits, free = program.pending()
    calls: list[int] = []

    def fail() -> None:
        calls.append(1)
        if len(calls) == (1 if fails == "the part that is read" else 2):
            program.backend.gate.set()
            raise RuntimeError("once")

    program.backend.first = fail
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # run op by op, which works
        assert free.tolist() == [2.0, 2.0]
        program.backend.gate.set()
        assert waits.tolist() == [9.0] * 3


def test_integers_of_something_large_are_not_computed_twice() -> None:
    program = Program()
    large = torch.arange(300_000.0).to(program.backend.device)
    torchport.metrics.reset()
    for _ in range(2):
        program.pending()
        place = large.argmax()
        waits, free = program.weight * place, place + 1
        threading.Timer(0.1, program.backend.gate.set).start()
        assert free.item() == 300_000
        assert waits.shape == (3,)
    assert not [reason for reason in torchport.compile_reasons() if reason.kind == "apart"]


class FailsThenInterrupts(fakes.Fake):
    """The first computation fails; while it is run op by op comes an interrupt."""

    name = "fails_then_interrupts"

    def __init__(self) -> None:
        self.calls = 0

    def execute(self, handle: Any, args: Sequence[BackendData], context: ExecutionContext) -> Sequence[BackendData]:
        self.calls += 1
        if self.calls == 1:
            raise RuntimeError("the whole fails")
        if self.calls == 2:
            raise KeyboardInterrupt
        return super().execute(handle, args, context)


def test_an_interrupt_while_operators_run_one_by_one() -> None:
    backend = FailsThenInterrupts.install()
    x = torch.zeros(2).to(backend.device).cos() + 1
    with pytest.raises(KeyboardInterrupt):
        x.tolist()
    with pytest.warns(RuntimeWarning, match="run op by op"):
        assert x.tolist() == [2.0, 2.0]
    assert x.tolist() == [2.0, 2.0]


def in_a_thread(read: Callable[[], Any]) -> Any:
    """What another thread reads."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(read()))
    thread.start()
    thread.join(60)
    return found[0]


@pytest.mark.parametrize("index", [0, 1])
def test_a_value_that_another_thread_read_stays_what_it_was(index: int) -> None:
    """Its number ended with the trace, whose numbers are those of other values after that."""
    torchport.use("reference")
    place = fakes.Fake.install().device if index else torch.device("port")
    x = torch.arange(4.0).to(place)
    y = x + 1
    assert in_a_thread(y.tolist) == [1.0, 2.0, 3.0, 4.0]
    torchport.sync()
    z = x * 100
    assert (y + 0).tolist() == y.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert z.tolist() == [0.0, 100.0, 200.0, 300.0]
    for _ in range(5):
        x = x + x.flip(0) * 0.5
        expected = x.detach().clone()
        assert in_a_thread(x.tolist) == expected.tolist()
        torchport.sync()


def test_a_thread_reads_what_another_is_computing() -> None:
    torchport.use("reference")
    failures: list[BaseException] = []

    def read(x: torch.Tensor) -> None:
        try:
            x.tolist()
        except BaseException as error:
            failures.append(error)

    x, readers = torch.arange(4.0).to("port"), list[threading.Thread]()
    for _ in range(40):
        x = x + x.flip(0) * 0.5
        readers.append(threading.Thread(target=read, args=(x,)))
        readers[-1].start()
        torchport.sync()
    for reader in readers:
        reader.join(60)
    assert not failures
