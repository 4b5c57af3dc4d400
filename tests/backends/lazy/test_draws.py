"""Random numbers that are drawn at once are those that the operators of a graph give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_support import COMPILER, compiles

import torchport
from torchport import native
from torchport.backend import random
from torchport.backend.interpret import ValueBuilder
from torchport.native.twins import twins


class _ByOperators(ValueBuilder):
    def drawn(self, *call: Any) -> Any:
        return None


@pytest.fixture(scope="module", params=["python", pytest.param("native", marks=compiles)])
def form(request: pytest.FixtureRequest) -> Any:
    """Either form of the function."""
    if request.param == "python":
        return twins.in_python["draw"]
    torchport.use("reference")
    torch.ones(1, device="port")
    native.build_all([str(COMPILER)])
    assert "draw" in twins.in_cpp()
    return twins.draw


@given(
    dtype=st.sampled_from([torch.int64, torch.float32, torch.float64]),
    count=st.one_of(st.integers(0, 40), st.integers(32_760, 33_000)),
    key=st.integers(-(1 << 63), (1 << 63) - 1),
    draw=st.integers(0, 2),
)
@settings(max_examples=120, deadline=None, derandomize=True, database=None)
def test_numbers_are_the_formula_s(form: Any, dtype: torch.dtype, count: int, key: int, draw: int) -> None:
    builder, of_key = _ByOperators(), torch.tensor(key)
    if dtype is torch.int64:
        want: Any = random._bits(builder, of_key, [count], draw)  # type: ignore[arg-type]
    else:
        want = random._unit(builder, of_key, [count], dtype, draw)  # type: ignore[arg-type]
    got = torch.full((count,), 7, dtype=dtype)
    form(got, key, draw * count)
    assert torch.equal(got, want)


@pytest.mark.parametrize("threads", [1, 2])
def test_numbers_do_not_depend_on_the_number_of_threads(form: Any, threads: int) -> None:
    before = torch.get_num_threads()
    numbers = [torch.empty(100_001), torch.empty(100_001)]
    try:
        form(numbers[0], 5, 0)
        torch.set_num_threads(threads)
        form(numbers[1], 5, 0)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*numbers)


@compiles
def test_a_dtype_that_is_not_drawn_is_refused() -> None:
    torchport.use("reference")
    torch.ones(1, device="port")
    native.build_all([str(COMPILER)])
    with pytest.raises(TypeError, match="this dtype"):
        twins.draw(torch.empty(3, dtype=torch.int32), 0, 0)
