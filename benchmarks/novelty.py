"""What is new to the program: shapes never seen, training steps never seen, ``generate``, operators in eager mode.

    python -m benchmarks.novelty [--backend reference] [--rounds 15] [--tiers auto]

Processor time of the whole process, one thread, against CPU eager in turn with it; ratios are of medians. With
``config.tiers = "auto"``, or as ``--tiers`` says. What is "never seen" has a length of its own in each round.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from statistics import median
from time import process_time
from typing import Any

import torch

import torchport

from .common import table

__all__ = ["main"]


def _gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(n_layer=4, n_embd=128, n_head=4, vocab_size=1000, n_positions=512)
    config.bos_token_id = config.eos_token_id = 0
    return GPT2LMHeadModel(config)


def _seconds(run: Callable[[], object]) -> float:
    start = process_time()
    run()
    return process_time() - start


def _pairs(run: Callable[[str, int], object], rounds: int, first: int) -> list[str]:
    """Milliseconds of CPU eager and of the device, and their ratio; each round has another length."""
    for length in range(first, first + 3):
        run("cpu", length)
        run("port", length)
    lengths = range(first + 3, first + 3 + rounds)
    cpu, port = zip(
        *((_seconds(lambda n=n: run("cpu", n)), _seconds(lambda n=n: run("port", n))) for n in lengths), strict=True
    )
    return [f"{median(cpu) * 1e3:.1f}", f"{median(port) * 1e3:.1f}", f"{median(port) / median(cpu):.2f}"]


def _forward(rounds: int) -> list[str]:
    cpu = _gpt2().eval()
    models = {"cpu": cpu, "port": copy.deepcopy(cpu).to("port")}

    def run(device: str, length: int) -> None:
        with torch.no_grad():
            models[device](torch.arange(length)[None].to(device)).logits.cpu()

    return _pairs(run, rounds, 8)


def _training(rounds: int) -> list[str]:
    cpu = _gpt2().train()
    models = {"cpu": cpu, "port": copy.deepcopy(cpu).to("port")}
    optimizers = {device: torch.optim.AdamW(model.parameters(), lr=1e-4) for device, model in models.items()}

    def run(device: str, length: int) -> None:
        ids = torch.arange(4 * length).reshape(4, length).remainder(1000).to(device)
        loss = models[device](ids, labels=ids).loss
        optimizers[device].zero_grad()
        loss.backward()
        optimizers[device].step()
        loss.item()

    return _pairs(run, rounds, 8)


def _generate(rounds: int) -> list[str]:
    cpu = _gpt2().eval()
    models = {"cpu": cpu, "port": copy.deepcopy(cpu).to("port")}

    def run(device: str, length: int) -> None:
        ids = torch.arange(1, length)[None].to(device)
        models[device].generate(ids, max_new_tokens=20, do_sample=False, pad_token_id=0).cpu()

    return _pairs(run, min(rounds, 5), 8)


def _small_operators(gradients: bool) -> list[str]:
    times: dict[str, float] = {}
    for device in ("cpu", "port"):
        x = torch.randn(8, 8).to(device).requires_grad_(gradients)

        def loop(x: torch.Tensor = x) -> None:
            y = x
            for _ in range(200):
                y = y * 1.01 + x

        with torchport.mode("eager"):
            loop()
            times[device] = min(_seconds(loop) for _ in range(30)) / 400
    return [f"{times['cpu'] * 1e6:.2f} us", f"{times['port'] * 1e6:.2f} us", f"{times['port'] / times['cpu']:.2f}"]


def main(argv: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="reference")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tiers", default="auto")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    torchport.config.tiers = options.tiers
    torchport.use(options.backend)
    rows = [
        ["GPT-2 (4 x 128), forward, a length never seen, ms", *_forward(options.rounds)],
        ["the same, training step, ms", *_training(options.rounds)],
        ["generate, 20 tokens, a length never seen, ms", *_generate(options.rounds)],
        ["eager mode, one small operator", *_small_operators(gradients=False)],
        ["the same with gradients", *_small_operators(gradients=True)],
    ]
    table(f"What is new, {options.backend}, tiers {options.tiers}", ["", "CPU eager", "port", "ratio"], rows)


if __name__ == "__main__":
    main()
