"""Computations in pieces, behind every frontend: few compilations, the same values, edits, the whole as last tier."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cache_engine
import pytest
import torch
from cache_engine import InPieces, compiled
from torch import nn

import torchport
from torchport import metrics
from torchport.backend import compile_key, kept
from torchport.backend.compiler import computations
from torchport.backend.pieced import is_pieced
from torchport.backend.pieces import cut
from torchport.backend.registry import registry
from torchport.cache.current import disk_cache
from torchport.core.config import config
from torchport.run import whole

HERE = Path(__file__).parents[1] / "support"


class Block(nn.Module):
    """A layer of a transformer, by hand."""

    def __init__(self, width: int, changed: bool = False) -> None:
        super().__init__()
        self.one, self.two = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(0.1)
        self.changed = changed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, length, width] to the same."""
        q, k, v = self.qkv(self.one(x)).chunk(3, -1)
        h = (q @ k.transpose(-1, -2) / 4.0).softmax(-1) @ v
        x = x + self.drop(self.out(h))
        if self.changed:
            x = x + x.sin()
        return x + self.down(nn.functional.gelu(self.up(self.two(x))))


def deep(layers: int, changed: int = -1) -> nn.Module:
    """A model of so many equal layers, but the ``changed`` one."""
    torch.manual_seed(3)
    blocks = [Block(8, changed=at == changed) for at in range(layers)]
    return nn.Sequential(nn.Linear(4, 8), *blocks, nn.Linear(8, 3))


def losses(model: nn.Module, device: str, steps: int = 2, forward: Callable[..., Any] | None = None) -> list[float]:
    """What training gives."""
    torch.manual_seed(5)
    model = model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(1)).to(device)
    found: list[torch.Tensor] = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (forward or model)(x).square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return [float(one) for one in found]


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[InPieces]:
    """The backend bound to ``port:0``, with an empty cache in a folder of the test's own."""
    monkeypatch.setenv(cache_engine.LOG, str(tmp_path / "compiled"))
    torchport.register(InPieces)
    with config.override(cache="on", cache_dir=str(tmp_path / "cache"), tiers="off"):
        torchport.use("in_pieces")
        metrics.reset()
        computations.clear()
        yield registry.get("in_pieces")  # type: ignore[misc]
    torchport.use("reference")
    registry.unregister("in_pieces")
    compile_key._fixed.clear()


def _next_process() -> None:
    torchport.sync()
    computations.clear()
    torchport.use("reference")
    torchport.use("in_pieces")
    metrics.reset()


@pytest.mark.slow
def test_deep_models_compile_as_much_as_shallow_ones(engine: InPieces) -> None:
    """From six layers to twelve: the layers, forward, backward and of the optimizer, are there already."""
    shallow = losses(deep(6), "port")
    before = len(compiled())
    assert metrics.counter("PiecesCompiled") > 0
    deeper = losses(deep(12), "port")
    assert len(compiled()) - before <= 4
    for layers, found in ((6, shallow), (12, deeper)):
        with config.override(pieces="off"):
            computations.clear()
            assert losses(deep(layers), "port") == found


def test_a_computation_counts_as_one(engine: InPieces) -> None:
    model, x = deep(8).to("port").eval(), torch.randn(2, 5, 4).to("port")
    with torch.no_grad():
        for _ in range(2):
            model(x).cpu()
        torchport.sync()
        before = {name: metrics.counter(name) for name in ("Execute", "UncachedCompile")}
        model(x).cpu()
    assert metrics.counter("Execute") - before["Execute"] == 1
    assert metrics.counter("UncachedCompile") == before["UncachedCompile"] == 1
    assert metrics.counter("PiecesCalled") > metrics.counter("PiecesCompiled") > 0


@pytest.mark.slow
def test_an_edit_compiles_what_changed(engine: InPieces) -> None:
    losses(deep(12), "port")
    before = len(compiled())
    _next_process()
    losses(deep(12, changed=6), "port")
    # Two computations, as the first step differs from the second. In each the layer's forward pass and its backward.
    assert len(compiled()) - before <= 5
    assert before >= 8


def test_the_next_process_finds_one_entry_per_computation(engine: InPieces) -> None:
    first = losses(deep(8), "port")
    before = len(compiled())
    _next_process()
    assert losses(deep(8), "port") == first
    assert len(compiled()) == before
    assert metrics.counter("UncachedCompile") == 0
    assert metrics.counter("DiskCacheHit") == 2


