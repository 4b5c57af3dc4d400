"""The same models through every frontend, on every installed backend: values, and what is compiled when.

A frontend is one entry of ``FRONTENDS``; whether it is there, the conformance kit's table of frontends knows.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchport
from torchport import metrics
from torchport.testing import frontends as kit
from torchport.testing import zoo

Step = Callable[[zoo.Batch], torch.Tensor]
MODELS = ("mlp", "resnet", "bert", "gpt2")


def _forward(example: zoo.Example, model: Any) -> Step:
    return lambda batch: example.forward(model, batch)


def _lazy(example: zoo.Example, model: nn.Module, backend: str) -> Step:
    device = torchport.device(backend)
    moved = model.to(device)
    return lambda batch: example.forward(moved, zoo.moved(batch, device))


def _eager(example: zoo.Example, model: nn.Module, backend: str) -> Step:
    lazy = _lazy(example, model, backend)

    def step(batch: zoo.Batch) -> torch.Tensor:
        with torchport.mode("eager"):  # type: ignore[attr-defined]
            return lazy(batch)

    return step


def _compile(example: zoo.Example, model: nn.Module, backend: str) -> Step:
    return _forward(example, torch.compile(model, backend="torchport", options={"backend": backend}))


def _compile_on_port(example: zoo.Example, model: nn.Module, backend: str) -> Step:
    device = torchport.device(backend)
    compiled = torch.compile(model.to(device), backend="torchport")
    return lambda batch: example.forward(compiled, zoo.moved(batch, device))


class _Whole(nn.Module):
    """The model with its way of being called, for the frontend that exports it."""

    def __init__(self, example: zoo.Example, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.call = example.forward

    def forward(self, batch: zoo.Batch) -> torch.Tensor:
        return self.call(self.model, batch)


def _aot(example: zoo.Example, model: nn.Module, backend: str) -> Step:
    import torchport.aot
    import torchport.runtime

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.pt2"
        torchport.aot.lower(_Whole(example, model), (dict(example.batch),), backend=backend).save(path)
        method = torchport.runtime.load(path).load_method()
    return lambda batch: method(*batch.values())[0]


FRONTENDS: dict[str, tuple[str, Callable[[zoo.Example, nn.Module, str], Step]]] = {
    "lazy": ("lazy", _lazy),
    "eager": ("eager", _eager),
    "compile": ("compile", _compile),
    "compile on port": ("compile", _compile_on_port),
    "aot": ("aot", _aot),
}
"""Name → (the kit's name of the frontend, how to bring a model to it)."""
TRAINED = ("lazy", "eager", "compile", "compile on port")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def _model(name: str) -> zoo.Example:
    if name == "mlp":
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
        return zoo.Example(model, {"x": x}, lambda m, b: m(b["x"]), lambda m, b: m(b["x"]).square().mean())
    return zoo.build(name)


def _open(frontend: str) -> Callable[[zoo.Example, nn.Module, str], Step]:
    known, make = FRONTENDS[frontend]
    missing = kit.FRONTENDS[known].missing()
    if missing:
        pytest.skip(missing)
    return make


def _compiled() -> int:
    torchport.sync()
    return metrics.counter("UncachedCompile")


@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning")  # torch.export's own use of it
@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize("name", ["mlp", *(pytest.param(m, marks=pytest.mark.slow) for m in MODELS[1:])])
def test_inference(name: str, frontend: str, backend: str) -> None:
    """Values as on the CPU; nothing runs on the host; the second and third call compile nothing."""
    _infer(name, frontend, backend)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning")
@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("engine", ["openvino", "executorch"])
def test_inference_on_engines_for_inference(name: str, frontend: str, engine: str) -> None:
    """The same; what they do not take runs on the host, which other tests look at."""
    row = next(row for row in torchport.list_backends() if row.name == engine)
    if not row.available:
        pytest.skip(row.reason)
    torchport.use(engine)
    _infer(name, frontend, engine, may_fall_back=True)


def _infer(name: str, frontend: str, backend: str, may_fall_back: bool = False) -> None:
    make, example = _open(frontend), _model(name)
    example.model.eval()
    ours = copy.deepcopy(example.model)
    fallbacks = metrics.counter("Fallback")
    with torch.no_grad():
        expected = example.forward(example.model, example.batch)
        run = make(example, ours, backend)
        same(run(example.batch), expected)
        before = _compiled()
        for _ in range(2):
            same(run(example.batch), expected)
        assert _compiled() == before
    assert may_fall_back or metrics.counter("Fallback") == fallbacks


def same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours.detach().cpu(), theirs.detach(), rtol=1e-4, atol=1e-5)


# At a graph break Dynamo itself looks at the gradient of a result.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("frontend", TRAINED)
@pytest.mark.parametrize("name", ["mlp", *(pytest.param(m, marks=pytest.mark.slow) for m in MODELS[1:])])
def test_training(name: str, frontend: str, backend: str) -> None:
    """Losses and parameters of three steps of SGD; the third step compiles nothing."""
    make, example = _open(frontend), _model(name)
    models = [example.model, copy.deepcopy(example.model)]
    runs = [_forward(example, models[0]), make(example, models[1], backend)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in models]
    losses: list[list[torch.Tensor]] = []
    for _ in range(3):
        before = _compiled()
        losses.append([])
        for run, optimizer in zip(runs, optimizers, strict=True):
            optimizer.zero_grad()
            loss = run(example.batch).square().mean()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss)
        same(losses[-1][1], losses[-1][0])
    assert _compiled() == before
    for theirs, ours in zip(models[0].parameters(), models[1].parameters(), strict=True):
        same(ours, theirs)
