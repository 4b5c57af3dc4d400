"""From a path to a graph: which operators and inputs a value needs, and that the graph computes it."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from helpers_traces import Recording, aten
from hypothesis import given, settings
from hypothesis import strategies as st

from torchport.backend.builder import capture_of
from torchport.trace.graph import TraceGraph, build_graph, inputs_of, needed


def _graph(recording: Recording, *outputs: int) -> TraceGraph:
    trace = recording.trace
    specs = [leaf.spec for leaf in trace.leaves]
    return build_graph(trace.cursor.path(), outputs, specs, capture_of(recording.runner.backend))  # type: ignore[arg-type]


def _run(recording: Recording, made: TraceGraph, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    """What the graph gives for the values of the trace's leaves."""
    args = [leaves[position] for position in made.leaves]
    scalars = recording.trace.scalar_inputs
    for positions, dtype in ((made.singles, torch.float32), (made.doubles, torch.float64)):
        if positions:
            args.append(torch.tensor([scalars[position] for position in positions], dtype=dtype))
    return list(made.module(*args))


def test_only_what_a_value_depends_on_is_needed() -> None:
    recording = Recording()
    x, y = recording.leaf(3), recording.leaf(3)
    one = recording.call(aten.neg.default, x)
    two = recording.call(aten.mul.Tensor, y, 2.5)
    three = recording.call(aten.add.Tensor, one, one)
    path = recording.trace.cursor.path()
    assert [node.op.name() for node in needed(path, [three.value_id])] == ["aten::neg", "aten::add.Tensor"]
    assert [node.op.name() for node in needed(path, [two.value_id])] == ["aten::mul.Tensor"]
    assert inputs_of(path[2]) == [("value", one.value_id)]
    assert _graph(recording, three.value_id).leaves == (0,)
    made = _graph(recording, two.value_id)
    assert (made.leaves, made.singles, made.doubles) == ((1,), (0,), ())


def test_a_scalar_input_comes_in_double_precision_where_the_operator_computes_in_it() -> None:
    recording = Recording()
    made = recording.call(aten.mul.Tensor, recording.leaf(3, dtype=torch.float64), 0.1)
    graph = _graph(recording, made.value_id)
    assert (graph.singles, graph.doubles) == ((), (0,))
    (result,) = _run(recording, graph, [torch.ones(3, dtype=torch.float64)])
    assert result.tolist() == [0.1] * 3


def test_several_results_of_one_operator_come_out_in_the_order_asked_for() -> None:
    recording = Recording()
    parts = recording.call(aten.split.Tensor, recording.leaf(4), 1)
    graph = _graph(recording, parts[3].value_id, parts[0].value_id)
    last, first = _run(recording, graph, [torch.arange(4.0)])
    assert (last.item(), first.item()) == (3.0, 0.0)


def test_a_result_that_would_be_an_input_is_a_copy() -> None:
    recording = Recording()
    made = recording.call(aten.alias.default, recording.leaf(4))
    given_ = torch.arange(4.0)
    (result,) = _run(recording, _graph(recording, made.value_id), [given_])
    assert result.data_ptr() != given_.data_ptr()
    assert result.tolist() == given_.tolist()


def test_inputs_that_will_probably_be_donated_are_marked() -> None:
    recording = Recording()
    made = recording.call(aten.add.Tensor, recording.leaf(3), recording.leaf(3))
    specs = [leaf.spec for leaf in recording.trace.leaves]
    graph = build_graph(
        recording.trace.cursor.path(), [made.value_id], specs, capture_of(recording.runner.backend), donated={1}  # type: ignore[arg-type]
    )  # fmt: skip
    marks = [node.meta.get("donated", False) for node in graph.module.graph.nodes if node.op == "placeholder"]
    assert marks == [False, True]


UNARY = (aten.neg.default, aten.sin.default, aten.relu.default, aten.t.default)
BINARY = (aten.add.Tensor, aten.mul.Tensor, aten.sub.Tensor)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(UNARY), st.integers(0, 99)),
        st.tuples(st.sampled_from(BINARY), st.integers(0, 99), st.integers(0, 99)),
        st.tuples(st.just(aten.mul.Tensor), st.integers(0, 99), st.floats(-2, 2)),
    ),
    min_size=1,
    max_size=10,
)


@given(STEPS, st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_the_graph_of_any_path_computes_what_its_operators_do(steps: list[tuple[Any, ...]], random: Random) -> None:
    recording = Recording()
    start = [torch.arange(4.0).reshape(2, 2) - 1.5, torch.full((2, 2), 0.25)]
    handles = [recording.leaf(2, 2), recording.leaf(2, 2)]
    values = list(start)
    for op, *given_ in steps:
        at = [value if isinstance(value, float) else value % len(handles) for value in given_]
        handles.append(recording.call(op, *(handles[n] if isinstance(n, int) else n for n in at)))
        values.append(op(*(values[n] if isinstance(n, int) else n for n in at)))
    wanted = [n for n in range(2, len(handles)) if random.random() < 0.5] or [len(handles) - 1]
    # The same leaf may have two positions only if it was never used before: put values in the order of first use.
    leaves = [start[handles.index(leaf)] for leaf in recording.trace.leaves]
    results = _run(recording, _graph(recording, *(handles[n].value_id for n in wanted)), leaves)
    for n, result in zip(wanted, results, strict=True):
        torch.testing.assert_close(result, values[n], rtol=1e-6, atol=1e-6)


def test_an_operator_that_lowers_to_another_shape_is_an_error_that_names_it() -> None:
    from torchport.core.errors import GraphError
    from torchport.core.specs import TensorSpec

    recording = Recording()
    made = recording.call(aten.neg.default, recording.leaf(3))
    node = recording.trace.cursor
    node.specs = (TensorSpec((4,), torch.float32, (1,)),)
    with pytest.raises(GraphError, match=r"aten\.neg"):
        _graph(recording, made.value_id)
