"""The ``inductor`` backend against the reference backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers_graphs import assert_same, normal_form

from torchport.backends.inductor import InductorBackend

backend = InductorBackend()
pytestmark = pytest.mark.skipif(not backend.is_available(), reason=backend.unavailable_reason())


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + 1)
    return torch.randn(*shape, generator=generator).to(dtype)


def check(fn: Callable[..., Any], *args: torch.Tensor, **tolerance: float) -> list[torch.Tensor]:
    graph, inputs = normal_form(fn, args)
    return assert_same(backend, graph, inputs, **tolerance)


def test_pointwise_and_views() -> None:
    x, y = rand(4, 6), rand(6)

    def fn(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        z = (x + y).tanh().t()
        return z, z[1:3].contiguous(), x.sum(0), (x > 0).any(), x.reshape(2, 12).permute(1, 0) * 2

    check(fn, x, y)


def test_scalars_empty_tensors_and_dtypes() -> None:
    def fn(s: torch.Tensor, e: torch.Tensor, i: torch.Tensor, h: torch.Tensor, b: torch.Tensor, d: torch.Tensor) -> Any:
        return s * 2 + 1, e.t() + 1, e.sum(), i // 3, i.to(torch.bool), h.float(), h * 2, b + b, d.double() / 3, i.sum()

    args = (torch.tensor(3.0), torch.empty(0, 3), torch.arange(-5, 5), rand(5, dtype=torch.float16))
    check(fn, *args, rand(7, dtype=torch.bfloat16), rand(3), rtol=1e-2, atol=1e-2)
