"""Fixtures of the backend tests: the device under test, bound to each backend in turn."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

pytest.register_assert_rewrite("everyday_support", "fakes", "native_support")

from everyday_support import DEVICE, ON_PORT  # noqa: E402  (after the line above, so that its assertions explain)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "everywhere: cheap enough to run on every backend by default")


def _backends() -> list[str]:
    if not ON_PORT:
        return ["cpu"]
    import torchport

    installed = [row.name for row in torchport.list_backends() if row.available and row.name in ("inductor", "xla")]
    return ["reference", *installed]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" not in metafunc.fixturenames:
        return
    slow = () if any(mark.name == "everywhere" for mark in metafunc.definition.iter_markers()) else (pytest.mark.slow,)
    params = [pytest.param(name, marks=slow if name != "reference" else ()) for name in _backends()]
    metafunc.parametrize("backend", params, indirect=True)


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> str:
    """The name of the backend bound to ``port:0`` during the test."""
    if ON_PORT:
        import torchport

        torchport.use(request.param)
    return request.param


@pytest.fixture
def device(backend: str) -> Iterator[torch.device]:
    """The device under test."""
    yield torch.device(DEVICE)
    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Nothing that torch.compile remembers, and counters at zero."""
    from torchport import metrics

    torch.compiler.reset()
    metrics.reset()
    yield
    torch.compiler.reset()


@pytest.fixture(params=["cpu", "port"])
def place(request: pytest.FixtureRequest, backend: str) -> torch.device:
    """Where a compiled model's tensors are: on the CPU, or on the device of the backend under test."""
    return torch.device(request.param)
