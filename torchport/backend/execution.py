"""The one way a compiled computation is run, whichever frontend asks: lock, call, check, map errors, count.

The lazy device's jobs, ``torch.compile`` and the delegates of program files come here. It needs no PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeAlias

from ..core import metrics
from ..core.errors import ExecutionError, TorchportError
from ..core.specs import TensorSpec
from .interface import BackendData, Computation, ExecutionContext

if TYPE_CHECKING:
    import torch

__all__ = ["Failure", "check_results", "count", "execute", "execute_on_host", "execution_error"]

Failure: TypeAlias = Callable[[Computation, Exception], TorchportError]
"""What a backend's own exception becomes."""


def execution_error(computation: Computation, error: Exception) -> ExecutionError:
    """A backend's own exception as :class:`ExecutionError`; the caller chains it."""
    return ExecutionError(
        f"backend {computation.backend.name!r} failed to execute: {type(error).__name__}: {error}",
        op=f"a computation of {computation.graph_ops} operators",
    )


def execute(
    computation: Computation,
    args: Sequence[Any],
    context: ExecutionContext | None = None,
    failure: Failure = execution_error,
) -> Sequence[BackendData]:
    """Run a computation on values of its backend; results in order. Raises what ``failure`` makes of an exception.

    ``context``: the computation's own, if ``None``. The first results are compared with the declared specs.
    """
    try:
        with computation.lock:
            start = perf_counter()
            results = computation.backend.execute(computation.handle, args, context or computation.context)
            computation.seconds = perf_counter() - start
            if not computation.checked:
                check_results(results, computation.results)
                computation.checked = True
    except Exception as error:
        raise failure(computation, error) from error
    count(computation)
    return results


def execute_on_host(computation: Computation, tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Run a computation on CPU tensors lent for the call; results are the caller's. Raises :class:`ExecutionError`."""
    backend, specs, device = computation.backend, computation.parameters, computation.device
    if not computation.checked:
        borrowed = [backend.borrow(t, spec, device) for t, spec in zip(tensors, specs, strict=True)]
        return _unaliased([backend.from_device(result) for result in execute(computation, borrowed)], tensors)
    try:
        with computation.lock:
            start = perf_counter()
            results = backend.execute_on_host(computation.handle, tensors, specs, computation.context)
            computation.seconds = perf_counter() - start
    except Exception as error:
        raise execution_error(computation, error) from error
    count(computation)
    return results


def _unaliased(results: Sequence[torch.Tensor], lent: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Results that are the caller's: those that share memory with what was lent, or with each other, as copies."""
    taken = {tensor.data_ptr() for tensor in lent}
    made: list[torch.Tensor] = []
    for result in results:
        mine = result.clone() if result.data_ptr() in taken else result
        taken.add(mine.data_ptr())
        made.append(mine)
    return made


def count(computation: Computation) -> None:
    """Note that a computation has run."""
    metrics.count("Execute")
    metrics.metrics.add_time("ExecuteTime", computation.seconds)


def check_results(results: Sequence[Any], specs: Sequence[TensorSpec]) -> None:
    """Raise ``TypeError`` or ``ValueError`` unless a backend returned what its computation's outputs are."""
    if not isinstance(results, (list, tuple)):
        raise TypeError(f"execute() returned a {type(results).__name__}; return a list of BackendData")
    if len(results) != len(specs):
        raise ValueError(f"execute() returned {len(results)} values for {len(specs)} outputs")
    for position, (result, spec) in enumerate(zip(results, specs, strict=True)):
        if not isinstance(result, BackendData):
            raise TypeError(f"output {position} is a {type(result).__name__}; return BackendData")
        if result.spec.shape != spec.shape or result.spec.dtype != spec.dtype:
            raise ValueError(f"output {position} is {result.spec}, but the graph says {spec}")
