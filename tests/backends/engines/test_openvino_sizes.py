"""``openvino``'s models for sizes that vary: each operator at many sizes, by one computation, with the CPU's values."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import torchport
from torchport import metrics
from torchport.backend.compiler import computations
from torchport.backend.sizes import families as known
from torchport.core.config import config

pytest.importorskip("openvino")

SIZES = [(3, 9), (5, 12), (4, 13), (7, 10), (5, 24), (12, 6)]


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The engine, to which no sizes are known."""
    monkeypatch.setattr(known, "families", type(known.families)())
    monkeypatch.setattr(known, "_bodies", type(known._bodies)())
    with config.override(cache="off", tiers="off"):
        computations.clear()
        torchport.use("openvino")
        yield
    torchport.use("reference")


def _padded() -> list[bool]:
    """Of each computation for several sizes, whether it is for a bucket."""
    return [one.padding is not None for family in known.families.values() for one in family.made]


def _inputs(batch: int, length: int) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(17 * batch + length)
    return {
        "x": torch.randn((batch, length, 4), generator=made),
        "y": torch.randn((batch, length, 4), generator=made),
        "ids": torch.randint(0, 7, (batch, length), generator=made),
        "table": torch.randn((7, 4), generator=torch.Generator().manual_seed(1)),
        "w": torch.randn((3, 4, 3), generator=torch.Generator().manual_seed(2)),
    }


def _compare(function: Callable[..., Any]) -> None:
    for batch, length in SIZES:
        inputs = _inputs(batch, length)
        wanted = function(**inputs)
        found = function(**{name: value.to("port") for name, value in inputs.items()})
        several = isinstance(wanted, (tuple, list))
        for one, other in zip(wanted if several else [wanted], found if several else [found], strict=True):
            torch.testing.assert_close(other.cpu(), one, rtol=1e-4, atol=1e-5)


def _gradients(x: torch.Tensor, w: torch.Tensor, step: int) -> Any:
    made = functional.conv1d(x, w, stride=step, padding=1).sin()
    settings = [3], [step], [1], [1], False, [0], 1, [True, True, True]
    return torch.ops.aten.convolution_backward(made, x, w, *settings)


ONE = {
    "view": lambda x, **_: x.view(x.shape[0] * x.shape[1], 4).t().reshape(4, x.shape[0], -1),
    "heads": lambda x, **_: x.view(*x.shape[:2], 2, 2).transpose(1, 2).reshape(-1, x.shape[1], 2) * 2,
    "expand": lambda x, **_: x[:, :1].expand(-1, x.shape[1], -1) * x,
    "slice": lambda x, **_: (x[:, 1:-1] * 2, x[:, -2:] + 1, x[1:, : x.shape[1] - 2].sin()),
    "select": lambda x, **_: (x[:, -1] + 1, x[0] * 2),
    "cat": lambda x, y, **_: (torch.cat([x, y], 1), torch.stack([x, y], 2), torch.cat([x.flatten(), y.flatten()])),
    "flip": lambda x, **_: x.flip(1) + x.roll(2, 1) + x.roll(-3, 1),
    "roll flat": lambda x, **_: x.roll(1) * 2,
    "filled": lambda x, **_: (
        torch.zeros_like(x) + x, x.new_full(x.shape[1:], 3.0), torch.ones_like(x, dtype=torch.int64)
    ),
    "size as a number": lambda x, **_: (x * x.shape[1] - x.shape[0], torch.full_like(x, x.shape[1])),
    "arange": lambda x, ids, **_: (
        torch.arange(x.shape[1], device=x.device).float() + ids, torch.arange(1, x.shape[1] + 1, device=x.device)
    ),
    "eye": lambda x, **_: torch.eye(x.shape[1], device=x.device) + x[:, :, :1],
    "triangles": lambda x, **_: (x.tril(), x.triu(1), (x @ x.transpose(1, 2)).tril(-1)),
    "diagonal": lambda x, **_: (x.diagonal(), x.diagonal(1, 1, 2), x.diagonal(-2, 0, 1)),
    "unfold": lambda x, **_: x.unfold(1, 3, 1) * 2,
    "repeat": lambda x, **_: x.repeat(2, 1, 3),
    "softmax": lambda x, **_: (x.softmax(1), x.log_softmax(0), x.logsumexp(1)),
    "sums": lambda x, **_: (x.sum(1), x.mean(), x.amax(0), x.var(1), x.std((0, 1)), x.norm(dim=1), x.prod(1)),
    "places": lambda x, **_: (x.argmax(1), *x.max(0), x.argmin(), *x.sort(1), *x.median(1)),
    "scans": lambda x, **_: (x.cumsum(1), x[:, :5].cumprod(1)),
    "norm": lambda x, **_: functional.layer_norm(x, (4,)),
    "embedding": lambda ids, table, **_: functional.embedding(ids, table) * 2,
    "rows": lambda ids, table, x, **_: (table[ids], x.gather(1, (ids % 2)[..., None].expand(-1, -1, 4))),
    "into places": lambda x, y, ids, **_: (x.index_add(1, ids[0] % 2, y), x.scatter_add(1, ids[..., None] % 2, y)),
    "classes": lambda x, ids, **_: functional.cross_entropy(x.flatten(0, 1), ids.flatten() % 4),
    "one hot": lambda ids, **_: functional.one_hot(ids, 7).float(),
    "products": lambda x, y, **_: (x @ y.transpose(1, 2), torch.addmm(x[0], x[1] @ x[1].t(), x[2 % 2])),
    "attention": lambda x, y, **_: functional.scaled_dot_product_attention(x[:, None], y[:, None], x[:, None]),
    "causal": lambda x, **_: functional.scaled_dot_product_attention(*[x[:, None]] * 3, is_causal=True),
    "convolution": lambda x, w, **_: functional.conv1d(x.transpose(1, 2), w, padding=1),
    "gradients of a convolution": lambda x, w, **_: _gradients(x.transpose(1, 2), w, 1),
    "gradients of a convolution with steps": lambda x, w, **_: _gradients(x.transpose(1, 2), w, 2),
    "pools": lambda x, **_: (functional.max_pool2d(x[:, None], 2), functional.max_pool1d(x.transpose(1, 2), 2)),
    "scattered": lambda x, y, **_: (
        torch.slice_scatter(x, y[:, 1:3], 1, 2, 4), torch.select_scatter(x, y[:, 0], 1, -1)
    ),
    "where": lambda x, y, ids, **_: torch.where((ids > 3)[..., None], x, y).masked_fill(x < -1, -1.0),
    "pad": lambda x, **_: functional.pad(x, (0, 0, 1, 2), value=0.5),
    "64 bits": lambda ids, **_: (ids.flatten(), ids[:, 1:], ids.t().contiguous(), torch.cat([ids, ids], 1)),
}  # fmt: skip


