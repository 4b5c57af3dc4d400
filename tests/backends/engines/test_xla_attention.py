"""Attention on XLA's CPU platform: the CPU's operator, at once and compiled, with gradients and without."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from torchport.backends.xla import XlaBackend

backend = XlaBackend()
pytestmark = [
    pytest.mark.skipif(not backend.is_available(), reason=backend.unavailable_reason()),
    pytest.mark.skipif(
        backend.is_available() and backend.devices()[0].type != "cpu", reason="an accelerator has attention written out"
    ),
]

_START = """
import torch, torchport
from torch.nn.functional import scaled_dot_product_attention as attention
torchport.use("xla")
"""


def _runs(program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _START + program + "\nprint('ended')"],
        capture_output=True, text=True, check=False, timeout=300, env={**os.environ, "TORCHPORT_TIERS": "auto"},
    )  # fmt: skip
    assert done.stdout.strip() == "ended", done.stderr[-3000:]


@pytest.mark.parametrize("masked", [False, True])
def test_at_once_it_is_bit_by_bit_the_cpus_and_compiled_it_is_close(masked: bool) -> None:
    _runs(f"""
def run(device):
    torch.manual_seed(0)
    given = [torch.randn(2, 3, 9, 4).to(device).requires_grad_() for _ in range(3)]
    mask = torch.randn(9, 9).to(device) if {masked} else None
    made = attention(*given, attn_mask=mask, is_causal=not {masked})
    made.square().sum().backward()
    return [made.detach().cpu(), *(one.grad.cpu() for one in given)]
wanted, found = run("cpu"), run("port")
assert all(torch.equal(one, other) for one, other in zip(found, wanted)), "at once"
before = torchport.metrics.counter("UncachedCompile") + torchport.metrics.counter("CachedCompile")
torchport.config.tiers = "off"
for one, other in zip(run("port"), wanted):
    torch.testing.assert_close(one, other)
assert torchport.metrics.counter("UncachedCompile") + torchport.metrics.counter("CachedCompile") > before
""")


def test_gradients_of_its_gradients_need_it_written_out_as_on_the_cpu() -> None:
    _runs("""
from torch.nn.attention import SDPBackend, sdpa_kernel
def run(device):
    torch.manual_seed(0)
    given = [torch.randn(2, 3, 9, 4, dtype=torch.float64).to(device).requires_grad_() for _ in range(3)]
    (grad,) = torch.autograd.grad(attention(*given).square().sum(), given[:1], create_graph=True)
    return torch.autograd.grad(grad.square().sum(), given[:1])[0].cpu()
for device in ("cpu", "port"):
    try:
        run(device)
    except RuntimeError as error:
        assert "derivative" in str(error), error
    else:
        raise AssertionError(device)
with sdpa_kernel(SDPBackend.MATH):
    torch.testing.assert_close(run("port"), run("cpu"))
""")
