"""What compiling costs, and when what is interpreted has cost enough to be recorded, looked up or compiled."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import torch

from ..backend.optional import optional_of
from ..cache.current import disk_cache
from ..core.config import config
from ..core.threads import cores
from ..trace.keys import beginning_of
from ..worker.service import service
from .kept_paths import may_begin
from .sizes import Family

if TYPE_CHECKING:
    from ..backend.interface import Backend
    from ..cache.folder import CacheFolder
    from ..trace.trie import Sights

__all__ = [
    "CompileCosts",
    "costs",
    "costs_enough",
    "is_worth_a_look",
    "is_worth_recording",
    "may_be_kept",
    "price",
    "share_to_record",
]

WORTH_WAITING: Final = 1.0
"""Part of the expected cost of compiling that interpreting has to have cost before the program itself compiles. At 1 it
never spends more than twice what it would have spent had it known how often the computation comes back (ski rental)."""

WORTH_A_PROCESS: Final = 0.1
"""The same where another process compiles, at low priority and on a core of its own."""

MOST_SAVED: Final = 1 / 3
"""Part of the interpreter's time that compiled code is expected to save at most for the operators' overhead."""

OVERHEAD: Final = 5e-6
"""Seconds per operator that interpreting takes beside computing. A compiled computation saves these, and what else it
saves is the engine's (:attr:`.Capabilities.compiled_saves`)."""

LOOKING: Final = 0.5
"""Seconds that interpreting has to have cost at most before the other process looks on disk: that takes a few seconds
of it, whatever compiling would take."""

RECORDING: Final = 150e-6
"""Seconds per operator that recording a path takes, and making runnable what was compiled of it: the program's own."""

SHARE: Final = 0.7
"""Part of a path's usual time that is spent on recording it, each time that it comes, until all of it is recorded."""

LEAST_SHARE: Final = 64
"""Operators that are recorded at one time at least: each time ends in a flush more."""

FEW: Final = 8
"""Operators that are better interpreted, unless they compute for long: to run a computation takes as much."""

LITTLE: Final = 1e-3
"""Seconds per operator, with what the program does in between."""


class CompileCosts:
    """What compiling costs with each backend, in seconds per operator, learned from what was compiled.

    A graph costs what its operators do, and as much more as :attr:`.Capabilities.fixed_compile_cost` of them.
    """

    FIRST_GUESS: Final = 0.004
    """Seconds per operator where a backend does not say, and nothing was compiled yet."""
    FIXED: Final = 20
    """Where a backend does not say what a graph of no operators costs."""
    MEMORY: Final = 0.7
    """How much of what was learned stays at each new observation."""
    FIRST_SAVED: Final = 1 / 3
    """Part of the interpreter's time that is saved, where a backend does not say, and nothing was compared yet."""
    LEAST_SAVED: Final = 0.05
    """Part of the interpreter's time that is expected to be saved at least, whatever was learned."""

    def __init__(self) -> None:
        self._per_operator: dict[str, float] = {}
        self._saved: dict[str, float] = {}
        self._ignored = 0

    def _size(self, backend: Backend, operators: int) -> int:
        return max(operators, 1) + (backend.capabilities.fixed_compile_cost or self.FIXED)

    def note(self, backend: Backend, operators: int, seconds: float) -> None:
        """A graph of so many operators took so long, by the clock."""
        seen = seconds / self._size(backend, operators)
        known = self._per_operator.get(backend.name)
        self._per_operator[backend.name] = seen if known is None else self.MEMORY * known + (1 - self.MEMORY) * seen

    def note_saved(self, backend: Backend, operators: int, interpreted: float, compiled: float) -> None:
        """A run of so many operators takes so many seconds interpreted, and so many compiled."""
        known = self._of_engine(backend)
        if OVERHEAD * operators < known * interpreted:  # else it says little of what the engine saves
            seen = max(1.0 - compiled / interpreted, self.LEAST_SAVED)
            self._saved[backend.name] = self.MEMORY * known + (1 - self.MEMORY) * seen

    def _of_engine(self, backend: Backend) -> float:
        known = self._saved.get(backend.name)
        return (backend.capabilities.compiled_saves or self.FIRST_SAVED) if known is None else known

    def saved(self, backend: Backend, each: float) -> float:
        """Part of the interpreter's time that compiled code may save, where each operator takes so many seconds."""
        return max(self._of_engine(backend), min(OVERHEAD / each, MOST_SAVED) if each > 0 else MOST_SAVED)

    @contextmanager
    def ignored(self) -> Iterator[None]:
        """Inside of the block, everything is worth compiling."""
        self._ignored += 1
        try:
            yield
        finally:
            self._ignored -= 1

    def expected(self, backend: Backend, operators: int) -> float:
        """Seconds that a graph of so many operators may take."""
        if self._ignored:
            return 0.0
        known = self._per_operator.get(backend.name)
        each = (backend.capabilities.seconds_per_operator or self.FIRST_GUESS) if known is None else known
        return each * self._size(backend, operators)


