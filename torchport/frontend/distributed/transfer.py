"""A collective in gloo's hands: the futures of what it brings, and the ``Work`` that PyTorch gives to the program.

The program goes on tracing while the bytes travel. A computation that needs what they bring waits for them by itself,
so a program that forgets ``work.wait()`` computes the right thing, too.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from ...core import metrics
from ...core.default_state import default_state
from ...core.errors import CollectiveError, TorchportError
from ...core.specs import TensorSpec
from ...core.traffic import Collective
from ...run.device_runtime import DeviceRuntime
from ...run.future import Future
from ...trace.handle import LazyTensor, make_handle
from .communicator import Communicator

if TYPE_CHECKING:
    from ...run.jobs import Job

__all__ = ["Arrival", "Received", "Transfer", "TransferWork", "launch", "taken"]

Arrival = Callable[[], None]
"""Waits until bytes are there. Raises :class:`CollectiveError`."""


class Transfer:
    """Bytes on their way. To the futures of what they bring it is what a job is to a computation's."""

    def __init__(self, runtime: DeviceRuntime, arrive: Arrival) -> None:
        self.runtime = runtime
        self.error: TorchportError | None = None
        self.done = False
        self._arrive: Arrival | None = arrive
        self._results: list[Callable[[], torch.Tensor]] = []
        self._futures: list[Future] = []
        self._lock = threading.Lock()

    def result(self, spec: TensorSpec, host: Callable[[], torch.Tensor]) -> LazyTensor:
        """A handle for what ``host`` gives once the bytes are there, a CPU tensor that nobody else holds."""
        handle = make_handle(spec, self.runtime.index)
        job: Job = self  # type: ignore[assignment]
        future = Future(job, spec)
        self._futures.append(future)
        self._results.append(host)
        handle.value = future
        return handle

    def finish(self) -> None:
        """Return when the bytes are there and the futures settled, be it by an error."""
        with self._lock:
            if self.done:
                return
            assert self._arrive is not None
            outcomes: list[Any] = []
            try:
                self._arrive()
                with default_state():
                    outcomes = [self._to_device(host()) for host in self._results]
            except TorchportError as error:
                self.error = error
                outcomes = [error] * len(self._futures)
            for future, outcome in zip(self._futures, outcomes, strict=True):
                future.settle(outcome)
            self.done = True
            self._arrive = None
            self._results, self._futures = [], []

    def _to_device(self, host: torch.Tensor) -> Any:
        runtime = self.runtime
        try:
            data = runtime.backend.to_device(host, runtime.device)
        except Exception as error:
            raise CollectiveError(
                f"backend {runtime.backend.name!r} failed to take what a collective brought: "
                f"{type(error).__name__}: {error}"
            ) from error
        data.info = runtime
        return data


def launch(communicator: Communicator, runtime: DeviceRuntime, works: Sequence[Any], what: str) -> Transfer:
    """The transfer of what gloo has been told to do."""

    record = communicator.latest

    def arrive() -> None:
        start = time.perf_counter()
        for work in works:
            communicator.arrive(work, what)
        taken(record, start)

    return Transfer(runtime, arrive)


def taken(record: Collective | None, waiting_since: float) -> None:
    """Note how long a program has waited for bytes."""
    metrics.metrics.add_time("CollectiveTime", time.perf_counter() - waiting_since)
    if record is not None:
        record.arrive(waiting_since)


class Received:
    """The rank in the group that a receive got its values from, once that is known."""

    def __init__(self, source: int | None) -> None:
        self.source = source


_kept: Final[deque[TransferWork]] = deque(maxlen=4096)
"""PyTorch's C++ may hold a work's C++ half alone, whose ``wait`` would never return. It asks soon or not at all."""


class TransferWork(dist.Work):
    """PyTorch's ``Work`` of a transfer, with the tensors that the program gets.

    Its future is complete from the start, since its tensors wait for themselves where their values are needed; so what
    a communication hook does with them is traced on the program's own thread. ``wait`` does wait, and raises
    :class:`CollectiveError`.
    """

    def __init__(self, transfer: Transfer, outputs: Sequence[torch.Tensor], received: Received | None = None) -> None:
        super().__init__()
        self._transfer = transfer
        self._outputs: list[torch.Tensor] | None = list(outputs)
        self._received = received
        self._future: Any = None
        _kept.append(self)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:  # type: ignore[override]
        """Return when the bytes are there. Raises :class:`CollectiveError`. The limit is the group's own."""
        self._transfer.finish()
        if self._transfer.error is not None:
            raise self._transfer.error
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._transfer.done

    def is_success(self) -> bool:
        return self._transfer.done and self._transfer.error is None

    def exception(self) -> Any:
        return self._transfer.error

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return self._outputs or []

    def _source_rank(self) -> int:
        self.wait()
        source = None if self._received is None else self._received.source
        return -1 if source is None else source

    source_rank = _source_rank

    def get_future(self) -> Any:
        """A future of the tensors."""
        if self._future is None:
            self._future = torch.futures.Future()
            self._future.set_result(self._outputs)
            self._outputs = None
        return self._future
