"""What glibc does with memory that a program has freed, once operators are interpreted (``core/freed_memory.py``)."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

_PROGRAM = """
import ctypes, resource, torch, torchport
torchport.use("reference")
(torch.ones(3, device="port") + 1).cpu()

class Mallinfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in "arena ordblks smblks hblks a b c d e f".split()]

libc = ctypes.CDLL(None)
libc.mallinfo.restype, libc.malloc.restype, libc.malloc.argtypes = Mallinfo, ctypes.c_void_p, [ctypes.c_size_t]
mapped = libc.mallinfo().hblks  # blocks that were taken from the system by themselves, not from the heap
libc.malloc(4_000_000)
print(libc.mallinfo().hblks - mapped)

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def step():  # 12 MB in three blocks, each larger than glibc takes from the heap by itself
    kept = [torch.empty(1_000_000).fill_(1.0) for _ in range(3)]
for _ in range(5):
    step()
before = faults()
for _ in range(10):
    step()
print(faults() - before)
"""


def _measured(**environment: str) -> tuple[int, int]:
    """``(blocks of 4 MB taken by themselves: 0 or 1, page faults of ten steps)``, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=False, timeout=120,
        env={**os.environ, "TORCHPORT_TIERS": "auto", **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    mapped, faults = map(int, done.stdout.split())
    return mapped, faults


pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is about glibc")


def test_memory_is_kept_once_something_is_interpreted() -> None:
    mapped, faults = _measured()
    assert mapped == 0
    assert faults < 3 * 4_000_000 // 4096  # those of one step of the ten


@pytest.mark.parametrize("bound", ["MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"])
def test_a_programs_own_bounds_stay(bound: str) -> None:
    mapped, _ = _measured(**{bound: "131072"})  # with either of the two glibc moves none any more
    assert mapped == 1