@pytest.mark.parametrize("place", ["cpu", "port"])
def test_torch_compile(engine: InPieces, place: str) -> None:
    torch.compiler.reset()
    model = deep(8).eval()
    x = torch.randn(2, 5, 4)
    with torch.no_grad():
        wanted = model(x)
        fn = torch.compile(
            model.to(place), backend="torchport", options={"backend": "in_pieces"} if place == "cpu" else {}
        )
        for _ in range(3):
            torch.testing.assert_close(fn(x.to(place)).cpu(), wanted)
    assert metrics.counter("PiecesCalled") > 0


def test_a_failure_in_a_piece_names_the_engine_and_leaves_the_rest(engine: InPieces, monkeypatch: Any) -> None:
    model, x = deep(8).to("port").eval(), torch.randn(2, 5, 4).to("port")
    with torch.no_grad():
        wanted = model(x).cpu()
        calls = iter(range(1_000))
        run = type(engine).execute

        def fails(self: Any, handle: Any, args: Any, context: Any) -> Any:
            if next(calls) == 3:
                raise RuntimeError("out of luck")
            return run(self, handle, args, context)

        monkeypatch.setattr(InPieces, "execute", fails)
        other = x + 1
        result = model(x)
        with pytest.warns(RuntimeWarning, match="'in_pieces' failed to execute: RuntimeError: out of luck"):
            torch.testing.assert_close(result.cpu(), wanted)  # replayed, operator by operator
        torch.testing.assert_close(other.cpu(), x.cpu() + 1)


def test_backends_are_checked_in_pieces_too(engine: InPieces) -> None:
    """``config.check_backends`` looks at the whole's arguments and results."""
    model, x = deep(8).to("port").eval(), torch.randn(2, 5, 4).to("port")
    with torch.no_grad(), config.override(check_backends=True):
        for _ in range(2):
            torch.testing.assert_close(model(x).cpu(), deep(8).eval()(x.cpu()))
    assert metrics.counter("PiecesCalled") > 0


def test_pieces_that_are_told_apart_and_are_equal_are_one(engine: InPieces, monkeypatch: Any) -> None:
    """Who cuts may tell two pieces apart that have one fingerprint: each call still gets its own."""

    def one_per_call(graph: Any, fixed: int) -> Any:
        found = cut(graph, fixed)
        if found is None:
            return None
        calls = tuple(dataclasses.replace(call, graph=at) for at, call in enumerate(found.calls))
        return dataclasses.replace(found, graphs=tuple(found.graphs[call.graph] for call in found.calls), calls=calls)

    monkeypatch.setattr(kept, "cut", one_per_call)
    model, x = deep(8).to("port").eval(), torch.randn(2, 5, 4).to("port")
    with torch.no_grad():
        torch.testing.assert_close(model(x).cpu(), deep(8).eval()(x.cpu()))
    assert metrics.counter("PiecesCompiled") == metrics.counter("PiecesCalled") > len(compiled())


def test_values_on_several_devices_are_computed_whole(engine: InPieces, monkeypatch: Any) -> None:
    model, x = deep(8).to("port").eval(), torch.randn(2, 5, 4).to("port")
    with torch.no_grad():
        wanted = model(x).cpu()
        _next_process()
        monkeypatch.setattr("torchport.backend.pieces.is_partitioned", lambda backend: True)
        monkeypatch.setattr("torchport.backend.compiler.is_partitioned", lambda backend: True)
        torch.testing.assert_close(deep(8).to("port").eval()(x).cpu(), wanted)
    assert metrics.counter("PiecesCalled") == 0
    assert metrics.counter("UncachedCompile") > 0


