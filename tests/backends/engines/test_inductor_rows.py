"""Adding many rows is PyTorch's own kernel, which sorts them; few rows, short ones and others are Inductor's code."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from helpers_graphs import CPU, normal_form

from torchport import ExecutionError
from torchport.backend.interface import BackendData, ExecutionContext, FreeableBuffer, InitContext, TensorData
from torchport.backends.inductor import InductorBackend
from torchport.core.specs import CompileSpecs, TensorSpec

backend = InductorBackend()
pytestmark = pytest.mark.skipif(not backend.is_available(), reason=backend.unavailable_reason())
ROWS = 2048


class Compiled:
    """A function of tensors like these, by ``inductor``."""

    def __init__(self, fn: Callable[..., Any], *args: torch.Tensor) -> None:
        graph, _ = normal_form(fn, args)
        processed = backend.preprocess(graph, CompileSpecs())
        self.text = backend.text(processed)
        self.handle = backend.init(FreeableBuffer(processed.data), CompileSpecs(), InitContext(CPU))

    def __call__(self, *args: torch.Tensor) -> list[torch.Tensor]:
        data: list[BackendData] = [TensorData(CPU, TensorSpec.of(arg), arg) for arg in args]
        return [backend.from_device(one) for one in backend.execute(self.handle, data, ExecutionContext(CPU))]


def _given() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    x, rows = torch.randn(100, 16, generator=generator), torch.randn(ROWS, 16, generator=generator)
    return x, torch.randint(100, (ROWS,), generator=generator), rows


ADDITIONS: dict[str, Callable[..., torch.Tensor]] = {
    "index_add": lambda x, at, rows: x.index_add(0, at, rows),
    "times a number": lambda x, at, rows: x.index_add(-2, at, rows * 2, alpha=0.5),
    "numbers of 32 bits": lambda x, at, rows: x.index_add(0, at.to(torch.int32), rows),
    "index_put": lambda x, at, rows: x.index_put((at,), rows, accumulate=True),
    "from the end": lambda x, at, rows: x.index_put((at - 100,), rows, accumulate=True),
    "scatter_add": lambda x, at, rows: x.scatter_add(0, at[:, None].expand_as(rows), rows),
    "transposed": lambda x, at, rows: x.t().contiguous().t().index_add(0, at, rows.t().contiguous().t()),
    "twice": lambda x, at, rows: x.index_add(0, at, rows) * 2 + x.index_add(0, at, rows + 1),
}


def _all_of(functions: Iterable[Callable[..., torch.Tensor]]) -> Callable[..., tuple[torch.Tensor, ...]]:
    """What several functions give, as one computation."""
    return lambda *given: tuple(fn(*given) for fn in functions)


def test_many_rows_are_added_by_the_kernel() -> None:
    given, fn = _given(), _all_of(ADDITIONS.values())
    compiled = Compiled(fn, *given)
    assert "atomic_add" not in compiled.text
    for mine, cpu in zip(compiled(*given), fn(*given), strict=True):
        torch.testing.assert_close(mine, cpu, rtol=1e-5, atol=1e-4)


def test_so_it_is_with_other_dtypes() -> None:
    def fn(x: torch.Tensor, at: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        dtypes = (torch.float64, torch.float16, torch.bfloat16)
        return tuple(x.to(dtype).index_add(0, at, rows.to(dtype)) for dtype in dtypes)

    given = _given()
    compiled, exact = Compiled(fn, *given), fn(*(one.double() if one.is_floating_point() else one for one in given))[0]
    assert "atomic_add" not in compiled.text
    for mine in compiled(*given):
        torch.testing.assert_close(mine.double(), exact, rtol=0.1, atol=0.3)  # rounded after each addition


OTHERS: dict[str, Callable[..., torch.Tensor]] = {
    "few rows": lambda x, at, rows: x.index_add(0, at[:8], rows[:8]),
    "short rows": lambda x, at, rows: x[:, :2].index_add(0, at.repeat(8), rows[:, :2].repeat(8, 1)),
    "integers": lambda x, at, rows: (x * 9).int().index_add(0, at, (rows * 9).int()),
    "another dimension": lambda x, at, rows: x.t().index_add(1, at, rows.t()),
    "numbers for all": lambda x, at, rows: x.index_put((at,), rows[0], accumulate=True),
    "two indices": lambda x, at, rows: x.index_put((at, at % 16), rows[:, 0], accumulate=True),
    "written": lambda x, at, rows: x.index_put((at,), rows[:1].expand_as(rows)),
    "by a mask": lambda x, at, rows: x.index_put((x > 1,), rows[0, 0], accumulate=True),
}


def test_what_else_adds_or_writes_is_as_before() -> None:
    given, fn = _given(), _all_of(OTHERS.values())
    for name, mine, cpu in zip(OTHERS, Compiled(fn, *given)(*given), fn(*given), strict=True):
        torch.testing.assert_close(mine, cpu, rtol=1e-5, atol=1e-4, msg=lambda said, name=name: f"{name}: {said}")


@pytest.mark.parametrize("name", ["index_add", "index_put"])
def test_a_number_out_of_bounds_is_an_error(name: str) -> None:
    x, at, rows = _given()
    compiled = Compiled(ADDITIONS[name], x, at, rows)
    for number in (100, -101):
        wrong = at.clone()
        wrong[7] = number
        with pytest.raises(ExecutionError):
            compiled(x, wrong, rows)
