"""What compiled code asks of the machine and process it runs in, so that a wrong one gets an error and not a crash."""

from __future__ import annotations

import functools
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

__all__ = ["here", "misfit"]

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


def _torch_release() -> str:
    return torch.__version__.split("+")[0]


def here(native: bool) -> dict[str, Any]:
    """This machine, for :attr:`Artifact.platform`; with its instruction set extensions if code is ``native`` to it."""
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
