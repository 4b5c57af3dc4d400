"""A small GPT-2 with tied embeddings, its batches, and its losses on one device."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

WORDS, WIDTH, HEADS, LENGTH, BATCH = 64, 32, 4, 16, 4


class Block(nn.Module):
    """Attention and a perceptron; the number of heads follows from what is here of them."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        y = self.before(x)
        heads = [part(y).view(batch, length, -1, WIDTH // HEADS).transpose(1, 2) for part in (self.q, self.k, self.v)]
        seen = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).reshape(batch, length, -1)
        x = x + self.out(seen)
        return x + self.down(F.gelu(self.up(self.after(x))))


class GPT2(nn.Module):
    """Token ids to logits."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def model(layers: int) -> GPT2:
    """The same weights each time, on the CPU."""
    torch.manual_seed(0)
    return GPT2(layers)


def batch(step: int, part: int = 0, parts: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """The ids and targets of a step, or one of several equal parts of them."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(WORDS, (BATCH, LENGTH + 1), generator=generator)
    mine = ids[part * BATCH // parts : (part + 1) * BATCH // parts]
    return mine[:, :-1].contiguous(), mine[:, 1:].contiguous()


def loss_of(net: nn.Module, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(net(ids).flatten(0, 1), targets.flatten())


def losses_alone(layers: int, steps: int) -> list[float]:
    """The losses of one process on the CPU."""
    net = model(layers)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    losses: list[float] = []
    for step in range(steps):
        loss = loss_of(net, *batch(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
