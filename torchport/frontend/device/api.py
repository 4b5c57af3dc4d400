"""The public functions about devices and backends."""

from __future__ import annotations

from typing import Any

import torch

from ...backend.interface import Backend
from ...backend.registry import BackendInfo, registry
from . import module

__all__ = ["device", "get_backend", "list_backends", "register", "sync", "use"]


def device(name: str, ordinal: int = 0) -> torch.device:
    """The ``torch.device("port", i)`` that stands for a backend's device; the same one for the same backend.

    Raises :class:`BackendNotFound` or :class:`BackendUnavailable`.
    """
    module.init()
    from ...lazy.runtime import runtimes

    return torch.device("port", runtimes.bind(registry.get(name), ordinal))


def use(name: str, ordinal: int = 0) -> torch.device:
    """Bind ``port:0``, the default device, to a backend. Tensors on it move to the new backend when next used.

    Raises :class:`BackendNotFound` or :class:`BackendUnavailable`; the binding is then as before.
    """
    module.init()
    from ...lazy.runtime import rebind

    rebind(registry.get(name), ordinal)
    return torch.device("port", 0)


def register(backend: Any, name: str | None = None) -> Any:
    """Register a backend class, instance or factory under its ``name``; returns it, so that it decorates a class.

    Raises :class:`TorchportError` if the name is taken.
    """
    registry.register(backend, name)
    return backend


def get_backend(name: str) -> Backend:
    """The backend of that name. Raises :class:`BackendNotFound` or :class:`BackendUnavailable`."""
    return registry.get(name)


def list_backends() -> list[BackendInfo]:
    """Every registered backend, whether it can run here, and if not, why."""
    return registry.list()


def sync(device: Any = None) -> None:
    """Compute everything the calling thread has pending, on one device or on all, and wait for it.

    Raises the first error among the pending values.
    """
    if not module.is_initialized():
        return
    from ...lazy.executor import flush
    from ...lazy.runtime import runtimes, threads

    wanted = None if device is None else torch.device(device).index or 0
    errors = [flush(trace, "sync") for trace in threads.mine() if wanted is None or trace.index == wanted]
    for runtime in runtimes.all():
        if wanted is None or runtime.index == wanted:
            runtime.backend.synchronize(runtime.device)
    for error in errors:
        if error is not None:
            raise error
