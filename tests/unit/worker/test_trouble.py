"""A program whose computations are interpreted at first goes on, with right values, whatever its compiler does."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from worker_engines import Troubled

import torchport
from torchport import metrics
from torchport.core.config import config
from torchport.core.specs import CompileSpecs
from torchport.run import device_runtime, tiers, worth
from torchport.trace.threads import threads
from torchport.worker.service import service

SECONDS = 240


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, eager_workers: None) -> Iterator[Any]:
    """Runs steps on the backend of ``worker_engines`` until its compiler has come to an end, in whatever way."""
    torchport.register(Troubled)
    monkeypatch.setattr(device_runtime, "is_worth_recording", lambda backend, sights: sights.times >= 1)
    monkeypatch.setattr(worth.costs, "expected", lambda backend, operators: 0.0)
    monkeypatch.setattr(tiers, "_said", set())

    def run(how: str) -> None:
        config.compile_timeout = 15 if how == "hangs" else 200  # the worker imports this folder's modules first
        torchport.use("troubled")
        runtime: Any = threads.of(0).runtime
        runtime.specs = CompileSpecs({"how": how})
        runtime.forget_decisions()
        x = torch.rand(3, 4)
        ends = "StaysInterpreted", "TakenOver"
        before = sum(map(metrics.counter, ends))
        latest = time.monotonic() + SECONDS
        while sum(map(metrics.counter, ends)) == before:
            torch.testing.assert_close((x.to("port").tanh() * 2).sum().cpu(), (x.tanh() * 2).sum())
            assert time.monotonic() < latest, "the compiler's end did not reach the program"
            time.sleep(0.01)
        for _ in range(3):
            torch.testing.assert_close((x.to("port").tanh() * 2).sum().cpu(), (x.tanh() * 2).sum())

    with config.override(tiers="auto", compile_workers=1, compile_timeout=200):
        yield run
    torchport.use("reference")
    torchport.registry.unregister("troubled")
    service.stop()


ENDS = {
    "raises": "the engine divides by nothing",
    "exits": "exit code 3",
    "crashes": "SIGSEGV",
    "hangs": "did not end within 15 s",
    "hungry": "emory",
}


@pytest.mark.parametrize(
    "how", ["raises", *(pytest.param(how, marks=pytest.mark.slow) for how in ("exits", "crashes", "hangs", "hungry"))]
)
def test_what_does_not_compile_is_said_once_and_interpreted(
    program: Any, capfd: pytest.CaptureFixture[str], how: str
) -> None:
    stays = metrics.counter("StaysInterpreted")
    program(how)
    assert metrics.counter("StaysInterpreted") == stays + 1
    said = capfd.readouterr().err
    assert said.count("a computation stays interpreted") == 1
    assert ENDS[how] in said


def test_what_compiles_takes_over(program: Any, capfd: pytest.CaptureFixture[str]) -> None:
    taken = metrics.counter("TakenOver")
    program("slow")
    assert metrics.counter("TakenOver") == taken + 1
    assert capfd.readouterr().err == ""
