"""Under ``torchrun``: what it starts again goes on from a checkpoint, to the losses of a run without a fault."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launch_ranks import PROGRAMS, environment

sys.path.insert(0, str(PROGRAMS))


def torchrun(program: str, *args: str, folder: Path, restarts: int = 0, limit: float = 600) -> str:
    """Run a program of ``programs`` on two ranks; what it printed. Fails where it does, or is late."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--max-restarts={restarts}",
        "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1", str(PROGRAMS / program), *args,
    ]  # fmt: skip
    process = subprocess.Popen(
        command,
        env=environment("reference", TEST_FOLDER=str(folder)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        text, _ = process.communicate(timeout=limit)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, text[-6000:]
    return text


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["raised", "killed"])
def test_a_restart_gives_the_losses_of_an_undisturbed_run(kind: str, tmp_path: Path) -> None:
    import torch
    from tiny_models import losses_alone, model

    torchrun("restart_program.py", kind, folder=tmp_path, restarts=1)
    rows = [line.split() for line in (tmp_path / "losses.txt").read_text().splitlines()]
    assert [int(step) for step, _ in rows] == [0, 1, 2, 3, 4, 5], rows
    found = torch.tensor([float(loss) for _, loss in rows])
    torch.testing.assert_close(found, torch.tensor(losses_alone(model("gpt2", 1), 6)), rtol=1e-4, atol=0)
