"""Programs that go on, with right values, whatever their compiler does; and end, whenever they end, without a trace."""

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

ROOT = Path(__file__).parents[3]
SUPPORT = ROOT / "tests" / "backends" / "support"
FRONTENDS = ("lazy", "compile")


class Program:
    """``tier_program.py`` in a process and session of its own."""

    def __init__(self, frontend: str, *end: str, how: str = "slow", **settings: str) -> None:
        folders = [ROOT, SUPPORT, ROOT / "tests" / "unit" / "worker"]
        path = os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            [sys.executable, str(SUPPORT / "tier_program.py"), frontend, *end],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": path, "TIER_ENGINE_HOW": how, **settings},
        )

    def has_worker(self) -> None:
        """Return when it has a worker."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("workers"), line + self.process.communicate()[1]

    def end(self, seconds: float = 600) -> tuple[int, str, dict[str, int], str]:
        """Its exit code, what it printed, what it counted, and what it said on standard error."""
        try:
            said, errors = self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            pytest.fail(f"the program hangs: {self.process.communicate()}")
        counts = [line.split()[1:] for line in said.splitlines() if line.startswith("counts")]
        numbers = dict(pair.split("=") for pair in counts[-1]) if counts else {}
        return self.process.returncode, said, {name: int(value) for name, value in numbers.items()}, errors

    def orphans(self, seconds: float = 20.0) -> list[str]:
        """Processes of its workers that are still there after so long."""
        end = time.monotonic() + seconds
        while (left := _workers_of(self.process.pid)) and time.monotonic() < end:
            time.sleep(0.05)
        return left


def _workers_of(program: int) -> list[str]:
    found: list[str] = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                command = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"torchport.worker" in command and str(program).encode() in command:
                found.append(f"{name} {command}")
    return found


@pytest.fixture
def start() -> Iterator[Any]:
    programs: list[Program] = []

    def begin(*args: Any, **kwargs: Any) -> Program:
        programs.append(Program(*args, **kwargs))
        return programs[-1]

    yield begin
    for program in programs:
        if program.process.poll() is None:
            os.killpg(program.process.pid, signal.SIGKILL)
            program.process.communicate()


@pytest.mark.parametrize("frontend", ["lazy", pytest.param("compile", marks=pytest.mark.slow)])
def test_what_compiles_takes_over(start: Any, frontend: str) -> None:
    program = start(frontend, "compiled")
    code, _, counts, errors = program.end()
    assert (code, errors) == (0, "")
    assert counts["TakenOver"] >= 1
    assert counts["StaysInterpreted"] == 0
    assert program.orphans() == []


TROUBLE = {
    "raises": "the engine divides by nothing",
    "aborts": "SIGABRT",
    "hangs": "did not end within 12 s",
    "hungry": "emory",
}


@pytest.mark.slow
@pytest.mark.parametrize("how", TROUBLE)
@pytest.mark.parametrize("frontend", FRONTENDS)
def test_what_does_not_compile_is_said_and_stays_interpreted(start: Any, frontend: str, how: str) -> None:
    program = start(frontend, "interpreted", how=how, TORCHPORT_COMPILE_TIMEOUT="12")
    code, said, counts, errors = program.end()
    assert code == 0, said + errors
    assert TROUBLE[how] in errors
    assert "stays interpreted" in errors or "no more compiling in other processes" in errors
    assert counts["StaysInterpreted"] >= 1
    assert counts["TakenOver"] == 0
    assert program.orphans() == []


@pytest.mark.slow
@pytest.mark.parametrize("frontend", FRONTENDS)
def test_a_compiler_that_dies_three_times_is_left_alone(start: Any, frontend: str) -> None:
    """Nothing is compiled in the program itself then: what ended the other process could end it."""
    program = start(frontend, "off", how="slow")
    code, said, counts, errors = program.end()
    assert code == 0, said + errors
    assert errors.count("no more compiling in other processes") == 1
    assert counts["CompileWorkerDeaths"] >= 3
    assert program.orphans() == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("frontend", FRONTENDS)
def test_a_worker_killed_at_random_moments_is_replaced(start: Any, frontend: str, seed: int) -> None:
    program = start(frontend, "kills", "10", str(seed))
    code, said, counts, errors = program.end()
    assert code == 0, said + errors
    assert "killed 10" in said
    assert counts["CompileWorkerDeaths"] >= 8  # two kills may hit the watcher and the worker of one
    assert counts["TakenOver"] >= 1
    assert program.orphans() == []


ENDS = ("exit", "raise", "sys.exit", "_exit", "SIGTERM", "SIGKILL", "SIGINT")
CODES = {"exit": (0,), "raise": (1,), "sys.exit": (3,), "_exit": (4,), "SIGTERM": (-15,), "SIGKILL": (-9,)}
CODES["SIGINT"] = (-2, 1)  # Python ends by the signal, but not where something at exit ran code given as text


@pytest.mark.slow
@pytest.mark.parametrize("number", range(50))
@pytest.mark.parametrize("frontend", FRONTENDS)
def test_a_program_that_ends_while_something_compiles_leaves_nothing(start: Any, frontend: str, number: int) -> None:
    draw = random.Random(number)
    end, seconds = ENDS[number % len(ENDS)], draw.choice([draw.uniform(0, 0.5), draw.uniform(0, 6)])
    if end in ("exit", "raise", "sys.exit", "_exit"):
        program = start(frontend, end, f"{seconds:.3f}")
    else:
        program = start(frontend, "outside")
        program.has_worker()
        time.sleep(seconds)
        program.process.send_signal(getattr(signal, end))
    begun = time.monotonic()
    code, said, _, errors = program.end(120)
    assert code in CODES[end], (code, said, errors)
    assert "wrong" not in said
    wanted = {"raise": "ValueError: the program fails", "SIGINT": "KeyboardInterrupt"}.get(end)
    assert wanted in errors if wanted else errors == ""
    if end.startswith("SIG"):
        assert time.monotonic() - begun < 30  # no compiler is waited for
    assert program.orphans() == []
