"""Compilers in processes of their own, when the process that wants them ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys, threading, time
from pathlib import Path
from torchport.core.compilers import run_compiler, side_by_side

folder = Path(sys.argv[1])

def compiler():
    run_compiler(["sh", "-c", f"touch {folder}/started; sleep 600 & wait"])

def work():
    try:
        WORK
    except SystemExit:
        time.sleep(1)  # what leaves PyTorch takes a while
        (folder / "left").touch()
        raise

threading.Thread(target=work, daemon=True).start()
while not (folder / "started").exists():
    time.sleep(0.01)
"""


@pytest.mark.parametrize("work", ["compiler()", "side_by_side([compiler, compiler])"])
def test_a_thread_that_waits_for_a_compiler_leaves_before_the_process_ends(tmp_path: Path, work: str) -> None:
    program = PROGRAM.replace("WORK", work)
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "left").exists()
