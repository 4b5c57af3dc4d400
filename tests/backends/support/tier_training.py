"""A training loop for tests of tiers: what it gives says whether a swap has changed anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

__all__ = ["are_equal", "train"]


def train(
    make: Callable[[], nn.Module],
    steps: int,
    device: torch.device | str = "port",
    before: Callable[[int], object] = lambda step: None,
) -> list[Any]:
    """Losses and final parameters of a network with 6 inputs and 3 outputs; ``before`` is called before each step."""
    torch.manual_seed(3)
    net = make().to(device)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-2)
    x, y = torch.randn(5, 6).to(device), torch.randn(5, 3).to(device)
    losses: list[float] = []
    for step in range(steps):
        before(step)
        loss = nn.functional.mse_loss(net(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return [*losses, *(p.detach().cpu() for p in net.parameters())]


def are_equal(one: list[Any], other: list[Any]) -> bool:
    """Whether two runs gave the same, bit by bit."""
    return all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(one, other, strict=True))
