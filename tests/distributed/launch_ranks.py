"""Start the ranks of a distributed program on this machine's loopback, and leave none of them behind."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = Path(__file__).parent / "programs"
ROOT = Path(__file__).parents[2]


@dataclass
class Rank:
    """How a rank's process ended: its exit status and what it printed."""

    status: int
    text: str


def environment(backend: str, **more: str) -> dict[str, str]:
    """What every rank gets: loopback only, one thread, the checkout's own code."""
    path = os.pathsep.join([str(ROOT), str(PROGRAMS), os.environ.get("PYTHONPATH", "")])
    return {
        **os.environ,
        "PYTHONPATH": path,
        "MASTER_ADDR": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHPORT_BACKEND": backend,
        "PYTHONWARNINGS": "ignore",
        **more,
    }


def free_port() -> int:
    """A port of the loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_ranks(
    program: str,
    *args: str,
    ranks: int = 2,
    backend: str = "reference",
    limit: float = 120,
    meanwhile: Callable[[Sequence[subprocess.Popen[str]], Path], None] | None = None,
    **env: str,
) -> list[Rank]:
    """Run a program of ``programs`` on so many ranks; how each ended. Fails where one is not done within ``limit`` s.

    ``meanwhile(processes, folder)`` is called once they are started; ranks get the folder as ``TEST_FOLDER``.
    """
    port = str(free_port())
    processes: list[subprocess.Popen[str]] = []
    with tempfile.TemporaryDirectory() as folder:
        common = environment(backend, MASTER_PORT=port, WORLD_SIZE=str(ranks), TEST_FOLDER=folder, **env)
        outputs = [open(Path(folder) / f"rank{rank}.txt", "w+") for rank in range(ranks)]  # noqa: SIM115
        try:
            for rank in range(ranks):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
                command = [sys.executable, str(PROGRAMS / program), *args]
                processes.append(
                    subprocess.Popen(
                        command,
                        env=common | own,
                        stdout=outputs[rank],
                        stderr=subprocess.STDOUT,
                        text=True,
                        start_new_session=True,
                    )
                )
            if meanwhile is not None:
                meanwhile(processes, Path(folder))
            until = time.monotonic() + limit
            late = [rank for rank, process in enumerate(processes) if not _ended(process, until)]
        finally:
            for process in processes:
                _kill(process)
        ended: list[Rank] = []
        for process, output in zip(processes, outputs, strict=True):
            output.seek(0)
            ended.append(Rank(process.returncode, output.read()))
            output.close()
    said = "\n".join(f"-- rank {rank}, status {one.status}\n{one.text[-4000:]}" for rank, one in enumerate(ended))
    assert not late, f"ranks {late} were not done within {limit} s\n{said}"
    return ended


def _ended(process: subprocess.Popen[str], until: float) -> bool:
    try:
        process.wait(max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        return False
    return True


def _kill(process: subprocess.Popen[str]) -> None:
    """End a process and everything it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(30)


def all_well(ended: Sequence[Rank]) -> None:
    """Fail unless every rank ended with status 0."""
    said = "\n".join(f"-- rank {rank}, status {one.status}\n{one.text[-6000:]}" for rank, one in enumerate(ended))
    assert all(one.status == 0 for one in ended), said
