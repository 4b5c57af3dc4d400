"""A small GPT-2, Llama and Mixtral, their batches, and their losses on one device."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

WORDS, WIDTH, HEADS, LENGTH, BATCH, EXPERTS = 64, 32, 8, 16, 4, 4
SIZE = WIDTH // HEADS


class Attention(nn.Module):
    """Causal; the number of heads follows from what is here of them. Llama's turns them, and shares keys and values."""

    def __init__(self, llama: bool) -> None:
        super().__init__()
        few = WIDTH // 2 if llama else WIDTH
        self.q, self.out = (nn.Linear(WIDTH, WIDTH, bias=not llama) for _ in range(2))
        self.k, self.v = (nn.Linear(WIDTH, few, bias=not llama) for _ in range(2))
        self.turned, self.shared = llama, WIDTH // few

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (part(x).view(batch, length, -1, SIZE).transpose(1, 2) for part in (self.q, self.k, self.v))
        if self.turned:
            q, k = turned(q), turned(k)
        k, v = (one.repeat_interleave(self.shared, 1) for one in (k, v))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(seen.transpose(1, 2).reshape(batch, length, -1))


def turned(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions."""
    rates = 10000.0 ** (-torch.arange(0, SIZE, 2, device=x.device) / SIZE)
    angles = torch.outer(torch.arange(x.shape[-2], device=x.device), rates).repeat(1, 2)
    low, high = x.chunk(2, -1)
    return x * angles.cos() + torch.cat([-high, low], -1) * angles.sin()


class Perceptron(nn.Module):
    """GPT-2's with GELU, or Llama's with a gate."""

    def __init__(self, llama: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH, bias=not llama), nn.Linear(2 * WIDTH, WIDTH, bias=not llama)
        self.gate = nn.Linear(WIDTH, 2 * WIDTH, bias=False) if llama else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = F.gelu(self.up(x)) if self.gate is None else F.silu(self.gate(x)) * self.up(x)
        return self.down(up)


class Experts(nn.Module):
    """Mixtral's: each token goes by the two experts that its router picks."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Perceptron(True) for _ in range(EXPERTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        best, which = self.router(x).softmax(-1).topk(2, -1)
        share = F.one_hot(which, EXPERTS).to(x.dtype).mul((best / best.sum(-1, keepdim=True)).unsqueeze(-1)).sum(-2)
        parts = [share[..., n, None] * expert(x) for n, expert in enumerate(self.experts)]
        return torch.stack(parts).sum(0)


class Block(nn.Module):
    """Attention and a perceptron, or several."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.before, self.after = norm(kind), norm(kind)
        self.attention = Attention(kind != "gpt2")
        self.perceptron = Experts() if kind == "mixtral" else Perceptron(kind != "gpt2")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.before(x))
        return x + self.perceptron(self.after(x))


def norm(kind: str) -> nn.Module:
    return nn.LayerNorm(WIDTH) if kind == "gpt2" else nn.RMSNorm(WIDTH, eps=1e-5)


class Transformer(nn.Module):
    """Token ids to logits. GPT-2's has learned positions, and a head that is tied to the embeddings."""

    def __init__(self, kind: str, layers: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH) if kind == "gpt2" else None
        self.blocks = nn.ModuleList(Block(kind) for _ in range(layers))
        self.norm, self.head = norm(kind), nn.Linear(WIDTH, WORDS, bias=False)
        if kind == "gpt2":
            self.head.weight = self.words.weight

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        return x if self.places is None else x + self.places(torch.arange(ids.shape[1], device=ids.device))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def model(kind: str, layers: int) -> Transformer:
    """The same weights each time, on the CPU."""
    torch.manual_seed(0)
    return Transformer(kind, layers)


def untied(kind: str, layers: int) -> Transformer:
    """The same, with a head of its own: for a pipeline, whose last rank has no embeddings."""
    net = model(kind, layers)
    net.head.weight = nn.Parameter(net.head.weight.detach().clone())
    return net


def batch(step: int, part: int = 0, parts: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """The ids and targets of a step, or one of several equal parts of them."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(WORDS, (BATCH, LENGTH + 1), generator=generator)
    mine = ids[part * BATCH // parts : (part + 1) * BATCH // parts]
    return mine[:, :-1].contiguous(), mine[:, 1:].contiguous()


def loss_of(net: nn.Module, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(net(ids).flatten(0, 1), targets.flatten())


def losses_alone(net: nn.Module, steps: int) -> list[float]:
    """The losses of one process on the CPU."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    losses: list[float] = []
    for step in range(steps):
        loss = loss_of(net, *batch(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
