"""Minimising: a fault among many operators comes out alone, as a file that fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import torchport
from torchport.testing import Case, minimise_case, minimise_script

FAKES = Path(__file__).parents[1] / "support" / "conform_fakes.py"
PROGRAM = """
import torch
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4)).to("port")
y = torch.sin(net(torch.randn(5, 6).to("port"))).softmax(-1)
(y * y).sum().backward()
print(net[0].weight.grad.norm().item())
"""


@pytest.mark.parametrize(
    ("name", "verdict"), [pytest.param("SlightlyWrong", "wrong", marks=pytest.mark.slow), ("Crashing", "crashed")]
)
def test_a_program_comes_down_to_the_one_operator_that_fails(tmp_path: Path, name: str, verdict: str) -> None:
    script, out = tmp_path / "program.py", tmp_path / "small.py"
    script.write_text(PROGRAM)
    found = minimise_script(f"{FAKES}:{name}", script, out)
    assert found.verdict.startswith(verdict)
    assert found.before > 20
    assert found.after == 1
    assert found.confirmed
    text = out.read_text()
    assert "torch.ops.aten.sin.default(" in text
    assert "torch.tensor([[1.0]], dtype=torch.float32)" in text
    mended = text.replace(f"{FAKES}:{name}", f"{FAKES}:FiveOps")
    out.write_text(mended)
    done = subprocess.run([sys.executable, "-W", "ignore", str(out)], capture_output=True, text=True, check=False)
    assert done.stdout == "agrees with the CPU\n", done.stderr


def test_a_case_that_does_not_fail_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(torchport.TorchportError, match="nothing fails"):
        minimise_case("reference", Case.parse("cos/forward/float32/0/lazy"), tmp_path / "x.py")
    with pytest.raises(torchport.TorchportError, match="no case"):
        minimise_case("reference", Case.parse("cos/forward/float32/999/lazy"), tmp_path / "x.py")