@pytest.mark.parametrize("name", ONE)
def test_one_model_computes_every_size(name: str) -> None:
    before = metrics.counter("NotSymbolic"), metrics.counter("OtherSizes")
    _compare(ONE[name])
    assert metrics.counter("NotSymbolic") == before[0]
    assert metrics.counter("OtherSizes") - before[1] >= 3
    assert not any(_padded())


def test_what_has_no_symbols_is_padded_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    """What averages are divided by is found out when the graph is compiled."""
    with caplog.at_level(logging.INFO, "torchport.compile"):
        _compare(lambda x, **_: functional.avg_pool2d(x[:, None], (2, 2), ceil_mode=True).sum() + x.sin())
    said = [record.getMessage() for record in caplog.records]
    assert any("there is no code with symbols" in one or "no code for several" in one for one in said), said
    assert any("aten.avg_pool2d" in one for one in said), said


def test_strides_of_results_are_those_of_each_size() -> None:
    for batch, length in SIZES:
        x = torch.randn(batch, length, 4)
        found, wanted = (one.transpose(1, 2).sin() for one in (x.to("port"), x))
        assert found.stride() == wanted.stride()
        torch.testing.assert_close(found.cpu(), wanted)


def test_weights_are_bound_once_for_all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model with constants serves every size, and one of them may change afterwards."""
    from torchport.backends.openvino import steady

    bound: list[int] = []
    made = steady.SteadyArguments.__init__

    def cheap(self: Any, bind: Any, cost: float) -> None:
        def counted(constants: Any) -> Any:
            bound.append(len(constants))
            return bind(constants)

        made(self, counted, 0.0)

    monkeypatch.setattr(steady.SteadyArguments, "__init__", cheap)
    host = nn.Sequential(nn.Linear(4, 160), nn.GELU(), nn.Linear(160, 160))
    device = copy.deepcopy(host).to("port")
    with torch.no_grad():
        for _ in range(2):
            for length in (9, 12, 10, 14, 12, 17):
                x = torch.randn(2, length, 4)
                torch.testing.assert_close(device(x.to("port")).cpu(), host(x), rtol=1e-4, atol=1e-5)
            host[2].weight.mul_(1.5)
            device[2].weight.mul_(1.5)
    assert bound


class Convolutions(nn.Module):
    """A small conv net over images."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.AvgPool2d(3, 2, 1), nn.AdaptiveAvgPool2d(1),
            nn.Flatten(), nn.Linear(4, 5),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, 3, 8, 8] to [batch, 5]."""
        return self.layers(x)


def test_a_conv_net_trains_on_batches_of_many_sizes() -> None:
    """A step is one graph. Compiled are the first step, one of the others, and those for batches up to 15 and from 16:
    PyTorch chooses a kernel of the CPU's by that."""
    torch.manual_seed(4)
    host = Convolutions()
    device = copy.deepcopy(host).to("port")
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (host, device)]
    names = "NotSymbolic", "UncachedCompile", "aten::convolution_backward", "aten::avg_pool2d_backward"
    before = [metrics.counter(name) for name in names]
    for batch in (12, 9, 14, 11, 15, 3, 33, 40):
        x, labels = torch.randn(batch, 3, 8, 8), torch.randint(5, (batch,))
        losses: list[torch.Tensor] = []
        for model, optimizer, place in zip((host, device), optimizers, ("cpu", "port"), strict=True):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x.to(place)), labels.to(place))
            loss.backward()
            optimizer.step()
            losses.append(loss.detach().cpu())
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-5)
    assert metrics.counter("NotSymbolic") == before[0]
    assert metrics.counter("UncachedCompile") - before[1] <= 4
    assert [metrics.counter(name) for name in names[2:]] == before[2:]
    assert not any(_padded())