costs: Final = CompileCosts()


def price(backend: Backend, each: float) -> float:
    """Part of the expected cost of compiling that interpreting has to have cost before another process compiles, where
    each operator takes so many seconds.

    That process takes a core. Where the program computes on as many threads as there are cores, it goes on with fewer
    (:mod:`..core.threads`). What it loses by that is worth it once the compiled code would have saved as much, had it
    been there from the beginning (ski rental). So whenever the program ends, it has taken longer than if nothing had
    been compiled by no larger a part than what compiled code is expected to save.
    """
    if service.off:
        return WORTH_A_PROCESS  # nothing is compiled there: see ``WORTH_WAITING``
    if config.compile_after != "auto":
        return float(config.compile_after)
    left = max(cores() - config.compile_workers, 0.5)
    lost = max(0.0, 1.0 - left / torch.get_num_threads())
    return max(WORTH_A_PROCESS, lost / costs.saved(backend, each))


def is_worth_a_look(seconds: float, expected: float) -> bool:
    """Whether what has cost so many seconds is to be looked for on disk, where compiling may take ``expected``."""
    return seconds >= min(WORTH_A_PROCESS * expected, LOOKING)


def may_be_kept(backend: Backend) -> bool:
    """Whether there is anything on disk that an earlier program may have left of the backend's."""
    folder = None if backend.capabilities.skips_cache else disk_cache()
    return folder is not None and _had_entries(folder, backend.name)


LOOKED_AT: Final = 256
"""Entries on disk, of those that were used last, that are looked at for whether one is the backend's."""


@lru_cache(maxsize=32)
def _had_entries(folder: CacheFolder, backend: str) -> bool:
    """Whether a folder had any of a backend's when it was first asked for: what this program has compiled since is in
    its memory."""
    described = (folder.description(one.key) for one in folder.list()[:LOOKED_AT])
    return any(one is not None and one.about.get("backend") == backend for one in described)


def is_worth_recording(backend: Backend, sights: Sights) -> bool:
    """Whether a path that was computed at once so far has cost so much that the compiler's process is to have it.

    To record a path costs several times what it costs to compute it at once, and gains nothing but that.
    """
    if sights.times == 0:
        return False
    if sights.share:
        return True  # it is the rest of a path that was
    is_short = sights.ops < FEW and sights.seconds < sights.times * sights.ops * LITTLE
    if is_short and costs.expected(backend, 1):
        return False
    if Family.any_shared and optional_of(backend).symbolic_sizes is not None:
        return sights.seconds >= RECORDING * sights.ops  # it may be another size of what is compiled
    return costs_enough(backend, sights.seconds, sights.ops, sights.times, beginning_of(sights))


def share_to_record(backend: Backend, sights: Sights) -> int:
    """How many operators of a path that is worth it are recorded at one time: no step is to take twice as long."""
    if not RECORDING or not costs.expected(backend, 1):
        return sys.maxsize  # it costs nothing, or whoever waits for it wants all at once
    usual = sights.seconds / max(sights.times, 1)
    return max(LEAST_SHARE, int(SHARE * usual / RECORDING))


def costs_enough(backend: Backend, seconds: float, ops: int, runs: int, begins: str = "") -> bool:
    """Whether so many operators have cost so many seconds, in so many runs, that the other process is to have them.

    ``begins``: what the path begins with, if it is one (:func:`~torchport.trace.keys.beginning`).
    """
    expected = costs.expected(backend, ops)
    if not expected:
        return True
    spent = seconds - RECORDING * ops
    if spent >= price(backend, seconds / max(runs * ops, 1)) * expected:
        return True
    return is_worth_a_look(spent, expected) and (may_begin(backend, begins) if begins else may_be_kept(backend))
