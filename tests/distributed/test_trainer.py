"""transformers' ``Trainer`` under ``torchrun``: nothing but the device's name changed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launch_ranks import PROGRAMS, environment
from test_restarts import torchrun

pytest.importorskip("accelerate", reason="transformers' Trainer needs it; it comes with the extra `recipes`")


@pytest.mark.slow
def test_two_ranks_have_the_losses_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "port")
    torchrun("trainer_program.py", str(tmp_path), folder=tmp_path)
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cpu")
    alone = [sys.executable, str(PROGRAMS / "trainer_program.py"), str(tmp_path)]
    subprocess.run(alone, env=environment("reference"), check=True, timeout=300, capture_output=True)
    two, one = (_read(tmp_path / f"of{size}.json") for size in (2, 1))
    assert two["device"].startswith("port")
    assert two["parallel"] == "DistributedDataParallel"
    assert len(two["losses"]) == 6
    torch.testing.assert_close(torch.tensor(two["losses"]), torch.tensor(one["losses"]), rtol=1e-3, atol=1e-3)


def _read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text())
