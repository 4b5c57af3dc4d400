"""What the everyday tests share: run a function on the CPU and on the device, and compare what comes out."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

DEVICE = os.environ.get("TORCHPORT_TEST_DEVICE", "port")
ON_PORT = DEVICE != "cpu"
CPU = torch.device("cpu")

needs_counters = pytest.mark.skipif(not ON_PORT, reason="counters belong to the port device; this run is on the CPU")
everywhere = pytest.mark.everywhere
"""Runs on every available backend by default; other tests run on ``reference``, and on the others as slow tests."""


def same(actual: Any, expected: Any, *, rtol: float = 1.3e-6, atol: float = 1e-6, strides: bool = False) -> None:
    """Nested results agree in structure, device, shape, dtype, requires_grad and values."""
    got, want = tree_leaves(actual), tree_leaves(expected)
    assert len(got) == len(want), f"{len(got)} results instead of {len(want)}"
    for a, b in zip(got, want, strict=True):
        if not isinstance(b, torch.Tensor):
            assert type(a) is type(b), f"{type(a)} instead of {type(b)}"
            assert a == pytest.approx(b, rel=1e-5) if isinstance(b, float) else a == b
            continue
        assert isinstance(a, torch.Tensor), f"a {type(a).__name__} instead of a tensor"
        assert (a.shape, a.dtype, a.requires_grad) == (b.shape, b.dtype, b.requires_grad)
        if strides:
            assert (a.stride(), a.is_contiguous()) == (b.stride(), b.is_contiguous())
        torch.testing.assert_close(a.detach().cpu(), b.detach().cpu(), rtol=rtol, atol=atol, equal_nan=True)


def agree(
    fn: Callable[[torch.device], Any],
    device: torch.device,
    *,
    rtol: float = 1.3e-6,
    atol: float = 1e-6,
    strides: bool = False,
) -> None:
    """``fn`` gives the same on the CPU and on the device, where every tensor it returns lives."""
    torch.manual_seed(0)
    expected = fn(CPU)
    torch.manual_seed(0)
    actual = fn(device)
    for leaf in tree_leaves(actual):
        if isinstance(leaf, torch.Tensor):
            assert leaf.device.type == device.type, f"a result is on {leaf.device}"
    same(actual, expected, rtol=rtol, atol=atol, strides=strides)


def ramp(*shape: int, device: torch.device | str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """0, 1, 2, … in the given shape, made on the CPU and copied."""
    count = 1
    for size in shape:
        count *= size
    return torch.arange(count, dtype=dtype).reshape(shape).to(device)


def randn(*shape: int, device: torch.device | str, seed: int = 0) -> torch.Tensor:
    """Normal numbers that depend on ``seed`` only, made on the CPU and copied."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


class Counts(dict[str, int]):
    """How much each counter grew inside a :func:`counted` block; missing names are 0."""

    def __missing__(self, name: str) -> int:
        return 0


@contextmanager
def counted() -> Iterator[Counts]:
    """Fill a :class:`Counts` when the block ends, all work done."""
    import torchport

    torchport.sync()
    before = dict(torchport.metrics.snapshot()["counters"])
    counts = Counts()
    yield counts
    torchport.sync()
    after = torchport.metrics.snapshot()["counters"]
    counts.update({name: int(value - before.get(name, 0)) for name, value in after.items()})
