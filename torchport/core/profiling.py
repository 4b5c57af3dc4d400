"""Ranges in ``torch.profiler``'s timeline: what torchport computes and compiles, with its times.

Kineto's own hooks for a device are C++; a range on the program's thread is what Python can give. Nothing here imports
PyTorch: where no profiler was imported, none is on.

Private torch APIs used here: ``torch.autograd.profiler._is_profiler_enabled``.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

__all__ = ["is_profiled", "profiled"]


def is_profiled() -> bool:
    """Whether a profiler of PyTorch's is on."""
    profiler: Any = sys.modules.get("torch.autograd.profiler")
    return profiler is not None and profiler._is_profiler_enabled


def profiled(what: str, label: str) -> AbstractContextManager[Any]:
    """A context that the profiler, if one is on, shows as ``torchport::what label``."""
    if not is_profiled():
        return nullcontext()
    return sys.modules["torch.autograd.profiler"].record_function(f"torchport::{what} {label}")
