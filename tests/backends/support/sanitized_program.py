"""What the sanitizers watch: programs on the device with the C++ libraries, compared with the CPU.

    python sanitized_program.py FOLDER

``FOLDER``: where the sources are whose libraries have been built.
"""

from __future__ import annotations

import gc
import random
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import torchport
from torchport import native
from torchport.native.twins import twins

LIBRARIES = (native.guard, native.flush, native.follow, native.steps)


def trained(device: str, foreach: bool) -> list[torch.Tensor]:
    """Parameters after some steps, gradients that are views among what they came from."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 2)).to(device)
    chosen = torch.optim.AdamW(net.parameters(), lr=0.01, foreach=foreach)
    for step in range(5):
        chosen.zero_grad()
        loss = net(torch.full((3, 4), 0.5 * step, device=device)).square().mean()
        loss.backward()
        kept = net[0].weight.grad if step == 3 else None
        chosen.step()
        del kept, loss
    return [parameter.detach().cpu() for parameter in net.parameters()]


def random_steps(device: str, seed: int) -> list[torch.Tensor]:
    """A program that takes the same path several times, then another; some of its values are kept over steps."""
    choices, values = random.Random(seed), torch.Generator().manual_seed(seed)
    plan = [choices.randrange(10) for _ in range(12)]
    kept: list[torch.Tensor] = []
    for step in range(6):
        if step == 4:
            plan[choices.randrange(len(plan))] = choices.randrange(10)
        x, y = (torch.randn(4, 4, generator=values).to(device) for _ in range(2))
        for what in plan:
            scale = 1.0 + step / 8
            match what:
                case 0:
                    x = x * scale
                case 1:
                    x = (x @ y).tanh()
                case 2:
                    x.add_(y, alpha=scale)
                case 3:
                    upper, lower = x.split(2)
                    x = torch.cat((lower, upper))
                    kept.append(upper)
                case 4:
                    torch._foreach_mul_([x, y], scale)
                case 5:
                    x = x.detach().t() + y
                case 6:
                    ordered = x.sort(descending=True)
                    x = ordered.values + ordered.indices
                case 7:
                    x[0].mul_(0.5)
                case 8:
                    x = torch.where(x > 0, x, y).sigmoid()
                case _:
                    y = nn.functional.layer_norm(y, (4,))
        kept = [*kept[-5:], x]
        if step % 2:
            torchport.sync()
            gc.collect()
    return [value.cpu() for value in kept]


def on_lists(device: str, seed: int) -> list[torch.Tensor]:
    """Arithmetic on lists that is put off (``native/put_off.h``), and what asks for it: reads, writes, views, ends."""
    choices, values = random.Random(seed), torch.Generator().manual_seed(seed)

    def made() -> list[torch.Tensor]:
        numbers = [torch.rand(size, generator=values).to(device) for size in (70_001, 3, 40_000)]
        return [one * 1.0 for one in [one + 0.5 for one in numbers]]

    x, y, kept = made(), made(), []
    for _ in range(30):
        match choices.randrange(9):
            case 0:
                torch._foreach_lerp_(x, y, 0.1)
            case 1:
                torch._foreach_addcdiv_(x, y, torch._foreach_sqrt(y), value=-0.1)
            case 2:
                torch._foreach_addcmul_(y, x, x, value=0.01)
            case 3:
                torch._foreach_mul_(x, [0.9, 1.1, 1.0])
            case 4:
                kept.append(x[0][5:9])
            case 5:
                x[0][5:9].mul_(0.5)
            case 6:
                kept.append(y[2].sum().cpu().clone())
            case 7:
                torch._foreach_neg_(made())
            case _:
                y = [one * 1.0 for one in y]
        del kept[:-4]
    return [one.cpu() for one in (*kept, *x, *y)]


def main(folder: Path) -> None:
    """Run everything; raises where the device and the CPU differ."""
    for library in LIBRARIES:
        library.source = folder / library.source.name
    torchport.use("reference")
    torch.ones(1, device="port")
    assert all(library.load() is not None for library in LIBRARIES), native.state()
    assert twins.in_cpp() == list(twins.in_python)
    for foreach in (False, True):
        for got, expected in zip(trained("port", foreach), trained("cpu", foreach), strict=True):
            torch.testing.assert_close(got, expected)
    differing: list[Any] = []

    def compare(run: Callable[[str, int], list[torch.Tensor]], seed: int) -> None:
        try:
            for got, expected in zip(run("port", seed), run("cpu", seed), strict=True):
                torch.testing.assert_close(got, expected)
        except BaseException as error:
            differing.append(error)

    for tiers in ("auto", "off"):  # operators at once, and a recorded path
        for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            with torchport.config.override(tiers=tiers), mode():
                for seed in range(4):
                    compare(random_steps, seed)
    with torchport.config.override(tiers="auto"):
        for seed in range(4):
            compare(on_lists, seed)
    in_threads = [(random_steps, 7), (random_steps, 8), (on_lists, 9), (on_lists, 10)]
    threads = [threading.Thread(target=compare, args=each) for each in in_threads]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if differing:
        raise differing[0]
    print("followed", native.follow.load().torchport_followed())  # type: ignore[union-attr]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
