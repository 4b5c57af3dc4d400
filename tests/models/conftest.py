"""Fixtures of the model tests: each backend in turn, ``inductor`` and ``xla`` as slow tests."""

from __future__ import annotations

import os

import pytest
import torch

DEVICE = os.environ.get("TORCHPORT_TEST_DEVICE", "port")


def _backends() -> list[object]:
    if DEVICE == "cpu":
        return ["cpu"]
    import torchport

    names = [row.name for row in torchport.list_backends() if row.available]
    return ["reference", *(pytest.param(n, marks=pytest.mark.slow) for n in names if n in ("inductor", "xla"))]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" in metafunc.fixturenames:
        metafunc.parametrize("backend", _backends(), indirect=True)


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> str:
    """The name of the backend bound to ``port:0`` during the test."""
    if DEVICE != "cpu":
        import torchport

        torchport.use(request.param)
    return request.param


@pytest.fixture
def device(backend: str) -> torch.device:
    """The device under test."""
    return torch.device(DEVICE)
