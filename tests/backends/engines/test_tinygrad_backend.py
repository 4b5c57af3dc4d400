"""``examples/tinygrad_backend.py``: models train on tinygrad as on the CPU. It compiles some hundred kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from examples_support import example, train_model, train_perceptron, trains_as_the_cpu_does

import torchport

pytest.importorskip("tinygrad", reason="the example runs on tinygrad: pip install tinygrad")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def device() -> Iterator[torch.device]:
    with example("tinygrad") as module:
        if reason := module.TinygradBackend().unavailable_reason():
            pytest.skip(reason)
        yield torchport.device("tinygrad")


def test_a_perceptron_trains(device: torch.device) -> None:
    trains_as_the_cpu_does(train_perceptron, device)


def test_gpt2_trains(device: torch.device) -> None:
    trains_as_the_cpu_does(lambda place: train_model("gpt2", place), device)


def test_resnet_trains(device: torch.device) -> None:
    trains_as_the_cpu_does(lambda place: train_model("resnet", place), device)


def test_results_of_one_call_stay_when_the_next_has_come(device: torch.device) -> None:
    """The engine writes to the same memory in every call that it replays, so values that are kept have to be copies."""
    x = torch.linspace(-1, 1, 8)
    kept = [x.to(device) * 2 + step for step in range(5) for _ in (torchport.sync(),)]
    torchport.sync()
    for step, value in enumerate(kept):
        torch.testing.assert_close(value.cpu(), x * 2 + step)
