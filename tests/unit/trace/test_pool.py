"""Pools: which handles are held, and which are handed out again."""

from __future__ import annotations

from typing import Any

from helpers_traces import Recording, aten

from torchport.core.errors import ExecutionError
from torchport.trace.pool import alive, fill_pool, forget, pending, release, sweep
from torchport.trace.trie import NONE


def test_only_handles_that_somebody_holds_are_alive() -> None:
    recording = Recording()
    held = recording.call(aten.neg.default, recording.leaf(3))
    recording.call(aten.sin.default, held)
    pool: list[Any] = [node.ready for node in recording.trace.cursor.path()]
    found = alive(pool)
    del pool
    assert [id(handle) for handle in found] == [id(held)]


def test_what_is_pending_comes_oldest_first_and_leaves_its_pool() -> None:
    recording = Recording()
    one = recording.call(aten.neg.default, recording.leaf(3))
    two = recording.call(aten.sin.default, one)
    node = recording.trace.cursor
    made = pending([two, one])
    assert made[0] is one
    assert made[1] is two
    assert node.ready is not two
    assert two.home is None


def test_a_handle_with_a_value_or_a_failure_is_not_pending() -> None:
    recording = Recording()
    one = recording.call(aten.neg.default, recording.leaf(3))
    two = recording.call(aten.sin.default, one)
    one.value, two.failure = recording.leaf(3).value, ExecutionError("it failed")
    assert pending([one, two]) == []


def test_a_sweep_finds_the_handles_held_up_to_the_last_one() -> None:
    recording = Recording()
    trace = recording.trace
    first = recording.call(aten.neg.default, recording.leaf(3))
    seen = trace.cursor
    recording.call(aten.sin.default, first)  # nobody holds it
    last = recording.call(aten.cos.default, first)
    made: list[object] = []
    sweep(made, trace.cursor, seen)  # type: ignore[arg-type]
    assert len(made) == 1
    assert made[0] is last
    sweep(made, seen, trace.root)  # type: ignore[arg-type]
    assert {id(handle) for handle in made} == {id(first), id(last)}


def test_results_held_as_one_tuple_are_each_held() -> None:
    recording = Recording()
    parts = recording.call(aten.split.Tensor, recording.leaf(4), 2)
    made: list[object] = []
    sweep(made, recording.trace.cursor, recording.trace.root)  # type: ignore[arg-type]
    assert {id(handle) for handle in made} == {id(part) for part in parts}


def test_a_released_handle_is_replaced_by_another_with_the_same_spec() -> None:
    recording = Recording()
    parts = recording.call(aten.split.Tensor, recording.leaf(4), 2)
    node = recording.trace.cursor
    release(parts[1])
    assert isinstance(node.ready, (list, tuple))
    kept, replaced = node.ready
    assert kept is parts[0]
    assert replaced is not None
    assert replaced is not parts[1]
    assert (replaced.value_id, replaced.shape) == (parts[1].value_id, parts[1].shape)
    former = replaced
    fill_pool(node, 1)
    assert former.home is None


def test_forgotten_handles_belong_to_no_trace() -> None:
    recording = Recording()
    made = recording.call(aten.neg.default, recording.leaf(3))
    node = recording.trace.cursor
    forget([made])
    assert made.value_id == NONE
    assert made.home is None
    assert node.ready is not made
