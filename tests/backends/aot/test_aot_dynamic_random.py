"""Random programs of two sizes that change: what is padded gives what the exported program gives."""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

from torchport import aot

Op = Callable[[random.Random, torch.Tensor, Sequence[torch.Tensor], int], list[torch.Tensor]]


def _attention(r: random.Random, x: torch.Tensor, values: Sequence[torch.Tensor], d: int) -> list[torch.Tensor]:
    return [nn.functional.scaled_dot_product_attention(x, x * 2, x * 3, is_causal=r.random() < 0.5)]


def _gathered(r: random.Random, x: torch.Tensor, values: Sequence[torch.Tensor], d: int) -> list[torch.Tensor]:
    return [x.gather(d, torch.zeros_like(x, dtype=torch.int64))]


OPS: tuple[tuple[int, Op], ...] = (
    (0, lambda r, x, v, d: [x.sin() + 1]),
    (1, lambda r, x, v, d: [x.sum(d)]),
    (1, lambda r, x, v, d: [x.softmax(d)]),
    (2, lambda r, x, v, d: [x.transpose(r.randrange(x.dim()), d)]),
    (2, lambda r, x, v, d: [x.flatten(*sorted(r.sample(range(x.dim()), 2)))]),
    (1, lambda r, x, v, d: [x.amax(d), x.argmax(d).float()]),
    (1, lambda r, x, v, d: [x.cumsum(d)]),
    (1, lambda r, x, v, d: [x.mean(d, keepdim=True) * x, x.mean()]),
    (0, lambda r, x, v, d: [x * r.choice(v) + x]),
    (1, lambda r, x, v, d: [x @ r.choice(v)]),
    (1, lambda r, x, v, d: [torch.cat([x, x * 2], d)]),
    (1, lambda r, x, v, d: [x.select(d, 0)]),
    (1, lambda r, x, v, d: [x.max(d).values, x.max(d).indices.float()]),
    (0, lambda r, x, v, d: [x.unsqueeze(d)]),
    (2, lambda r, x, v, d: [x.tril()]),
    (3, _attention),
    (1, lambda r, x, v, d: [x.prod(d)]),
    (1, lambda r, x, v, d: [torch.arange(x.shape[d]).float()]),
    (1, lambda r, x, v, d: [(1 / x).abs().log_softmax(d)]),
    (2, lambda r, x, v, d: [x.reshape(-1), x.permute(*reversed(range(x.dim())))]),
    (1, lambda r, x, v, d: [x[..., torch.arange(x.shape[-1])]]),
    (1, lambda r, x, v, d: [(x > 0).any(d).float(), (x > 0.5).all(d).float()]),
    (1, _gathered),
)
"""The smallest rank, and what is made of a value."""


class Program(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        r = random.Random(self.seed)
        values = [x, y]
        for _ in range(r.randrange(2, 7)):
            value = r.choice(values)
            rank, op = r.choice(OPS)
            if value.dim() >= rank:
                values += op(r, value, values, r.randrange(value.dim()) if value.dim() else 0)
        return tuple(values)


def _inputs(b: int, t: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(b, t, 4) + 0.3, torch.rand(t) + 0.2


def _run(seed: int) -> bool:
    """Whether the program was one that can be padded; its results are compared then."""
    b, t = Dim("b", max=8), Dim("t", max=8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            exported = torch.export.export(Program(seed), _inputs(5, 6), dynamic_shapes=({0: b, 1: t}, {0: t}))
        except Exception:  # shapes that do not fit together, or only for some sizes
            return False
        lowered = aot.lower(exported, backend="reference", buckets=[8])
        if not lowered.program.meta().padded:
            return False
        for sizes in ((5, 6), (2, 2), (8, 8), (3, 8), (8, 3), (1, 3), (3, 1)):
            args = _inputs(*sizes)
            torch.testing.assert_close(
                lowered(*args), exported.module()(*args), rtol=1e-3, atol=1e-4, equal_nan=True,
                msg=lambda text, sizes=sizes: f"seed {seed}, sizes {sizes}: {text}",
            )  # fmt: skip
    return True


@pytest.mark.slow
def test_random_programs() -> None:
    with contextlib.redirect_stderr(None):
        assert sum(map(_run, range(25))) > 10


@pytest.mark.slow
@pytest.mark.parametrize("start", range(1000, 2000, 100))
def test_more_random_programs(start: int) -> None:
    assert sum(map(_run, range(start, start + 100))) > 30
