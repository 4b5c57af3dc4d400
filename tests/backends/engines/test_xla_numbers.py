"""Numbers that are not finite, bools that are computed with, and memory: where XLA by itself differs from PyTorch."""

from __future__ import annotations

import warnings

import pytest
import torch

import torchport
from torchport.backends.xla import XlaBackend

pytestmark = pytest.mark.skipif(not XlaBackend().is_available(), reason=XlaBackend().unavailable_reason())

INFINITE = torch.tensor([1.0, float("inf"), float("nan"), 2.0])
SMALL = torch.tensor([1e-45, -1e-40, 1e-38, 2.0**-126, 0.0, -0.0, 3.0, float("-inf")])
MASK = torch.tensor([True, False, False, False])
NUMBERS = {
    "a mask times infinity": lambda x, m: (m.float() * x, m * x, x * (x > 5).to(x.dtype), m.half() * x.half()),
    "a mask by zero": lambda x, m: (m / 0.0, m / torch.zeros_like(x)),
    "complex logarithms of zero": lambda x, m: (m.to(torch.complex64).log2(), m.to(torch.complex64).log10()),
    "bools that are added up": lambda x, m: (
        m.sum(dtype=torch.bool), m.reshape(2, 2).sum(0, dtype=torch.bool),
        m.put(m.long(), m, accumulate=True), m.index_put((m.long(),), m, accumulate=True),
        m.scatter(0, m.long(), 1.5, reduce="add"), m.scatter(0, m.long(), 0.0, reduce="multiply"),
    ),
    "bounds of a logit that are the wrong way round": lambda x, m: (torch.logit(x, 0.6), torch.logit(x / 2, 0.6)),
    "the spread of nothing": lambda x, m: torch.std_mean(x.reshape(4, 1)[:0], [0], correction=-200),
    "a number beyond half precision": lambda x, m: (torch.xlogy(m.half(), 70_000),),
    "the parts of numbers below the smallest normal one": lambda x, m: (
        *torch.frexp(SMALL.to(x.device)), *torch.frexp(SMALL.bfloat16().to(x.device)),
        *torch.frexp(torch.tensor([5e-324, -1e-310, 7.0], dtype=torch.float64).to(x.device)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_as_pytorch_has_them(name: str) -> None:
    device = torchport.device("xla")
    with torchport.config.override(tiers="off"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of degrees of freedom
        ours = NUMBERS[name](INFINITE.to(device), MASK.to(device))
        for one, other in zip(ours, NUMBERS[name](INFINITE, MASK), strict=True):
            torch.testing.assert_close(one.cpu(), other, equal_nan=True)


def test_as_strided_stays_within_the_memory() -> None:
    x = torch.arange(6.0).to(torchport.device("xla"))
    with torchport.config.override(tiers="off"):
        assert x.as_strided((2, 2), (2, 1), 1).tolist() == [[1.0, 2.0], [3.0, 4.0]]
        for size, stride, offset in (((6,), (2,), 0), ((2, 2), (2, 1), 3)):
            with pytest.raises(RuntimeError, match="out of bounds for storage of size 24"):
                x.as_strided(size, stride, offset).tolist()
