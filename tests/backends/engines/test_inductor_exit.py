"""A process that ends while a daemon thread of it compiles: it waits for no compiler, and leaves none."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from native_support import COMPILER, compiles

pytestmark = compiles

SLOW = """#!/bin/sh
case "$*" in
*header.h.gch*) echo $$ >> "$STARTED"; sleep 600 & wait;;
*) exec "$REAL" "$@";;
esac
"""
PROGRAM = """
import atexit, os, threading, time
atexit.register(time.sleep, 0.5)  # runs last
import pytest
import torch, torchport
def work():
    f = torch.compile(lambda x: torch.sin(x) + 1, backend="torchport", options={"backend": "inductor"})
    try:
        f(torch.ones(3))
    finally:  # PyTorch computes without the interpreter's lock, and a process that ends meanwhile is aborted
        until = time.monotonic() + 2
        while time.monotonic() < until:
            torch.ones(200, 200) @ torch.ones(200, 200)
threading.Thread(target=work, daemon=True).start()
while not os.path.exists(os.environ["STARTED"]):
    time.sleep(0.05)
"""


def _runs(pid: int) -> bool:
    """Whether a process is there and computes: one that nobody has asked for its exit status does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_a_process_ends_while_a_thread_of_it_compiles(tmp_path: Path) -> None:
    compiler, started = tmp_path / "slow++", tmp_path / "started"
    compiler.write_text(SLOW)
    compiler.chmod(0o700)
    environment = {
        **os.environ, "CXX": str(compiler), "REAL": str(COMPILER), "STARTED": str(started),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "TORCHPORT_NATIVE": "0",
    }  # fmt: skip
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    # A compiler that is waited for takes ten minutes.
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=400)
    assert (done.returncode, done.stderr) == (0, "")
    compilers = [int(line) for line in started.read_text().split()]
    assert compilers
    for _ in range(100):
        if not any(map(_runs, compilers)):
            return
        time.sleep(0.1)
    raise AssertionError(f"still running: {[pid for pid in compilers if _runs(pid)]}")
