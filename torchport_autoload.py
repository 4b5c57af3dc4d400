"""What ``import torch`` calls (entry point group ``torch.backends``): registers torchport's device, or stands back.

PyTorch takes a device of this kind for its accelerator as soon as it is registered, and from 2.8 on ``backward`` on any
other accelerator then ends in an assertion (PyTorch issue 161129). Where there is another one, a program that only has
torchport installed must not get that: it says that it wants the device, by ``import torchport`` or
``TORCHPORT_BACKEND``. Not a part of the package, which would be imported before this could ask whether it was.
"""

from __future__ import annotations

import os
import sys

__all__ = ["autoload", "other_accelerator"]

stood_back: str = ""
"""The accelerator for whose sake nothing was registered; importing torchport registers then."""
_NODES = ("/dev/nvidiactl", "/dev/nvmap", "/dev/dxg", "/dev/kfd")
"""Where drivers of GPUs that CUDA and ROCm run on are found, on machines whose library cannot count them."""


def autoload() -> None:
    """Called at the end of ``import torch``; must never make that import fail."""
    global stood_back
    if "torchport" not in sys.modules and "TORCHPORT_BACKEND" not in os.environ:
        stood_back = other_accelerator()
        if stood_back:
            return
    import torchport

    torchport._autoload()


def other_accelerator() -> str:
    """The device type of another accelerator that PyTorch could use here, or an empty string. Starts no driver."""
    try:
        import torch

        if torch.backends.cuda.is_built() and _has_gpu():
            return "cuda"
        if torch.backends.mps.is_available():
            return "mps"
        return "xpu" if torch.xpu.is_available() else ""
    except Exception:  # nobody may fail for having asked
        return ""


def _has_gpu() -> bool:
    """Whether there is a GPU for CUDA or ROCm. CUDA itself is not asked: a process that did cannot use it in a fork."""
    import torch

    count = torch.cuda._device_count_amdsmi() if torch.version.hip else torch.cuda._device_count_nvml()
    return count > 0 or (count < 0 and any(os.path.exists(node) for node in _NODES))
