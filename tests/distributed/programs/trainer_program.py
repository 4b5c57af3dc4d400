"""A Llama trained by ``transformers.Trainer``, against a loop on the CPU over the same batches."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=32,
    use_cache=False,
)
STEPS, BATCH = 4, 2


class Tokens(torch.utils.data.Dataset[Any]):
    """Rows of ids, always the same."""

    def __init__(self, count: int) -> None:
        self.rows = torch.randint(64, (count, 16), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG)


def main() -> None:
    size = int(os.environ["WORLD_SIZE"])
    data = Tokens(STEPS * BATCH * size)
    arguments = TrainingArguments(
        output_dir=os.environ["TEST_FOLDER"],
        per_device_train_batch_size=BATCH,
        max_steps=STEPS,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        optim="adamw_torch",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        train_sampling_strategy="sequential",
    )
    trainer = Trainer(model=model(), args=arguments, train_dataset=data)
    trainer.train()
    found = [row["loss"] for row in trainer.state.log_history if "loss" in row]

    alone = model()
    optimizer = torch.optim.AdamW(alone.parameters(), lr=1e-3)
    expected: list[float] = []
    for step in range(STEPS):
        ids = data.rows[step * BATCH * size : (step + 1) * BATCH * size]
        loss = alone(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    if dist.get_rank() == 0:
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-3, atol=1e-3)
    print(f"trained on {trainer.args.device.type}", flush=True)


if __name__ == "__main__":
    main()
