"""Models and backends that the tests of lowering share."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn

import torchport
from torchport.backends.reference import ReferenceBackend

_numbers = itertools.count()


def fresh(**attributes: Any) -> Any:
    """A reference backend under a name of its own, registered."""
    name = f"aot_{next(_numbers)}"
    kind = type("Named", (ReferenceBackend,), {"name": name, **attributes})
    torchport.register(kind)
    return torchport.registry.get(name)


class Net(nn.Module):
    """A layer, a table that is shared, a buffer that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor, scale: float = 2.0, *, extra: dict[str, torch.Tensor]) -> dict[str, Any]:
        self.calls += 1
        hidden = torch.relu(self.first(x)) * scale
        return {"y": self.second(hidden) + extra["b"], "calls": self.calls, "scale": scale}

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.first(x))


X = torch.linspace(-1, 1, 8).reshape(2, 4)
EXTRA = {"b": torch.ones(4)}


class Chain(nn.Module):
    def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        a = x @ w
        b = torch.relu(a)
        c = torch.sin(b)
        return torch.relu(c @ w) + a


W = torch.eye(4) * 0.5


class Cache(nn.Module):
    """Two methods on one buffer and one table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.arange(4096.0).reshape(64, 64))
        self.register_buffer("seen", torch.zeros(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(x)
        return x @ self.table

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        return self.seen @ self.table + x
