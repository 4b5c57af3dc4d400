"""The whole graph beside its pieces: the last tier of a computation that was compiled in pieces.

What is fused across two layers is lost where a graph is cut (:mod:`..backend.pieces`). Mostly that costs nothing that
can be measured. When the pieces have run for so long that compiling the whole would have paid, the compiler's process
is asked for it; then both run in turn, a few times each, and the whole takes over if it is clearly quicker.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from ..backend.compiler import finish
from ..backend.execution import Computation
from ..backend.pieced import PiecedProgram
from ..cache.current import disk_cache
from ..core import metrics
from ..core.errors import TorchportError
from ..worker.paths import NotSendable
from ..worker.request import Answer, Request, as_whole
from ..worker.service import Cancelled, Ticket, service
from .tier_record import TierRecord

if TYPE_CHECKING:
    from ..backend.interface import Backend, BackendDevice
    from ..core.specs import CompileSpecs

__all__ = ["WholeGraph", "watch_pieces"]

TRIED: Final = 9
"""Runs of each before it is decided which is to stay."""
QUICKER: Final = 0.95
"""Part of the pieces' time that the whole takes at most where it takes over."""
WORTH: Final = 4.0
"""Times what compiling the pieces took: what they have to have run for before the whole is compiled."""
SOONEST: Final = 20.0
"""Seconds that they have to have run for at least."""


class WholeGraph:
    """Decides for one computation whether its pieces run or the whole. Attached to the pieces' program."""

    def __init__(
        self,
        backend: Backend,
        device: BackendDevice,
        specs: CompileSpecs,
        request: Request,
        seconds: float,
        record: TierRecord | None,
        entry: str = "",
    ) -> None:
        """``seconds``: how long compiling the pieces took. ``entry``: the key of their entry in the disk cache."""
        self._backend = backend
        self._device = device
        self._specs = specs
        self._request = request
        self._record = record
        self._left = max(SOONEST, WORTH * seconds)
        self._ticket: Ticket | None = None
        self._entries = entry, ""
        self._whole: Computation | None = None
        self._times: tuple[list[float], list[float]] = ([], [])
        self.settled = False
        """Whether it is decided."""

    def run(self, pieces: Callable[[], Any], whole: Callable[[Computation], Any]) -> Any:
        """One run of either. ``pieces`` and ``whole`` each run the computation once, on the same values."""
        if self.settled:
            return pieces() if self._whole is None else whole(self._whole)
        if self._whole is not None:
            return self._tried(pieces, whole, self._whole)
        begun = time.perf_counter()
        results = pieces()
        self._left -= time.perf_counter() - begun
        if self._left <= 0:
            self._advance()
        return results

    def _advance(self) -> None:
        if self._ticket is None:
            if service.off or service.failed:
                self.settled = True
                return
            metrics.count("WholeAsked")
            self._ticket = service.submit(as_whole(self._request), self._loaded)
        elif self._ticket.done():
            try:
                whole = self._ticket.loaded or self._loaded(self._ticket.result())
                if isinstance(whole, Exception):
                    raise whole.with_traceback(None)
                self._whole = whole
            except (TorchportError, NotSendable, Cancelled):
                self.settled = True  # the pieces are right, and stay

    def _loaded(self, answer: Answer) -> Computation:
        self._entries = self._entries[0], answer.entry
        return finish(self._backend, self._device, self._specs, answer)

    def _tried(self, pieces: Callable[[], Any], whole: Callable[[Computation], Any], compiled: Computation) -> Any:
        """One run of the one that has run less often, timed to the end of what it computes."""
        which = int(len(self._times[1]) < len(self._times[0]))
        begun = time.perf_counter()
        results = whole(compiled) if which else pieces()
        self._backend.synchronize(self._device)
        self._times[which].append(time.perf_counter() - begun)
        if len(self._times[1]) >= TRIED:
            self._settle()
        return results

    def _settle(self) -> None:
        # The first run of each may load code and reserve memory.
        own, other = (statistics.median(times[1:]) for times in self._times)
        self.settled = True
        if other <= QUICKER * own:
            metrics.count("WholeTookOver")
            folder = disk_cache()
            if folder is not None and all(self._entries):
                folder.replace_by(*self._entries)  # the next process starts with the whole
            form = f"whole ({other / own:.2f} of the time of its pieces)"
        else:
            metrics.count("PiecesStay")
            self._whole = None
            form = f"in pieces (the whole would take {other / own:.2f} of their time)"
        if self._record is not None:
            self._record.form = form


def watch_pieces(
    backend: Backend,
    device: BackendDevice,
    specs: CompileSpecs,
    computation: Computation,
    request: Request,
    record: TierRecord | None,
    entry: str,
) -> None:
    """Have the whole graph tried when it may pay, if a computation is in pieces. ``request``: what it is made of.

    ``entry``: the key of the computation's entry in the disk cache, "" if it has none.
    """
    program: Any = computation.handle
    if isinstance(program, PiecedProgram):
        if record is not None:
            record.form = f"in pieces ({len(program.calls)} calls, {program.different} different)"
        if program.whole is None:
            program.whole = WholeGraph(backend, device, specs, request, computation.compile_seconds, record, entry)
