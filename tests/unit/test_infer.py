"""Shape inference says what the CPU says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchport.backend.infer import infer
from torchport.backend.probe import cpu_result
from torchport.core.specs import TensorSpec


@st.composite
def views(draw: st.DrawFn) -> tuple[torch.Tensor, list[int]]:
    """A tensor of any order of strides, with expanded dimensions, and a shape of as many elements, or of -1."""
    sizes = draw(st.lists(st.sampled_from([1, 1, 2, 3]), min_size=1, max_size=4))
    tensor = torch.empty(sizes).permute(*draw(st.permutations(range(len(sizes)))))
    where = draw(st.integers(0, tensor.dim()))
    tensor = tensor.unsqueeze(where)
    if draw(st.booleans()):
        tensor = tensor.expand(*(2 if at == where else n for at, n in enumerate(tensor.shape)))
    wanted = draw(st.one_of(st.just([-1]), st.permutations(tensor.shape), st.just([1, -1]), st.just([2, -1])))
    return tensor, list(wanted)


@settings(deadline=None)
@given(views())
def test_a_view_is_taken_where_the_cpu_takes_it(drawn: tuple[torch.Tensor, list[int]]) -> None:
    tensor, size = drawn
    op = torch.ops.aten.view.default
    try:
        want = tensor.view(size)
    except RuntimeError:
        with pytest.raises(RuntimeError):
            infer(op, [TensorSpec.of(tensor), size], {})
    else:
        (got,) = infer(op, [TensorSpec.of(tensor), size], {}).specs
        assert got is not None
        assert got.shape == tuple(want.shape)
        told = [(a, b) for n, a, b in zip(want.shape, got.strides, want.stride(), strict=True) if n > 1]
        assert all(a == b for a, b in told)


@pytest.mark.parametrize("name", ["linalg_ldl_solve", "linalg_lu_solve"])
def test_lapack_is_not_asked_about_pivots_that_are_none(name: str) -> None:
    """It would exchange rows in front of the matrix: the try is made on zeros."""
    packet = getattr(torch.ops.aten, name)
    matrix, pivots, right = (
        TensorSpec.of(torch.ones(shape, dtype=dtype))
        for shape, dtype in (((3, 3), torch.float32), ((3,), torch.int32), ((3, 2), torch.float32))
    )
    assert cpu_result(packet.default, [matrix, pivots, right], {}) is None
    assert cpu_result(packet.out, [matrix, pivots, right], {"out": right}) is None
