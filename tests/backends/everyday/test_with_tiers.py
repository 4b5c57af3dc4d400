"""Everyday programs while what is new is interpreted, as users have it: the other files run with tiers off.

Tests that count what is compiled are marked ``compiled`` and keep tiers off. What failed here when tiers became the
default: generators as arguments, zero tensors of forward-mode differentiation, ``out=`` that overlaps in part, lists of
tensors inside of a ``DTensor``, ``config.fallback = "error"`` in the middle of a trace.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]
FILES = [f"backends/everyday/test_{name}.py" for name in (
    "everyday_random", "everyday_inference", "everyday_autograd", "layouts", "errors",
)]  # fmt: skip
CHOSEN = "generator or hessian or linear or wrapper or repeated or what_is_not_strided or fallback or jagged"
FOLDERS = ("backends/everyday", "backends/compile", "models", "distributed", "unit/coexist")


def _run(paths: list[str], *options: str) -> None:
    # xdist's variables would make the other pytest believe that it is a worker of this one.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    asked = [*options, *(str(TESTS / path) for path in paths)]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *asked],
        cwd=TESTS.parent,
        env={**kept, "TORCHPORT_TIERS": "auto"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-6000:]


@pytest.mark.slow
def test_what_once_failed() -> None:
    _run(FILES, "-k", CHOSEN)


@pytest.mark.slow
@pytest.mark.parametrize("folder", FOLDERS)
def test_all_of_it(folder: str) -> None:
    _run([folder])


def test_tiers_are_on_where_nobody_says_otherwise() -> None:
    code = """
import torch, torchport
assert torchport.config.tiers == "auto"
torchport.use("inductor")
net = torch.nn.Linear(4, 4).to("port")
net(torch.ones(2, 4, device="port")).sum().backward()
count = torchport.metrics.counter
assert net.weight.grad.sum().item() == 32
print(count("UncachedCompile"), count("InterpretedOps") > 5)
"""
    env = {name: value for name, value in os.environ.items() if name != "TORCHPORT_TIERS"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 True"
