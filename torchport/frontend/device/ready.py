"""The device's first use: the kernels are registered when a program first names the device, not before.

PyTorch calls ``torch.port._lazy_init``, which is :func:`init`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Final

from . import first_factories
from .opaque import opaque

__all__ = ["at_first_use", "init", "is_ready"]

_ready = False
_installing = False
_lock = threading.RLock()
at_first_use: Final[list[Callable[[], None]]] = []
"""Called once the kernels are there, before anybody else can use the device."""


@opaque
def init() -> None:
    """Make the device ready; PyTorch calls this function on first use.

    Other threads wait until the device is ready. A failure raises in the caller, and the next use tries again.
    """
    global _ready, _installing
    if _ready:
        return
    with _lock:
        if _ready or _installing:  # the thread that installs may come here again
            return
        _installing = True
        try:
            from .install import install  # on demand: ``import torch`` must stay light

            install()
            for call in at_first_use:
                call()
            _ready = True
        except BaseException:
            first_factories.forget()
            first_factories.expect(init)
            raise
        finally:
            _installing = False


def is_ready() -> bool:
    """Whether the device has been used."""
    return _ready


def _after_fork() -> None:
    """A child has only the thread that forked: an install in another thread would never end nor release the lock."""
    global _installing, _lock
    _installing, _lock = False, threading.RLock()


os.register_at_fork(after_in_child=_after_fork)