class _Ended:
    """A ticket whose answer is there."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.loaded = None

    def done(self) -> bool:
        return True

    def result(self) -> Any:
        return self.answer


@pytest.mark.parametrize("quicker", [True, False])
def test_the_whole_takes_over_where_it_is_quicker(
    engine: InPieces, monkeypatch: pytest.MonkeyPatch, quicker: bool
) -> None:
    """The clock is the test's: the pieces take 10, the whole 9 or 11."""
    model, x = deep(8).to("port").eval(), torch.randn(2, 5, 4).to("port")
    with torch.no_grad():
        wanted = model(x).cpu()
        (made,) = [one for one in computations._cache.values() if hasattr(one.handle, "calls")]
        with config.override(pieces="off"):
            _next_process()
            model(x).cpu()
            torchport.sync()
            (compiled_whole,) = computations._cache.values()
        folder = disk_cache()
        assert folder is not None
        entries = {one.key: folder.read(one.key) for one in folder.list()}
        (of_pieces,) = [key for key, one in entries.items() if one is not None and is_pieced(one.data)]
        (of_whole,) = [
            key for key, one in entries.items()
            if one is not None and one.about["operators"] == entries[of_pieces].about["operators"] and key != of_pieces  # type: ignore[union-attr]
        ]  # fmt: skip
        now = [0.0]
        monkeypatch.setattr(whole.time, "perf_counter", lambda: now[0])
        monkeypatch.setattr(whole, "finish", lambda *args: compiled_whole)
        monkeypatch.setattr(whole, "as_whole", lambda request: request)
        monkeypatch.setattr(whole.service, "submit", lambda request, load: _Ended(SimpleNamespace(entry=of_whole)))
        monkeypatch.setattr(type(whole.service), "off", property(lambda self: ""))
        record = whole.TierRecord("lazy", "port:0", 1)
        watched = whole.WholeGraph(engine, made.device, torchport.CompileSpecs(), object(), 0.0, record, of_pieces)  # type: ignore[arg-type]
        made.handle.whole = watched
        run_pieces, run_whole = type(made.backend)._run, type(engine).execute
        ran: list[str] = []

        def pieces(*args: Any) -> Any:
            ran.append("pieces")
            results = run_pieces(*args)
            now[0] = now[0] + 10.0
            return results

        def in_one(self: Any, handle: Any, args: Any, context: Any) -> Any:
            if handle is compiled_whole.handle:
                ran.append("whole")
                now[0] = now[0] + (9.0 if quicker else 11.0)
            return run_whole(self, handle, args, context)

        monkeypatch.setattr(type(made.backend), "_run", pieces)
        monkeypatch.setattr(InPieces, "execute", in_one)
        _next_process()
        computations._cache[made.key] = made
        model2 = deep(8).to("port").eval()
        for _ in range(40):
            torch.testing.assert_close(model2(x).cpu(), wanted)
            if watched.settled:
                break
        assert watched.settled
        assert ran.count("whole") == whole.TRIED
        ran.clear()
        torch.testing.assert_close(model2(x).cpu(), wanted)
        assert ran == ["whole" if quicker else "pieces"]
        assert ("whole" if quicker else "in pieces") in record.form
        now_there = folder.read(of_pieces)
        assert now_there is not None
        assert is_pieced(now_there.data) != quicker
        computations.clear()
        _next_process()
        torch.testing.assert_close(deep(8).to("port").eval()(x).cpu(), wanted)
        assert bool(metrics.counter("PiecesCalled")) != quicker
        assert metrics.counter("DiskCacheMiss") == 0


_WORKER = """
import time
import torch, torchport
from torchport import metrics
from torchport.run import whole
from cache_engine import InPieces
from test_in_pieces import deep, losses
torchport.register(InPieces)
torchport.use("in_pieces")
torchport.config.tiers = "on"
whole.SOONEST = whole.WORTH = 0.0  # the whole is asked for at once
model = deep(8).to("port").eval()
x = torch.randn(2, 5, 4).to("port")
with torch.no_grad():
    wanted = model(x).cpu()
    end = time.monotonic() + 240
    while not metrics.counter("TakenOver") and time.monotonic() < end:
        torch.testing.assert_close(model(x).cpu(), wanted)
    torch.testing.assert_close(model(x).cpu(), wanted)
assert metrics.counter("PiecesCalled") > 0, metrics.snapshot()
with torch.no_grad():
    while not metrics.counter("PiecesStay") + metrics.counter("WholeTookOver") and time.monotonic() < end:
        torch.testing.assert_close(model(x).cpu(), wanted)
    torch.testing.assert_close(model(x).cpu(), wanted)
assert metrics.counter("PiecesStay") + metrics.counter("WholeTookOver") == 1, metrics.snapshot()
print([str(record) for record in torchport.tiers()])
"""


@pytest.mark.slow
def test_the_other_process_compiles_pieces_and_then_the_whole(tmp_path: Path) -> None:
    """A process of its own: pieces take over from the interpreter, the whole is tried, and one of them stays."""
    environ = {"TORCHPORT_CACHE_DIR": str(tmp_path), "PYTHONPATH": f"{HERE}:{Path(__file__).parent}"}
    done = subprocess.run(
        [sys.executable, "-c", _WORKER], env={**os.environ, **environ}, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "in pieces (the whole would take" in done.stdout or "whole (" in done.stdout


@pytest.mark.parametrize("name", ["xla", pytest.param("inductor", marks=pytest.mark.slow)])
def test_engines_agree_with_themselves(name: str, tmp_path: Path) -> None:
    """Training in pieces, and as a whole."""
    torchport.use(name)
    found: dict[str, list[float]] = {}
    for pieces in ("auto", "off"):
        with config.override(pieces=pieces, tiers="off", cache="off"):
            computations.clear()
            metrics.reset()
            found[pieces] = losses(deep(12), "port")
            assert bool(metrics.counter("PiecesCalled")) == (pieces == "auto")
    torchport.use("reference")
    torch.testing.assert_close(found["auto"], found["off"], rtol=1e-4, atol=1e-6)
