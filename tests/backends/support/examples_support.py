"""What the tests of the examples share: loading one, and training on it as on the CPU."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

import torchport
from torchport.testing import Plan, assert_conforms, conform, zoo

EXAMPLES = Path(__file__).parents[3] / "examples"
STEPS = 5


@contextmanager
def example(name: str) -> Iterator[ModuleType]:
    """The module of ``examples/NAME_backend.py``, whose backend is registered until the ``with`` block ends."""
    spec = importlib.util.spec_from_file_location(f"{name}_backend", EXAMPLES / f"{name}_backend.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        del sys.modules[spec.name]
        torchport.registry.unregister(name)


def train_perceptron(device: Any) -> Any:
    """Losses of five steps of SGD with momentum, and the parameters after them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = torch.randn(32, 6).to(device), torch.linspace(-1, 1, 96).view(32, 3).to(device)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return [step().item() for _ in range(STEPS)], [parameter.detach().cpu() for parameter in model.parameters()]


def train_model(name: str, device: Any) -> Any:
    """The same with AdamW for a model of :mod:`torchport.testing.zoo`."""
    made = zoo.build(name)
    model = made.model.train().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = zoo.moved(made.batch, device)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = made.loss(model, batch)
        loss.backward()
        optimizer.step()
        return loss

    return [step().item() for _ in range(STEPS)], [parameter.detach().cpu() for parameter in model.parameters()]


def trains_as_the_cpu_does(train: Any, device: torch.device) -> None:
    """Same losses and parameters, one computation per step, nothing on the host."""
    expected = train("cpu")
    before = {name: torchport.metrics.counter(name) for name in ("Execute", "Fallback")}
    torch.testing.assert_close(train(device), expected, rtol=1e-4, atol=1e-5)
    assert torchport.metrics.counter("Fallback") == before["Fallback"]
    assert torchport.metrics.counter("Execute") - before["Execute"] == STEPS
    losses = expected[0]
    assert losses[-1] < 0.99 * losses[0], "it learns nothing"


def operators_are_right(name: str, kind: str, operators: str) -> None:
    """PyTorch's samples of these operators (names with spaces between) on the class ``kind`` of an example."""
    pattern = "^(" + "|".join(operators.replace(".", r"\.").split()) + ")$"
    plan = Plan(
        f"{EXAMPLES / f'{name}_backend.py'}:{kind}",
        pattern,
        ("float32", "int64", "bool"),
        ("lazy",),
        ("forward", "backward", "noncontiguous", "edge"),
        samples=2,
    )
    report = conform(plan)
    assert_conforms(report)
    assert report.totals()["native"] > 150
