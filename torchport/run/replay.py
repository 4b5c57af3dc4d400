"""After a computation failed: run its ops one by one, so that one bad op takes only what depends on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from ..backend.interface import BackendData
from ..core import metrics
from ..core.default_state import default_state
from ..core.errors import CacheMiss, ContractError, ExecutionError, TorchportError
from ..core.frames import warn_user
from ..trace.graph import inputs_of, needed
from ..trace.trie import Node, single_op
from .future import Future
from .interpreted import make_interpreted
from .jobs import Job, JobState
from .plans import ExecutionPlan, make_plan

__all__ = ["replay"]

Outcome = BackendData | TorchportError

COMPILED_AT_MOST: Final = 32
"""Operators that are compiled one by one to find the one that fails. Where there are more, the backend's boxed kernels,
if it has them, run in their place: compiling hundreds takes a compiler many minutes."""


class _Replay:
    """The values of a failed job, op by op: each its data, or the error that stands in for it."""

    def __init__(self, job: Job, walk: bool) -> None:
        self.job = job
        self.walk = walk
        places = range(len(job.args)) if job.plan is None else job.plan.leaves
        self.values: dict[tuple[str, int], Any] = {
            ("leaf", place): self._leaf(at, value)
            for at, (place, value) in enumerate(zip(places, job.args, strict=True))
        }

    def _leaf(self, at: int, value: Any) -> Outcome:
        if value.__class__ is Future:
            try:
                value = value.result()
            except TorchportError as error:
                return error
        restores = self.job.runtime.backend.capabilities.restores_donated
        kept = at not in self.job.donated or (restores and value.has_value)
        return value if kept else self._lost()

    def _lost(self) -> ExecutionError:
        """What is left to say of an input that was given to the computation as a whole."""
        error = self.job.error
        message = getattr(error, "message", str(error))
        lost = ExecutionError(
            f"{message}\n  Its inputs had been donated to it, so its operators could not be run one by one",
            op=getattr(error, "op", None),
        )
        lost.__cause__ = error
        return lost

    def run(self, node: Node) -> None:
        """Run one op; its results, or its error, become values."""
        inputs = inputs_of(node)
        failed = next((v for key in inputs if isinstance(v := self.values[key], TorchportError)), None)
        results: Sequence[Any] = [failed] * len(node.specs)
        if failed is None:
            try:
                results = self._execute(node, inputs)
            except TorchportError as error:
                if isinstance(error, ExecutionError):
                    named = ExecutionError(error.message, op=str(node.op), source=node.source)
                    named.__cause__ = error.__cause__
                    error = named
                results = [error] * len(node.specs)
        for offset, result in enumerate(results):
            self.values["value", node.first_id + offset] = result

    def _execute(self, node: Node, inputs: Sequence[tuple[str, int]]) -> list[Any]:
        runtime = self.job.runtime
        copy = single_op(node, {key: position for position, key in enumerate(inputs)})
        given = [self.values[key] for key in inputs]
        wanted = tuple(n for n, spec in enumerate(node.specs) if spec is not None)
        specs = [value.spec for value in given]
        if runtime.interprets:
            plan: ExecutionPlan = make_interpreted(runtime, [copy], wanted, specs)
        else:
            plan = make_plan(runtime, [copy], wanted, specs, alone=self.walk)
        results = Job.of(runtime, plan, given, self.job.scalar_inputs, self.job.random_keys).run()
        outputs = dict(zip(plan.value_ids, results, strict=True))
        return [outputs.get(offset) for offset in range(len(node.specs))]


def _outcomes(job: Job, error: TorchportError) -> list[Any]:
    """A value or an error for each value that was wanted."""
    if isinstance(error.__cause__, ContractError):
        return [error] * len(job.wanted)  # a fault of the backend, of which no operator is to blame
    kept = needed(job.cursor.path(), job.wanted)
    with default_state():
        ops = _Replay(job, walk=len(kept) > COMPILED_AT_MOST)
        for node in kept:
            ops.run(node)
    return [ops.values["value", value_id] for value_id in job.wanted]


def replay(job: Job) -> TorchportError | None:
    """Bring a failed job's values op by op, as far as they can be brought; returns the first error among them.

    The error of the whole computation is chained to the errors of the single ops.
    """
    error = job.error
    assert error is not None
    if isinstance(error, CacheMiss):  # nothing may be compiled, so its operators may not either
        job.state = JobState.DONE
        job.deliver([error] * len(job.wanted))
        return error
    metrics.count("Isolate")
    outcomes = _outcomes(job, error)
    errors = [outcome for outcome in outcomes if isinstance(outcome, TorchportError)]
    for single in errors:
        if single.__context__ is None and single is not error:
            single.__context__ = error
    job.error = errors[0] if errors else None
    job.state = JobState.DONE
    job.deliver(outcomes)
    if not errors:
        metrics.count("IsolateRecovered")
        warn_user(f"a computation failed as a whole and was run op by op, which is slow: {error}", RuntimeWarning)
    return job.error
