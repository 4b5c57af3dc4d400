"""``torch.func`` over functions that write to views: their gradients are those of the part that was written."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchport
from torchport.core.config import config


def _copied(t: torch.Tensor) -> torch.Tensor:
    u = t.clone()
    u[1:].copy_(t[:-1])
    return (u * t).sum()


def _multiplied(t: torch.Tensor) -> torch.Tensor:
    u = t.clone()
    u[1:].mul_(t[:-1])
    return (u * t).sum()


def _assigned(t: torch.Tensor) -> torch.Tensor:
    u = t * 1
    u[2:] = t[:2] * t[0]
    return (u * t * t).sum()


def _of_matrices(t: torch.Tensor) -> torch.Tensor:
    v = t.clone()
    v[1:].copy_(t[:-1])
    w = t.outer(t)
    w.diagonal().mul_(3)
    w[:, 1::2].add_(v[:2])
    w.t()[0] = v
    w.unflatten(0, (2, 2)).select(1, 1).squeeze(0).neg_()
    return (w * v).sum()


_WRITES = [_copied, _multiplied, _assigned, _of_matrices]
_TRANSFORMS: dict[str, Callable[[Callable[[torch.Tensor], torch.Tensor], torch.Tensor], Any]] = {
    "grad": lambda f, x: torch.func.grad(f)(x),
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](torch.ones((), device=x.device))[0],
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x * 2,))[1],
    "jacrev": lambda f, x: torch.func.jacrev(lambda t: f(t) * t)(x),
    "jacfwd": lambda f, x: torch.func.jacfwd(lambda t: f(t) * t)(x),
    "hessian": lambda f, x: torch.func.hessian(f)(x),
    "grad of grad": lambda f, x: torch.func.grad(lambda t: torch.func.grad(f)(t).square().sum())(x),
    "vmap of grad": lambda f, x: torch.func.vmap(torch.func.grad(f))(torch.stack([x, x * 2])),
    "grad of vmap": lambda f, x: torch.func.grad(lambda t: torch.func.vmap(f)(torch.stack([t, t * 2])).sum())(x),
    "functional.hessian": lambda f, x: torch.autograd.functional.hessian(f, x),
}


@pytest.mark.parametrize("transform", _TRANSFORMS)
@pytest.mark.parametrize("write", _WRITES)
def test_gradients_are_those_of_the_part_that_was_written(
    write: Callable[[torch.Tensor], torch.Tensor], transform: str
) -> None:
    torchport.use("reference")
    wanted = _TRANSFORMS[transform](write, torch.arange(1.0, 5.0))
    for tiers in ("off", "auto"):
        with config.override(tiers=tiers):
            found = _TRANSFORMS[transform](write, torch.arange(1.0, 5.0).to("port")).cpu()
        torch.testing.assert_close(found, wanted)


def test_the_state_of_the_thread_is_what_it_was() -> None:
    torchport.use("reference")

    def refused(t: torch.Tensor) -> torch.Tensor:
        raise ValueError("the program's own")

    x = torch.ones(3, device="port")
    assert not torch._C._is_view_replay_enabled()
    torch.func.grad(lambda t: torch.func.hessian(_copied)(t).sum())(x)
    with pytest.raises(ValueError, match="the program's own"):
        torch.func.jacfwd(torch.func.grad(refused))(x)
    assert not torch._C._is_view_replay_enabled()
    with torch.autograd._force_original_view_tracking(True):
        torch.func.grad(_copied)(x)
        assert torch._C._is_view_replay_enabled()


@pytest.mark.parametrize("tiers", ["off", "auto"])
def test_the_first_use_of_the_device_may_be_inside_of_a_transform(tiers: str) -> None:
    program = """
import torch, torchport

def written(t):
    u = t.to("port")
    v = u.clone()
    v[1:].copy_(u[:-1])
    return (v * u).sum().cpu()

print([torch.func.grad(written)(torch.arange(4.0)).tolist() for _ in range(2)], torch._C._is_view_replay_enabled())
"""
    command = [sys.executable, "-W", "ignore", "-c", program]
    environment = {**os.environ, "TORCHPORT_TIERS": tiers}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[[1.0, 2.0, 4.0, 2.0], [1.0, 2.0, 4.0, 2.0]] False"


@pytest.mark.parametrize("device", ["cpu", "port"])
@pytest.mark.parametrize("write", [_copied, _multiplied, _of_matrices])
def test_transforms_are_compiled(write: Callable[[torch.Tensor], torch.Tensor], device: str) -> None:
    torchport.use("reference")
    x = torch.arange(1.0, 5.0)
    torch._dynamo.reset()
    compiled = torch.compile(torch.func.grad(write), backend="torchport", fullgraph=True)
    torch.testing.assert_close(compiled(x.to(device)).cpu(), torch.func.grad(write)(x))
