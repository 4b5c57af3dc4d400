"""When what is interpreted has cost enough: what compiling costs, and what it takes from the program."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import torchport
from torchport.cache.entry import CacheEntry
from torchport.cache.folder import CacheFolder
from torchport.core.config import config
from torchport.run import worth
from torchport.run.worth import CompileCosts, costs_enough, may_be_kept, price
from torchport.worker.service import Service


class _Engine(torchport.Backend):
    name = "worth"
    capabilities = torchport.Capabilities(slow_to_compile=True, seconds_per_operator=0.01, fixed_compile_cost=50)

    def preprocess(self, graph: Any, specs: Any) -> torchport.Processed:
        raise NotImplementedError

    def execute(self, handle: Any, args: Any, context: Any) -> list[Any]:
        raise NotImplementedError


engine = _Engine()


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A machine of two cores with one worker, nothing compiled before, nothing on disk."""
    monkeypatch.setattr(worth, "cores", lambda: 2)
    monkeypatch.setattr(worth, "costs", CompileCosts())
    monkeypatch.setattr(worth, "service", Service())  # whatever became of this process's own
    before = torch.get_num_threads()
    with config.override(compile_workers=1, cache="on", cache_dir=str(tmp_path / "cache")):
        yield
    torch.set_num_threads(before)


def test_a_backend_is_believed_until_something_is_compiled() -> None:
    made = CompileCosts()
    assert made.expected(engine, 150) == pytest.approx(2.0)
    made.note(engine, 150, 20.0)
    assert made.expected(engine, 150) == pytest.approx(20.0)
    assert made.expected(engine, 50) == pytest.approx(10.0)


def test_a_small_graph_does_not_make_a_large_one_look_hopeless() -> None:
    """Nearly all of what a graph of a few operators takes is what any graph takes."""
    made = CompileCosts()
    made.note(engine, 10, 6.0)
    assert made.expected(engine, 450) < 60


def test_inside_the_block_everything_is_worth_it() -> None:
    made = CompileCosts()
    with made.ignored():
        assert made.expected(engine, 1_000) == 0.0
    assert made.expected(engine, 1_000) > 0.0


@pytest.mark.parametrize(
    ("cores", "threads", "workers", "want"),
    [
        (2, 1, 1, worth.WORTH_A_PROCESS),  # a core is idle
        (4, 3, 1, worth.WORTH_A_PROCESS),
        (2, 2, 1, worth.WORTH_LOST_TIME / 2),
        (4, 4, 1, worth.WORTH_LOST_TIME / 4),
        (4, 4, 2, worth.WORTH_LOST_TIME / 2),
        (64, 64, 1, worth.WORTH_A_PROCESS),  # one core of 64 is not missed
        (1, 1, 1, worth.WORTH_LOST_TIME / 2),  # the two share it
        (2, 2, 0, worth.WORTH_A_PROCESS),  # no other process compiles
    ],
)
def test_the_price_is_what_the_program_loses(
    cores: int, threads: int, workers: int, want: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worth, "cores", lambda: cores)
    torch.set_num_threads(threads)
    with config.override(compile_workers=workers):
        assert price() == pytest.approx(want)


def test_what_may_be_on_disk_is_looked_for_early() -> None:
    torch.set_num_threads(2)
    expected = worth.costs.expected(engine, 100)
    seconds = 0.2 * expected
    assert not costs_enough(engine, 0.0, 100)
    assert not costs_enough(engine, seconds, 100)
    assert costs_enough(engine, 20 * seconds, 100)
    with config.override(cache_dir=str(_with_an_entry(Path(config.cache_dir).parent / "kept"))):
        assert costs_enough(engine, seconds, 100)
        assert not costs_enough(engine, 0.0, 100)
        # To look takes no longer where compiling takes long.
        assert costs_enough(engine, worth.LOOKING + worth.RECORDING * 10_000, 10_000)


def test_what_is_never_kept_is_not_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with config.override(cache_dir=str(_with_an_entry(tmp_path / "kept"))):
        assert may_be_kept(engine)
        with config.override(cache="off"):
            assert not may_be_kept(engine)
        monkeypatch.setattr(_Engine, "capabilities", torchport.Capabilities(slow_to_compile=True, skips_cache=True))
        assert not may_be_kept(engine)


def test_another_backend_s_entries_are_not_ones_to_look_for(tmp_path: Path) -> None:
    with config.override(cache_dir=str(_with_an_entry(tmp_path / "kept", "another"))):
        assert not may_be_kept(engine)


def _with_an_entry(folder: Path, backend: str = engine.name) -> Path:
    folder.mkdir(mode=0o700)
    assert CacheFolder(folder, 1 << 20).write(CacheEntry({"graph": "x"}, b"data", {"backend": backend}))
    return folder


def test_the_program_may_say_when() -> None:
    torch.set_num_threads(2)
    expected = worth.costs.expected(engine, 100)
    with config.override(compile_after=4, compile_workers=0):
        assert price() == worth.WORTH_A_PROCESS  # it is about the other process
    with config.override(compile_after=0.01):
        assert price() == 0.01
        assert costs_enough(engine, 0.02 * expected + worth.RECORDING * 100, 100)
    with config.override(compile_after="4"):
        assert price() == 4.0
        assert not costs_enough(engine, 3 * expected, 100)
    for wrong in (-1, "often", True, "nan", "inf", None):
        with pytest.raises(torchport.ConfigError, match="compile_after"):
            config.compile_after = wrong  # type: ignore[assignment]
