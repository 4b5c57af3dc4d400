"""The ranks of a process group, as the device has them: gloo carries bytes, a store what ranks say to each other.

Before a collective each rank writes to the store what it is about to do, and reads what the others wrote
(:meth:`Communicator.agree`). Only where that fits is anything handed to gloo, which would otherwise hang, mix up values
or end the process. And nothing waits in gloo for a rank that does not come.

Private torch APIs used here: ``torch._C._distributed_c10d.ProcessGroupGloo``, ``FakeProcessGroup`` of the same module,
``ProcessGroup._get_backend``.
"""

from __future__ import annotations

import secrets
import time
import weakref
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup

from ...core import metrics, traffic
from ...core.config import config
from ...core.errors import CollectiveError
from ...core.frames import user_line, warn_user
from ..device.names import NAME
from .statements import Statement, disagreement
from .watch import Watch

__all__ = ["Communicator", "communicator_of", "create_gloo"]

POLL: Final = 1.0
"""Seconds between two looks at the ranks that are waited for."""
SHORTEST: Final = 0.0001
LONGEST: Final = 0.01
"""Seconds between two questions to the store, at first and in the end."""
PATIENCE: Final = 30.0
"""Seconds of waiting after which a warning says for whom."""
IN_TRANSIT: Final = 60.0
"""Seconds that bytes may travel, once all ranks are there, besides what their number takes."""
SLOWEST: Final = 1e6
"""Bytes per second that a network is trusted to carry."""
_DEVICE: Final = torch.device(NAME)

T = TypeVar("T")


