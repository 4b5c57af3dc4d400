"""A small GPT-2, from random weights, learns to write like Python's language reference."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch

from .job import DemoJob, Outcome, Steps
from .text import paragraphs

__all__ = ["JOB"]

BATCH = 16
CONTEXT = 64
VOCABULARY = 1024
SAMPLE_TOKENS = 60


@cache
def _tokens() -> tuple[Any, torch.Tensor]:
    """A byte-level BPE tokenizer trained on the text, and the text's tokens."""
    from tokenizers import ByteLevelBPETokenizer

    text = "\n".join(paragraphs())
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(paragraphs(), vocab_size=VOCABULARY, min_frequency=2, show_progress=False)
    return tokenizer, torch.tensor(tokenizer.encode(text).ids)


def _model() -> torch.nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    # Without dropout, as its random numbers differ from device to device and so would the losses.
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=CONTEXT,
        n_embd=128,
        n_layer=4,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def _sample(model: torch.nn.Module, prompt: torch.Tensor, device: str) -> list[int]:
    """Continue the prompt token by token, always looking at the last ``CONTEXT`` of them."""
    generator = torch.Generator().manual_seed(0)
    window, written = prompt, []
    with torch.no_grad():
        for _ in range(SAMPLE_TOKENS):
            logits = model(input_ids=window.unsqueeze(0).to(device)).logits[0, -1].cpu()
            best = (logits / 0.8).topk(20)
            choice = best.indices[torch.multinomial(best.values.softmax(dim=0), 1, generator=generator)]
            written.append(int(choice))
            window = torch.cat([window[1:], choice])
    return written


def train(device: str, steps: int) -> Steps:
    """Train for ``steps`` batches with AdamW, warm-up, cosine decay and clipping; then write a little."""
    tokenizer, tokens = _tokens()
    model = _model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
    warmup = min(20, steps)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, 0.55 + 0.45 * math.cos(math.pi * step / steps))
    )
    chooser = torch.Generator().manual_seed(0)
    losses: list[float] = []
    for _ in range(steps):
        starts = torch.randint(len(tokens) - CONTEXT, (BATCH,), generator=chooser)
        batch = torch.stack([tokens[start : start + CONTEXT] for start in starts.tolist()]).to(device)
        optimizer.zero_grad()
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        yield f"loss {losses[-1]:.3f}"

    model.eval()
    prompt = tokens[:CONTEXT]
    written = tokenizer.decode(_sample(model, prompt, device))
    final = sum(losses[-10:]) / len(losses[-10:])
    return Outcome(
        values=torch.tensor(losses, dtype=torch.float64),
        result=f"loss {losses[0]:.2f} → {final:.2f}",
        passed=final < 0.7 * losses[0] or steps < JOB.steps,
        text=f"… {tokenizer.decode(prompt[-24:].tolist())} ▸{written} …",
    )


JOB = DemoJob(title="GPT-2 on text", short="GPT-2", run=train, steps=300, quick_steps=20)
