"""Keys: which arguments tell one call from another."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers_traces import Recording
from hypothesis import given
from hypothesis import strategies as st

from torchport.trace import keys
from torchport.trace.trie import FLOAT, FLOATS, FOREIGN_DEVICE, LIMITS

NUMBERS = st.one_of(st.booleans(), st.integers(-5, 5), st.floats(width=16), st.complex_numbers(max_magnitude=4))


@given(NUMBERS, NUMBERS)
def test_constants_are_equal_only_where_no_operator_can_tell_them_apart(one: Any, other: Any) -> None:
    same = type(one) is type(other) and repr(one) == repr(other)
    assert (keys.constant(one) == keys.constant(other)) == same


@given(st.floats())
def test_a_finite_float_becomes_a_scalar_input_and_the_others_stay(value: float) -> None:
    trace = Recording().trace
    part = keys.scalar(trace, value)
    if math.isfinite(value):
        assert part is FLOAT
        assert trace.scalar_inputs == [value]
    else:
        assert part == (repr(value), float)
        assert trace.scalar_inputs == []


@given(st.floats(allow_nan=False, allow_infinity=False), st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_that_fit_other_dtypes_have_other_keys(one: float, other: float) -> None:
    trace = Recording().trace

    def passed(value: float) -> tuple[int, bool]:
        count = sum(abs(value) > limit for limit in LIMITS)
        return count, value > 0 and count > 0

    same = keys.sized(trace, one) is keys.sized(trace, other)
    assert same == (passed(one) == passed(other))


@pytest.mark.parametrize("at", range(len(LIMITS)))
def test_each_limit_is_a_key_of_its_own_on_either_side(at: int) -> None:
    trace, limit = Recording().trace, LIMITS[at]
    above, below = keys.sized(trace, math.nextafter(limit, math.inf)), keys.sized(trace, limit)
    assert above in FLOATS
    assert above is not below


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_zero_and_one_stay_constants_where_a_tensor_is_filled(value: float) -> None:
    trace = Recording().trace
    assert keys.filler(trace, value) == (repr(value), float)
    assert keys.filler(trace, 2.0) is FLOAT
    assert trace.scalar_inputs == [2.0]


def test_a_list_of_numbers_has_a_part_for_each() -> None:
    trace = Recording().trace
    assert keys.scalars(trace, [1, 2.5, math.inf]) == ((1, int), FLOAT, ("inf", float))
    assert keys.constants([1, 1.0, True]) == ((1, int), ("1.0", float), (True, bool))


def test_a_leaf_is_told_by_its_spec_first_and_by_its_id_from_then_on() -> None:
    recording = Recording()
    x = recording.leaf(2, 3, dtype=torch.int64)
    first = keys.leaf(recording.trace, x)
    assert (first.shape, first.dtype) == ((2, 3), torch.int64)
    assert keys.tensors(recording.trace, [x, None]) == (x.value_id, None)


def test_a_failed_leaf_makes_no_half_key() -> None:
    recording = Recording()
    x, broken = recording.leaf(2), recording.leaf(2)
    broken.value, broken.failure = None, ValueError("it failed")
    keys.scalar(recording.trace, 2.5)
    keys.leaf(recording.trace, x)
    with pytest.raises(ValueError, match="it failed"):
        keys.leaf(recording.trace, broken)
    assert recording.runner.flushes == ["failure"]
    assert recording.trace.scalar_inputs == []
    assert recording.trace.leaves == []


def test_what_stands_where_a_tensor_does() -> None:
    recording = Recording()
    x = recording.leaf(2)
    assert keys.foreign(recording.trace, None) is None
    assert keys.foreign(recording.trace, 3) == (3, int)
    assert keys.foreign(recording.trace, torch.ones(2)) is FOREIGN_DEVICE
    assert keys.foreign(recording.trace, torch.tensor(3)) == (torch.int64, (3, int))
    assert keys.foreign(recording.trace, x) == x.spec
    assert keys.foreign(recording.trace, x) == x.value_id
