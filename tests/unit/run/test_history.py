"""The history: bounded, and counted per operator only when somebody asks."""

from __future__ import annotations

from helpers_traces import Recording, aten

from torchport.core import metrics
from torchport.run.history import History


def test_operators_are_counted_along_the_paths_that_were_flushed() -> None:
    recording = Recording()
    recording.call(aten.sinh.default, recording.leaf(3))
    short = recording.trace.cursor
    recording.call(aten.cosh.default, recording.leaf(3))
    history, before = History(), dict(metrics.metrics.counters)
    history.flushed(short)
    history.flushed(recording.trace.cursor)
    history.count_ops()
    after = metrics.metrics.counters
    assert after["lazy::sinh"] - before.get("lazy::sinh", 0) == 2
    assert after["lazy::cosh"] - before.get("lazy::cosh", 0) == 1


def test_lines_that_wait_are_counted_and_bounded() -> None:
    history = History()
    for at in range(History.SITES + 10):
        history.waited("read", f"train.py:{at}")
    history.waited("read", "train.py:0")
    assert len(history.sites) == History.SITES
    assert history.sites["read", "train.py:0"] == 2


def test_a_line_that_is_not_known_says_so() -> None:
    history = History()
    history.waited("read", None)
    assert history.sites["read", "line unknown"] == 1
