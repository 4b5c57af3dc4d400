"""Well-known models on the device against CPU eager: values, gradients, training, and what a step costs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from torchport.testing import zoo

STEPS = 5


def _counts() -> dict[str, int]:
    import torchport

    torchport.sync()
    return {name: int(value) for name, value in torchport.metrics.snapshot()["counters"].items()}


WHOLE_LAYERS = {"lstm": 1}
"""Recurrent layers, which the CPU's kernels run between two computations; another runs their gradients."""


def _grown(before: dict[str, int], name: str) -> int:
    return _counts().get(name, 0) - before.get(name, 0)


def _fallbacks(before: dict[str, int]) -> dict[str, int]:
    return {name: _grown(before, name) for name in _counts() if name.startswith("aten::") and _grown(before, name)}


def _tolerance(backend: str) -> dict[str, float]:
    """The required rtol, with room for the rounding of values near zero."""
    return {"rtol": 1e-4, "atol": 1e-5} if backend != "reference" else {"rtol": 1e-6, "atol": 1e-6}


def _close(actual: torch.Tensor, expected: torch.Tensor, **tolerance: float) -> None:
    torch.testing.assert_close(actual.detach().cpu(), expected.detach(), **tolerance)


def _relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.cpu() - expected).norm() / expected.norm().clamp_min(1e-6)).item()


def _trainer(example: zoo.Example, device: Any) -> Any:
    """A training step as people write it: batch to the device, loss, backward, clip, AdamW."""
    model = example.model.to(device).train()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> torch.Tensor:
        batch = zoo.moved(example.batch, device)
        opt.zero_grad()
        loss = example.loss(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        return loss

    return step


@pytest.mark.parametrize("name", zoo.ZOO)
def test_forward_equals_the_cpu(device: torch.device, backend: str, name: str) -> None:
    example = zoo.build(name)
    example.model.eval()
    with torch.no_grad():
        expected = example.forward(example.model, example.batch)
        model = example.model.to(device)
        actual = example.forward(model, zoo.moved(example.batch, device))
    assert actual.device.type == device.type
    _close(actual, expected, **_tolerance(backend))


@pytest.mark.parametrize("name", zoo.ZOO)
def test_every_gradient_equals_the_cpu(device: torch.device, backend: str, name: str) -> None:
    here, there = zoo.build(name), zoo.build(name)
    expected = here.loss(here.model.train(), here.batch)
    expected.backward()
    there.model.train().to(device)
    actual = there.loss(there.model, zoo.moved(there.batch, device))
    actual.backward()
    _close(actual, expected, **_tolerance(backend))
    compared = 0
    for (label, p), q in zip(there.model.named_parameters(), here.model.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), label
        if p.grad is not None and q.grad is not None:
            compared += 1
            tiny = q.grad.norm() < 1e-6
            assert _relative(p.grad, q.grad) <= (1.0 if tiny else 1e-3), label
    assert compared > 5


@pytest.mark.parametrize("name", zoo.ZOO)
def test_training_gives_the_losses_of_the_cpu(device: torch.device, name: str) -> None:
    expected = [step.item() for step in _losses(name, "cpu")]
    actual = [step.item() for step in _losses(name, device)]
    assert actual == pytest.approx(expected, rel=1e-3)
    assert len(set(expected)) == STEPS


def _losses(name: str, device: Any) -> list[torch.Tensor]:
    step = _trainer(zoo.build(name), device)
    return [step() for _ in range(STEPS)]


@pytest.mark.compiled
@pytest.mark.parametrize("name", zoo.ZOO)
def test_a_steady_step_is_one_execution_and_no_compile(device: torch.device, name: str) -> None:
    if device.type == "cpu":
        pytest.skip("counters belong to the port device; this run is on the CPU")
    start = _counts()
    example = zoo.build(name)
    step = _trainer(example, device)
    for _ in range(3):
        step()
    steady = _counts()
    loss = step()
    for _ in range(STEPS - 1):
        loss = step()
    assert _grown(steady, "UncachedCompile") == 0
    assert _grown(steady, "Execute") == STEPS * (1 + example.reads + 2 * WHOLE_LAYERS.get(name, 0))
    assert not _fallbacks(start)
    assert _grown(start, "Fallback") == 0
    before = _counts()
    assert loss.item() == loss.item()
    assert _grown(before, "Execute") == 0


@pytest.mark.compiled
@pytest.mark.parametrize("name", zoo.ZOO)
def test_steady_inference_is_one_execution_and_no_compile(device: torch.device, name: str) -> None:
    if device.type == "cpu":
        pytest.skip("counters belong to the port device; this run is on the CPU")
    start = _counts()
    example = zoo.build(name)
    model = example.model.eval().to(device)

    def answer() -> int:
        with torch.no_grad():
            return int(example.forward(model, zoo.moved(example.batch, device)).argmax().item())

    first = [answer() for _ in range(3)]
    steady = _counts()
    assert {answer() for _ in range(STEPS)} == set(first)
    assert _grown(steady, "UncachedCompile") == 0
    assert _grown(steady, "Execute") == STEPS * (1 + example.reads + WHOLE_LAYERS.get(name, 0))
    assert not _fallbacks(start)
