"""What the tests of torch.compile share."""

from __future__ import annotations

import pytest
import torch

import torchport


@pytest.fixture
def reference() -> None:
    """The backend ``reference``, and a Dynamo that has compiled nothing."""
    torchport.use("reference")
    torch._dynamo.reset()
