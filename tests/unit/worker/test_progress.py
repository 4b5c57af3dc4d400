"""The line that says what is being compiled."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

from torchport.worker.progress import ProgressLine


def ticket(began: float | None, label: str = "a graph of 7 operators") -> Any:
    return SimpleNamespace(began=began, request=SimpleNamespace(label=label))


def test_the_line_comes_after_a_while_and_is_wiped_out_at_the_end() -> None:
    tickets = [ticket(10.0), ticket(None), ticket(None)]
    stream = io.StringIO()
    line = ProgressLine(lambda: tickets, stream)
    line.show(12.0)
    assert stream.getvalue() == ""
    line.show(15.0)
    said = "torchport: compiling a graph of 7 operators beside the program, 5 s, 2 more to do"
    assert stream.getvalue() == "\r" + said
    tickets.clear()
    line.show(16.0)
    assert stream.getvalue() == "\r" + said + "\r" + " " * len(said) + "\r"
    line.show(17.0)
    assert stream.getvalue().count("\r") == 3


def test_nothing_is_said_while_requests_only_wait() -> None:
    assert ProgressLine(lambda: [ticket(None)], io.StringIO()).text(100.0) == ""


def test_only_a_terminal_gets_a_line() -> None:
    class Terminal(io.StringIO):
        asked = 0

        def isatty(self) -> bool:
            self.asked += 1
            return False

    stream = Terminal()
    ProgressLine(list, stream).start()
    assert stream.asked == 1
