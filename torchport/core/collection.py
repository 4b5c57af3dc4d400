"""Garbage collection while what stays for good is made: modules, registrations, tables."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

__all__ = ["MANY", "made_to_stay"]

MANY: Final = 10_000
"""Objects, of those that the collector looks at, from which on it matters that they are looked at."""


@contextmanager
def made_to_stay() -> Iterator[None]:
    """No garbage is collected in the block; if much is made in it, what is young then counts as old.

    To begin with a backend makes some hundred thousand objects. They would have Python look through everything that the
    program holds, which with PyTorch and a library of models takes 0.3 s, and none of them is garbage. What was young
    before and is garbage is found when old objects are looked at the next time. Nothing changes for a program that has
    switched collection off, or that has objects frozen (``gc.freeze``).
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            if gc.get_count()[0] > MANY and not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()
            gc.enable()
