"""Computing everything that a thread has pending, and waiting until it is done."""

from __future__ import annotations

from ..trace.threads import threads
from . import direct, step_closures
from .device_runtime import runtimes
from .flush import flush

__all__ = ["compute_pending"]


def compute_pending(index: int | None = None, wait: bool = True) -> None:
    """Compute what the calling thread has pending, on one device index or on all; a step has ended then.

    ``wait``: return when it is done. Raises the first error among the pending values and, where it waits, those that
    nobody has read.
    """
    for compute in direct.settle:
        compute(0)
    errors = [flush(trace, "sync") for trace in threads.mine() if index is None or trace.index == index]
    if wait:
        for runtime in runtimes.all():
            if index is None or runtime.index == index:
                runtime.queue.drain()
                errors.append(runtime.queue.take_unseen())
                runtime.backend.synchronize(runtime.device)
    for error in errors:
        if error is not None:
            raise error
    if wait:
        step_closures.finish()
    else:
        step_closures.step_ended()
