"""Futures: values in flight, and the errors that nobody has seen yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakSet

from ..backend.interface import BackendData
from ..core.errors import TorchportError
from ..core.specs import TensorSpec
from ..native.twins import twins
from ..trace.handle import LazyTensor

if TYPE_CHECKING:
    from .jobs import Job

__all__ = ["Future", "UnseenErrors", "has_failed", "resolve"]


class UnseenErrors:
    """What computations of one device ended in, as long as no error was raised where the user sees it. Bounded."""

    AT_MOST: Final = 16

    def __init__(self) -> None:
        self.errors: list[TorchportError] = []
        _every.add(self)

    def add(self, error: TorchportError) -> None:
        """Note an error; the oldest goes where there are too many."""
        self.errors = [*self.errors[1 - self.AT_MOST :], error]

    def take(self) -> list[TorchportError]:
        """All of them; they are forgotten."""
        errors, self.errors = self.errors, []
        return errors


_every: Final[WeakSet[UnseenErrors]] = WeakSet()


def note_seen(error: TorchportError) -> None:
    """An error is about to be raised where the user sees it."""
    for unseen in list(_every):
        if unseen.errors:
            unseen.errors = [other for other in unseen.errors if other is not error]


class Future(BackendData):
    """A value in flight, which a job will bring: a placeholder of no backend's making.

    Once the job has been started ``data`` is the backend's placeholder; the value is there when ``job`` is gone.
    """

    __slots__ = ("data", "error", "job")

    job: Job | None
    data: BackendData | None
    error: TorchportError | None

    def __init__(self, job: Job, spec: TensorSpec) -> None:
        super().__init__(job.runtime.device, spec)
        self.info = job.runtime
        self.job, self.data, self.error = job, None, None

    @classmethod
    def of_each(cls, job: Job, specs: Sequence[TensorSpec]) -> list[Future]:
        """The futures of all values that a job will bring."""
        runtime = job.runtime
        shared: dict[str, Any] = {"info": runtime, "device": runtime.device, "exported": False}
        shared |= {"job": job, "data": None, "error": None}
        return twins.make_each(cls, shared, {"spec": specs})

    @property
    def has_value(self) -> bool:
        return self.job is None and self.data is not None and self.data.has_value

    def result(self) -> BackendData:
        """The value; waits for it. Raises the error its computation ended in."""
        job = self.job
        if job is not None:
            job.finish()
        if self.error is not None:
            note_seen(self.error)
            raise self.error
        assert self.data is not None
        return self.data

    def settle(self, outcome: BackendData | TorchportError) -> None:
        """What the job brought."""
        if isinstance(outcome, TorchportError):
            self.error, self.data = outcome, None
            self.info = None  # so that an operator that is given the value looks at it again
        else:
            self.data = outcome
        self.job = None


def resolve(tensor: LazyTensor) -> BackendData:
    """The data of a handle that is pending in no trace; waits for it. Raises the error its computation ended in."""
    value = tensor.value
    if value.__class__ is Future:
        future: Any = value
        try:
            data = future.result()
        except TorchportError as error:
            tensor.failure, tensor.value = error, None
            raise
        if tensor.value is future:
            tensor.value = data
        return data
    assert value is not None
    return value


def has_failed(tensor: LazyTensor) -> bool:
    """Whether a handle's computation is known to have ended in an error."""
    value: Any = tensor.value
    return tensor.failure is not None or (value.__class__ is Future and value.error is not None)
