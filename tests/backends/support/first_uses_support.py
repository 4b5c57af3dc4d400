"""What the kinds of first uses share: a register of them, a model to train, and results as JSON."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Kind = Callable[[str], Any]
KINDS: dict[str, Kind] = {}
AS_WARM: set[str] = set()
"""Kinds that the CPU has no answer to: draws, refusals and the device's own functions. They are as after a warm-up."""


def kind(fn: Kind) -> Kind:
    """A first use with the CPU's results."""
    KINDS[fn.__name__] = fn
    return fn


def as_warm(fn: Kind) -> Kind:
    """A first use with the results of a later one."""
    AS_WARM.add(fn.__name__)
    return kind(fn)


def weights(*shape: int) -> torch.Tensor:
    """The same numbers wherever they are made."""
    return (torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape) * 0.37).sin()


class Tied(nn.Module):
    """Two layers that share a weight, and a buffer."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.outer = nn.Linear(4, 4)
        self.outer.weight = self.inner[0].weight  # type: ignore[assignment]
        self.register_buffer("scale", torch.full((4,), 2.0))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(weights(*parameter.shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.inner(x)) * self.scale


def train(model: nn.Module, device: str, optimizer: torch.optim.Optimizer | None = None) -> list[Any]:
    """Two steps of SGD; the losses and what has become of the parameters."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = weights(3, 4).to(device)
    losses: list[float] = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [losses, [p.detach() for p in model.parameters()], len(list(model.parameters()))]


def plain(value: Any) -> Any:
    """A result as JSON."""
    if isinstance(value, torch.Tensor):
        numbers = value.detach().cpu()
        return [str(numbers.dtype), list(numbers.shape), value.requires_grad, numbers.double().flatten().tolist()]
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)


def told(fn: Callable[[], Any]) -> Any:
    """What a function returns, or what it says."""
    try:
        return plain(fn())
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
