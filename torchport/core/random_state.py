"""The state of a random number generator of the device: a seed, and how many random operators have drawn."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from .forks import guarded_lock

__all__ = ["DEFAULT_SEED", "RandomState", "drawing_from", "state_in_use"]

DEFAULT_SEED: Final = 67280421310721
"""PyTorch's default seed (c10::detail ``default_rng_seed_val``)."""

_SPLITMIX: Final = 0x9E3779B97F4A7C15
_MASK64: Final = (1 << 64) - 1


def mix64(value: int) -> int:
    """SplitMix64's finaliser (Steele, Lea and Flood 2014) on an unsigned 64-bit integer."""
    value &= _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


class RandomState:
    """Gives each random operator its key. Threads may share one."""

    def __init__(self, seed: int = DEFAULT_SEED, draws: int = 0) -> None:
        self.seed = seed
        self.draws = draws
        self._drawing = guarded_lock()

    def set_seed(self, seed: int) -> None:
        """Start anew from an integer, of which 64 bits count."""
        self.seed, self.draws = seed & _MASK64, 0

    def next_key(self) -> int:
        """The key of the next random operator, a signed 64-bit integer: a function of the seed and of the count."""
        with self._drawing:
            draw, self.draws = self.draws, self.draws + 1
        return self._key(draw)

    def _key(self, draw: int) -> int:
        key = mix64(mix64(self.seed + _SPLITMIX) + draw * _SPLITMIX)
        return key - (1 << 64) if key >> 63 else key

    def take_back(self, key: int) -> None:
        """The operator with this key was refused: the next one gets it, unless another thread has drawn meanwhile."""
        with self._drawing:
            if self.draws and self._key(self.draws - 1) == key:
                self.draws -= 1

    def to_bytes(self) -> bytes:
        """16 bytes: the seed and the count."""
        return self.seed.to_bytes(8, "little") + self.draws.to_bytes(8, "little")

    def from_bytes(self, data: bytes) -> None:
        """Take over what :meth:`to_bytes` gave."""
        self.seed, self.draws = int.from_bytes(data[:8], "little"), int.from_bytes(data[8:16], "little")


class _Given(threading.local):
    state: RandomState | None = None


_given: Final = _Given()


@contextmanager
def drawing_from(state: RandomState) -> Iterator[None]:
    """Random operators of the calling thread draw from this state instead of their device's."""
    before, _given.state = _given.state, state
    try:
        yield
    finally:
        _given.state = before


def state_in_use(of_device: RandomState) -> RandomState:
    """The state that an operator of the calling thread draws from."""
    return _given.state or of_device
