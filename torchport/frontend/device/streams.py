"""Streams and events of ``torch.port``: there is one stream of work per device, in order.

Private torch APIs used here: ``torch._C._autograd.DeviceType.PrivateUse1`` (to make a ``torch.Stream``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

from .names import NAME

__all__ = ["DeviceEvent", "Stream", "current_stream", "default_stream", "install", "set_stream", "stream"]

_waiting: Final[list[Callable[[int], None]]] = []
"""The function that waits for the work of a device index."""


def install(wait: Callable[[int], None]) -> None:
    """Set the function that waits for the work of a device index."""
    _waiting[:] = [wait]


class Stream(torch.Stream):
    """The stream of work of a device; all that are made for one index are the same."""

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Stream:
        kind = int(torch._C._autograd.DeviceType.PrivateUse1)  # type: ignore[attr-defined]
        index = kwargs.get("device_index", device if isinstance(device, int) else None)
        if index is None:
            index = 0 if device is None else torch.device(device).index or 0
        return super().__new__(cls, stream_id=0, device_index=index, device_type=kind)

    def synchronize(self) -> None:
        """Compute the pending values and wait for them."""
        _waiting[0](self.device_index)

    def query(self) -> bool:
        """Whether all work is done: it is, after waiting for it."""
        self.synchronize()
        return True

    def wait_event(self, event: Any) -> None:
        """Nothing: work is done in order."""

    def wait_stream(self, other: Any) -> None:
        """Nothing where it is the device's own stream; another device's work is waited for."""
        if (other.device_index, other.device_type) != (self.device_index, self.device_type):
            other.synchronize()

    def record_event(self, event: Any = None) -> Any:
        """Record an event, a new one if none is given; returns it."""
        made = DeviceEvent() if event is None else event
        made.record(self)
        return made

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        return None


class DeviceEvent(torch.Event):
    """A point in a device's work. Recording one with ``enable_timing`` waits for the work before it.

    Its class is PyTorch's, since ``torch.Stream.wait_event`` reads what it is given as an object of that class,
    whatever it is.
    """

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> DeviceEvent:
        return super().__new__(cls, device=NAME)

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        if interprocess:
            raise NotImplementedError(f"events of {NAME} are this process's own; make one without interprocess=True")
        self._timed = enable_timing
        self._stream: Any = None
        self._time: float | None = None

    def record(self, stream: Any = None) -> None:
        """Mark the work so far. Pending values stay pending, unless the event takes the time."""
        self._stream = current_stream() if stream is None else stream
        if self._timed:
            self._stream.synchronize()
            self._time = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Have a stream wait for the event: work is done in order."""

    def synchronize(self) -> None:
        """Wait for the work that the event marks."""
        if self._stream is not None:
            self._stream.synchronize()

    def query(self) -> bool:
        """Whether the work that the event marks is done: it is, after waiting for it."""
        self.synchronize()
        return True

    def elapsed_time(self, other: Any) -> float:
        """Milliseconds to another event. Raises ``RuntimeError`` unless both take the time and were recorded."""
        if not (self._timed and other._timed):
            raise RuntimeError("both events have to be made with enable_timing=True")
        if self._time is None or other._time is None:
            raise RuntimeError("both events have to be recorded before the time between them is known")
        return (other._time - self._time) * 1e3


def current_stream(device: Any = None) -> Stream:
    """The device's only stream."""
    return Stream(device)


default_stream = current_stream


def set_stream(stream: Any) -> None:
    """Nothing: there is one stream, which is the current one."""


@contextmanager
def stream(stream: Any) -> Iterator[Any]:
    """A context that changes nothing: work goes to the only stream."""
    yield stream
