"""``examples/pjrt_backend.py`` on the PJRT client that JAX brings: it trains, and says what the hardware lacks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from examples_support import EXAMPLES, example, train_model, train_perceptron, trains_as_the_cpu_does

import torchport

pytest.importorskip("jax", reason="the example runs on JAX: pip install 'torchport[xla]'")


@pytest.fixture(scope="module")
def module() -> Iterator[ModuleType]:
    with example("pjrt") as found:
        yield found


@pytest.fixture
def device(module: ModuleType) -> torch.device:
    return torchport.device("pjrt")


def test_a_perceptron_trains(device: torch.device) -> None:
    trains_as_the_cpu_does(train_perceptron, device)


@pytest.mark.slow
def test_gpt2_trains(device: torch.device) -> None:
    trains_as_the_cpu_does(lambda place: train_model("gpt2", place), device)


def test_dtypes_that_the_hardware_lacks_are_the_hosts(device: torch.device) -> None:
    wide = torch.linspace(0, 1, 3, dtype=torch.float64)
    before = torchport.metrics.counter("Fallback")
    torch.testing.assert_close((wide.to(device) * 2).cpu(), wide * 2)
    assert torchport.metrics.counter("Fallback") == before + 1
    with torchport.config.override(fallback="error"), pytest.raises(torchport.UnsupportedOp, match="float64"):
        _ = wide.to(device) * 3


def test_operators_that_the_compiler_lacks_have_a_reason(device: torch.device) -> None:
    x = torch.tensor([2.0, 3.0, 1.0])
    assert (x.to(device) + 1).sort().values.tolist() == [2, 3, 4]
    with (
        torchport.config.override(fallback="error"),
        pytest.raises(torchport.UnsupportedOp, match="the plugin's compiler has no sort"),
    ):
        x.to(device).sort()


def test_random_numbers_are_those_of_every_backend(device: torch.device) -> None:
    torch.manual_seed(3)
    drawn = torch.rand(5, device=device).cpu()
    torch.manual_seed(3)
    torch.testing.assert_close(torch.rand(5, device=torchport.device("reference")).cpu(), drawn, rtol=0, atol=0)


def test_a_plugin_that_is_not_there_is_named() -> None:
    code = (
        "import pjrt_backend, torchport; backend = pjrt_backend.PjrtBackend()\n"
        "assert not backend.is_available(); print(backend.unavailable_reason())"
    )
    for given, said in (
        ({"PJRT_PLUGIN": "/nowhere/plugin.so", "PJRT_PLATFORM": "chip"}, "/nowhere/plugin.so, which is no file"),
        ({"PJRT_PLUGIN": sys.executable}, "PJRT_PLATFORM is not set"),
    ):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(EXAMPLES), str(EXAMPLES.parent))), **given}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert said in done.stdout
