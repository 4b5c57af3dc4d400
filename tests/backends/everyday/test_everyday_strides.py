"""Strides are those that the CPU's kernels give, those of dimensions of size 1, too: PyTorch branches on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch.nn import functional

import torchport

SHAPES = ((1, 3, 4), (2, 1, 4), (2, 3, 1), (1, 1, 4), (2, 3, 1, 1), (1, 3, 4, 5))
OPERATORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "add": lambda x: x + 1,
    "relu": torch.relu,
    "gelu": functional.gelu,
    "where": lambda x: torch.where(x > 0, x, -x),
    "empty_like": torch.empty_like,
    "zeros_like": torch.zeros_like,
    "sort": lambda x: x.sort(-1)[0],
    "flip": lambda x: x.flip(0),
    "layer_norm": lambda x: functional.layer_norm(x, x.shape[-1:]),
    "index": lambda x: x[torch.zeros(1, dtype=torch.long, device=x.device)],
}


def _views(x: torch.Tensor) -> Iterator[torch.Tensor]:
    yield x
    yield x.transpose(0, -1)
    yield x.transpose(1, 2)
    yield x[..., ::2]
    yield x.transpose(0, -1)[:1]
    yield x.diagonal(0, 0, 1)
    yield x.transpose(0, -1) + 1


@pytest.mark.parametrize("name", OPERATORS)
def test_strides_are_the_cpus(name: str) -> None:
    torchport.use("reference")
    operator = OPERATORS[name]
    for shape in SHAPES:
        x = torch.arange(float(torch.tensor(shape).prod())).reshape(shape)
        for ours, theirs in zip(_views(x.to("port")), _views(x), strict=True):
            assert ours.stride() == theirs.stride()
            found, expected = operator(ours), operator(theirs)
            assert found.stride() == expected.stride(), (shape, ours.shape, ours.stride())
            if name != "empty_like":
                torch.testing.assert_close(found.cpu(), expected)


def test_what_is_channels_last_is_so_on_the_device() -> None:
    """Of this sum, which dimension is innermost decides what pooling gives: strides of more than size 1 differ."""
    torchport.use("reference")
    x = torch.rand(2, 3, 1, 1)
    expected = (x.transpose(0, -1) + 1, functional.max_pool2d(x.transpose(0, -1) + 1, 1))
    ours = x.to("port").transpose(0, -1) + 1
    assert (ours.stride(), functional.max_pool2d(ours, 1).stride()) == tuple(one.stride() for one in expected)


def test_large_elementwise_results_too() -> None:
    torchport.use("reference")
    x = torch.rand(1, 64, 4, 80)
    for one in (x.transpose(1, 2), x.permute(3, 0, 2, 1)):
        ours = x.to("port").transpose(1, 2) if one.shape[0] == 1 else x.to("port").permute(3, 0, 2, 1)
        assert torch.relu(ours).stride() == torch.relu(one).stride()
        assert (ours + 1).stride() == (one + 1).stride()
