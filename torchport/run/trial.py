"""A compiled computation in turn with the interpreter, until it is known which of the two is quicker.

An engine's code need not be quicker than PyTorch's kernels one after the other: a convolution's gradients on XLA take
half as long again. So where a run takes long enough to be timed, both run a few times each, and the compiled
computation is dropped if it is clearly slower. Both give the same values, within the engine's tolerance: which runs
when shows no more than the moment of any take-over does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

from torch import fx

from ..backend.compiler import computations
from ..backend.execution import execute
from ..backend.interface import Backend, BackendData, ExecutionContext, Processed
from ..backend.pieced import PiecedProgram
from ..core import metrics, threads
from ..core.errors import ExecutionError
from ..core.specs import CompileSpecs
from .checked_swap import compiled_args
from .host_forms import as_tensor
from .interpreted import InterpretedPlan
from .plans import ExecutionPlan
from .worth import costs

if TYPE_CHECKING:
    import torch

    from .device_runtime import DeviceRuntime

__all__ = ["TrialPlan", "is_worth_trying", "make_trial"]

log: Final = logging.getLogger("torchport.compile")

TRIED: Final = 5
"""Runs of each before it is decided; the first of each does not count: it may load code and reserve memory."""
SLOWER: Final = 1.05
"""Times the interpreter's time that the compiled computation takes at least where it is dropped, ..."""
MUCH_SLOWER: Final = 1.15
"""... and where it may become quicker than it is here: no argument is donated to it, or its pieces may become one."""
LEAST: Final = 0.0003
"""Seconds that a run takes at least where it is tried: a shorter one cannot be timed well, and costs little."""


def is_worth_trying(backend: Backend, plan: InterpretedPlan) -> bool:
    """Whether an interpreted plan's runs take so long that a compiled one may be slower, unless the program wants it
    compiled whatever that costs (:func:`.warm`)."""
    return plan.quickest >= LEAST and costs.expected(backend, 1) > 0


@dataclass(slots=True, eq=False)
class TrialPlan(InterpretedPlan):
    """A plan that runs one of two plans, ``interpreted`` and ``compiled``, in turn."""

    interpreted: InterpretedPlan | None = None
    compiled: ExecutionPlan | None = None
    trial: _Trial | None = None
    dropped: Callable[[], object] | None = None
    """Called when the interpreted one is the quicker."""

    @property
    def tier(self) -> str:
        """Where it stands, in words."""
        return "interpreted and compiled in turn, until it is known which is quicker"

    def settled(self) -> ExecutionPlan:
        """What is to run from now on: this while it is not decided, then the quicker one."""
        assert self.interpreted is not None
        assert self.compiled is not None
        assert self.trial is not None
        record = self.interpreted.record
        if self.compiled.computation is None:
            if record is not None:
                record.tier = "interpreted"
            return self.interpreted  # it was dropped from memory, and is asked for again
        computations.touch(self.compiled.computation)
        if not self.trial.is_over():
            return self
        own, compiled = self.trial.medians()
        if own and compiled and self.interpreted.computation is not None:
            operators = self.interpreted.computation.graph_ops
            costs.note_saved(self.trial.runtime.backend, operators, own, compiled)
        why = self.trial.verdict()
        if not why:
            if record is not None:
                record.tier = "compiled"
            return self.compiled
        log.info("a computation of %d operators stays interpreted: %s", self.trial.operators, why)
        metrics.count("InterpreterIsQuicker")
        self.interpreted.stays = True
        if self.dropped is not None:
            self.dropped()
        if record is not None:
            record.stay(why)
        return self.interpreted


def make_trial(
    runtime: DeviceRuntime,
    interpreted: InterpretedPlan,
    compiled: ExecutionPlan,
    dropped: Callable[[], object] | None = None,
) -> TrialPlan:
    """A plan that times these two, which bring the same values, in its first runs; ``dropped`` is called if that
    drops the compiled one."""
    known = interpreted.computation
    assert known is not None
    trial = _Trial(runtime, interpreted, compiled)
    computation = known.run_by(trial)
    plan = TrialPlan(
        computation, interpreted.leaves, (), interpreted.doubles, interpreted.random_keys, interpreted.value_ids,
        interpreted.specs, interpreted=interpreted, compiled=compiled, trial=trial, dropped=dropped,
    )  # fmt: skip
    if interpreted.record is not None:
        interpreted.record.tier = "tried"
    computation.users.add(plan)
    return plan


class _Trial(Backend):
    """Runs both plans of a :class:`TrialPlan` in turn, each timed to the end of what it computes."""

    def __init__(self, runtime: DeviceRuntime, interpreted: InterpretedPlan, compiled: ExecutionPlan) -> None:
        self.name = runtime.backend.name  # type: ignore[misc]  # errors are told of it
        self.runtime = runtime
        self.interpreted = interpreted
        self.compiled = compiled
        self.operators = 0 if compiled.computation is None else compiled.computation.graph_ops
        backend = runtime.backend
        is_pieces = compiled.computation is not None and isinstance(compiled.computation.handle, PiecedProgram)
        self._limit = MUCH_SLOWER if backend.capabilities.donation or is_pieces else SLOWER
        self._failure = ""
        self._begun = [0, 0]
        self._times: tuple[list[float], list[float]] = ([], [])

    def is_over(self) -> bool:
        """Whether both have run often enough."""
        return min(self._begun) >= TRIED

    def medians(self) -> tuple[float, float]:
        """Seconds that a run takes, interpreted and compiled; 0 where none can be told."""
        own, compiled = (median(times[1:]) if len(times) > 1 else 0.0 for times in self._times)
        return own, compiled

    def verdict(self) -> str:
        """Why the compiled computation is dropped; empty if it is not."""
        own, compiled = self.medians()
        if own and not compiled:
            return self._failure
        slower = compiled / own if own else 1.0
        return f"compiled it takes {slower:.2f} times as long" if slower >= self._limit else ""

    def preprocess(self, graph: fx.GraphModule, specs: CompileSpecs) -> Processed:
        raise NotImplementedError("both plans are there already")

    def from_device(self, data: BackendData) -> torch.Tensor:
        return as_tensor(self.runtime.backend, data)

    def execute(self, handle: None, args: Sequence[BackendData], context: ExecutionContext) -> list[BackendData]:
        computation, own = self.compiled.computation, self.interpreted.computation
        assert own is not None
        which = int(self._begun[1] <= self._begun[0] and computation is not None)
        if not which:
            metrics.count("InterpretedRun")
        # A compiler that runs beside them takes a core from one more than from the other: nothing counts until it ends.
        is_fair = not threads.most.value
        self._begun[which] += is_fair
        given: Sequence[Any] = args
        if which:
            given = compiled_args(self.runtime, self.interpreted, self.compiled, args)
        begun = perf_counter()
        try:
            one = computation if which and computation is not None else own
            results = list(execute(one, given, counted=False))  # whoever runs this counts it
        except ExecutionError as error:
            cause = error.__cause__
            if which:
                self._failure = str(error)
            if not isinstance(cause, Exception):
                raise
            raise cause from cause.__cause__  # the backend's own: whoever runs this maps it, once
        self.runtime.backend.synchronize(self.runtime.device)
        if is_fair:
            self._times[which].append(perf_counter() - begun)
        return results
