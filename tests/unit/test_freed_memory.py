"""What glibc does with memory that a program has freed, once operators are interpreted (``core/freed_memory.py``)."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

_PROGRAM = """
import resource, torch, torchport
torchport.use("reference")
if {on_the_device}:
    (torch.ones(3, device="port") + 1).cpu()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def step():  # 12 MB in three blocks, each larger than glibc takes from the heap by itself, no page of them read
    kept = [torch.empty(1_000_000).fill_(1.0) for _ in range(3)]
for _ in range(5):
    step()
before = faults()
for _ in range(10):
    step()
print(faults() - before)
"""


def _faults(on_the_device: bool, **environment: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM.format(on_the_device=on_the_device)],
        capture_output=True, text=True, check=False, timeout=120,
        env={**os.environ, "TORCHPORT_TIERS": "auto", **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return int(done.stdout.split()[-1])


pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is about glibc")
A_STEP = 3 * 4_000_000 // 4096
"""Pages."""


def test_memory_is_kept_once_something_is_interpreted() -> None:
    assert _faults(on_the_device=True) < A_STEP
    assert _faults(on_the_device=False) > 5 * A_STEP  # glibc gives it back, where nothing larger was ever freed


def test_a_programs_own_bounds_stay() -> None:
    assert _faults(on_the_device=True, MALLOC_TRIM_THRESHOLD_="131072") > 5 * A_STEP
