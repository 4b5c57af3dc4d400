"""The one way a compiled computation is run, whichever frontend asks: lock, call, check, map errors, count.

The lazy device's jobs, ``torch.compile`` and the delegates of program files come here. It needs no PyTorch.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeAlias

from ..core import metrics
from ..core.config import config
from ..core.errors import ExecutionError, TorchportError
from ..core.forks import guarded_lock
from ..core.profiling import is_profiled, profiled
from ..core.specs import TensorSpec
from .answers import contents_of
from .borrow import borrower
from .interface import Backend, BackendData, BackendDevice, ExecutionContext
from .optional import OptionalMethods, Started, optional_of

if TYPE_CHECKING:
    import torch

__all__ = [
    "Computation",
    "Failure",
    "call_kernel",
    "check_results",
    "count",
    "execute",
    "execute_on_host",
    "execution_error",
    "start",
]


@dataclass(slots=True, eq=False)
class Computation:
    """A compiled graph, ready to run (``torch::lazy::Computation``): specs of inputs and results, and the handle."""

    backend: Backend
    device: BackendDevice
    parameters: tuple[TensorSpec, ...]
    parameter_names: tuple[str, ...]
    results: tuple[TensorSpec, ...]
    handle: Any
    context: ExecutionContext
    fingerprint: str = ""
    graph_ops: int = 0
    compile_seconds: float = 0.0
    key: tuple[str, ...] = ()
    """Under which it is kept in memory."""
    users: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet[Any])
    """Objects that hold it as their ``computation``, which becomes ``None`` when it is dropped from memory."""
    lock: threading.Lock = field(default_factory=guarded_lock)
    """Held while the computation runs: one call at a time, whichever frontend asks."""
    checked: bool = False
    """Whether the backend's results were once seen to be what they should be."""
    seconds: float = 0.0
    """How long the last run took."""
    optional: OptionalMethods = field(init=False)
    """The backend as the optional protocols that it satisfies."""
    released: bool = False
    """Whether the handle was given back."""
    shared: Computation | None = None
    """The computation of another device whose handle this one has."""
    overlap: Any = None
    """What is known of running it beside the program (``run.overlap_trial``)."""
    resized: Computation | None = None
    """The computation for several sizes whose code this one runs for some; it is not given back before this one."""
    segments: tuple[Computation, ...] = ()
    """The computations that it consists of, where it consists of several: they are what is counted and kept."""

    def __post_init__(self) -> None:
        self.optional = optional_of(self.backend)

    def on(self, device: BackendDevice) -> Computation:
        """The same for another device that what was loaded runs on."""
        made = Computation(
            self.backend, device, self.parameters, self.parameter_names, self.results, self.handle,
            ExecutionContext(device, self.results), self.fingerprint, self.graph_ops, self.compile_seconds,
            lock=self.lock,
        )  # fmt: skip
        made.shared = self.shared or self
        made.resized = self.resized
        return made

    def release(self) -> None:
        """Give the handle back to the backend, once; the computation cannot run after that."""
        if not self.released:
            self.released = True
            handle, self.handle = self.handle, None
            if self.shared is None:
                self.backend.destroy(handle)
            self.shared = self.resized = None

    def run_by(self, runner: Backend) -> Computation:
        """One with the same inputs and results that ``runner`` runs, without a handle."""
        context = ExecutionContext(self.device, self.results)
        return Computation(
            runner, self.device, self.parameters, (), self.results, None, context, graph_ops=self.graph_ops
        )

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """Release the handle with the last reference to the computation; not while the interpreter ends."""
        if not is_finalizing():
            self.release()


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
    counted: bool = True,
) -> Sequence[BackendData]:
    """Run a computation on values of its backend; results in order. Raises what ``failure`` makes of an exception.

    ``context``: the computation's own, if ``None``. ``counted``: whether the run shows in the metrics. The first
    results are compared with the declared specs, later ones counted.
    """
    try:
        with computation.lock:
            begun = perf_counter()
            results = _run(computation)(computation.handle, args, context or computation.context)
            computation.seconds = perf_counter() - begun
            if not computation.checked or len(results) != len(computation.results):
                check_results(results, computation.results)
                computation.checked = True
    except Exception as error:
        if computation.segments and isinstance(error, TorchportError):
            raise  # a segment's
        raise failure(computation, error) from error
    if counted and not computation.segments:
        count(computation)
    return results


