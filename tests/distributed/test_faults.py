"""A rank that errs becomes an error on the others, which names ranks and lines, and every process ends."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from launch_ranks import Rank, run_ranks


def _ready(folder: Path) -> None:
    until = time.monotonic() + 90
    while time.monotonic() < until and not (folder / "ready1").exists():
        time.sleep(0.05)


def _signal(number: int) -> object:
    def send(processes: Sequence[subprocess.Popen[str]], folder: Path) -> None:
        _ready(folder)
        os.kill(processes[1].pid, number)
        if number == signal.SIGSTOP:
            processes[0].wait(90)
            os.kill(processes[1].pid, signal.SIGKILL)

    return send


def _run(kind: str, meanwhile: object = None) -> list[Rank]:
    return run_ranks("fault_program.py", kind, meanwhile=meanwhile, TORCHPORT_PEER_TIMEOUT="3")  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "said"), [("operation", "broadcast from rank 0"), ("shape", "float32[5]")])
def test_ranks_that_disagree_are_told_who_is_where(kind: str, said: str) -> None:
    for ended in _run(kind):
        assert ended.status == 1, ended.text
        assert "CollectiveError" in ended.text
        assert "the ranks are not about to do the same" in ended.text
        assert "rank 0: all_reduce(SUM) of float32[4]" in ended.text
        assert f"rank 1: {'all_reduce(SUM) of ' if kind == 'shape' else ''}{said}" in ended.text
        assert "fault_program.py:" in ended.text
        assert "came through" not in ended.text


@pytest.mark.slow
def test_a_rank_ends_well_while_it_waits_for_a_message() -> None:
    """Of another rank that lives, and after a third one has ended: its end was that of the process, by a signal."""
    ended = run_ranks("fault_program.py", "left", ranks=3)
    assert [one.status for one in ended] == [0, 0, 0], [one.text for one in ended]


@pytest.mark.slow
def test_a_message_of_another_shape_is_refused() -> None:
    receiver, _ = _run("message")
    assert receiver.status == 1, receiver.text
    assert "rank 1 sends float32[5]" in receiver.text
    assert "rank 0 receives float32[4]" in receiver.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "said"), [("raises", "ended with ValueError: a bad batch"), ("ends", "its process has left the group")]
)
def test_a_rank_that_has_ended_is_named(kind: str, said: str) -> None:
    other, _ = _run(kind)
    assert other.status == 1, other.text
    assert "rank 1 is missing" in other.text
    assert said in other.text
    assert "it was last at all_reduce(SUM) of float32[4]" in other.text


@pytest.mark.slow
def test_a_rank_that_messages_go_to_is_named_when_it_is_killed() -> None:
    """gloo refuses a message at once, in words of its own, where it has lost the other side."""
    sender, _ = _run("addressed", _signal(signal.SIGKILL))
    assert sender.status == 1, sender.text
    assert "CollectiveError: rank 1 is missing: its process has given no sign of life" in sender.text
    assert "send to rank 1 of float32[4] with tag 0" in sender.text


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda number: number.name)
def test_a_rank_that_is_silent_is_named(number: signal.Signals) -> None:
    other, silent = _run("killed", _signal(number))
    assert silent.status == -signal.SIGKILL
    assert other.status == 1, other.text
    assert "rank 1 is missing: its process has given no sign of life" in other.text
