"""A line on a terminal that says what is being compiled beside the program, once that takes a while."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, TextIO

__all__ = ["ProgressLine"]

_AFTER: Final = 3.0
"""Seconds that something compiles before it is worth a line."""
_EVERY: Final = 1.0


class ProgressLine:
    """Written over and over in one place, and wiped out at the end. ``pending`` gives the tickets, oldest first."""

    def __init__(self, pending: Callable[[], Sequence[Any]], stream: TextIO) -> None:
        self._pending = pending
        self._stream = stream
        self._shown = 0

    def start(self) -> None:
        """Look every second, in a thread of its own, if the stream is a terminal."""
        if self._stream.isatty():
            threading.Thread(target=self._work, name="torchport progress", daemon=True).start()

    def _work(self) -> None:
        while True:
            time.sleep(_EVERY)
            try:
                self.show(time.monotonic())
            except (OSError, ValueError):  # the terminal is gone, or the stream is closed
                return

    def show(self, now: float) -> None:
        """Bring the line up to date; ``now`` by ``time.monotonic()``."""
        text = self.text(now)
        if text or self._shown:
            self._stream.write("\r" + text.ljust(self._shown) + ("" if text else "\r"))
            self._stream.flush()
        self._shown = len(text)

    def text(self, now: float) -> str:
        """What the line says; nothing while nothing takes long."""
        tickets = self._pending()
        began = [ticket for ticket in tickets if ticket.began is not None]
        if not began or now - began[0].began < _AFTER:
            return ""
        waiting = len(tickets) - 1
        more = f", {waiting} more to do" if waiting else ""
        return f"torchport: compiling {began[0].request.label} beside the program, {now - began[0].began:.0f} s{more}"
