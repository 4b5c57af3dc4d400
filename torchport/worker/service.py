"""The compile service: requests go to a process of its own, and what they bring is kept until somebody asks for it.

A thread per worker process carries bytes back and forth. Whoever asks may have that thread make an answer runnable,
too; else reading it is left to whoever wants it. Nothing is started before the first request.

A worker that dies takes the request that it was at with it. The others wait for the next worker. After three deaths in
a row without an answer the service is off for the rest of the program, and a line on standard error says so.

Programs go on to other things, and a compiler that stands back for a busy program takes minutes. So what the program
asks about is served before what it has left. What is left waits. A worker that has been at it for a while is ended when
something else is asked about, once for each request.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any, Final

from ..core import metrics
from ..core.config import config
from ..core.default_state import default_state
from ..core.errors import CompileError
from ..core.forks import guarded_lock, guarded_rlock
from ..core.threads import leave_cores
from .process import Worker
from .progress import ProgressLine
from .protocol import BrokenMessage
from .request import Answer, Request, answer_of

__all__ = ["Cancelled", "Service", "Ticket", "service"]

_DEATHS_IN_A_ROW: Final = 3
_LOOK: Final = 0.5
"""Seconds after which a thread looks whether what its worker is at is still what the program wants most."""
_LEFT: Final = 2.0
"""Seconds without a question after which a request counts as left, ..."""
_MISSED: Final = 10
"""... and how many times as long as its last two questions were apart."""
_BEGUN: Final = 10.0
"""Seconds that a worker is left with what the program has left, at least, ..."""
_STARTS: Final = 3
"""... and how many times as long as it took to start: else there would be nothing but starts."""
_LOADING_AT_EXIT: Final = 30.0
"""Seconds that the program's end waits for an engine that is at work on a thread of the service."""
_loading: Final = guarded_lock()
Load = Callable[[Answer], object]


class Cancelled(Exception):
    """A request came to nothing, and that says nothing about whether it would compile. It may be made again."""


class Ticket:
    """A request that was handed in."""

    __slots__ = (
        "__weakref__",
        "_answer",
        "_asked",
        "_done",
        "_error",
        "_load",
        "_pace",
        "_service",
        "_waited_for",
        "began",
        "gave_way",
        "loaded",
        "request",
        "seconds",
    )

    def __init__(self, service: Service, request: Request, load: Load | None = None) -> None:
        self._service = service
        self._load = load
        self.loaded: Any = None
        """What ``load`` has made of the answer, or the exception that it raised; ``None`` where it was not called."""
        self._done = False
        self._answer: bytes | Answer | None = None
        self._error: Exception | None = None
        self.request = request
        self.began: float | None = None
        """When a worker was given it, by ``time.monotonic()``; ``None`` while it waits."""
        self.seconds = 0.0
        """How long a worker was at it, by the clock, and this process at making it runnable."""
        self.gave_way = False
        """Whether a worker was ended for something else while it was at this."""
        self._asked = time.monotonic()
        self._pace = 0.0
        self._waited_for = 0

    def done(self) -> bool:
        """Whether :meth:`result` will not wait. Who asks this now and then is served before who has stopped to."""
        if not self._done:
            now = time.monotonic()
            self._pace, self._asked = now - self._asked, now
        return self._done

    def is_wanted(self, now: float) -> bool:
        """Whether somebody waits for it, or has asked of late; ``now`` by ``time.monotonic()``."""
        return bool(self._waited_for) or now - self._asked < max(_LEFT, _MISSED * self._pace)

    def result(self, timeout: float | None = None) -> Answer:
        """What was prepared; waits for it.

        Raises :class:`CompileError` where it does not compile, with what the other process raised as its cause,
        :class:`~torchport.worker.paths.NotSendable` where the other process cannot read it, :class:`Cancelled`, or
        ``TimeoutError`` after so many seconds.
        """
        if not self._done and not self._service.wait_for(self, timeout):
            raise TimeoutError(f"{self.request.label} is not compiled after {timeout} s")
        if self._error is not None:
            raise self._error.with_traceback(None)
        assert self._answer is not None
        return answer_of(self._answer, self.request) if isinstance(self._answer, bytes) else self._answer

    def prepare(self, answer: bytes) -> bytes | Answer:
        """Have ``load`` make of an answer what the program runs, on this thread; returns the answer, read or not."""
        if self._load is None:
            return answer
        try:
            found = answer_of(answer, self.request)
        except Exception:  # it did not compile: whoever asks for the result gets that
            return answer
        # A fork waits for the lock: the child of one in the middle of this would have half of an engine's work.
        with _loading, default_state():
            try:
                self.loaded = self._load(found)
            except Exception as error:
                self.loaded = error
        return found

    def cancel(self) -> None:
        """Not wanted any more, by anybody who has it: taken back if it has not begun, else its result is dropped."""
        self._service.drop(self)

    def _end(self, answer: bytes | Answer | None, error: Exception | None) -> None:
        if not self._done:
            self._answer, self._error = answer, error
            if self.began is not None:
                self.seconds = time.monotonic() - self.began
            self._done = True
        self._load = None


