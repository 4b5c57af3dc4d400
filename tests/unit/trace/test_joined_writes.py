"""Writes into parts of one tensor, in a row, become one value: what a graph has of them, and what it gives."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
import torch
from helpers_traces import AddsOnly, Recording, aten

from torchport.backend.builder import capture_of
from torchport.core.specs import contiguous_strides
from torchport.trace.graph import TraceGraph, build_graph

Write = tuple[tuple[int, ...], int]
"""The shape of a part and where it begins."""


def _written(
    writes: list[Write], size: int, more: int = 0, strides: tuple[int, ...] | None = None
) -> tuple[TraceGraph, list[torch.Tensor], torch.Tensor]:
    """A graph of the writes, its leaves, and what comes out; also the value after ``more`` of the writes."""
    recording = Recording()
    leaves = [torch.zeros(size) - 1, *(torch.full(shape, at + 1.0) for at, (shape, _) in enumerate(writes))]
    whole = recording.leaf(size)
    given = [recording.leaf(*shape) for shape, _ in writes]
    expected, ids = leaves[0].clone(), list[int]()
    for (shape, start), handle, value in zip(writes, given, leaves[1:], strict=True):
        place = strides or contiguous_strides(shape)
        whole = recording.call(aten.as_strided_scatter.default, whole, handle, shape, place, start)
        ids.append(whole.value_id)
        expected = aten.as_strided_scatter(expected, value, shape, place, start)
    outputs = [ids[-1], *ids[:more]]
    specs = [leaf.spec for leaf in recording.trace.leaves]
    made = build_graph(recording.trace.cursor.path(), outputs, specs, capture_of(recording.runner.backend))  # type: ignore[arg-type]
    return made, leaves, expected


def _operators(made: TraceGraph) -> Counter[str]:
    return Counter(node.target.name() for node in made.module.graph.nodes if node.op == "call_function")


def _result(made: TraceGraph, leaves: list[torch.Tensor]) -> torch.Tensor:
    return made.module(*(leaves[position] for position in made.leaves))[0]


def test_a_row_of_writes_is_one_value() -> None:
    made, leaves, expected = _written([((2, 3), 2), ((4,), 10), ((2,), 8)], 20)
    operators = _operators(made)
    assert operators["aten::as_strided_scatter"] == 0
    assert operators["aten::cat"] == 1
    assert torch.equal(_result(made, leaves), expected)


def test_what_is_written_whole_needs_nothing_of_what_it_was() -> None:
    made, leaves, expected = _written([((2, 3), 4), ((4,), 0)], 10)
    first = next(node for node in made.module.graph.nodes if node.op == "placeholder")
    assert not first.users
    assert torch.equal(_result(made, leaves), expected)


@pytest.mark.parametrize(
    ("writes", "more", "strides"),
    [
        ([((4,), 0), ((4,), 2)], 0, None),
        ([((2, 3), 0), ((2, 3), 6)], 0, (1, 2)),
        ([((4,), 0), ((4,), 4)], 1, None),
        ([((4,), 3)], 0, None),
    ],
    ids=["overlapping", "not in one piece", "somebody uses what is between", "one alone"],
)
def test_other_writes_stay(writes: list[Write], more: int, strides: tuple[int, ...] | None) -> None:
    made, leaves, expected = _written(writes, 12, more, strides)
    assert _operators(made)["aten::as_strided_scatter"] == len(writes)
    assert torch.equal(_result(made, leaves), expected)


def test_a_backend_that_cannot_join_gets_the_writes() -> None:
    recording, backend = Recording(), AddsOnly()
    whole, one, two = recording.leaf(4), recording.leaf(2), recording.leaf(2)
    for start, part in ((0, one), (2, two)):
        whole = recording.call(aten.as_strided_scatter.default, whole, part, (2,), (1,), start)
    specs = [leaf.spec for leaf in recording.trace.leaves]
    made = build_graph(recording.trace.cursor.path(), [whole.value_id], specs, capture_of(backend))
    assert _operators(made)["aten::as_strided_scatter"] == 2
    assert [refusal.op for refusal in made.refusals] == [aten.as_strided_scatter.default] * 2
    leaves = [torch.zeros(4), torch.ones(2), torch.full((2,), 2.0)]
    assert _result(made, leaves).tolist() == [1, 1, 2, 2]


def test_any_writes_give_what_they_do_one_by_one() -> None:
    random = Random(0)
    for _ in range(40):
        writes, start = list[Write](), 0
        for _ in range(random.randint(2, 6)):
            start += random.choice((0, 0, 1, 3))
            shape = tuple(random.randint(1, 3) for _ in range(random.randint(1, 2)))
            writes.append((shape, start))
            start += torch.Size(shape).numel()
        random.shuffle(writes)
        made, leaves, expected = _written(writes, start + random.choice((0, 2)))
        assert torch.equal(_result(made, leaves), expected), writes


def test_what_is_read_after_its_write_is_what_was_written() -> None:
    """As DDP has it: a view of each part of a bucket lives on."""
    recording = Recording()
    whole, parts = recording.leaf(9), [recording.leaf(2, 2), recording.leaf(5)]
    outputs: list[int] = []
    for start, part in ((0, parts[0]), (4, parts[1])):
        shape = tuple(part.shape)
        place = shape, contiguous_strides(shape), start
        whole = recording.call(aten.as_strided_scatter.default, whole, part, *place)
        outputs.append(recording.call(aten.as_strided_copy.default, whole, *place).value_id)
    specs = [leaf.spec for leaf in recording.trace.leaves]
    capture = capture_of(recording.runner.backend)  # type: ignore[arg-type]
    made = build_graph(recording.trace.cursor.path(), [whole.value_id, *outputs], specs, capture)
    assert set(_operators(made)) == {"aten::view", "aten::cat", "aten::clone"}
    leaves = [torch.zeros(9), torch.arange(4.0).reshape(2, 2), torch.arange(5.0)]
    joined, first, second = made.module(*(leaves[position] for position in made.leaves))
    assert joined.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4]
    assert torch.equal(first, leaves[1])
    assert torch.equal(second, leaves[2])
