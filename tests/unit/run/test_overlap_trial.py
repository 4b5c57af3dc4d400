"""Which way a computation runs where that takes a core from the program: measured, with a clock of the test's own."""

from __future__ import annotations

import contextlib

import pytest

from torchport.run import overlap_trial
from torchport.run.overlap_trial import AGAIN, LATE, OverlapTrial


class Program:
    """A loop that traces for a while and then has one computation run. ``reads``: it waits for the result each time."""

    def __init__(self, patch: pytest.MonkeyPatch, traces: float, alone: float, beside: float, reads: bool) -> None:
        self.traces, self.alone, self.own_beside, self.reads = traces, alone, beside, reads
        self.trial = OverlapTrial()
        self.now = self.device_free = 100.0
        patch.setattr(overlap_trial, "perf_counter", lambda: self.now)

    def run(self, count: int) -> list[bool]:
        """Which of so many runs went beside the program."""
        ways = []
        for _ in range(count):
            overlap_trial.reads.count += self.reads
            self.now += self.traces
            ways.append(self.trial.beside(self.alone))
            if not ways[-1]:
                self.now = self.device_free = max(self.now, self.device_free) + self.alone
                continue
            begins = max(self.now, self.device_free - 2 * self.own_beside)  # two may wait
            self.device_free = max(self.now, self.device_free) + self.own_beside
            self.now = self.device_free if self.reads else begins
        return ways


def test_a_program_that_traces_long_computes_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = Program(monkeypatch, traces=0.016, alone=0.020, beside=0.030, reads=False).run(60)
    assert not any(ways[:6])
    assert True in ways[:12]
    assert all(ways[-20:])


def test_where_each_result_is_read_at_once_it_is_tried_once_and_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = Program(monkeypatch, traces=0.016, alone=0.020, beside=0.030, reads=True).run(AGAIN)
    assert ways.count(True) == 9


@pytest.mark.parametrize(("traces", "alone"), [(0.005, 0.1), (0.1, 0.005), (0.001, 0.001)])
def test_what_cannot_matter_is_not_tried(monkeypatch: pytest.MonkeyPatch, traces: float, alone: float) -> None:
    assert not any(Program(monkeypatch, traces, alone, 2 * alone, reads=False).run(3 * AGAIN))


def test_a_program_that_changes_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    program = Program(monkeypatch, traces=0.016, alone=0.020, beside=0.030, reads=False)
    assert all(program.run(60)[-20:])
    program.reads = True
    assert not any(program.run(LATE + 40)[-20:])
    program.reads = False
    assert all(program.run(40)[-10:])


def test_an_interrupt_at_any_moment_leaves_a_trial_that_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    program = Program(monkeypatch, traces=0.016, alone=0.020, beside=0.030, reads=False)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for place in ("_begin", "_is_over", "_settled"):
        with monkeypatch.context() as patch:
            patch.setattr(OverlapTrial, place, interrupt)
            for _ in range(2 * AGAIN):
                with contextlib.suppress(KeyboardInterrupt):
                    program.run(1)
        program.run(AGAIN)
        assert any(program.run(2 * AGAIN))


def test_it_is_tried_again_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = Program(monkeypatch, traces=0.016, alone=0.020, beside=0.030, reads=True).run(7 * AGAIN)
    begins = [at for at in range(1, len(ways)) if ways[at] and not ways[at - 1]]
    assert len(begins) == 3
    assert begins[2] - begins[1] > 1.9 * (begins[1] - begins[0])
