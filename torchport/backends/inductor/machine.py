"""What compiled code asks of the machine and process it runs in, so that a wrong one gets an error and not a crash."""

from __future__ import annotations

import functools
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from torchport.core.config import config
from torchport.core.threads import cores, most
from torchport.core.torch_library import cpu_library

__all__ = [
    "avx512_without_mkl",
    "has_sleef",
    "here",
    "misfit",
    "should_overlap",
    "threads_beside",
]

_INSTRUCTIONS = re.compile(
    r"^(3dnow|abm|adx|aes|amx|asimd|avx|bf16|bmi|cldemote|clflushopt|clwb|f16c|fma|gfni|i8mm|lzcnt|movbe|movdir|pclmul"
    r"|pku|popcnt|prfchw|ptwrite|rdrand|rdseed|rtm|serialize|sha|sse|ssse|sve|tbm|vaes|vpclmul|waitpkg|xop|xsave)"
)
"""Names in ``/proc/cpuinfo`` of extensions that a compiler may use under ``-march=native``."""


@functools.cache
def _extensions() -> tuple[str, ...]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return ()
    found = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", text, re.MULTILINE)
    return tuple(sorted(name for name in (found.group(1).split() if found else ()) if _INSTRUCTIONS.match(name)))


@functools.cache
def avx512_without_mkl() -> bool:
    """Whether the processor has AVX-512 and is not Intel's, so that MKL does not use it."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    vendor = re.search(r"^vendor_id\s*:\s*(.*)$", text, re.MULTILINE)
    return vendor is not None and vendor.group(1) != "GenuineIntel" and "avx512f" in _extensions()


@functools.cache
def has_sleef() -> bool:
    """Whether PyTorch's library has SLEEF's functions, which vectorized code calls, for AVX2 and AVX-512."""
    library = cpu_library()
    if platform.machine() != "x86_64" or library is None:
        return False
    return all(hasattr(library, name) for name in ("Sleef_expf8_u10", "Sleef_expf16_u10"))


_cores = functools.cache(cores)


def threads_beside() -> int:
    """How many threads a computation takes that is started: one where PyTorch's two have both of two cores, so that the
    program keeps one. Only where it is tried whether that pays (:func:`should_overlap`)."""
    return torch.get_num_threads() if should_overlap() is not None or config.execution != "auto" else 1


def should_overlap() -> bool | None:
    """Whether it pays to compute while the program goes on; ``None`` where both ways must be tried.

    It does where there are cores for a second team of PyTorch's threads. Where there are not, a second team of several
    has much to lose: OpenMP's threads no longer spin when there are more of them than cores. On two cores GPT-2's
    training step took 41 ms instead of 33, and one of a small MLP, on the program's thread after the first had run
    elsewhere, 4.5 instead of 1.3. A single thread is no team, so on two cores it may have one of them, unless sums
    must not change their order or a compiler has the other core.
    """
    if 2 * torch.get_num_threads() <= _cores():
        return True
    if _cores() != 2 or most.value or torch.are_deterministic_algorithms_enabled():
        return False
    return None


def _torch_release() -> str:
    return torch.__version__.split("+")[0]


def here(native: bool) -> dict[str, Any]:
    """This machine, for :attr:`InductorArtifact.platform`; with its instruction set extensions if code
    is ``native`` to it.
    """
    extensions = list(_extensions()) if native else []
    return {"torch": _torch_release(), "machine": platform.machine(), "extensions": extensions}


def misfit(wanted: Mapping[str, Any]) -> str:
    """Why code made for ``wanted`` cannot run here; empty if it can."""
    if wanted.get("torch") != _torch_release():
        return f"it was compiled for torch {wanted.get('torch')}, this is torch {_torch_release()}"
    if wanted.get("machine") != platform.machine():
        return f"it was compiled for {wanted.get('machine')}, this machine is {platform.machine()}"
    missing = [name for name in wanted.get("extensions", ()) if name not in _extensions()]
    if missing and _extensions():
        return f"this CPU lacks {', '.join(missing)}, which the machine it was compiled on has"
    return ""
