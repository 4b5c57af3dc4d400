"""Whether this process was forked from one that had used the device."""

from __future__ import annotations

import os

__all__ = ["forked_after_use", "note_use"]

_pid: int | None = None


def note_use() -> None:
    """Remember which process made the device ready."""
    global _pid
    _pid = os.getpid()


def forked_after_use() -> bool:
    """True in a child forked after the device was made ready in the parent."""
    return _pid is not None and _pid != os.getpid()