class Communicator:
    """The ranks of one process group.

    ``rank`` is the process's in the group, ``ranks`` the global ranks of all members. ``gloo`` carries the bytes of
    host tensors. ``watch`` may be ``None`` for a group of one.
    """

    def __init__(
        self, name: str, gloo: Any, rank: int, ranks: Sequence[int], watch: Watch | None, timeout: timedelta, nonce: str
    ) -> None:
        self.name = name
        self.gloo = gloo
        self.rank, self.size, self.ranks = rank, len(ranks), tuple(ranks)
        self.timeout = timeout.total_seconds()
        self.sequence = 0
        self.failure: CollectiveError | None = None
        self.rehearses = False
        """Whether it is of PyTorch's fake process group: what would be exchanged is noted, and nothing computed."""
        self.is_default = False
        """Whether it is the program's first group, which the others are part of."""
        self.latest: traffic.Collective | None = None
        """What the ranks have agreed on last."""
        self._watch = watch
        self._prefix = f"{name}/{zlib.crc32(repr(self.ranks).encode()):x}{nonce}"

    @property
    def memory(self) -> str:
        """Where what comes is put: nowhere, in a rehearsal."""
        return "meta" if self.rehearses else "cpu"

    # -- agreeing ------------------------------------------------------------------------------------------------
    def agree(self, signature: str, sent: Sequence[int] = (), received: Sequence[int] = ()) -> None:
        """Return when every rank is about to do the same. Raises :class:`CollectiveError` on all of them otherwise."""
        if self.failure is not None:
            raise self.failure
        self.sequence += 1
        mine = Statement(signature, user_line() or "a line of PyTorch's", tuple(sent), tuple(received))
        self.latest = self.record(signature, mine.line)
        watch = self._watch
        if watch is None:
            return
        watch.at(f"{signature} at {mine.line} (collective {self.sequence} of group {self.name!r})")
        keys = [f"{self._prefix}/{self.sequence}/{rank}" for rank in range(self.size)]
        start = time.perf_counter()
        said = self._meet(watch, mine, keys)
        self.latest.agreeing = time.perf_counter() - start
        metrics.metrics.add_time("CollectiveAgreeTime", self.latest.agreeing)
        watch.garbage.append(f"{self._prefix}/{self.sequence - 1}/{self.rank}")
        wrong = disagreement(dict(zip(self.ranks, said, strict=True)))
        if wrong is not None:
            self.fail(f"in collective {self.sequence} of group {self.name!r} {wrong}")

    def record(self, what: str, line: str) -> traffic.Collective:
        """A record of what this rank is about to do."""
        metrics.count("Collective")
        return traffic.journal.new(what.partition(" ")[0].partition("(")[0], what, self.name, self.size, line)

    def leave(self) -> None:
        """Tell the others that this rank has destroyed the group: it will come to nothing any more."""
        if self._watch is not None:
            self._watch.end()

    def note(self, place: str) -> None:
        """Note where this rank is, for others to be told. Raises what the group has failed of."""
        if self.failure is not None:
            raise self.failure
        if self._watch is not None:
            self._watch.at(place)

    def _meet(self, watch: Watch, mine: Statement, keys: Sequence[str]) -> list[Statement]:
        """What all ranks say, this one's included; waits for them."""
        store = watch.store

        def meet() -> list[bytes] | None:
            # Asked again and again, since PyTorch's client prints a warning for each wait that ends too early.
            pause, until = SHORTEST, time.monotonic() + POLL
            while not store.check(keys):
                if time.monotonic() > until:
                    return None
                time.sleep(pause)
                pause = min(2 * pause, LONGEST)
            return store.multi_get(keys)

        def absent() -> list[int]:
            return [rank for rank, key in zip(self.ranks, keys, strict=True) if not store.check([key])]

        self._of_store(lambda: store.set(keys[self.rank], mine.encode()))
        what = f"{mine.signature}\n    at {mine.line}"
        return [Statement.decode(text) for text in self.wait(meet, absent, what, self.timeout, lambda: True)]

    def wait(
        self,
        attempt: Callable[[], T | None],
        absent: Callable[[], Sequence[int]],
        what: str,
        limit: float,
        unmet: Callable[[], bool] = lambda: False,
    ) -> T:
        """Try until something comes, each time for a bounded while, and look after the ranks that are ``absent``.

        ``unmet``: whether nothing of theirs has come at all; two ranks that wait for each other so wait for ever.
        Raises :class:`CollectiveError` where one is gone, another rank has failed, or ``limit`` seconds are over.
        """
        try:
            return self._wait(attempt, absent, what, limit, unmet)
        finally:
            if self._watch is not None:
                self._watch.waits_for = ()

    def _wait(
        self,
        attempt: Callable[[], T | None],
        absent: Callable[[], Sequence[int]],
        what: str,
        limit: float,
        unmet: Callable[[], bool],
    ) -> T:
        begun, warned = 0.0, False
        while True:
            result = self._of_store(attempt)
            if result is not None:
                return result
            assert self._watch is not None
            now = time.monotonic()
            if not begun:
                begun = now
                self._watch.begin()
            missing = self._of_store(absent)
            self._watch.waits_for = missing if unmet() else ()
            places = self._of_store(lambda: self._look(missing, what))  # noqa: B023 - called at once
            if now - begun > limit:
                self.fail(f"not every rank has come within {limit:.0f} s to\n    {what}\n{places}")
            if now - begun > PATIENCE and not warned and missing:
                warned = True
                warn_user(f"torchport: rank {self.ranks[self.rank]} waits at {what}\n{places}", RuntimeWarning)

    def _look(self, missing: Sequence[int], what: str) -> str:
        """Where the missing ranks are. Raises :class:`CollectiveError` if one is gone or another rank has failed."""
        watch = self._watch
        assert watch is not None
        key = f"{self._prefix}/failed"
        if watch.store.check([key]):
            self.fail(watch.store.get(key).decode(), tell=False)
        places: list[str] = []
        for rank in missing:
            trouble, place = watch.look(rank)
            if trouble is not None:
                self.fail(f"rank {rank} is missing: {trouble}\n    it was last at {place}\n  the others are at {what}")
            places.append(f"  rank {rank} is missing; it was last at {place}")
        return "\n".join(places)

    def _of_store(self, call: Callable[[], T]) -> T:
        """What a call of the store gives. Raises :class:`CollectiveError` where the store is gone."""
        try:
            return call()
        except dist.DistNetworkError as error:
            silent = self._watch is not None and self._watch.silent
            why = (
                f"has not answered for {config.peer_timeout:.0f} s, so the process that keeps it is stopped or cut off"
                if silent
                else "is gone, so the process that keeps it has ended"
            )
            self.failure = CollectiveError(
                f"the store of the process group {why} (rank 0, or torchrun): {str(error).partition(chr(10))[0]}"
            )
            if self._watch is not None:
                self._watch.store_is_gone()
            raise self.failure from error

    def fail(self, message: str, tell: bool = True) -> NoReturn:
        """Raise :class:`CollectiveError`, now and for all that is asked of the group later; other ranks are told."""
        self.failure = CollectiveError(message)
        if tell and self._watch is not None:
            self._of_store(lambda: self._watch.store.set(f"{self._prefix}/failed", message))  # type: ignore[union-attr]
        raise self.failure

    # -- bytes on their way ----------------------------------------------------------------------------------------
    def limit(self, nbytes: int) -> timedelta:
        """How long gloo may take for that many bytes, once all ranks are there."""
        return timedelta(seconds=min(self.timeout, IN_TRANSIT + nbytes * self.size / SLOWEST))

    def arrive(self, work: Any, what: str) -> None:
        """Return when gloo has done a work. Raises :class:`CollectiveError` if it could not."""
        failed: list[RuntimeError] = []

        def attempt() -> bool | None:
            try:
                return work.wait(timedelta(seconds=POLL)) or True
            except RuntimeError as error:
                if work.is_completed():
                    failed.append(error)
                    return True
                return None

        if self._watch is None:
            work.wait()
            return
        others = [rank for rank in self.ranks if rank != self.ranks[self.rank]]
        self.wait(attempt, lambda: others, what, float("inf"))
        if failed:
            self.blame(failed[0], what)

    def post(self, call: Callable[[], T], what: str) -> T:
        """What gloo gives for a message that it is handed. It refuses at once where it has lost the other side."""
        try:
            return call()
        except RuntimeError as error:
            if self._watch is None:
                raise
            self.blame(error, what)

    def blame(self, error: Exception, what: str) -> NoReturn:
        """gloo has lost a rank: find out which one, and raise :class:`CollectiveError`."""
        assert self._watch is not None
        others = [rank for rank in self.ranks if rank != self.ranks[self.rank]]
        self._watch.begin()
        until = time.monotonic() + config.peer_timeout + 3 * POLL
        while time.monotonic() < until:
            self._of_store(lambda: self._look(others, what))
            time.sleep(POLL / 4)
        self.fail(f"the bytes of {what}\n  did not arrive, though every rank lives: {error}")


