"""Backward stays on the calling thread, and where PyTorch cannot do it for another accelerator, an error says why.

Private torch API touched here: ``torch.autograd.graph._engine_run_backward``.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import torch

from ...core.errors import DeviceMismatch
from .opaque import opaque
from .patches import replace

__all__ = ["install"]

_ASSERTION: Final = "opt_ready_stream && opt_parent_stream"


_in_use: Final[list[bool]] = []


def install(in_use: bool) -> None:
    """Run backward on the calling thread once the device is in use, so that it continues the trace of the forward.

    PyTorch's switch for this is thread-local, and leaving ``torch.inference_mode`` restores its former state. So each
    backward sets it. Done at first use, and when the device is registered beside another accelerator.
    """
    if in_use:
        _in_use[:] = [True]
    _wrap()


@functools.cache
def _wrap() -> None:
    original = torch.autograd.graph._engine_run_backward

    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            if not _in_use:
                return original(*args, **kwargs)
            with torch.autograd.set_multithreading_enabled(False):
                return original(*args, **kwargs)
        except RuntimeError as error:
            if _ASSERTION not in str(error):
                raise
            raise DeviceMismatch(
                "PyTorch cannot run backward on another accelerator in a process where the device port is registered "
                "(PyTorch issue 161129); train on it in a process that neither imports torchport nor has "
                "TORCHPORT_BACKEND set"
            ) from error

    for module in ("torch.autograd", "torch.autograd.graph"):
        replace(f"{module}._engine_run_backward", opaque(run))
