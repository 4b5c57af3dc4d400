"""A service of the test's own, and a backend that it can take to another process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from worker_engines import Troubled

import torchport
from torchport.backend.interface import Backend
from torchport.core.config import config
from torchport.worker.service import Service


@pytest.fixture
def eager_workers() -> Iterator[None]:
    """Workers that do not stand back: tests wait for them."""
    with config.override(compile_nice=0):
        yield


@pytest.fixture
def fresh(eager_workers: None) -> Iterator[Service]:
    """A service of its own, without a worker yet."""
    service = Service()
    yield service
    service.stop()


@pytest.fixture(scope="module")
def shared() -> Iterator[Service]:
    """A service whose worker is warm for the module's tests; they do it no harm."""
    service = Service()
    with config.override(compile_nice=0):
        yield service
    service.stop()


@pytest.fixture
def troubled() -> Iterator[Backend]:
    """The backend of ``worker_engines``."""
    torchport.register(Troubled)
    yield torchport.get_backend("troubled")
    torchport.registry.unregister("troubled")
