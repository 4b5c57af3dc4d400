"""How many hold an object. What an interpreter counts for its own names and calls is measured here, not assumed:
CPython 3.14 borrows references where earlier versions take them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Final

__all__ = ["holders"]


def _counts(values: Sequence[Any]) -> list[int]:
    return [sys.getrefcount(value) for value in values]


_LIST_ALONE: Final = _counts([object()])[0]
"""What :func:`_counts` says of an item that only its list holds."""


def holders(values: Sequence[Any]) -> list[int]:
    """How many hold each item of a list, not counting the list. No name of the caller may stand for an item."""
    return [count - _LIST_ALONE for count in _counts(values)]
