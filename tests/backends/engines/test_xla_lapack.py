"""Stored programs of ``xla`` that call LAPACK, loaded by another process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torchport
from torchport.backends.xla import XlaBackend

backend = XlaBackend()
pytestmark = pytest.mark.skipif(not backend.is_available(), reason=backend.unavailable_reason())


@pytest.mark.parametrize("executable", [True, False], ids=["executable", "module"])
def test_another_process_finds_lapack(executable: bool, tmp_path: Path) -> None:
    """Loading a stored program lowers nothing, and JAX finds LAPACK when it lowers a call of it."""

    class Solve(torch.nn.Module):
        def forward(self, a: torch.Tensor) -> torch.Tensor:
            return torch.linalg.solve_ex(a, torch.ones(3, 1))[0]

    torchport.aot.lower(Solve().eval(), (2 * torch.eye(3),), backend="xla").save(tmp_path / "solve.pt2")
    program = f"""
import sys, torch, torchport
from torchport.backends.xla import executables
if not {executable}:
    executables.fits = lambda *of: False
method = torchport.runtime.load(sys.argv[1]).load_method()
print(method(2 * torch.eye(3))[0].sum().item())
"""
    command = [sys.executable, "-W", "ignore", "-c", program, str(tmp_path / "solve.pt2")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "1.5", done.stderr
