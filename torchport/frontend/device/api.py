"""The public functions about devices and backends."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from ...backend.interface import Backend, BackendData
from ...backend.registry import BackendInfo, registry
from ...core.collection import made_to_stay
from ...core.errors import ConfigError, UnsupportedOp
from ...core.frames import user_line
from ...core.varying import mark, put_by
from ...run import step_closures
from ...run.device_runtime import rebind, runtimes
from ...run.donation import give_up
from ...run.future import has_failed, resolve
from ...run.sync import compute_pending
from ...trace.handle import IndexedLazyTensor, LazyTensor
from ...trace.threads import threads
from ...trace.wrapping import unwrap
from .ready import init, is_ready

__all__ = [
    "backend_data", "device", "donate", "get_backend", "list_backends", "mark_dynamic", "mode", "register", "sync",
    "use",
]  # fmt: skip

_P = ParamSpec("_P")
_R = TypeVar("_R")


def device(name: str, ordinal: int = 0) -> torch.device:
    """The ``torch.device("port", i)`` that stands for a backend's device; the same one for the same backend.

    Raises :class:`BackendNotFound` or :class:`BackendUnavailable`.
    """
    init()
    return torch.device("port", runtimes.bind(registry.get(name), ordinal))


def donate(*tensors: torch.Tensor) -> None:
    """Give up the tensors' values, as if their last references were gone, so that other values can use their memory.

    What was computed from a tensor before still gets its value; afterwards any use of the tensor raises
    :class:`ExecutionError`. Views and aliases keep their values. Raises :class:`UnsupportedOp` for other devices'
    tensors. Inputs that nobody holds are donated without being told.
    """
    init()
    line = user_line()
    handles = [unwrap(tensor) for tensor in tensors]
    for handle in handles:
        if not isinstance(handle, LazyTensor):
            raise UnsupportedOp(f"donate() takes tensors on port, got one on {handle.device}", source=line)
    for handle in handles:
        index = handle.get_device() if isinstance(handle, IndexedLazyTensor) else 0
        give_up(threads.of(index), handle, line)


def mark_dynamic(tensor: torch.Tensor, dim: int, *, min: int | None = None, max: int | None = None) -> None:
    """Say that a dimension of tensors like this one will vary: of its dtype, and its shape but for that dimension.

    The first graph that has such an input is then compiled for several sizes, where without it the second one is. On
    any device, and for torch.compile as ``torch._dynamo.mark_dynamic`` says it. Sizes outside of ``min`` and ``max``
    are not served by that. A graph for which it does not hold is compiled as if nothing had been said.

    Raises ``IndexError`` for a dimension that there is not, and :class:`ConfigError` for bounds that the present size
    is not within.
    """
    made = mark(tensor, dim, min, max)
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is None:
        put_by(tensor, made)  # importing it takes long; torch.compile does, and then looks for this backend
    else:
        dynamo.mark_dynamic(tensor, made.dim, min=min, max=max)


def backend_data(tensor: torch.Tensor) -> BackendData | None:
    """The backend's value of a tensor on ``port``, if it is there; ``None`` while it is pending. Nothing is computed.

    The value is the device's: nobody may write to it. Raises :class:`UnsupportedOp` for other devices' tensors, and the
    error that the tensor's computation ended in.
    """
    init()
    handle = unwrap(tensor)
    if not isinstance(handle, LazyTensor):
        raise UnsupportedOp(f"backend_data() takes tensors on port, got one on {handle.device}", source=user_line())
    if handle.failure is not None:
        raise handle.failure
    value = handle.value
    if value is None or not (value.has_value or has_failed(handle)):
        return None
    data = resolve(handle)
    data.exported = True
    return data


def use(name: str, ordinal: int = 0) -> torch.device:
    """Bind ``port:0``, the default device, to a backend. Tensors on it move to the new backend when next used.

    Raises :class:`BackendNotFound` or :class:`BackendUnavailable`; the binding is then as before.
    """
    with made_to_stay():
        init()
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


class mode:
    """``mode("eager")``: the calling thread's ops are computed at once; ``mode("lazy")``: when a value is needed.

    A call sets the mode. A ``with`` block sets the former mode again at its end, and a decorated function runs in the
    mode (as with ``torch.set_grad_enabled``). Eager ops run through the backend's own kernels, or as computations of
    one op each; random numbers are the same in both modes. A change of mode computes the pending values.
    Threads start in ``config.mode``. Raises :class:`ConfigError` for any other name.
    """

    def __init__(self, name: str) -> None:
        if name not in ("lazy", "eager"):
            raise ConfigError(f"there is no mode {name!r}; write torchport.mode('lazy') or torchport.mode('eager')")
        self.name = name
        self._before = self.current()
        self._set(name)

    @staticmethod
    def current() -> str:
        """The calling thread's mode."""
        return "eager" if threads.eager else "lazy"

    @staticmethod
    def _set(name: str) -> None:
        threads.switch(name == "eager")

    def __enter__(self) -> None:
        self._set(self.name)

    def __exit__(self, *exc: object) -> None:
        self._set(self._before)

    def __call__(self, fn: Callable[_P, _R]) -> Callable[_P, _R]:
        self._set(self._before)

        @functools.wraps(fn)
        def inside(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            with type(self)(self.name):
                return fn(*args, **kwargs)

        return inside

    def __repr__(self) -> str:
        return f"torchport.mode({self.name!r})"


def sync(device: Any = None, wait: bool = True) -> None:
    """Compute all pending values of the calling thread, on one device or on all.

    ``wait``: return when the values are there, and raise the first error among them and among values that nobody has
    read. A step has then ended, so step closures run.
    """
    if is_ready():
        compute_pending(None if device is None else torch.device(device).index or 0, wait)
    else:
        step_closures.finish()
