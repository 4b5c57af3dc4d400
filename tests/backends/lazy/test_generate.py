"""transformers' ``generate``: what it compiles does not depend on how long the prompts are; tokens are the CPU's."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from torchport import metrics
from torchport.core.config import config
from torchport.run import regions, worth
from torchport.trace.threads import threads

PROMPTS = (3, 5, 9, 16, 17, 30, 41)
"""How many tokens each prompt has."""


@pytest.fixture(autouse=True)
def _compiled_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tiers without another process; what is to be compiled is compiled at once, also of a small model."""
    monkeypatch.setattr(regions, "SHORTEST", 24)
    monkeypatch.setattr(worth, "WORTH_WAITING", 0.0)
    monkeypatch.setattr(worth, "RECORDING", 1e-9)
    monkeypatch.setattr(worth, "WORTH_A_PROCESS", 1e-9)
    runtime: Any = threads.of(0).runtime
    runtime.forget_decisions()  # the rounds that other tests ran count, too
    with config.override(tiers="auto", compile_workers=0):
        yield


@pytest.fixture(scope="module")
def gpt2() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"n_layer": 3, "n_head": 2, "n_embd": 32, "vocab_size": 40, "n_positions": 128}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=None, pad_token_id=0)
    return transformers.GPT2LMHeadModel(config).eval()


def _generate(model: Any, prompt: int, **options: Any) -> list[list[int]]:
    ids = (torch.arange(prompt)[None] * 7 % 40).to(model.device)
    return model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **options).tolist()


def _compiled_runs() -> int:
    return metrics.counter("Execute") - metrics.counter("InterpretedRun")


STATIC = {"cache_implementation": "static", "max_length": 56}


@pytest.mark.parametrize(
    ("options", "most"),
    [(STATIC, 3), pytest.param({"max_new_tokens": 15}, 40, marks=pytest.mark.slow)],
    ids=["static", "dynamic"],
)
def test_prompts_of_other_lengths_compile_next_to_nothing(
    device: torch.device, gpt2: Any, options: dict[str, Any], most: int
) -> None:
    """A compiler's work is bounded by the cache and the model, not by the number of tokens or of prompts."""
    port, compiled, ran = copy.deepcopy(gpt2).to(device), [], _compiled_runs()
    fallbacks = metrics.counter("Fallback")  # other tests' count, too
    for prompt in PROMPTS:
        before = metrics.counter("UncachedCompile")
        assert _generate(port, prompt, **options) == _generate(gpt2, prompt, **options), prompt
        compiled.append(metrics.counter("UncachedCompile") - before)
    # No two of some hundred steps have the same sizes throughout. What does have them is compiled and entered, or what
    # is compiled serves several sizes.
    assert _compiled_runs() > ran + 50
    assert 0 < sum(compiled) <= most, compiled
    assert sum(compiled[5:]) <= 2, compiled
    assert metrics.counter("Fallback") == fallbacks


def test_a_static_cache_of_another_size_compiles_once_not_once_per_token(device: torch.device, gpt2: Any) -> None:
    """``max_new_tokens`` makes a cache as long as the prompt and the new tokens."""
    port = copy.deepcopy(gpt2).to(device)
    options = {"cache_implementation": "static", "max_new_tokens": 20}
    _generate(port, 3, **options)
    for prompt in (8, 13, 40):
        before = metrics.counter("UncachedCompile")
        assert _generate(port, prompt, **options) == _generate(gpt2, prompt, **options)
        assert metrics.counter("UncachedCompile") - before <= 5
