"""The worker's life ends with the program's, however that ends; nothing that it has started is left."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from worker_support import family, gone

from torchport.worker.process import Worker

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
MANY_ENDS = 100


class Program:
    """``life_program.py`` in a process and session of its own."""

    def __init__(self, how: str, file: Path) -> None:
        self.how = how
        self.file = file
        path = os.pathsep.join([str(ROOT), str(HERE), os.environ.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "life_program.py"), how, str(file)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": path},
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        said = self.process.stdout.readline()
        if not said:
            raise AssertionError(self.process.communicate()[1])
        return said.strip()

    def workers(self) -> list[int]:
        """Every process that its worker consists of."""
        return [int(word) for word in self.line().split()]

    def end(self) -> tuple[int, str]:
        _, errors = self.process.communicate(timeout=120)
        return self.process.returncode, errors


@pytest.fixture
def begun(tmp_path: Path) -> Iterator[Any]:
    started: list[Program] = []

    def begin(how: str) -> Program:
        started.append(Program(how, tmp_path / f"began {len(started)}"))
        return started[-1]

    yield begin
    for program in started:
        if program.process.poll() is None:
            os.killpg(program.process.pid, signal.SIGKILL)
        program.process.communicate()


def descendants(program: Program, workers: list[int]) -> None:
    """The watcher, the worker, a child of its, and one that has left the session and lost its parent."""
    assert len(workers) >= 4, workers
    assert len({os.getsid(pid) for pid in workers}) >= 2
    assert os.getsid(program.process.pid) not in {os.getsid(pid) for pid in workers}


SLOW = [pytest.param(how, marks=pytest.mark.slow) for how in ("_exit", "raise")]


@pytest.mark.parametrize("how", ["exit", "exit at once", *SLOW])
def test_a_program_that_ends_while_something_compiles_leaves_nothing(begun: Any, how: str) -> None:
    program = begun(how)
    workers = program.workers()
    code, errors = program.end()
    assert code == (1 if how == "raise" else 0)
    assert errors == "" if how != "raise" else errors.endswith("ValueError: the program fails\n")
    assert gone(workers) == []


@pytest.mark.slow
def test_programs_that_end_while_their_steps_are_compiled_leave_nothing(begun: Any) -> None:
    draw = random.Random(4)
    for _ in range(MANY_ENDS):
        program = begun(f"train {draw.uniform(0, 6):.2f} {draw.choice(['exit', '_exit', 'killed'])}")
        workers = program.workers()
        if program.how.endswith("killed"):
            time.sleep(draw.uniform(0, 6))
            program.process.kill()
            program.end()
        else:
            assert program.end() == (0, "")
        assert gone(workers) == []


def test_a_program_that_is_killed_leaves_nothing(begun: Any) -> None:
    program = begun("wait")
    workers = program.workers()
    descendants(program, workers)
    program.process.kill()
    program.end()
    assert gone(workers) == []


def test_a_terminal_interrupts_the_program_and_not_the_worker(begun: Any) -> None:
    program = begun("wait")
    workers = program.workers()
    os.killpg(program.process.pid, signal.SIGINT)  # as a terminal does with Ctrl-C
    said = program.line()
    assert said == f"interrupted False {workers[0]}"
    assert program.end() == (0, "")
    assert gone(workers) == []


def test_a_forked_program_has_a_worker_of_its_own(begun: Any) -> None:
    program = begun("fork")
    workers = program.workers()
    word, outputs, *others = program.line().split()
    assert (word, outputs) == ("child", "1")
    child = int(program.line().split()[1])
    theirs = [int(pid) for pid in others]
    assert not set(theirs) & set(workers)
    program.process.kill()  # its child lives on, and does not keep the parent's worker
    program.process.wait()
    assert gone(workers) == []
    assert gone(theirs, 0) == theirs
    os.kill(child, signal.SIGKILL)
    assert gone([child, *theirs]) == []


def test_a_killed_watcher_takes_the_worker_with_it() -> None:
    worker = Worker(0)
    try:
        worker.wait_until_ready()
        (below,) = family(worker.pid)[1:]
        os.kill(worker.pid, signal.SIGKILL)
        assert "SIGKILL" in worker.death()
        assert gone([below]) == []
    finally:
        worker.end()
        worker.close()


def test_signals_that_the_program_blocks_reach_the_watcher() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGUSR1, signal.SIGTERM})
    try:
        worker = Worker(0)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        worker.wait_until_ready()
        (below,) = family(worker.pid)[1:]
        os.kill(below, signal.SIGSEGV)
        assert gone([worker.pid, below]) == []
        assert worker.death() == "was ended by signal SIGSEGV"
    finally:
        worker.end()
        worker.close()


@pytest.mark.slow
def test_a_worker_ends_at_every_stage_of_its_start() -> None:
    draw = random.Random(0)
    for _ in range(MANY_ENDS):
        worker = Worker(0)
        time.sleep(draw.choice([0, draw.uniform(0, 0.1), draw.uniform(0, 3)]))
        pids = family(worker.pid)
        worker.end()
        worker.close()
        assert gone(pids) == []
