"""Keys that every call in this thread includes or excludes (c10's LocalDispatchKeySet and its guards)."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Final, final

from .keys import FUNCTIONALITY_MASK
from .keyset import DEFAULT_EXCLUDED, DEFAULT_INCLUDED, DispatchKeySet, Keys, to_bits

__all__ = ["KeyGuard", "LocalKeys", "exclude", "force", "include", "local_keys"]


@final
class LocalKeys:
    """One (include, exclude) pair. One object per pair, so that decisions can be remembered under its identity."""

    __slots__ = ("exclude", "include")

    def __init__(self, include: int, exclude: int) -> None:
        self.include: Final = include
        self.exclude: Final = exclude

    def apply(self, bits: int) -> int:
        """``(bits | include) - exclude``: exclusion wins, backend bits are never taken away."""
        return (bits | self.include) & ~(self.exclude & FUNCTIONALITY_MASK)


_known: dict[tuple[int, int], LocalKeys] = {}


def _local_keys(include: int, exclude: int) -> LocalKeys:
    return _known.setdefault((include, exclude), LocalKeys(include, exclude))


class ThreadKeys(threading.local):
    """This thread's pair; the class attribute is what a new thread starts with."""

    current: LocalKeys = _local_keys(DEFAULT_INCLUDED.bits, DEFAULT_EXCLUDED.bits)


thread_keys: Final = ThreadKeys()


def local_keys() -> tuple[DispatchKeySet, DispatchKeySet]:
    """This thread's included and excluded keys."""
    current = thread_keys.current
    return DispatchKeySet.from_bits(current.include), DispatchKeySet.from_bits(current.exclude)


class KeyGuard:
    """Context manager that changes this thread's keys and puts the previous ones back, exceptions included."""

    def __init__(self, include: int, exclude: int, *, replace: bool = False) -> None:
        self._include = include
        self._exclude = exclude
        self._replace = replace
        self._previous: list[LocalKeys] = []

    def __enter__(self) -> None:
        current = thread_keys.current
        self._previous.append(current)
        if self._replace:
            thread_keys.current = _local_keys(self._include, self._exclude)
        else:
            thread_keys.current = _local_keys(current.include | self._include, current.exclude | self._exclude)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        thread_keys.current = self._previous.pop()


def include(*keys: Keys) -> KeyGuard:
    """``with include("Functionalize"):`` every call in this thread also has these keys."""
    return KeyGuard(to_bits(keys), 0)


def exclude(*keys: Keys) -> KeyGuard:
    """``with exclude("AutogradCPU"):`` no call in this thread has these functionalities."""
    return KeyGuard(0, to_bits(keys))


def force(included: DispatchKeySet, excluded: DispatchKeySet) -> KeyGuard:
    """Replace both sets for the block (c10's ForceDispatchKeyGuard)."""
    return KeyGuard(included.bits, excluded.bits, replace=True)
