"""Padding for several sizes where what stands beyond the true size could be seen: values are the CPU's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

import torchport
from torchport import metrics
from torchport.backend.compiler import computations
from torchport.backend.registry import registry
from torchport.backend.sizes import families as known
from torchport.backend.sizes import padded
from torchport.backend.sizes.guards import NotSymbolic
from torchport.core.config import config


def _refused(*_: Any) -> Any:
    raise NotSymbolic("not today")


Inputs = Callable[[int, int], Sequence[torch.Tensor]]


@pytest.fixture(params=["xla", "openvino"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """An engine that pads, to which no sizes are known; ``openvino`` as if it took no graph with symbols."""
    if not registry.get(request.param).is_available():
        pytest.skip(f"{request.param} is not installed")
    monkeypatch.setattr(known, "families", type(known.families)())
    if request.param == "openvino":
        monkeypatch.setattr(type(registry.get("openvino")), "preprocess_symbolic", _refused)
    with config.override(cache="off", tiers="off"):
        computations.clear()
        torchport.use(request.param)
        yield request.param
    torchport.use("reference")


def _same(run: Callable[..., Any], inputs: Inputs, sizes: Sequence[tuple[int, int]], tolerance: float = 1e-5) -> int:
    """Compare with the CPU at all sizes; how many of them had a computation for several."""
    before = metrics.counter("OtherSizes")
    for batch, length in sizes:
        torch.manual_seed(batch + length)
        given = inputs(batch, length)
        want, got = run(*given), run(*[one.to("port") for one in given])
        torch.testing.assert_close(got.cpu(), want, rtol=tolerance, atol=tolerance)
    return metrics.counter("OtherSizes") - before


_SIZES = [(3, 9), (5, 12), (4, 15), (7, 10)]


def _gradient(loss: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def run(leaf: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        made = leaf.detach().clone().requires_grad_()
        (found,) = torch.autograd.grad(loss(made, *others), [made])
        return found

    return run


def test_rows_that_are_padded_in_another_order_are_not_put_together(engine: str) -> None:
    """``[B, T]`` and ``[T, B]``, both flattened, have as many rows, and others at each place of what is padded."""
    _same(
        lambda x, y: functional.cross_entropy(x.flatten(0, 1), y.flatten()),
        lambda b, t: (torch.randn(b, t, 5), torch.randint(0, 5, (t, b))),
        _SIZES,
    )


def test_what_is_no_number_beyond_the_true_size_does_not_count(engine: str) -> None:
    """Rows of zeros divided by their sum are none: they are multiplied by a gradient of zero."""

    def normed(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x / x.sum(-1, keepdim=True), (6,), weight).square().sum()

    def convolved(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return functional.conv2d((x / x.sum(-1, keepdim=True))[:, None, :3, :, None].flatten(3), weight).square().sum()

    assert _same(_gradient(normed), lambda b, t: (torch.rand(6), torch.rand(b, t, 6) + 0.1), _SIZES, 1e-4)
    _same(_gradient(convolved), lambda b, t: (torch.rand(2, 1, 2, 2), torch.rand(b, 4, 6) + 0.1), _SIZES, 1e-4)


def test_indices_that_are_computed_beyond_the_true_size_write_nothing(engine: str) -> None:
    """Zeros less one are no row of a table."""
    _same(
        _gradient(lambda table, ids: functional.embedding(ids - 1, table).square().sum()),
        lambda b, t: (torch.randn(7, 4), torch.randint(1, 8, (b, t))),
        _SIZES,
    )
    _same(
        lambda ids: torch.zeros(*ids.shape, 5, device=ids.device).scatter(2, (ids - 1)[..., None], 1.0),
        lambda b, t: (torch.randint(1, 6, (b, t)),),
        _SIZES,
    )


_NUMBERS = [(torch.float16, 1001, 1e-3), (torch.bfloat16, 1001, 1e-4), (torch.float64, 1000003, 1e-14)]


@pytest.mark.parametrize(("dtype", "factor", "tolerance"), _NUMBERS)
def test_a_number_that_is_a_size_is_as_exact_as_on_the_cpu(
    engine: str, dtype: torch.dtype, factor: int, tolerance: float
) -> None:
    """A product of sizes may be more than float16 holds, bfloat16 has no 257, and float32 not every large one."""
    if engine == "openvino" and dtype is torch.float64:
        pytest.skip("openvino computes in float32")
    sizes = [(3, 257), (5, 301), (4, 399), (7, 333)]

    def inputs(batch: int, length: int) -> Sequence[torch.Tensor]:
        return [(torch.rand(batch, length) * 2e4 + 1e4).to(dtype)]

    divided = _same(lambda x: x / (x.shape[1] * factor), inputs, sizes, tolerance)
    multiplied = _same(lambda x: x * 1e-3 * x.shape[1], inputs, sizes, tolerance)
    assert (divided and multiplied) or engine == "openvino"  # which computes it in another way


def test_more_rows_than_float32_counts_are_not_masked(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which are true ones is told by comparing floats."""
    monkeypatch.setattr(padded, "_EXACT", 8)
    sizes = [(9, 1), (12, 1), (15, 1), (10, 1)]
    assert not _same(lambda x: x.cumsum(0).sum(), lambda b, _: (torch.randn(b, 3),), sizes)
    monkeypatch.setattr(padded, "_EXACT", 1 << 24)
    assert _same(lambda x: x.cumsum(0).sum() + 1, lambda b, _: (torch.randn(b, 3),), sizes)


def test_negative_places_in_several_dimensions_count_from_the_end(engine: str) -> None:
    """On ``openvino`` they were places in another row, whatever the sizes."""
    _same(
        lambda x, i: x[torch.arange(x.shape[0], device=x.device) - 2, i],
        lambda b, t: (torch.randn(b, t, 3), torch.randint(-t, t, (b,))),
        _SIZES,
    )
