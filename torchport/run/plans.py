"""Plans: how to bring some values of a trace about. A plan belongs to a place in a trie and the values wanted there."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

from ..backend.compiler import computations
from ..backend.execution import Computation
from ..backend.interface import ExecutionContext
from ..core import metrics
from ..core.errors import CompileError
from ..core.specs import TensorSpec
from ..trace.graph import build_graph
from ..trace.handle import intern_spec, shown_as
from .walk import walked

if TYPE_CHECKING:
    from ..trace.trie import Node
    from .device_runtime import DeviceRuntime

__all__ = ["ExecutionPlan", "make_plan"]


@dataclass(slots=True, eq=False, weakref_slot=True)
class ExecutionPlan:
    """How to bring some values of a trace about: which computation, on what, and whose values come out.

    ``value_ids`` are the values' ids in output order; ``specs`` theirs, interned, ready for the handles. The
    computation is ``None`` once it has been dropped from memory.
    """

    computation: Computation | None
    leaves: tuple[int, ...]
    singles: tuple[int, ...]
    doubles: tuple[int, ...]
    random_keys: tuple[int, ...]
    value_ids: tuple[int, ...]
    specs: tuple[TensorSpec, ...]
    contexts: dict[frozenset[int], ExecutionContext] = field(default_factory=dict[frozenset[int], ExecutionContext])
    """One context per set of donated arguments."""

    def select(self, wanted: tuple[int, ...], results: Sequence[Any]) -> Sequence[Any]:
        """Of one thing per value of the plan, those of the values wanted, in their order."""
        if wanted == self.value_ids:
            return results
        by_value_id = dict(zip(self.value_ids, results, strict=True))
        return [by_value_id[value_id] for value_id in wanted]

    def context(self, donated: frozenset[int], plain: ExecutionContext) -> ExecutionContext:
        """What ``execute`` is told when these arguments are donated; ``plain``: what it is told when none is."""
        if not donated:
            return plain
        found = self.contexts.get(donated)
        if found is None:
            found = ExecutionContext(plain.device, plain.outputs, donated, plain.method)
            if len(self.contexts) < 64:
                self.contexts[donated] = found
        return found


def make_plan(
    runtime: DeviceRuntime,
    path: Sequence[Node],
    value_ids: tuple[int, ...],
    leaf_specs: Sequence[TensorSpec],
    alone: bool = False,
    donated: Set[int] = frozenset(),
) -> ExecutionPlan:
    """Build and compile the computation of these values at the end of a path. Raises :class:`CompileError`.

    ``alone``: the path is one op, which need not be compiled where the backend has a boxed kernel. ``donated``: leaves
    that are likely to be donated.
    """
    node = path[-1]
    start = perf_counter()
    try:
        made = build_graph(path, value_ids, leaf_specs, runtime.capture, donated=donated)
    except Exception as error:
        raise CompileError(
            f"the trace could not be written as a graph: {type(error).__name__}: {error}",
            op=str(node.op),
            source=node.source,
        ) from error
    metrics.metrics.add_time("GraphTime", perf_counter() - start)
    boxed = runtime.kernels.boxed if alone else None
    if boxed is not None:
        computation = walked(runtime, made, boxed)
    else:
        computation = computations.get(runtime.backend, runtime.device, runtime.specs, made.module, node.source)
    seen = {node.first_id + at: spec for node in path for at, spec in enumerate(node.specs) if spec is not None}
    pairs = zip(computation.results, value_ids, strict=True)
    results = tuple(intern_spec(shown_as(spec, seen[value_id])) for spec, value_id in pairs)
    plan = ExecutionPlan(computation, made.leaves, made.singles, made.doubles, made.random_keys, value_ids, results)
    computation.users.add(plan)
    return plan
