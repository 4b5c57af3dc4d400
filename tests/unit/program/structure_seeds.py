"""Lowered models for :mod:`fuzz_structure`: ``structure_seeds.py ENGINE FOLDER`` writes files, inputs and results."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchport import aot, runtime
from torchport.aot import OpList

ENGINES = ("reference", "inductor", "xla", "openvino", "executorch")


class Many(nn.Module):
    """Operators whose arguments are numbers, lists, dtypes, layouts and memory formats."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1, groups=2)
        self.norm = nn.GroupNorm(2, 4)
        self.table = nn.Embedding(6, 4)
        self.register_buffer("mask", torch.tensor([True, False, True, True]))
        self.register_buffer("order", torch.tensor([3, 1, 0]))

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = self.norm(self.conv(x))
        h = nn.functional.max_pool2d(h, 2, stride=1)
        up = nn.functional.interpolate(h, scale_factor=2.0, mode="nearest")
        e = nn.functional.layer_norm(self.table(ids), (4,))
        top, at = torch.topk(e, 2, dim=-1)
        a, b = torch.split(e, [1, 2])
        s = torch.softmax(e, 1, dtype=torch.float64).to(torch.float32)
        picked = torch.gather(s, 1, at) + top
        where = torch.where(self.mask, e, torch.full((3, 4), 2.0))
        rolled = torch.roll(where, 1, 0).index_select(0, self.order.clamp(max=2))
        padded = nn.functional.pad(a, (1, 2), value=0.5)
        return up.contiguous(memory_format=torch.channels_last), picked, rolled, padded, b.t(), torch.cumsum(s, 0)


class Linear(nn.Module):
    """What every engine has."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.relu(self.first(x))
        return torch.softmax(self.second(hidden), -1), hidden + 1.0


class Counting(nn.Module):
    """A buffer that changes, and a method that reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total += x
        return self.total * 2

    def read(self, x: torch.Tensor) -> torch.Tensor:
        return self.total + x


def _write(name: str, lowered: Any, folder: Path, inputs: dict[str, tuple[Any, ...]], **more: Any) -> None:
    path = folder / f"{name}.pt2"
    lowered.save(path, **more)
    program = runtime.load(path)
    outputs = {method: program.load_method(method)(*given) for method, given in inputs.items()}
    torch.save({"inputs": inputs, "outputs": outputs}, path.with_suffix(".pt"))


def make_seeds(engine: str, folder: Path) -> None:
    """Write an engine's programs to a folder."""
    torch.manual_seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    x = torch.randn(2, 4)
    linear = Linear().eval()
    _write(f"{engine}-linear", aot.lower(linear, (x,), backend=engine), folder, {"forward": (x,)})
    three = torch.ones(3)
    if engine == "executorch":
        return
    counting = aot.lower(Counting(), (three,), backend=engine, methods={"read": (three,)})
    _write(f"{engine}-state", counting, folder, {"forward": (three,), "read": (three,)})
    if engine != "reference":
        return
    image, ids = torch.randn(1, 2, 4, 4), torch.tensor([0, 5, 2])
    many = Many().eval()
    _write("reference-many", aot.lower(many, (image, ids), backend=engine), folder, {"forward": (image, ids)})
    some = OpList(engine, ["aten.embedding", "aten.add", "aten.convolution", "aten.conv2d", "aten.native_layer_norm"])
    left = aot.lower(many, (image, ids), partitioners=[some])
    _write("reference-left", left, folder, {"forward": (image, ids)})
    name = "reference-outside"
    outside = aot.lower(linear, (x,), backend=engine)
    _write(name, outside, folder, {"forward": (x,)}, external_weights=folder / f"{name}.safetensors")
    sizes = {"x": {0: torch.export.Dim("n", min=1, max=4)}}
    changing = aot.lower(linear, (x,), backend=engine, dynamic_shapes=sizes, buckets=[2, 4])
    _write("reference-sizes", changing, folder, {"forward": (x,)})


if __name__ == "__main__":
    make_seeds(sys.argv[1], Path(sys.argv[2]))