class _State:
    """What a service has in one process. A fork begins with a new one."""

    def __init__(self) -> None:
        self.changed = threading.Condition(guarded_rlock())  # a finalizer may cancel a ticket anywhere
        self.waiting: deque[Ticket] = deque()
        self.tickets: dict[Hashable, Ticket] = {}
        self.running: list[Ticket | None] = []
        self.workers: set[Worker] = set()
        self.deaths = 0
        self.off = ""
        self.stops = 0


class Service:
    """Hands requests to worker processes, :attr:`torchport.config.compile_workers` of them."""

    def __init__(self) -> None:
        self._state = _State()
        self._exiting = False
        _every.add(self)

    # -- for those who have something to compile ---------------------------------------------------------------------
    @property
    def off(self) -> str:
        """Why nothing can be handed in; empty where it can."""
        if not config.compile_workers:
            return "torchport.config.compile_workers is 0"
        return "the program ends" if self._exiting else self._state.off

    @property
    def failed(self) -> str:
        """Why nothing will ever be compiled by other processes any more, if those came to an end too often."""
        return self._state.off

    def submit(self, request: Request, load: Load | None = None) -> Ticket:
        """Hand in a request; returns at once. What is under way already under the same key is not begun again.

        ``load``: called with the answer on a thread of the service, before the ticket is done; :attr:`Ticket.loaded`
        has what it returns. Making an engine's bytes runnable may take longer than a step of the program.
        """
        state, ticket = self._state, Ticket(self, request, load)
        with state.changed:
            known = state.tickets.get(request.key)
            if known is not None:
                return known
            off = self.off
            if off:
                ticket._end(None, Cancelled(f"nothing is compiled in other processes: {off}"))
                return ticket
            state.tickets[request.key] = ticket
            state.waiting.append(ticket)
            busy = sum(running is not None for running in state.running)
            if len(state.running) < min(config.compile_workers, busy + len(state.waiting)):
                self._add_thread(state)
            state.changed.notify_all()
        return ticket

    def idle(self) -> bool:
        """Whether nothing waits and nothing is being compiled."""
        return not self._state.tickets

    def pending(self) -> list[Ticket]:
        """What waits or is being compiled, oldest first."""
        with self._state.changed:
            return list(self._state.tickets.values())

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing is under way; whether that came to be."""
        state = self._state
        with state.changed:
            return state.changed.wait_for(lambda: not state.tickets, timeout)

    def pids(self) -> list[int]:
        """The process ids of the workers; each has a child that compiles."""
        return sorted(worker.pid for worker in list(self._state.workers) if worker.alive())

    def stop(self) -> None:
        """End every worker at once and cancel what is under way. A later request starts a new one."""
        state = self._state
        with state.changed:
            state.stops += 1
            workers, tickets = list(state.workers), list(state.tickets.values())
            state.waiting.clear()
            for ticket in tickets:
                self._finish(state, ticket, None, Cancelled("the compile service was stopped"))
        for worker in workers:
            worker.hang_up()
        with state.changed:
            state.changed.notify_all()
        end = time.monotonic() + 1.0
        for worker in workers:
            worker.end(max(0.0, end - time.monotonic()))

    def _exit(self) -> None:
        """The program ends, and waits for no compiler. An engine that is at work in this process ends that first."""
        self._exiting = True
        self.stop()
        if _loading.acquire(timeout=_LOADING_AT_EXIT):
            _loading.release()

    # -- for tickets -------------------------------------------------------------------------------------------------
    def wait_for(self, ticket: Ticket, timeout: float | None) -> bool:
        """Wait until a ticket is done; whether it is."""
        with self._state.changed:
            ticket._waited_for += 1
            try:
                return self._state.changed.wait_for(lambda: ticket._done, timeout)
            finally:
                ticket._waited_for -= 1

    def drop(self, ticket: Ticket) -> None:
        """Cancel a ticket."""
        state = self._state
        with state.changed:
            if ticket in state.waiting:
                state.waiting.remove(ticket)
            self._finish(state, ticket, None, Cancelled("the request was cancelled"))

    def _finish(self, state: _State, ticket: Ticket, answer: bytes | Answer | None, error: Exception | None) -> None:
        """With the lock held: a ticket has come to its end."""
        ticket._end(answer, error)
        if state.tickets.get(ticket.request.key) is ticket:
            del state.tickets[ticket.request.key]
        state.changed.notify_all()

    # -- the threads -------------------------------------------------------------------------------------------------
    def _add_thread(self, state: _State) -> None:
        place = len(state.running)
        state.running.append(None)
        if place == 0:
            atexit.register(self._exit)
            if sys.stderr is not None:
                ProgressLine(self.pending, sys.stderr).start()
        name = f"torchport compile service {place}"
        threading.Thread(target=self._carry, args=(state, place), name=name, daemon=True).start()

    def _carry(self, state: _State, place: int) -> None:
        """Carry requests to a worker and its answers back, for as long as the program runs."""
        worker: Worker | None = None
        while True:
            ticket = self._next(state, place, worker)
            if worker is not None and worker.ended:  # by ``stop``
                worker = self._lose(state, worker)
            if ticket is not None:
                worker = self._serve(state, ticket, worker)

    def _next(self, state: _State, place: int, worker: Worker | None) -> Ticket | None:
        """Wait for something to do: the next ticket, or ``None`` where the worker has been ended meanwhile."""
        with state.changed:
            state.running[place] = None
            leave_cores(sum(running is not None for running in state.running))
            state.changed.wait_for(lambda: bool(state.waiting) or (worker is not None and worker.ended))
            if not state.waiting:
                return None
            now = time.monotonic()
            ticket = next((one for one in state.waiting if one.is_wanted(now)), state.waiting[0])
            state.waiting.remove(ticket)
            state.running[place] = ticket
            leave_cores(sum(running is not None for running in state.running))
            return ticket

    def _serve(self, state: _State, ticket: Ticket, worker: Worker | None) -> Worker | None:
        """Bring a ticket to its end; returns the worker, if it is still good."""
        begun = False
        while not begun:
            if worker is None:
                worker = self._start(state)
            if state.off or ticket._done:
                return worker
            if worker is not None:
                begun = self._begin(ticket, worker)
                worker = worker if begun else self._lose(state, worker, f"the compiler's process {worker.death()}")
        assert worker is not None
        try:
            if self._gives_way(state, ticket, worker):
                return self._put_back(state, ticket, worker)
            answer = worker.answer(config.compile_timeout)
        except TimeoutError:
            limit = f"within {config.compile_timeout} s (torchport.config.compile_timeout)"
            error = _failure(ticket, f"compiling {ticket.request.label} did not end {limit}, so its process was ended")
        except (EOFError, OSError, BrokenMessage):
            said = worker.last_words()
            how = f"the compiler's process {worker.death()} while it compiled {ticket.request.label}"
            error = _failure(ticket, f"{how}; it printed last:\n{said}" if said else how)
        else:
            metrics.count("CompiledApart")
            prepared = answer if self._exiting or ticket._done else ticket.prepare(answer)
            with state.changed:
                state.deaths = 0
                self._finish(state, ticket, prepared, None)
            return worker
        with state.changed:
            self._finish(state, ticket, None, error)
        self._lose(state, worker, error.message)
        return None

    @staticmethod
    def _gives_way(state: _State, ticket: Ticket, worker: Worker) -> bool:
        """Wait until a worker has answered, or is to be at something else. Raises ``TimeoutError``."""
        begun = time.monotonic()
        patience = max(_BEGUN, _STARTS * worker.start_seconds)
        while not worker.has_answer(_LOOK):
            now = time.monotonic()
            if now > begun + config.compile_timeout:
                raise TimeoutError
            if ticket.gave_way or now < begun + patience or ticket.is_wanted(now):
                continue
            with state.changed:
                if any(one.is_wanted(now) for one in state.waiting):
                    return True
        return False

    def _put_back(self, state: _State, ticket: Ticket, worker: Worker) -> None:
        """The program has left this one and waits for others: its worker ends, and it is begun again after them."""
        metrics.count("CompileGaveWay")
        worker.hang_up()
        self._lose(state, worker)
        with state.changed:
            ticket.began, ticket.gave_way = None, True
            if not ticket._done:  # cancelled meanwhile
                state.waiting.append(ticket)

    @staticmethod
    def _begin(ticket: Ticket, worker: Worker) -> bool:
        """Whether a worker took a ticket's request; else it was dead already, and not for that."""
        try:
            worker.begin(ticket.request.body)
        except (EOFError, OSError, BrokenMessage):
            return False
        ticket.began = time.monotonic()
        return True

    def _start(self, state: _State) -> Worker | None:
        """A new worker, ready; ``None`` where it did not come to be, which counts as a death."""
        worker: Worker | None = None
        stops = state.stops
        try:
            worker = Worker(config.compile_nice)
            with state.changed:
                state.workers.add(worker)
                if state.stops != stops:
                    worker.hang_up()
            worker.wait_until_ready()
        except (EOFError, OSError, BrokenMessage) as error:
            if worker is None:
                self._count_death(state, f"it cannot be started: {type(error).__name__}: {error}")
                return None
            how = "did not start in time" if isinstance(error, TimeoutError) else f"{worker.death()} before it began"
            self._lose(state, worker, f"the compiler's process {how}\n{worker.last_words()}".rstrip())
            return None
        metrics.count("CompileWorkers")
        return worker

    def _lose(self, state: _State, worker: Worker, why: str = "") -> None:
        """A worker is of no use any more."""
        ours = worker.ended  # by ``stop``
        worker.end()
        with state.changed:
            state.workers.discard(worker)
        worker.close()
        if not ours:
            self._count_death(state, why)

    def _count_death(self, state: _State, why: str) -> None:
        metrics.count("CompileWorkerDeaths")
        with state.changed:
            state.deaths += 1
            if state.deaths < _DEATHS_IN_A_ROW or state.off:
                return
            state.off = f"the compiler's process failed {state.deaths} times in a row"
            state.waiting.clear()
            for ticket in list(state.tickets.values()):
                self._finish(state, ticket, None, Cancelled(f"nothing is compiled in other processes: {state.off}"))
        # Said once per process, to people: a warning would break programs that turn warnings into errors.
        with contextlib.suppress(OSError, ValueError):  # a closed stream must not end this thread
            print(
                f"torchport: no more compiling in other processes: {state.off}; the last time, {why}", file=sys.stderr
            )

    # -- forks -------------------------------------------------------------------------------------------------------
    def after_fork_in_child(self) -> None:
        """The workers and the threads are the parent's. What was under way is to be asked for again."""
        former, self._state = self._state, _State()
        self._state.off = former.off
        for ticket in former.tickets.values():
            ticket._end(None, Cancelled("the process was forked; the request is its parent's"))


def _failure(ticket: Ticket, message: str) -> CompileError:
    return CompileError(message, op=ticket.request.label, source=ticket.request.source)


_every: Final[weakref.WeakSet[Service]] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for one in list(_every):
        one.after_fork_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)

service: Final = Service()
"""The program's one service."""
