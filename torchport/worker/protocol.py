"""Messages between the program and the process that compiles: a header, then bytes, over a pair of sockets.

Both ends are the same installation, so a version only guards against files that were replaced while a program runs. The
bytes of a request come from the program itself; nothing here reads what somebody else could have written.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from enum import IntEnum
from typing import Final

__all__ = ["BrokenMessage", "Kind", "read_message", "write_message"]

_HEADER: Final = struct.Struct("<4sHHQ")
_MAGIC: Final = b"tpcw"
VERSION: Final = 1
_CHUNK: Final = 1 << 20
_NO_SIGNAL: Final = getattr(socket, "MSG_NOSIGNAL", 0)
"""A program may have SIGPIPE end it; the end of a worker should not."""


class Kind(IntEnum):
    """What a message is. The program sends the first two, the process the others."""

    SURROUNDINGS = 1
    """The program's environment, ``sys.path`` and folder, as they are from now on."""
    REQUEST = 2
    READY = 3
    """The process has imported what it needs."""
    BEGUN = 4
    """A request has been read: what happens from now on is its doing."""
    REPLY = 5


class BrokenMessage(Exception):
    """What came is not a message of this version."""


def write_message(to: socket.socket, kind: Kind, body: bytes) -> None:
    """Write one message. Raises ``OSError`` where the other end is gone."""
    for part in (_HEADER.pack(_MAGIC, VERSION, kind, len(body)), body):
        to.sendall(part, _NO_SIGNAL)


def read_message(source: socket.socket, seconds: float | None = None) -> tuple[Kind, bytes]:
    """Read one message. Raises ``EOFError``, ``TimeoutError`` after so many seconds, or :class:`BrokenMessage`."""
    end = None if seconds is None else time.monotonic() + seconds
    magic, version, kind, length = _HEADER.unpack(_read(source, _HEADER.size, end))
    if magic != _MAGIC or version != VERSION:
        raise BrokenMessage(f"a message begins with {magic!r}, version {version}; expected {_MAGIC!r}, {VERSION}")
    return Kind(kind), bytes(_read(source, length, end))


def _read(source: socket.socket, count: int, end: float | None) -> bytearray:
    poll = select.poll()
    poll.register(source, select.POLLIN)
    made = bytearray()
    while len(made) < count:
        left = None if end is None else max(0.0, end - time.monotonic()) * 1000
        if not poll.poll(left):
            raise TimeoutError
        try:
            part = source.recv(min(_CHUNK, count - len(made)))
        except ConnectionError:
            raise EOFError from None
        if not part:
            raise EOFError
        made += part
    return made
