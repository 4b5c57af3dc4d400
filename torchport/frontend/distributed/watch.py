"""What the ranks of a program know of each other: each says in the store that it lives, and where it is.

A thread of each process writes a line to the store every second, on a connection of its own. Whoever waits for a rank
looks there: a rank that has ended, or has said nothing for a while, is an error with a name, not a wait without end.
The process that keeps the store may be stopped, too. A question to it would then never return; so a second thread sees
whether the lines are taken, and closes the connections if they are not.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

from ...core.config import config

__all__ = ["Watch"]

EVERY: Final = 1.0
"""Seconds between two lines of a rank."""


class Watch:
    """The process's line in a store that all ranks share, and a look at those of others.

    ``store`` is for the calling threads; the thread that writes has a client of its own.
    """

    def __init__(self, store: Any, rank: int) -> None:
        self.store = store.clone()
        self.rank = rank
        self.garbage: deque[str] = deque()
        """Keys that every rank has read: the thread deletes them."""
        self._own = store.clone()
        self._port = _port_of(store)
        self._asked = 0.0
        """When the thread has asked the store for something that is not done yet; 0: it waits for nothing."""
        self.silent = False
        """Whether the store has stopped answering."""
        self._place = "it has come to no collective yet"
        self._beats = 0
        self._seen: dict[int, tuple[str, float]] = {}
        self._held: dict[int, tuple[str, float]] = {}
        self.waits_for: Sequence[int] = ()
        """The ranks without whom this one cannot go on, while it waits for them."""
        self._ended, self._said_all = threading.Event(), threading.Event()
        self._beat("")
        self._thread = threading.Thread(target=self._work, name="torchport watch", daemon=True)
        self._thread.start()
        if self._port:
            threading.Thread(target=self._guard, name="torchport store guard", daemon=True).start()
        atexit.register(self.end)

    def at(self, place: str) -> None:
        """Note where this rank is, for others to be told."""
        self._place = place

    def _beat(self, ended: str) -> None:
        self._beats += 1
        self._asked = time.monotonic()
        waits = ",".join(map(str, self.waits_for))
        self._own.set(f"rank/{self.rank}", f"{ended}\n{self._beats}\n{waits}\n{self._place}")
        self._own.check([f"rank/{self.rank}"])  # ``set`` asks for no answer
        self._asked = 0.0

    def _work(self) -> None:
        while not self._ended.wait(EVERY):
            try:
                self._beat("")
                while self.garbage:
                    self._asked = time.monotonic()
                    self._own.delete_key(self.garbage.popleft())
                self._asked = 0.0
            except RuntimeError:  # the store is gone; whoever waits for something finds out
                self.store_is_gone()
                return

    def _guard(self) -> None:
        while not self._said_all.wait(EVERY):
            if self._asked and time.monotonic() - self._asked > config.peer_timeout:
                self.silent = True
                close_connections(self._port)
                return

    def end(self) -> None:
        """Say that this process ends, and of what, so that nobody waits for it."""
        atexit.unregister(self.end)
        if self._ended.is_set():
            return
        self._ended.set()
        self._thread.join(2 * EVERY)
        error = getattr(sys, "last_value", None)
        said = (
            "left the group"
            if error is None
            else f"ended with {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        )
        try:
            self._beat(said)
        except RuntimeError:
            return
        finally:
            self._said_all.set()

    def store_is_gone(self) -> None:
        """Say nothing any more: the process that keeps the store has ended."""
        atexit.unregister(self.end)
        self._ended.set()
        self._said_all.set()

    def look(self, rank: int) -> tuple[str | None, str]:
        """What is wrong with a rank, if anything is, and where it was last."""
        ended, _, rest = self.store.get(f"rank/{rank}").decode().partition("\n")
        beats, _, rest = rest.partition("\n")
        waits, _, place = rest.partition("\n")
        now = time.monotonic()
        if rank not in self._seen or self._seen[rank][0] != beats:
            self._seen[rank] = beats, now
        if ended:
            return f"its process has {ended}", place
        silent = now - self._seen[rank][1]
        if silent > config.peer_timeout:
            return f"its process has given no sign of life for {silent:.0f} s: killed, stopped or cut off", place
        mine = str(self.rank) in waits.split(",") and rank in self.waits_for
        if not mine or self._held.get(rank, ("", 0.0))[0] != place:
            self._held[rank] = place, now
        if mine and now - self._held[rank][1] > config.peer_timeout:
            return "it waits for this rank, which waits for it", place
        return None, place

    def begin(self) -> None:
        """Begin to wait for others: only their silence from now on counts."""
        self._seen.clear()
        self._held.clear()


def _port_of(store: Any) -> int:
    """Where a store's server listens; 0 for a store without one."""
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    return getattr(store, "port", 0)


def close_connections(port: int) -> None:
    """Shut down this process's connections to a port, so that whoever waits for an answer gets an error."""
    for descriptor in range(3, _descriptors()):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.getpeername()[1] == port:
                connection.shutdown(socket.SHUT_RDWR)


def _descriptors() -> int:
    """One more than the highest file descriptor that is open."""
    with contextlib.suppress(OSError):
        return 1 + max(map(int, os.listdir("/dev/fd")))
    return 1024
