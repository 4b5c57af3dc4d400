"""``config.verify_swap``: the first runs of a compiled computation beside the interpreter, on the same values.

Where the two differ beyond what the dtypes allow, the compiled computation is dropped, the program goes on with the
interpreter's values, and the operators that the wrong value needs are written to a file.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import fx

from ..backend.execution import execute
from ..backend.interface import Backend, BackendData, ExecutionContext, Processed
from ..core import metrics
from ..core.config import config
from ..core.errors import TorchportError
from ..core.specs import CompileSpecs, TensorSpec
from ..trace.graph import build_graph
from .host_forms import as_tensor, own_form
from .interpreted import InterpretedPlan
from .plans import ExecutionPlan

if TYPE_CHECKING:
    from ..trace.trie import Node
    from .device_runtime import DeviceRuntime

__all__ = ["CheckedPlan", "compare", "compiled_args", "make_checked", "say_dropped", "say_that_it_agrees"]

_TOLERANCES: Final = {
    torch.float64: (1e-7, 1e-7),
    torch.complex128: (1e-7, 1e-7),
    torch.bfloat16: (1.6e-2, 1e-2),
    torch.float16: (2e-3, 2e-3),
}
_SINGLE: Final = (1e-4, 1e-4)
"""(rtol, atol) of float32 and complex64: sums of a whole training step, in another order."""


@dataclass(slots=True, eq=False)
class CheckedPlan(InterpretedPlan):
    """A plan that runs both, and gives the compiled computation's values as long as they are right.

    ``interpreted`` and ``compiled`` are the plans that it compares, ``left`` how many runs are still to be compared,
    ``largest`` the largest difference so far.
    """

    interpreted: InterpretedPlan | None = None
    compiled: ExecutionPlan | None = None
    left: int = 0
    largest: float = 0.0
    wrong: str = ""

    def settled(self) -> ExecutionPlan:
        """What is to run from now on: this while there are runs to compare, then one of the two."""
        assert self.interpreted is not None
        assert self.compiled is not None
        if self.wrong:
            self.interpreted.stays = True
            return self.interpreted
        if self.left > 0:
            return self
        operators = self.compiled.computation.graph_ops if self.compiled.computation is not None else 0
        say_that_it_agrees(operators, self.largest)
        return self.compiled


def say_that_it_agrees(operators: int, largest: float) -> None:
    """Say that a compiled graph of so many operators gave what the interpreter gave, but for such differences."""
    print(
        f"torchport: a compiled graph of {operators} operators agrees with the interpreter: the largest "
        f"difference in {config.verify_swap} runs was {largest:.3g}",
        file=sys.stderr,
    )


def say_dropped(where: str, why: str, graph: fx.GraphModule) -> None:
    """Say that a compiled graph on such a device gave other values; write what the first wrong one needs to a file."""
    metrics.count("RefusedSwap")
    text = f"{why}\n\n{graph.print_readable(print_output=False)}\n"
    try:
        folder = Path(tempfile.mkdtemp(prefix="torchport-mismatch-"))
        place = folder / f"{os.getpid()}.txt"
        place.write_text(text, encoding="utf-8")
        told = f"the operators that the value needs are in {place}"
    except OSError as error:
        told = f"its graph could not be written to a file: {error}"
    print(
        f"torchport: a compiled graph is dropped, and stays interpreted: on {where} a result differs "
        f"from the interpreter's: {why.splitlines()[0]}; {told}",
        file=sys.stderr,
    )


def compare(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> tuple[float, int, str]:
    """The largest difference between two rows of tensors, and where the first is that differs by more than its dtype
    allows, with what differs; -1 and nothing where none does."""
    largest = 0.0
    for at, (a, b) in enumerate(zip(found, wanted, strict=True)):
        rtol, atol = _TOLERANCES.get(b.dtype, _SINGLE)
        try:
            torch.testing.assert_close(a, b, rtol=rtol, atol=atol, equal_nan=True)
        except AssertionError as error:
            return largest, at, str(error)
        if b.numel() and b.dtype.is_floating_point:
            gap = (a.double() - b.double()).abs().nan_to_num(0.0, 0.0).max().item()
            largest = max(largest, gap)
    return largest, -1, ""


def make_checked(
    runtime: DeviceRuntime,
    node: Node,
    leaf_specs: Sequence[TensorSpec],
    interpreted: InterpretedPlan,
    compiled: ExecutionPlan,
) -> CheckedPlan:
    """A plan that compares these two, which bring the same values, in its first runs."""
    known = interpreted.computation
    assert known is not None
    checker = _Checker(runtime, node, tuple(leaf_specs), interpreted, compiled)
    computation = known.run_by(checker)
    plan = CheckedPlan(
        computation, interpreted.leaves, (), interpreted.doubles, interpreted.random_keys, interpreted.value_ids,
        interpreted.specs, interpreted=interpreted, compiled=compiled, left=config.verify_swap,
    )  # fmt: skip
    checker.plan = plan
    computation.users.add(plan)
    return plan


def compiled_args(
    runtime: DeviceRuntime, mine: InterpretedPlan, theirs: ExecutionPlan, args: Sequence[BackendData]
) -> list[Any]:
    """What a compiled plan's computation is given, from what the interpreted plan's was that it takes the place of."""
    backend, device = runtime.backend, runtime.device
    leaves = dict(zip(mine.leaves, args, strict=False))
    rest = [as_tensor(backend, value) for value in args[len(mine.leaves) :]]
    numbers = dict(zip(mine.doubles, rest.pop(0).tolist(), strict=True)) if mine.doubles else {}
    keys = dict(zip(mine.random_keys, rest.pop(0).tolist(), strict=True)) if mine.random_keys else {}
    given: list[Any] = [own_form(runtime, leaves[at]) for at in theirs.leaves]
    for places, source, dtype in (
        (theirs.singles, numbers, torch.float32),
        (theirs.doubles, numbers, torch.float64),
        (theirs.random_keys, keys, torch.int64),
    ):
        if places:
            given.append(backend.to_device(torch.tensor([source[at] for at in places], dtype=dtype), device))
    return given


class _Checker(Backend):
    """Runs both plans of a :class:`CheckedPlan` on the values that the interpreter is given."""

    def __init__(
        self,
        runtime: DeviceRuntime,
        node: Node,
        leaf_specs: tuple[TensorSpec, ...],
        interpreted: InterpretedPlan,
        compiled: ExecutionPlan,
    ) -> None:
        self.name = runtime.backend.name  # type: ignore[misc]  # errors are told of it
        self.runtime = runtime
        self.node = node
        self.leaf_specs = leaf_specs
        self.interpreted = interpreted
        self.compiled = compiled
        self.plan: CheckedPlan | None = None

    def preprocess(self, graph: fx.GraphModule, specs: CompileSpecs) -> Processed:
        raise NotImplementedError("both plans are there already")

    def from_device(self, data: BackendData) -> torch.Tensor:
        return as_tensor(self.runtime.backend, data)

    def execute(self, handle: None, args: Sequence[BackendData], context: ExecutionContext) -> list[BackendData]:
        plan, backend = self.plan, self.runtime.backend
        assert plan is not None
        assert self.interpreted.computation is not None
        assert self.compiled.computation is not None
        wanted = list(execute(self.interpreted.computation, args))
        plan.left -= 1
        try:
            found = list(
                execute(self.compiled.computation, compiled_args(self.runtime, self.interpreted, self.compiled, args))
            )
        except TorchportError as error:
            self._refuse(0, str(error))
            return wanted
        metrics.count("VerifiedSwap")
        ours = [as_tensor(backend, one) for one in found]
        largest, at, why = compare(ours, [as_tensor(backend, one) for one in wanted])
        plan.largest = max(plan.largest, largest)
        if why:
            self._refuse(at, why)
            return wanted
        return found

    def _refuse(self, at: int, why: str) -> None:
        """The compiled computation is wrong in the result at this position: say so, and write down what it needs."""
        assert self.plan is not None
        self.plan.wrong = why
        if self.interpreted.record is not None:
            self.interpreted.record.stay(why)
        value_id = self.plan.value_ids[at]
        graph = build_graph(self.node.path(), (value_id,), self.leaf_specs, self.runtime.capture).module
        say_dropped(repr(self.runtime), why, graph)
