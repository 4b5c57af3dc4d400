"""``inductor`` on a machine that has compiled nothing yet: an empty folder, and a process of its own per program."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchport.backends.inductor import InductorBackend

backend = InductorBackend()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not backend.is_available(), reason=backend.unavailable_reason()),
]
LIMIT = 300.0
"""Seconds for two precompiled headers on a machine that does much else."""

COMPILES = """
import torch, torchport
torchport.use("inductor")
torchport.config.tiers = "off"
x = torch.arange(6.0).reshape(2, 3).to("port")
found, host = (x.exp() @ x.T).cpu(), x.cpu()
print(torch.allclose(found, host.exp() @ host.T))
"""
ENDS = """
import time, torch
from torchport.backends.inductor import build, toolchain
build.import_compiler()
build.begin(toolchain.toolchain_in_force(precompile=True))
time.sleep(1.0)
print("ends")
"""


def _run(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder), "TORCHPORT_CACHE": "off"}
    command = [sys.executable, "-W", "ignore", "-c", program]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=LIMIT, check=False)


def _parts(folder: Path) -> list[str]:
    return sorted(path.name.split("-")[0] for path in (folder / "torchport").glob("*"))


def test_the_first_compile_makes_what_all_graphs_share_and_the_next_finds_it(tmp_path: Path) -> None:
    for _ in range(2):
        done = _run(COMPILES, tmp_path)
        assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
        assert _parts(tmp_path) == ["header", "header", "libtorch", "libtorch_cpu"]


def test_a_program_that_ends_while_headers_are_made_leaves_nothing(tmp_path: Path) -> None:
    """Neither a compiler that goes on, nor half of a header, nor words about it."""
    done = _run(ENDS, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ends\n", "")
    assert _parts(tmp_path) == []
    assert _run(COMPILES, tmp_path).stdout == "True\n"
