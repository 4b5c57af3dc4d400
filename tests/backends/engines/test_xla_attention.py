"""Attention on ``xla``: by the CPU's fused operator where it is interpreted at once, also under gradients."""

from __future__ import annotations

import pytest
import torch
from native_support import compiles, with_libraries
from torch.nn.functional import scaled_dot_product_attention as attend

import torchport
from torchport.backends.xla import XlaBackend
from torchport.core import metrics
from torchport.core.config import config

backend = XlaBackend()
pytestmark = [
    pytest.mark.skipif(not backend.is_available(), reason=backend.unavailable_reason()),
    pytest.mark.skipif(
        backend.is_available() and backend.devices()[0].type != "cpu",
        reason="an accelerator's operators are not interpreted on the host",
    ),
]
FUSED = "ScaledDotProductFlashAttentionForCpuBackward0"


def _heads(device: str) -> list[torch.Tensor]:
    return [torch.arange(48.0).add(at).sin().reshape(1, 2, 6, 4).to(device).requires_grad_() for at in range(3)]


def _forward(heads: list[torch.Tensor], masked: bool) -> torch.Tensor:
    mask = (torch.arange(36.0).reshape(6, 6) % 5 > 1).to(heads[0].device) if masked else None
    return attend(*(x * 1.5 for x in heads), attn_mask=mask, is_causal=not masked)


def _gradients(heads: list[torch.Tensor], y: torch.Tensor) -> list[torch.Tensor]:
    y.square().sum().backward()
    return [x.grad.cpu() for x in heads if x.grad is not None]


@pytest.mark.parametrize("library", [False, pytest.param(True, marks=compiles)], ids=["Python", "C++"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("backward", ["interpreted", "compiled"])
def test_attention_has_gradients_in_either_tier(library: bool, masked: bool, backward: str) -> None:
    wanted = _heads("cpu")
    gradients = _gradients(wanted, _forward(wanted, masked))

    def check() -> None:
        torchport.use("xla")
        with config.override(tiers="auto", compile_after=1e9):
            for _ in range(6):  # the first are noted, operator by operator
                heads = _heads("port")
                y = _forward(heads, masked)
                again = y + 0  # computed, and held
                assert y.grad_fn is not None
                named = y.grad_fn.name()
                assert again.tolist()  # read, so that nothing is pending
                flushes = metrics.counter("Flush")
                with config.override(tiers="auto" if backward == "interpreted" else "off"):
                    found = _gradients(heads, again)
                assert (metrics.counter("Flush") > flushes) == (backward == "compiled")
                assert len(found) == 3
                for one, other in zip(found, gradients, strict=True):
                    torch.testing.assert_close(one, other)
            assert named == FUSED

    if library:
        with with_libraries():
            check()
    else:
        check()
