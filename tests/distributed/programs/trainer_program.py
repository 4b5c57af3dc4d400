"""transformers' ``Trainer``, as a script for ``torchrun`` and for one process: ``python trainer_program.py FOLDER``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import transformers

STEPS = 6
BATCH = 4
"""Sequences in a step, over all processes."""


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences of ids, each of its own."""

    def __len__(self) -> int:
        return STEPS * BATCH

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(64, (12,), generator=torch.Generator().manual_seed(at))
        return {"input_ids": ids, "labels": ids}


class InOrder(transformers.Trainer):
    """Without shuffling, so that a step has the same sequences however many processes share it."""

    def _get_train_sampler(self, *_: object) -> torch.utils.data.Sampler[int]:
        return torch.utils.data.SequentialSampler(Tokens())


def main(folder: str) -> None:
    """Train, and write the losses and the device."""
    if dist.is_torchelastic_launched():
        dist.init_process_group()
    size = dist.get_world_size() if dist.is_initialized() else 1
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    arguments = transformers.TrainingArguments(
        folder, max_steps=STEPS, per_device_train_batch_size=BATCH // size, learning_rate=1e-2, logging_steps=1,
        report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=True,  # accelerate knows other devices by vendor
    )  # fmt: skip
    trainer = InOrder(transformers.GPT2LMHeadModel(config), arguments, train_dataset=Tokens())
    trainer.train()
    if trainer.is_world_process_zero():
        found = {
            "losses": [row["loss"] for row in trainer.state.log_history if "loss" in row],
            "device": str(trainer.args.device),
            "parallel": type(trainer.model_wrapped).__name__,
        }
        (Path(folder) / f"of{size}.json").write_text(json.dumps(found))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
