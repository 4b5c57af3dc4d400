"""Reference counts: what is held is told from what is not, whatever an interpreter counts for its names and calls."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import torchport
from torchport.core.references import holders
from torchport.frontend.device import shims

PROGRAM = """
import sys
extra, real = {extra}, sys.getrefcount
sys.getrefcount = lambda value: real(value) + extra
import torch, torchport
from torchport.native.twins import twins
from torchport.trace.threads import threads
from torchport.trace.wrapping import unwrap
torchport.use("reference")
x = torch.arange(6.0, device="port")
assert twins.in_cpp() == []

kept, pools = [], []
for step in range(4):
    parts = torch.split(x + step, 3)
    summed = (x * 2).sum()
    node = threads.of(0).cursor
    pools.append((id(node.ready), id(node.parent.ready)))
    (held,) = threads.of(0).live()[:1] if step == 3 else (None,)
    torchport.sync()
    kept.append(parts[0] if step % 2 else summed)
    del parts, summed
print([one.tolist() for one in kept], len({{first for first, _ in pools}}), len({{second for _, second in pools}}))

net = torch.nn.Linear(3, 2).to("port")
net(torch.ones(4, 3, device="port")).sum().backward()
watched = net.bias.grad
def wrappers():
    return [net.weight.grad._cdata, net.bias.grad._cdata]
before = wrappers()
twins.own_gradients(list(net.parameters()))
print([was == now for was, now in zip(before, wrappers())], watched is net.bias.grad)
"""


@pytest.mark.slow
def test_an_interpreter_that_counts_otherwise_finds_the_same() -> None:
    """One that borrows references counts less, one whose calls hold more counts more."""
    said = []
    for extra in (-1, 0, 3):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", PROGRAM.format(extra=extra)],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "TORCHPORT_NATIVE": "0"},
        )
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
    assert said[0] == said[1] == said[2]
    assert said[1].splitlines()[1] == "[False, True] True"


def test_a_list_and_names_hold_what_they_hold() -> None:
    values = [object() for _ in range(3)]
    held, again = values[1], [values[2], values[2]]
    assert holders(values) == [0, 1, 2]
    del held, again
    assert holders(values) == [0, 0, 0]


def test_a_gradient_of_the_device_is_counted_as_the_one_measured(device: torch.device) -> None:
    parameter = torch.ones(2, 3, device=device, requires_grad=True)
    (torch.ones(4, 2, device=device) @ parameter).sum().backward()
    assert shims._gradient_counts(parameter) == shims._gradient_alone()
    held = parameter.grad
    counts = shims._gradient_counts(parameter)
    assert counts[0] == shims._gradient_alone()[0] + 1
    del held
    view = parameter.grad.view(-1)  # type: ignore[union-attr]
    assert shims._gradient_counts(parameter) > shims._gradient_alone()
    del view
    assert shims._gradient_counts(parameter) == shims._gradient_alone()


@pytest.fixture
def device() -> torch.device:
    """The device, bound to the backend that needs nothing."""
    torchport.use("reference")
    return torch.device("port", 0)
