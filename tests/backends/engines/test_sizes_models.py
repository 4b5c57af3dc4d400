"""Models of transformers at batches and lengths that vary, on a backend that pads: few computations serve them all.

T5's training step is not among them: dimensions of its inputs are products of others (``docs/compile-once.md``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest
import torch
from padding_engine import Padding

import torchport
from torchport import metrics
from torchport.backend.compiler import computations
from torchport.backend.registry import registry
from torchport.backend.sizes import families as known
from torchport.core.config import config

transformers = pytest.importorskip("transformers")

SHAPES: Final = (
    (2, 8),
    (2, 9),
    (2, 13),
    (3, 11),
    (4, 16),
    (3, 20),
    (5, 18),
    (4, 23),
    (3, 19),
    (2, 31),
    (5, 30),
    (4, 28),
)
SETTLED: Final = 6
"""Batches after which nothing is compiled."""
BERT: Final = {
    "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
MODELS: Final[dict[str, Callable[[], Any]]] = {
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_layer=2, n_head=2, n_embd=32, vocab_size=97, n_positions=64, bos_token_id=0, eos_token_id=0
        )
    ),
    "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**BERT)),
    "bert for classes": lambda: transformers.BertForSequenceClassification(transformers.BertConfig(**BERT)),
    "roberta": lambda: transformers.RobertaForMaskedLM(transformers.RobertaConfig(**BERT)),
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**BERT, num_key_value_heads=1)),
    "distilbert": lambda: transformers.DistilBertForMaskedLM(
        transformers.DistilBertConfig(
            vocab_size=97, dim=32, n_layers=2, n_heads=2, hidden_dim=64, max_position_embeddings=64
        )
    ),
    "opt": lambda: transformers.OPTForCausalLM(
        transformers.OPTConfig(
            vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, ffn_dim=64,
            max_position_embeddings=64, word_embed_proj_dim=32, pad_token_id=0, bos_token_id=0, eos_token_id=0,
        )
    ),
    "t5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=97, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, decoder_start_token_id=0
        )
    ),
}  # fmt: skip


@pytest.fixture
def padding() -> Iterator[str]:
    """The backend's name; it is registered, and no sizes are known."""
    torchport.register(Padding)
    with config.override(tiers="off", cache="off"):
        computations.clear()
        known.families.clear()
        yield Padding.name
    torchport.use("reference")
    registry.unregister(Padding.name)


def _run(engine: str, name: str, train: bool) -> tuple[list[float], list[int]]:
    """Losses, or sums of logits, and how many computations there were after each batch."""
    torch.manual_seed(0)
    model = MODELS[name]()
    torchport.use(engine)
    torch.manual_seed(3)  # dropout's
    model = model.to("port").train(train)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    seen, compiled, before = list[float](), list[int](), metrics.counter("UncachedCompile")
    for rows, length in SHAPES:
        ids = torch.arange(rows * length).reshape(rows, length).remainder(90) + 3
        mask = torch.ones_like(ids)
        mask[0, -2:] = 0
        labels = ids[:, 0].remainder(2) if name == "bert for classes" else ids
        batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
        batch = {key: value.to("port") for key, value in batch.items()}
        if train:
            optimizer.zero_grad()
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
        else:
            with torch.no_grad():
                seen.append(model(**batch).logits.sum().item())
        compiled.append(metrics.counter("UncachedCompile") - before)
    return seen, compiled


@pytest.mark.parametrize(
    ("name", "train"),
    [
        pytest.param(name, train, marks=[] if (name, train) == ("gpt2", True) else pytest.mark.slow)
        for name in MODELS
        for train in (False, True)
        if (name, train) != ("t5", True)
    ],
)
def test_a_model_of_many_sizes_is_compiled_a_few_times(name: str, train: bool, padding: str) -> None:
    wanted, _ = _run("reference", name, train)
    found, compiled = _run(padding, name, train)
    assert found == pytest.approx(wanted, rel=2e-5, abs=1e-3)
    assert compiled[-1] == compiled[SETTLED - 1], compiled
