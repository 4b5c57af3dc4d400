"""What is compiled takes over only where it is not slower than the interpreter."""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import torchport
from torchport import metrics
from torchport.backends.reference import ReferenceBackend
from torchport.cache.current import disk_cache
from torchport.cache.folder import CacheFolder
from torchport.core.config import config
from torchport.core.threads import leave_cores
from torchport.run import device_runtime, flush, tiers, trial, worth
from torchport.run.history import history
from torchport.run.worth import CompileCosts


class _Slow(ReferenceBackend):
    """Takes its time to run what is compiled; ``fails``: raises instead, so many times."""

    name = "slow_engine"
    seconds = 0.0
    fails = 0
    runs = 0

    def execute(self, handle: Any, args: Sequence[Any], context: Any) -> list[Any]:
        type(self).runs += 1
        time.sleep(self.seconds)
        if self.fails:
            type(self).fails -= 1
            raise RuntimeError("the engine has no memory left")
        return list(super().execute(handle, args, context))


def _expected(backend: torchport.Backend, operators: int) -> float:
    return 0.0 if history.tiers and history.tiers[-1].runs > 2 else 1e9


@pytest.fixture(autouse=True)
def _tried(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An engine whose graphs are compiled when they come back, by the program itself, and tried."""
    torchport.register(_Slow)
    torchport.use("slow_engine")
    monkeypatch.setattr(trial, "LEAST", 0.0)
    monkeypatch.setattr(trial, "costs", CompileCosts())  # ``expected`` below is 0 where it is to be compiled
    leave_cores(0)
    monkeypatch.setattr(_Slow, "runs", 0)
    monkeypatch.setattr(_Slow, "fails", 0)
    # Once it was interpreted three times, so that there are runs to compare with.
    monkeypatch.setattr(worth.costs, "expected", _expected)
    monkeypatch.setattr(device_runtime, "is_worth_recording", lambda backend, sights: sights.times > 0)
    with config.override(tiers="on", compile_workers=0):
        yield
    torchport.sync()
    torchport.use("reference")
    torchport.registry.unregister("slow_engine")


def _run(times: int, size: int) -> None:
    x = torch.rand(size, 3)
    for _ in range(times):
        torch.testing.assert_close(((x.to("port").sin() + 1).cos() * 2).sum(0).cpu(), ((x.sin() + 1).cos() * 2).sum(0))


def test_a_slower_one_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Slow, "seconds", 0.02)
    before = metrics.counter("InterpreterIsQuicker")
    _run(30, 11)
    assert metrics.counter("InterpreterIsQuicker") == before + 1
    assert _Slow.runs == trial.TRIED
    record = torchport.tiers()[-1]
    assert record.tier == "stays interpreted"
    assert "compiled it takes" in str(record)
    assert "compiled after" not in str(record)
    y = ((torch.rand(11, 3).to("port").sin() + 1).cos() * 2).sum(0)
    assert "stays so: compiled it takes" in torchport.dump(y)


@pytest.mark.parametrize("seconds", [0.02, 0.0])
def test_the_next_program_does_not_look_for_one_that_is_slower(
    seconds: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(_Slow, "capabilities", dataclasses.replace(ReferenceBackend.capabilities, skips_cache=False))
    monkeypatch.setattr(_Slow, "seconds", seconds)
    monkeypatch.setattr(trial, "MUCH_SLOWER", 1.15 if seconds else 1e9)
    notes: list[str] = []
    noted = CacheFolder.note_path
    monkeypatch.setattr(CacheFolder, "note_path", lambda self, name: (notes.append(name), noted(self, name))[1])
    with config.override(cache="on", cache_dir=str(tmp_path / "cache")):
        _run(30, 20 + bool(seconds))
        assert torchport.tiers()[-1].tier == ("stays interpreted" if seconds else "compiled")
        folder = disk_cache()
        assert folder is not None
        assert len(notes) == 2  # the path, and what it begins with
        assert folder.knows_path(notes[0]) is not bool(seconds)
        assert folder.knows_path(notes[1])


def test_a_quicker_one_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "MUCH_SLOWER", 1e9)  # the engine donates
    monkeypatch.setattr(_Slow, "seconds", 0.0)
    before = metrics.counter("InterpretedRun")
    _run(40, 12)
    assert _Slow.runs > 15
    assert metrics.counter("InterpretedRun") - before < 15
    assert torchport.tiers()[-1].tier == "compiled"


def test_while_both_are_tried_they_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "TRIED", 1_000)
    _run(12, 13)
    assert torchport.tiers()[-1].tier == "tried"
    y = ((torch.rand(13, 3).to("port").sin() + 1).cos() * 2).sum(0)
    assert "compiled in turn" in torchport.dump(y)
    assert 2 <= _Slow.runs <= 7  # one by one with the interpreter


def test_nothing_is_decided_beside_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Slow, "seconds", 0.005)
    leave_cores(1)
    try:
        _run(30, 14)
        assert torchport.tiers()[-1].tier == "tried"
        assert _Slow.runs > trial.TRIED
    finally:
        leave_cores(0)
    _run(12, 14)
    assert torchport.tiers()[-1].tier == "stays interpreted"


def test_short_runs_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "LEAST", 10.0)
    _run(12, 15)
    assert torchport.tiers()[-1].tier == "compiled"


def test_an_engine_that_fails_while_it_is_tried_leaves_the_program_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Slow, "fails", 1)
    with pytest.warns(RuntimeWarning, match="was run op by op.*no memory left") as told:
        _run(30, 16)
    assert _Slow.fails == 0
    assert str(told[0].message).count("failed to execute") == 1


@pytest.mark.filterwarnings("ignore:a computation failed as a whole:RuntimeWarning")
def test_an_engine_that_always_fails_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Slow, "fails", 10**6)
    _run(40, 17)
    record = torchport.tiers()[-1]
    assert record.tier == "stays interpreted"
    assert "no memory left" in str(record)
    assert _Slow.runs < 15


def test_what_both_take_is_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Slow, "seconds", 0.02)
    monkeypatch.setattr(worth, "OVERHEAD", 0.0)
    before = trial.costs.saved(_Slow(), 1.0)
    _run(30, 22)
    assert trial.costs.saved(_Slow(), 1.0) < before


def test_garbage_is_collected_while_a_graph_is_compiled_here_and_in_no_other_flush(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    collects: dict[str, set[bool]] = {"next_plan": set(), "make_plan": set()}
    for module, name in ((flush, "next_plan"), (tiers, "make_plan")):
        real = getattr(module, name)

        def noting(*args: Any, real: Any = real, name: str = name, **kwargs: Any) -> Any:
            collects[name].add(gc.isenabled())
            return real(*args, **kwargs)

        monkeypatch.setattr(module, name, noting)
    _run(12, 23)
    assert collects == {"next_plan": {False}, "make_plan": {True}}
    assert gc.isenabled()


def test_what_is_warmed_is_not_tried() -> None:
    x = torch.rand(18, 3)

    def step() -> torch.Tensor:
        return ((x.to("port").sin() + 1).cos() * 2).sum(0).cpu()

    _run(5, 18)  # there are runs to compare with
    with trial.costs.ignored():  # as ``warm`` has those that are everybody's
        torchport.warm(step)
    assert torchport.tiers()[-1].tier == "compiled"


def test_a_run_counts_once() -> None:
    trial_of = metrics.counter("Execute")
    _run(12, 19)
    assert torchport.tiers()[-1].tier == "tried"
    assert metrics.counter("Execute") - trial_of <= 12
