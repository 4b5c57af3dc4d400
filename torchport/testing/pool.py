"""Hands units to worker processes; a crash or a hang is the result of the case that did it, and the run goes on."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from ..core import errors
from ..core.errors import TorchportError
from .plan import Case, Plan, Result, Subject, Unit
from .worker import list_everything, work

__all__ = ["Catalogue", "death_of", "list_target", "process_context", "run_units", "start_process", "tail_of"]

_START_SECONDS = 300.0
_UNITS_PER_WORKER = 250
"""A worker is replaced after so many units: caches of engines and of PyTorch only grow."""
_TROUBLE_PER_UNIT = 40
"""After so many crashes and hangs in one unit the rest of it is left."""


@contextlib.contextmanager
def _no_interrupts() -> Iterator[None]:
    """Start processes that Ctrl-C does not reach: it goes to every process of a terminal. Ours ends them.

    What is blocked in the calling thread is blocked in the processes that it starts.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # which unblocks what it had blocked
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_process(target: Callable[..., None], *args: Any) -> Any:
    """Start a worker process, which Ctrl-C does not reach."""
    context = process_context()
    process = context.Process(target=target, args=args, daemon=True)
    if context.get_start_method() == "forkserver":
        with _no_interrupts():
            forkserver.ensure_running()
        process.start()  # which waits for the server's imports: Ctrl-C ends that
    else:
        with _no_interrupts():
            process.start()
    return process


def process_context() -> Any:
    """Processes forked from a server that has imported PyTorch's databases and nothing of any engine."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torchport.testing.preload"])
    return context


@dataclass
class Catalogue:
    """What can be run, by which frontends, on what."""

    subjects: list[Subject]
    missing: dict[str, str]
    frontend_limits: dict[str, int | None]
    backend: dict[str, str]


def _raise(kind: str, message: str) -> None:
    error: type[TorchportError] = getattr(errors, kind, TorchportError)
    raise error(message if error is not TorchportError else f"{kind}: {message}")


def list_target(target: str) -> Catalogue:
    """Ask a process of its own what there is. Raises what loading the backend raises."""
    context = process_context()
    with tempfile.TemporaryDirectory(prefix="torchport-conform-") as folder:
        log = Path(folder) / "log"
        ours, theirs = context.Pipe()
        process = start_process(list_everything, theirs, target, str(log))
        theirs.close()
        try:
            said: tuple[Any, ...] = (
                ours.recv() if ours.poll(_START_SECONDS) else ("error", "TorchportError", "loading takes too long")
            )
        except EOFError:
            process.join(5)
            how = f"the process that loaded {target!r} died ({death_of(process)})"
            said = ("error", "BackendUnavailable", f"{how}\n{tail_of(log)}")
        finally:
            process.kill()
            process.join()
    if said[0] == "error":
        _raise(said[1], said[2])
    return Catalogue(*said[1:])


def death_of(process: Any) -> str:
    """How a process ended: a signal's name, or its exit code."""
    code = process.exitcode
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return signal.Signals(-code).name
    return f"exit code {code}"


def tail_of(log: Path, size: int = 3000) -> str:
    """The end of what a process printed, or the stack it crashed with."""
    try:
        text = log.read_bytes().decode("utf-8", "replace").strip("\0\n ")
    except OSError:
        return ""
    return text.split("\nExtension modules:")[0][-size:].strip()


@dataclass
class _Worker:
    """A process, the unit it has, and the case it announced last."""

    number: int
    plan: Plan
    folder: Path
    unit: Unit | None = None
    case: Case | None = None
    position: int = 0
    heard: float = 0.0
    trouble: int = 0
    units: int = 0
    ready: bool = False
    cpu: float = 0.0
    """Processor time of the present process, in seconds, as it last said."""
    results: list[Result] = field(default_factory=list[Result])
    process: Any = None
    pipe: Any = None

    @property
    def log(self) -> Path:
        return self.folder / f"worker-{self.number}.log"

    def start(self) -> None:
        self.pipe, theirs = process_context().Pipe()
        self.process = start_process(work, theirs, self.plan, str(self.log))
        theirs.close()
        self.ready, self.units, self.cpu, self.heard = False, 0, 0.0, time.monotonic()

    def give(self, unit: Unit, first: int) -> None:
        self.unit, self.case, self.heard = unit, None, time.monotonic()
        with contextlib.suppress(OSError):  # it has died; its end is noticed where we listen
            self.pipe.send((unit, first))

    def stop(self) -> str:
        self.process.kill()
        self.process.join()
        self.pipe.close()
        return death_of(self.process)


