"""Measures which operators reach a backend when models train, and writes them into ``docs/howto/rows-that-train.md``.

``python docs/_site/rows.py`` writes the tables; ``tests/unit/test_rows.py`` compares them with what is measured.
"""

from __future__ import annotations

import functools
import importlib
import logging
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch._decomp import core_aten_decompositions, get_decompositions

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "howto" / "rows-that-train.md"
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import torchport as tp  # noqa: E402  # the checkout's, wherever this is run
from torchport.backend.serialize import decode, encode  # noqa: E402

aten = torch.ops.aten
PHASES = {"forward": "F", "backward": "B", "step": "S"}
Measured = dict[str, str]
"""Operator → the letters of the phases in which it came."""


class Watching(tp.Backend):
    """Runs a graph with the CPU's kernels, and notes what is in it."""

    def __init__(self, name: str, refuses: bool, decompositions: Mapping[Any, Callable[..., Any]]) -> None:
        self.name = name  # pyright: ignore[reportAttributeAccessIssue]
        self.refused = core_aten_decompositions() if refuses else {}
        self.rewrites = decompositions
        self.phase = ""
        self.seen: dict[str, set[str]] = {}

    def supports(self, node: fx.Node) -> tp.Support:
        taken_apart = node.target in self.refused or node.target in self.rewrites
        return tp.Support.no("PyTorch takes it apart") if taken_apart else tp.Support.yes()

    def decompositions(self) -> Mapping[Any, Callable[..., Any]]:
        return self.rewrites

    def preprocess(self, graph: fx.GraphModule, specs: tp.CompileSpecs) -> tp.Processed:
        for node in graph.graph.nodes:
            if isinstance(node.target, torch._ops.OpOverload):
                self.seen.setdefault(str(node.target).removeprefix("aten."), set()).add(self.phase)
        return tp.Processed(encode(graph))

    def init(self, processed: tp.FreeableBuffer, specs: tp.CompileSpecs, context: tp.InitContext) -> Any:
        return decode(processed.data)

    def execute(
        self, handle: Any, args: Sequence[tp.BackendData], context: tp.ExecutionContext
    ) -> list[tp.BackendData]:
        with torch.no_grad():
            results = handle(*[self.from_device(value) for value in args])
        return [self.to_device(result, context.device) for result in results]


def _gpt2(dropout: float = 0.0) -> tuple[nn.Module, dict[str, torch.Tensor], torch.optim.Optimizer]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2, resid_pdrop=dropout, embd_pdrop=dropout,
        attn_pdrop=dropout, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    tokens = torch.randint(0, 64, (2, 8))
    model: Any = GPT2LMHeadModel(config)
    model.train().to("port")
    return model, {"input_ids": tokens, "labels": tokens}, torch.optim.AdamW(model.parameters())


def _resnet18() -> tuple[nn.Module, dict[str, torch.Tensor], torch.optim.Optimizer]:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=4, hidden_sizes=[4, 4, 8, 8], depths=[2, 2, 2, 2], layer_type="basic")
    config.num_labels = 5
    model: Any = ResNetForImageClassification(config)
    model.train().to("port")
    batch = {"pixel_values": torch.randn(2, 3, 64, 64), "labels": torch.tensor([1, 4])}
    return model, batch, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


MODELS: dict[str, Callable[..., Any]] = {"GPT-2": _gpt2, "ResNet-18": _resnet18}


def measure(backend: Watching, make: Callable[..., Any], **options: Any) -> Measured:
    """What reaches the backend in two steps of training. Raises ``RuntimeError`` if anything ran on the host."""
    tp.register(backend)
    backend.seen.clear()
    tp.use(backend.name)
    try:
        with tp.config.override(cache="off"):
            fallbacks = tp.metrics.counter("Fallback")
            model, batch, optimizer = make(**options)
            batch, loss = {name: tensor.to("port") for name, tensor in batch.items()}, torch.empty(())
            for _ in range(2):  # the first step of an optimizer makes its state
                for backend.phase in PHASES:
                    if backend.phase == "forward":
                        loss = model(**batch).loss
                    elif backend.phase == "backward":
                        loss.backward()
                    else:
                        optimizer.step()
                        optimizer.zero_grad()
                    tp.sync()
            if tp.metrics.counter("Fallback") != fallbacks:
                raise RuntimeError("something ran on the host; it would be missing from the table")
    finally:
        tp.use("reference")
        tp.registry.unregister(backend.name)
    return {op: "".join(PHASES[one] for one in PHASES if one in where) for op, where in backend.seen.items()}


@functools.cache
def _taken_apart() -> Mapping[Any, Callable[..., Any]]:
    """Those of ``examples/text_backend.py``, and batch normalization."""
    text_backend: Any = importlib.import_module("text_backend")
    tp.registry.unregister("text")
    more: Any = get_decompositions([aten._native_batch_norm_legit_functional.default])
    return {**text_backend.TAKEN_APART, **more}


def column(model: str, stage: int, **options: Any) -> Measured:
    """A column of the table: what reaches a backend that takes everything (1), one that refuses what core ATen takes
    apart (2), or one that takes more apart (3)."""
    backend = Watching(f"watching_{stage}", stage > 1, _taken_apart() if stage == 3 else {})
    torch.manual_seed(0)
    logging.disable(logging.WARNING)  # transformers' remarks about tiny configurations
    try:
        return measure(backend, MODELS[model], **options)
    finally:
        logging.disable(logging.NOTSET)


def render(columns: Mapping[str, Measured], dropout: Measured) -> str:
    """The table, and what dropout adds to its second column."""
    lines = [
        f"| operator | {' | '.join(columns)} |",
        "|---" * (1 + len(columns)) + "|",
        f"| **how many** | {' | '.join(f'**{len(one)}**' for one in columns.values())} |",
    ]
    for op in sorted({op for one in columns.values() for op in one}):
        cells = [" ".join(one.get(op, "·")) for one in columns.values()]
        lines.append(f"| `{op}` | {' | '.join(cells)} |")
    more = sorted(dropout.keys() - columns["GPT-2: 2"].keys())
    return "\n".join([*lines, "", f"Dropout adds to column 2 of GPT-2: {', '.join(f'`{op}`' for op in more)}."])


def shown() -> tuple[dict[str, Measured], list[str]]:
    """What the page says: its columns, and what dropout adds."""
    marked = re.search(MARKED, PAGE.read_text(encoding="utf-8"))
    assert marked is not None, "the page has lost its marks"
    table, _, dropout = marked[0].removeprefix(marked[1]).removesuffix(marked[2]).partition("\n\n")
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    columns: dict[str, Measured] = {name: {} for name in head[1:]}
    for op, *cells in rows[1:]:
        for name, cell in zip(columns, cells, strict=True):
            if cell != "·":
                columns[name][op.strip("`")] = cell.replace(" ", "")
    assert rows[0][1:] == [f"**{len(one)}**" for one in columns.values()]
    return columns, re.findall(r"`([^`]+)`", dropout)


MARKED = re.compile(r"(<!-- Measured by docs/_site/rows\.py: -->\n\n).*?(\n\n<!-- End -->)", re.DOTALL)


if __name__ == "__main__":
    measured = {f"{model}: {stage}": column(model, stage) for model in MODELS for stage in (1, 2, 3)}
    tables = render(measured, column("GPT-2", 2, dropout=0.1))
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(MARKED.sub(lambda found: found[1] + tables + found[2], text), encoding="utf-8")
