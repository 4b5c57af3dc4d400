"""Gradients of convolutions and averages on ``openvino``, against PyTorch's CPU."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import torchport
from torchport import metrics
from torchport.core.config import config

pytest.importorskip("openvino")

aten = torch.ops.aten
GRADIENTS = aten.convolution_backward.default


@pytest.fixture(autouse=True)
def engine() -> Iterator[None]:
    with config.override(cache="off", tiers="off", sizes="off"):
        torchport.use("openvino")
        yield
    torchport.use("reference")


def _compare(*args: Any) -> int:
    """Compare what a mask wants; how many operators the host ran."""
    before = metrics.counter("Fallback")
    moved = [arg.to("port") if isinstance(arg, torch.Tensor) else arg for arg in args]
    found, wanted = GRADIENTS(*moved), GRADIENTS(*args)
    for one, other, asked in zip(found, wanted, args[-1], strict=True):
        if asked:
            torch.testing.assert_close(one.cpu(), other, rtol=1e-4, atol=1e-4)
    return metrics.counter("Fallback") - before


def _arguments(chosen: random.Random, rank: int, transposed: bool) -> list[Any]:
    """Arguments of the operator, at random."""

    def each(low: int, high: int) -> list[int]:
        return [chosen.randint(low, high) for _ in range(rank)]

    groups = chosen.choice([1, 1, 2, 3])
    most = chosen.choice([4, 4, 1])  # of the last: a kernel for each channel
    channels = [groups * chosen.randint(1, most) for _ in range(2)]
    stride, padding, dilation, kernel = each(1, 3), each(0, 2), each(1, 2), each(1, 3)
    limits = [max(one) - 1 for one in zip(stride, dilation, strict=True)]
    extra = [chosen.randint(0, one) if transposed else 0 for one in limits]
    first, second = channels if transposed else channels[::-1]
    weight = torch.randn(first, second // groups, *kernel)
    source = torch.randn(chosen.randint(1, 4), channels[0], *each(5, 9))
    settings = stride, padding, dilation, transposed, extra, groups
    grad = torch.randn_like(aten.convolution(source, weight, None, *settings))
    mask = chosen.choice([[True] * 3, [True] * 3, [False, True, False], [True, False, True], [False, True, True]])
    return [grad, source, weight, [channels[1]], *settings, mask]


@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_values_are_the_cpus(rank: int, transposed: bool) -> None:
    chosen = random.Random(31 * rank + transposed)
    torch.manual_seed(rank)
    for _ in range(8):
        args = _arguments(chosen, rank, transposed)
        assert _compare(*args) == 0, args[3:]


def _of(source: list[int], weight: list[int], groups: int = 1, padding: int = 1) -> list[Any]:
    settings = [1, 1], [padding, padding], [1, 1], False, [0, 0], groups
    x, kernel = torch.randn(source), torch.randn(weight)
    grad = torch.randn_like(aten.convolution(x, kernel, None, *settings))
    return [grad, x, kernel, [weight[0]], *settings, [True, True, True]]


@pytest.mark.parametrize("many", [None, 0], ids=["", "by row"])
@pytest.mark.parametrize(
    "args",
    [
        pytest.param(([4, 12, 12], [5, 4, 3, 3]), id="a product for each image"),
        pytest.param(([48, 3, 3], [40, 48, 3, 3]), id="a product over all images"),
        pytest.param(([6, 7, 7], [8, 3, 1, 1], 2, 0), id="single elements in groups"),
        pytest.param(([6, 8, 8], [6, 1, 3, 3], 6), id="a group for each channel"),
        pytest.param(([6, 8, 40], [6, 1, 3, 3], 6), id="a group for each channel, in long rows"),
    ],
)
def test_kernels_by_size_and_by_row(args: tuple[Any, ...], many: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way by which a kernel's gradient is made, and the same where patches would be large."""
    from torchport.backends.openvino import convolution_gradients

    batch = 3
    if many is not None:
        monkeypatch.setattr(convolution_gradients, "_MANY", many)
        batch = 5  # another graph than the one that is known
    assert _compare(*_of([batch, *args[0]], *args[1:])) == 0


def test_what_would_take_much_memory_is_left_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchport.backends.openvino import convolution_gradients

    monkeypatch.setattr(convolution_gradients, "_MOST", 1000)
    args = _of([5, 3, 9, 10], [4, 3, 3, 3])
    assert _compare(*args) == 1
    assert _compare(*args[:-1], [True, False, True]) == 0


@pytest.mark.parametrize("rank", [2, 3])
def test_gradients_of_averages(rank: int) -> None:
    """Windows that overlap, that are rounded up, that reach beyond the image, and what none reaches."""
    chosen = random.Random(rank)
    pool = getattr(aten, f"avg_pool{rank}d").default
    gradient = getattr(aten, f"avg_pool{rank}d_backward").default
    before = metrics.counter("Fallback")
    for _ in range(8):
        kernel = [chosen.randint(1, 4) for _ in range(rank)]
        stride = chosen.choice([[], [chosen.randint(1, 4) for _ in range(rank)]])
        padding = [chosen.randint(0, size // 2) for size in kernel]
        how = [kernel, stride, padding, *chosen.choices([False, True], k=2), chosen.choice([None, None, 3])]
        x = torch.randn(*chosen.choice([[], [3]]), chosen.randint(1, 3), *(chosen.randint(5, 9) for _ in range(rank)))
        grad = torch.randn_like(pool(x, *how))
        found = gradient(grad.to("port"), x.to("port"), *how).cpu()
        torch.testing.assert_close(found, gradient(grad, x, *how), msg=str(how))
    assert metrics.counter("Fallback") == before