@dataclass
class _Run:
    """One run: what is left to do, who does it, and whom to tell."""

    plan: Plan
    queue: list[Unit]
    on_unit: Callable[[Unit, list[Result], bool], None]
    on_case: Callable[[Case], None]
    folder: Path
    started: float
    workers: list[_Worker] = field(default_factory=list[_Worker])
    cpu: float = 0.0

    def stop(self, worker: _Worker) -> str:
        self.cpu += worker.cpu
        return worker.stop()

    @property
    def over(self) -> bool:
        return self.plan.budget > 0 and time.monotonic() - self.started > self.plan.budget

    def loop(self) -> None:
        while (self.queue and not self.over) or any(w.unit for w in self.workers):
            while len(self.workers) < min(self.plan.jobs, max(1, len(self.queue) + len(self._busy()))):
                worker = _Worker(len(self.workers), self.plan, self.folder)
                worker.start()
                self.workers.append(worker)
            wait([worker.pipe for worker in self.workers], timeout=0.2)
            for worker in self.workers:
                self._attend(worker)
            if self.over:
                for worker in self._busy():
                    self._finish(worker, complete=False)

    def _busy(self) -> list[_Worker]:
        return [worker for worker in self.workers if worker.unit]

    def _attend(self, worker: _Worker) -> None:
        died = self._listen(worker)
        waited = time.monotonic() - worker.heard
        if died:
            self._blame(worker, "crashed")
        elif worker.unit and worker.case and waited > self.plan.case_seconds:
            self._blame(worker, "hung")
        elif not worker.ready and waited > _START_SECONDS:
            raise TorchportError(f"a worker did not start in {_START_SECONDS:.0f} s:\n{tail_of(worker.log)}")
        elif worker.ready and not worker.unit and self.queue and not self.over:
            if worker.units >= _UNITS_PER_WORKER:
                self.stop(worker)
                worker.start()
                return
            worker.units += 1
            worker.trouble = 0
            worker.give(self.queue.pop(0), 0)

    def _listen(self, worker: _Worker) -> bool:
        """Take what the worker has said; whether it has died."""
        try:
            while worker.pipe.poll():
                said = worker.pipe.recv()
                worker.heard = time.monotonic()
                if said[0] == "ready":
                    worker.ready = True
                elif said[0] == "case":
                    _, worker.position, worker.case = said
                    self.on_case(said[2])
                elif said[0] == "result":
                    worker.case = None
                    worker.position = said[1]
                    worker.results.append(said[2])
                elif said[0] == "end":
                    worker.cpu = said[2]
                    self._finish(worker, complete=True)
                else:
                    _raise(said[1], said[2])
        except (EOFError, OSError):
            return True
        return False

    def _finish(self, worker: _Worker, complete: bool) -> None:
        assert worker.unit is not None
        unit, results = worker.unit, worker.results
        worker.unit, worker.case, worker.results = None, None, []
        self.on_unit(unit, results, complete)

    def _blame(self, worker: _Worker, status: str) -> None:
        """Record the case that a worker died of, and have a new process go on behind it."""
        case, unit = worker.case, worker.unit
        how = self.stop(worker)
        log = tail_of(worker.log)
        if unit is None or not worker.ready:
            raise TorchportError(f"a worker process died while it loaded {self.plan.backend!r} ({how}):\n{log}")
        first = worker.position + 1
        if case is None:
            # It died between two cases, of something an earlier one left behind.
            share = unit.shares[0]
            case = Case(unit.op, share.variants[0], unit.dtype, 0, share.frontend)
            if worker.results:
                case = worker.results.pop().case
        message = f"no answer for {self.plan.case_seconds:.0f} s" if status == "hung" else f"the process died ({how})"
        again = f"from torchport.testing import run_case\nprint(run_case({self.plan.backend!r}, {str(case)!r}))"
        worker.results.append(Result(case, status, message, reproducer=again, detail=log))
        worker.trouble += 1
        if worker.trouble >= _TROUBLE_PER_UNIT:
            self._finish(worker, complete=True)
            worker.start()
            return
        worker.start()
        worker.give(unit, first)

    def end(self) -> None:
        for worker in self.workers:
            self.stop(worker)


def run_units(
    plan: Plan,
    units: Sequence[Unit],
    on_unit: Callable[[Unit, list[Result], bool], None],
    on_case: Callable[[Case], None] = lambda case: None,
    started: float | None = None,
) -> tuple[list[Unit], float]:
    """Run the units; ``on_unit`` is told each with its results and whether it was completed.

    Returns the units that the time bound left out, and the workers' processor time in seconds. Raises
    :class:`TorchportError` if a worker cannot start.
    """
    with tempfile.TemporaryDirectory(prefix="torchport-conform-") as folder:
        run = _Run(plan, list(units), on_unit, on_case, Path(folder), started or time.monotonic())
        try:
            run.loop()
        finally:
            run.end()
    return run.queue, run.cpu
