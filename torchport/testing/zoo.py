"""Tiny models with random weights, a fixed batch each, and the loss they are trained with.

Dropout is off: the device draws its own masks, and these models are compared with the CPU number by number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

Batch = dict[str, torch.Tensor]

_ANY: Any = dict
"""Options that ``transformers`` takes and its annotations do not know."""


@dataclass(frozen=True)
class Example:
    """A model on the CPU, its inputs, how to call it, and its scalar loss.

    ``reads`` is how often its forward takes a Python ``if`` on a value, which ends a computation each time.
    """

    model: nn.Module
    batch: Batch
    forward: Callable[[nn.Module, Batch], torch.Tensor]
    loss: Callable[[nn.Module, Batch], torch.Tensor]
    reads: int = 0


def _tokens(*shape: int, high: int = 60) -> torch.Tensor:
    return torch.randint(3, high, shape, generator=torch.Generator().manual_seed(1))


def _noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def _transformers(model: nn.Module, **batch: torch.Tensor) -> Example:
    """A ``transformers`` model, which computes its own loss from ``labels``."""
    return Example(model, batch, lambda m, b: m(**b).logits, lambda m, b: m(**b).loss)


def _gpt2() -> Example:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    return _transformers(GPT2LMHeadModel(config), input_ids=_tokens(2, 8), labels=_tokens(2, 8))


def _llama() -> Example:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    return _transformers(LlamaForCausalLM(config), input_ids=_tokens(2, 8), labels=_tokens(2, 8))


def _bert() -> Example:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=64,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
        hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
    )
    mask = torch.ones(2, 8, dtype=torch.int64)
    mask[1, 6:] = 0
    model = BertForMaskedLM(config)
    example = _transformers(model, input_ids=_tokens(2, 8), attention_mask=mask, labels=_tokens(2, 8))
    return replace(example, reads=1)  # transformers asks whether the mask is all ones


def _t5() -> Example:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=64,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=2,
        dropout_rate=0,
        **_ANY(decoder_start_token_id=0),
        pad_token_id=0,
    )
    return _transformers(T5ForConditionalGeneration(config), input_ids=_tokens(2, 8), labels=_tokens(2, 6))


def _vit() -> Example:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=16,
        patch_size=4,
        **_ANY(num_labels=5),
        hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
    )
    labels = torch.tensor([1, 4])
    return _transformers(ViTForImageClassification(config), pixel_values=_noise(2, 3, 16, 16), labels=labels)


def _resnet() -> Example:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], layer_type="basic", **_ANY(num_labels=5)
    )
    labels = torch.tensor([1, 4, 0, 2])
    return _transformers(ResNetForImageClassification(config), pixel_values=_noise(4, 3, 32, 32), labels=labels)


def _whisper() -> Example:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=64,
        num_mel_bins=8,
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_source_positions=8,
        max_target_positions=16,
        decoder_start_token_id=1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = WhisperForConditionalGeneration(config)
    return _transformers(model, input_features=_noise(2, 8, 16), labels=_tokens(2, 6))


def _mixtral() -> Example:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=32,
    )
    return _transformers(MixtralForCausalLM(config), input_ids=_tokens(2, 8), labels=_tokens(2, 8))


class _Reader(nn.Module):
    """Two LSTM layers over embedded tokens, predicting each next token."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 12)
        self.lstm = nn.LSTM(12, 16, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(32, 64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        states, _ = self.lstm(self.table(tokens))
        return self.head(states)


def _lstm() -> Example:
    def forward(model: nn.Module, batch: Batch) -> torch.Tensor:
        return model(batch["tokens"])

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        return nn.functional.cross_entropy(forward(model, batch).flatten(0, 1), batch["labels"].flatten())

    return Example(_Reader(), {"tokens": _tokens(2, 8), "labels": _tokens(2, 8)}, forward, loss)


def _double(channels_in: int, channels_out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, padding=1),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(inplace=True),
        nn.Conv2d(channels_out, channels_out, 3, padding=1),
        nn.GroupNorm(2, channels_out),
        nn.SiLU(inplace=True),
    )


class _UNet(nn.Module):
    """Two levels down and up, with skips, in-place activations, and both kinds of upsampling."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.bottom = _double(3, 4), _double(4, 8), _double(8, 8)
        self.up2 = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.join2, self.join1 = _double(16, 4), _double(8, 4)
        self.last = nn.Conv2d(4, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.down1(x)
        second = self.down2(nn.functional.max_pool2d(first, 2))
        bottom = self.bottom(nn.functional.avg_pool2d(second, 2))
        joined = self.join2(torch.cat([second, self.up2(bottom)], 1))
        larger = nn.functional.interpolate(joined, scale_factor=2, mode="bilinear")
        return self.last(self.join1(torch.cat([first, larger], 1)))


def _unet() -> Example:
    def forward(model: nn.Module, batch: Batch) -> torch.Tensor:
        return model(batch["image"])

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        return nn.functional.binary_cross_entropy_with_logits(forward(model, batch), batch["mask"])

    mask = (_noise(2, 1, 16, 16) > 0).float()
    return Example(_UNet(), {"image": _noise(2, 3, 16, 16), "mask": mask}, forward, loss)


ZOO: dict[str, Callable[[], Example]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "bert": _bert,
    "t5": _t5,
    "vit": _vit,
    "resnet": _resnet,
    "whisper": _whisper,
    "mixtral": _mixtral,
    "lstm": _lstm,
    "unet": _unet,
}


def build(name: str) -> Example:
    """The named example, the same every time."""
    torch.manual_seed(0)
    return ZOO[name]()


def moved(batch: Batch, device: Any) -> Batch:
    """A batch on a device."""
    return {name: tensor.to(device) for name, tensor in batch.items()}
