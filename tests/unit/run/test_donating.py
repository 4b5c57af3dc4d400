"""Donation: which arguments nobody else holds."""

from __future__ import annotations

from typing import Any

import pytest
from helpers_traces import FakeRunner, Overlapping, Recorder, Recording, aten, contiguous, data

from torchport.core.errors import ExecutionError
from torchport.run.donation import give_up, likely_donated, take_place, unshared
from torchport.trace.trie import NONE

LARGE = (600, 600)  # above a megabyte of float32


def test_an_argument_that_only_the_job_holds_may_be_donated() -> None:
    runner = FakeRunner()
    given: list[Any] = [data(runner, contiguous((2,))), data(runner, contiguous((2,)))]
    kept = given[1]
    args = list(given)
    assert unshared(given, args) == {0}
    del kept
    assert unshared(given, args) == {0, 1}


def test_memory_that_somebody_else_may_see_is_not_donated() -> None:
    runner = FakeRunner()
    given: list[Any] = [data(runner, contiguous((2,)))]
    given[0].exported = True
    assert unshared(given, list(given)) == frozenset()


def test_packs_of_scalar_inputs_are_the_jobs_own() -> None:
    runner = FakeRunner()
    args: list[Any] = [data(runner, contiguous((2,)))]
    assert unshared([], args) == {0}
    kept = args[0]
    assert unshared([], args) == frozenset()
    assert kept is args[0]


@pytest.mark.parametrize(("shape", "backend", "expected"), [
    (LARGE, Overlapping, True),
    ((2, 2), Overlapping, False),
    (LARGE, Recorder, False),
])  # fmt: skip
def test_a_large_leaf_without_a_holder_will_probably_be_donated(
    shape: tuple[int, ...], backend: type[Recorder], expected: bool
) -> None:
    recording = Recording(FakeRunner(backend()))
    held = recording.leaf(*shape)
    recording.call(aten.add.Tensor, held, recording.leaf(*shape))
    assert likely_donated(recording.trace) == ({1} if expected else frozenset())


def test_a_donated_handle_says_where_its_value_went_and_the_trace_keeps_it() -> None:
    recording = Recording()
    x = recording.leaf(3)
    value = x.value
    recording.call(aten.neg.default, x)
    give_up(recording.trace, x, "train.py:3")
    assert x.value is None
    assert x.value_id == NONE
    assert isinstance(x.failure, ExecutionError)
    assert "donate()" in str(x.failure)
    assert "train.py:3" in str(x.failure)
    (leaf,) = recording.trace.leaves
    assert leaf is not x
    assert leaf.value is value


def test_taking_the_place_of_a_handle_that_the_trace_does_not_use_changes_nothing() -> None:
    recording = Recording()
    x, other = recording.leaf(3), recording.leaf(3)
    recording.call(aten.neg.default, x)
    take_place(recording.trace, other)
    assert recording.trace.leaves[0] is x
