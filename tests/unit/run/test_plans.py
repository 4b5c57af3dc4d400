"""Plans: whose values a computation brings, and what it is told about donated arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers_traces import FakeRunner, Recording, aten

from torchport.backend.interface import BackendDevice, ExecutionContext
from torchport.core.specs import TensorSpec
from torchport.run.plans import ExecutionPlan, plan_of
from torchport.trace.graph import build_graph
from torchport.trace.handle import ShownSpec

PLAIN = ExecutionContext(BackendDevice("cpu"), ())


class _Computation:
    """A computation that is never run: what its results will be, and who uses it."""

    def __init__(self, results: tuple[TensorSpec, ...]) -> None:
        self.results = results
        self.users: set[Any] = set()


def _plan(value_ids: tuple[int, ...]) -> ExecutionPlan:
    return ExecutionPlan(None, (), (), (), (), value_ids, ())


def test_results_are_picked_by_value_id_in_the_order_wanted() -> None:
    plan = _plan((7, 8, 9))
    results = ["seven", "eight", "nine"]
    assert plan.select((7, 8, 9), results) is results
    assert plan.select((9, 7), results) == ["nine", "seven"]
    with pytest.raises(KeyError):
        plan.select((6,), results)


def test_a_context_is_made_once_per_set_of_donated_arguments() -> None:
    plan = _plan((1,))
    assert plan.context(frozenset(), PLAIN) is PLAIN
    first = plan.context(frozenset({2}), PLAIN)
    assert first.donated == {2}
    assert plan.context(frozenset({2}), PLAIN) is first
    assert plan.context(frozenset({2, 3}), PLAIN) is not first


def test_the_contexts_that_are_kept_are_bounded() -> None:
    plan = _plan((1,))
    for argument in range(200):
        assert plan.context(frozenset({argument}), PLAIN).donated == {argument}
    assert len(plan.contexts) == 64


def test_a_plan_names_the_inputs_that_its_values_need_and_is_known_to_its_computation() -> None:
    recording = Recording(FakeRunner())
    recording.call(aten.neg.default, recording.leaf(3))
    made = recording.call(aten.mul.Tensor, recording.leaf(3), 0.5)
    path = recording.trace.cursor.path()
    specs = [leaf.spec for leaf in recording.trace.leaves]
    graph = build_graph(path, [made.value_id], specs, recording.runner.capture)  # type: ignore[arg-type]
    computation: Any = _Computation((TensorSpec((3,), torch.float32, (1,)),))
    plan = plan_of(computation, path, (made.value_id,), graph)
    assert (plan.leaves, plan.singles, plan.doubles, plan.random_keys) == ((1,), (0,), (), ())
    assert computation.users == {plan}


def test_a_value_without_the_strides_of_its_handle_is_shown_with_them() -> None:
    recording = Recording(FakeRunner())
    made = recording.call(aten.t.default, recording.leaf(2, 3))
    path = recording.trace.cursor.path()
    specs = [leaf.spec for leaf in recording.trace.leaves]
    graph = build_graph(path, [made.value_id], specs, recording.runner.capture)  # type: ignore[arg-type]
    computation: Any = _Computation((TensorSpec((3, 2), torch.float32, (2, 1)),))
    (spec,) = plan_of(computation, path, (made.value_id,), graph).specs
    assert isinstance(spec, ShownSpec)
    assert (spec.strides, spec.shown) == ((2, 1), (1, 3))
