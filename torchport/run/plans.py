"""Plans: which computation gives the values that a flush wants, and on which inputs.

A plan belongs to a node of the trie and to the ids of the values wanted there; the node remembers it.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ..backend.builder import Refusal
from ..backend.compiler import computations
from ..backend.execution import Computation
from ..backend.interface import BackendData, ExecutionContext
from ..core.fallback import check_fallback
from ..core.specs import TensorSpec
from ..trace.decide import not_taken
from ..trace.graph import Sources, write_graph
from ..trace.handle import intern_spec, shown_as
from .segmented import segmented
from .walk import walked

if TYPE_CHECKING:
    from torch import fx

    from ..trace.trie import Node
    from .device_runtime import DeviceRuntime

__all__ = ["ExecutionPlan", "make_plan", "plan_of"]


@dataclass(slots=True, eq=False, weakref_slot=True)
class ExecutionPlan:
    """Which computation gives some values of a trace, what its inputs are, and whose values its results are.

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
    refusals: tuple[Refusal, ...] = ()
    """The operators that the backend does not take."""
    takes_tensors: ClassVar[bool] = False
    """Whether it takes CPU tensors as they are, also where the backend has a form of its own."""
    contexts: dict[frozenset[int], ExecutionContext] = field(default_factory=dict[frozenset[int], ExecutionContext])
    """One context per set of donated arguments."""
    packs: dict[torch.dtype, tuple[bytes, BackendData | None]] = field(
        default_factory=dict[torch.dtype, tuple[bytes, BackendData | None]]
    )
    """The scalar inputs of the last run, by the dtype that they were packed in: their bits, and the pack if they were
    the same in the run before."""

    @property
    def tier(self) -> str:
        """Where it stands on its way to be compiled, in words."""
        return "compiled"

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
    """Build and compile the computation of these values at the end of a path. Raises :class:`CompileError`, or
    :class:`UnsupportedOp` where an operator has to run on the host and may not.

    ``alone``: the path is one op, which need not be compiled where the backend has a boxed kernel. ``donated``: leaves
    that are likely to be donated.
    """
    made = write_graph(path, value_ids, leaf_specs, runtime.capture, donated)
    for one in made.refusals:
        check_fallback(one.op, one.source, not_taken(runtime.backend, one.reason))
    boxed = runtime.kernels.boxed if alone and not (runtime.capture.kernels and _has_own(made.module)) else None
    if made.refusals:
        computation = segmented(runtime, made.module, path[-1].source)
    elif boxed is not None:
        computation = walked(runtime, made, boxed)
    else:
        computation = computations.get(runtime.backend, runtime.device, runtime.specs, made.module, path[-1].source)
    plan = plan_of(computation, path, value_ids, made)
    plan.refusals = made.refusals
    return plan


def _has_own(graph: fx.GraphModule) -> bool:
    """Whether a graph holds an operator that the program gave a kernel for, which nobody else can call."""
    return any("kernel" in node.meta for node in graph.graph.nodes)


def plan_of(
    computation: Computation, path: Sequence[Node], value_ids: tuple[int, ...], sources: Sources
) -> ExecutionPlan:
    """The plan for these values at the end of a path, whose computation it is."""
    seen = {node.first_id + at: spec for node in path for at, spec in enumerate(node.specs) if spec is not None}
    pairs = zip(computation.results, value_ids, strict=True)
    specs = tuple(intern_spec(shown_as(spec, seen[value_id])) for spec, value_id in pairs)
    places = (sources.leaves, sources.singles, sources.doubles, sources.random_keys)
    plan = ExecutionPlan(computation, *places, value_ids, specs)
    for one in computation.segments or (computation,):
        one.users.add(plan)
    return plan
