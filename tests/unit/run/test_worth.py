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
from torchport.run.worth import CompileCosts, costs_enough, is_worth_recording, may_be_kept, price
from torchport.trace.trie import Sights
from torchport.worker.service import Service


class _Engine(torchport.Backend):
    name = "worth"
    capabilities = torchport.Capabilities(
        slow_to_compile=True, seconds_per_operator=0.01, fixed_compile_cost=50, compiled_saves=0.2
    )

    def preprocess(self, graph: Any, specs: Any) -> torchport.Processed:
        raise NotImplementedError

    def execute(self, handle: Any, args: Any, context: Any) -> list[Any]:
        raise NotImplementedError


engine = _Engine()
SAVED = 0.2
LONG = 1.0  # seconds per operator, beside which what interpreting takes is nothing


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
        (2, 2, 1, 1 / 2 / SAVED),
        (4, 4, 1, 1 / 4 / SAVED),
        (4, 4, 2, 1 / 2 / SAVED),
        (64, 64, 1, worth.WORTH_A_PROCESS),  # one core of 64 is not missed
        (1, 1, 1, 1 / 2 / SAVED),  # the two share it
        (2, 2, 0, worth.WORTH_A_PROCESS),  # no other process compiles
    ],
)
def test_the_price_is_what_the_program_loses(
    cores: int, threads: int, workers: int, want: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worth, "cores", lambda: cores)
    torch.set_num_threads(threads)
    with config.override(compile_workers=workers):
        assert price(engine, LONG) == pytest.approx(want)


def test_a_backend_that_does_not_say_saves_a_third(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(2)
    monkeypatch.setattr(_Engine, "capabilities", torchport.Capabilities(slow_to_compile=True))
    assert price(engine, LONG) == pytest.approx(1.5)


def test_where_operators_are_short_a_compiled_graph_saves_what_interpreting_takes() -> None:
    torch.set_num_threads(2)
    assert price(engine, worth.OVERHEAD) == price(engine, 0.0) == pytest.approx(0.5 / worth.MOST_SAVED)
    assert price(engine, 4 * worth.OVERHEAD) == pytest.approx(0.5 / 0.25)
    assert price(engine, 5 * worth.OVERHEAD) == price(engine, 50 * worth.OVERHEAD) == pytest.approx(0.5 / SAVED)
    # As the program's own paths are: in ten runs as much as in one, of ten times as many seconds.
    seconds = (price(engine, LONG) - 0.5) * worth.costs.expected(engine, 10)
    assert not costs_enough(engine, seconds, 10, 1)
    assert costs_enough(engine, seconds, 10, 1_000_000)


def test_the_rest_of_a_path_is_worth_recording_as_the_whole_was() -> None:
    """What the whole has cost, in many runs, counts for the rest, of which the runs begin anew."""
    torch.set_num_threads(2)
    rest = Sights()
    rest.seconds, rest.ops, rest.observed, rest.share = 1.6 * worth.costs.expected(engine, 400), 300, True, 64
    assert not is_worth_recording(engine, rest)  # it has not come yet
    rest.times = 1
    assert is_worth_recording(engine, rest)
    rest.share = 0
    assert not is_worth_recording(engine, rest)  # one run that took that long is of operators that compute


def test_how_much_an_engine_saves_is_learned() -> None:
    made = CompileCosts()
    assert made.saved(engine, LONG) == SAVED
    made.note_saved(engine, 10, 1.0, 0.5)
    assert SAVED < made.saved(engine, LONG) < 0.5
    for _ in range(30):
        made.note_saved(engine, 10, 1.0, 2.0)
    assert made.saved(engine, LONG) == pytest.approx(CompileCosts.LEAST_SAVED, rel=1e-3)  # it may be another one's turn
    made.note_saved(engine, 10, 20 * worth.OVERHEAD, worth.OVERHEAD)  # half of it is what interpreting takes
    assert made.saved(engine, LONG) == pytest.approx(CompileCosts.LEAST_SAVED, rel=1e-3)


@pytest.mark.parametrize("wrong", [1.0, -0.1, 2.0, float("nan")])
def test_what_is_saved_is_a_part(wrong: float) -> None:
    with pytest.raises(ValueError, match=r"compiled_saves is .* a part of the interpreter.s time below 1"):
        torchport.Capabilities(compiled_saves=wrong)


def test_what_may_be_on_disk_is_looked_for_early() -> None:
    torch.set_num_threads(2)
    expected = worth.costs.expected(engine, 100)
    seconds = 0.2 * expected
    assert not costs_enough(engine, 0.0, 100, 1)
    assert not costs_enough(engine, seconds, 100, 1)
    assert costs_enough(engine, 20 * seconds, 100, 1)
    with config.override(cache_dir=str(_with_an_entry(Path(config.cache_dir).parent / "kept"))):
        assert costs_enough(engine, seconds, 100, 1)
        assert not costs_enough(engine, 0.0, 100, 1)
        # To look takes no longer where compiling takes long.
        assert costs_enough(engine, worth.LOOKING + worth.RECORDING * 10_000, 10_000, 1)


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
        assert price(engine, LONG) == worth.WORTH_A_PROCESS  # it is about the other process
    with config.override(compile_after=0.01):
        assert price(engine, LONG) == 0.01
        assert costs_enough(engine, 0.02 * expected + worth.RECORDING * 100, 100, 1)
    with config.override(compile_after="4"):
        assert price(engine, LONG) == 4.0
        assert not costs_enough(engine, 3 * expected, 100, 1)
    for wrong in (-1, "often", True, "nan", "inf", None):
        with pytest.raises(torchport.ConfigError, match="compile_after"):
            config.compile_after = wrong  # type: ignore[assignment]