def _run(computation: Computation) -> Callable[..., Sequence[BackendData]]:
    """The backend's ``execute``, looked at where ``config.check_backends`` or a profiler asks for that."""
    run: Callable[..., Sequence[BackendData]] = computation.backend.execute
    if config.check_backends:
        from .watch import watched  # on demand: it needs PyTorch

        run = functools.partial(watched, computation.backend)
    return functools.partial(_profiled, computation, run) if is_profiled() and not computation.segments else run


def _profiled(computation: Computation, run: Callable[..., Any], *args: Any) -> Any:
    """A run as a range in the profiler's timeline."""
    with profiled("execute", f"{computation.backend.name}, {computation.graph_ops} operators"):
        return run(*args)


def start(computation: Computation, args: Sequence[Any], context: ExecutionContext) -> Started | None:
    """Have the backend begin a computation, if it can (:class:`.SupportsStart`); ``None``: nothing was done.

    Raises :class:`ExecutionError`.
    """
    backend = computation.optional.start
    if backend is None or config.check_backends:
        return None
    try:
        started = backend.start(computation.handle, args, context)
    except Exception as error:
        raise execution_error(computation, error) from error
    if started is not None:
        metrics.count("Execute")
    return started


def execute_on_host(computation: Computation, tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Run a computation on CPU tensors lent for the call; results are the caller's. Raises :class:`ExecutionError`."""
    host = computation.optional.host_execution
    if host is not None and computation.checked and not config.check_backends:
        try:
            with computation.lock:
                begun = perf_counter()
                run = host.execute_on_host
                if is_profiled():
                    run = functools.partial(_profiled, computation, run)
                results = run(computation.handle, tensors, computation.parameters, computation.context)
                computation.seconds = perf_counter() - begun
        except Exception as error:
            raise execution_error(computation, error) from error
        if results is not None:
            count(computation)
            return results
    backend, specs, device = computation.backend, computation.parameters, computation.device
    lend = borrower(backend)
    borrowed = [lend(t, spec, device) for t, spec in zip(tensors, specs, strict=True)]
    return _unaliased([backend.from_device(result) for result in execute(computation, borrowed)], tensors)


def call_kernel(
    backend: Backend,
    kernel: Callable[..., Any],
    op: object,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    source: str | None,
) -> Any:
    """Call a backend's own kernel for one operator; arguments that are ``None`` by name are left out.

    Raises what the kernel raises of the errors that PyTorch's kernels raise; :class:`ExecutionError` for others, with
    the user's line, ``source``.
    """
    metrics.count("KernelCall")
    try:
        return kernel(*args, **{name: value for name, value in kwargs.items() if value is not None})
    except (TorchportError, IndexError, ValueError, TypeError):
        raise
    except RuntimeError as error:
        error.add_note(f"torchport: in a kernel of backend {backend.name!r} for {op}")
        raise
    except Exception as error:
        raise ExecutionError(
            f"backend {backend.name!r} failed in its own kernel: {type(error).__name__}: {error}",
            op=str(op),
            source=source,
        ) from error


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
    metrics.metrics.count_time("Execute", "ExecuteTime", computation.seconds)


def check_results(results: Sequence[Any], specs: Sequence[TensorSpec]) -> None:
    """Raise ``TypeError`` or ``ValueError`` unless a backend returned what its computation's outputs are."""
    if not isinstance(results, (list, tuple)):
        raise TypeError(f"execute() returned a {type(results).__name__}; return a list of BackendData")
    if len(results) != len(specs):
        raise ValueError(
            f"execute() returned {len(results)} values for {len(specs)} outputs; return one per output, in order"
        )
    for position, (result, spec) in enumerate(zip(results, specs, strict=True)):
        if not isinstance(result, BackendData):
            raise TypeError(f"output {position} is a {type(result).__name__}; return BackendData")
        if result.spec.shape != spec.shape or result.spec.dtype != spec.dtype:
            raise ValueError(f"output {position} is {result.spec}, but the graph says {spec}")
        contents = contents_of(result)
        if contents is not None and tuple(contents.shape) != spec.shape:
            raise ValueError(
                f"output {position} says it is {result.spec}, but holds a {type(contents).__name__} of shape "
                f"{list(contents.shape)}"
            )