# -- which group is which ------------------------------------------------------------------------------------------
_created: Final[dict[str, Communicator]] = {}
"""Made with their groups, by name, and not asked for yet."""
_of_group: Final[weakref.WeakKeyDictionary[Any, Communicator]] = weakref.WeakKeyDictionary()
_world: list[Watch] = []
"""The watch of the default group that is there now."""


def create_gloo(options: Any) -> Any:
    """The gloo of a new process group, by the options that PyTorch gives to whoever makes one."""
    rank, size = options.group_rank, options.group_size
    gloo: Any = dist.ProcessGroupGloo(options.store, rank, size, options.timeout)  # type: ignore[attr-defined]
    ranks = list(options.global_ranks_in_group) or list(range(size))
    if not options.global_ranks_in_group:
        while _world:
            _world.pop().end()
        traffic.journal.rank = rank
        if size > 1:
            _world.append(Watch(options.store, rank))
    nonce = torch.tensor([secrets.randbits(62)], device="cpu")  # the program may have a default device
    if size > 1:  # a store may have the keys of an earlier group of this name
        gloo.broadcast(nonce, 0).wait()
    watch = _world[0] if size > 1 else None
    made = Communicator(options.group_id, gloo, rank, ranks, watch, options.timeout, f"-{int(nonce):x}")
    made.is_default = not options.global_ranks_in_group
    _created[options.group_id] = made
    return gloo


def communicator_of(group: Any) -> Communicator:
    """The communicator of a process group that has a backend for the device."""
    found = _of_group.get(group)
    if found is None:
        found = _created.pop(group.group_name, None)
        backend = group._get_backend(_DEVICE)
        ranks = dist.get_process_group_ranks(group)
        if found is None or found.ranks != tuple(ranks):  # a part that was split off another group
            rehearses = isinstance(backend, FakeProcessGroup)
            watch = _world[0] if len(ranks) > 1 and not rehearses else None
            found = Communicator(group.group_name, backend, group.rank(), ranks, watch, _timeout_of(backend), "")
            found.rehearses = rehearses
            if rehearses and traffic.journal.rank is None:
                traffic.journal.rank = dist.get_rank()
        found.gloo = backend  # with PyTorch's own checks around it, where they are switched on
        _of_group[group] = found
        if found.is_default:
            weakref.finalize(group, found.leave).atexit = False
    return found


def _timeout_of(backend: Any) -> timedelta:
    options = getattr(backend, "options", None)
    return getattr(options, "_timeout", None) or timedelta(minutes=30)
