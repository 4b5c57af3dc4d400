"""Lowering for sizes that change: results are eager's for every size, from few variants."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from aot_support import fresh
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.export import Dim

import torchport
from torchport import aot, runtime
from torchport.aot import Supported, WholeProgram
from torchport.core.errors import ConfigError, ErrorCode, MethodError, UnsupportedOp

ENGINES = [
    pytest.param(
        name,
        marks=[
            pytest.mark.skipif(
                not any(row.name == name and row.available for row in torchport.list_backends()),
                reason=f"{name} is not installed",
            ),
            *([pytest.mark.slow] if name in ("inductor", "xla", "executorch") else []),
        ],
    )
    for name in ("reference", "openvino", "add_sub", "xla", "inductor", "executorch")
]
BATCH = Dim("batch", max=64)


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def check(lowered: Any, model: nn.Module, args: Sequence[Any]) -> None:
    """Whether the program gives what eager gives."""
    with torch.no_grad():
        expected = model(*args)
    found = lowered(*args)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Attention(nn.Module):
    """A softmax over the sequence, by hand and by PyTorch; a mean over it; a size."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project = nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> Any:
        b, t, _ = x.shape
        q, k, v = self.project(x).view(b, t, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        made = ((q @ k.transpose(-1, -2)).softmax(-1) @ v).transpose(1, 2).reshape(b, t, 8)
        fused = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return made, fused.mean(2), b * t


class Pairs(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return (x[:, None] - y[None]).abs().sum(), x[:, None] * y, (x[:, None] + y).amax(0)


class Reverse(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.flip(0).cumsum(0)


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).flatten(1)


class Running(nn.Module):
    """A buffer that every call changes, whatever its size."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(3))
        self.weight = nn.Parameter(torch.arange(9.0).reshape(3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total += x.sum(0)
        return x @ self.weight + self.total

    def read(self, x: torch.Tensor) -> torch.Tensor:
        return self.total + x


# -- exact padding -----------------------------------------------------------------------------------------------------
Make = Callable[..., tuple[torch.Tensor, ...]]
PADDED: dict[str, tuple[Callable[[], nn.Module], Make, Any, Sequence[tuple[int, ...]], int]] = {
    "mlp": (Mlp, lambda n: (rand(n, 4),), ({0: BATCH},), [(3,), (1,), (8,), (9,), (64,)], 4),
    "attention": (
        Attention,
        lambda b, t: (rand(b, t, 8),),
        ({0: Dim("b", max=4), 1: Dim("t", max=20)},),
        [(2, 5), (1, 1), (4, 20), (3, 17), (4, 8)],
        3,
    ),
    "two symbols": (
        Pairs,
        lambda n, k: (rand(n), rand(k + 1)[:k].clone()),
        ({0: Dim("n", max=9)}, {0: Dim("k", max=10)}),
        [(4, 7), (1, 10), (9, 1), (8, 8), (9, 10)],
        4,
    ),
    "images": (Images, lambda n: (rand(n, 3, 8, 8),), ({0: Dim("n", max=10)},), [(4,), (10,), (1,)], 2),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", PADDED)
def test_every_size_gives_what_eager_gives(name: str, engine: str) -> None:
    kind, make, dynamic, sizes, variants = PADDED[name]
    model = kind().eval()
    lowered = aot.lower(model, make(*sizes[0]), dynamic_shapes=dynamic, backend=engine)
    assert lowered.program.meta().padded, lowered.program.meta().reason
    assert len(lowered.program.meta().variants) == variants
    for one in sizes:
        check(lowered, model, make(*one))


def test_an_engine_without_integers_gets_all_of_it() -> None:
    """True sizes are floats: masks of integers would be left to PyTorch, and cut the graph at every softmax."""
    if not any(row.name == "openvino" and row.available for row in torchport.list_backends()):
        pytest.skip("openvino is not installed")
    lowered = aot.lower(Attention(), (rand(2, 5, 8),), dynamic_shapes=({1: Dim("t", max=16)},), backend="openvino")
    assert lowered.left["forward@16"] == ()
    assert len(lowered.pieces["forward@16"]) == 1


MLP = Mlp().eval()
MLP_4 = torch.export.export(MLP, (rand(4, 4),))
PAIRS = Pairs()


@pytest.fixture(scope="module")
def mlp() -> Any:
    return aot.lower(MLP, (rand(3, 4),), dynamic_shapes=({0: BATCH},), backend="reference")


@pytest.fixture(scope="module")
def pairs() -> Any:
    return aot.lower(
        PAIRS, (rand(3), rand(4)), dynamic_shapes=({0: Dim("n", max=20)}, {0: Dim("k", max=20)}), backend="reference"
    )


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(1, 64))
def test_random_sizes(mlp: Any, rows: int) -> None:
    check(mlp, MLP, (rand(rows, 4),))


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 20), k=st.integers(1, 20))
def test_random_pairs_of_sizes(pairs: Any, n: int, k: int) -> None:
    check(pairs, PAIRS, (rand(n), rand(k, 1)[:, 0]))


def test_what_is_padded_does_not_count() -> None:
    """What lies beyond the true size is no number once it was divided by."""

    class Division(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return (1 / x).sum(0), x.log().softmax(0), x.log().mean(), (x > 0).all(0)

    model = Division()
    lowered = aot.lower(model, (torch.ones(3, 2),), dynamic_shapes=({0: Dim("n", max=9)},), backend="reference")
    for n in (1, 5, 8, 9):
        check(lowered, model, (torch.rand(n, 2) + 0.5,))


def test_places_that_are_picked_by_number() -> None:
    class Picks(nn.Module):
        def forward(self, x: torch.Tensor, at: torch.Tensor) -> Any:
            return x[at], x.gather(0, at.abs()[:, None].expand(-1, 2)), x[0]

    model = Picks()
    args = (rand(5, 2), torch.tensor([0, -1, 2]))
    lowered = aot.lower(model, args, dynamic_shapes=({0: Dim("n", max=9)}, {0: Dim("k", max=9)}), backend="reference")
    assert lowered.program.meta().padded
    for n in (3, 4, 9):
        check(lowered, model, (rand(n, 2), torch.tensor([0, -1, 2, 1 - n, 1])))


def test_places_that_are_computed_from_sizes_or_constants() -> None:
    class Picks(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            places = torch.arange(x.shape[0])
            return x[places], x[places.amax() - 5 + places[:1]], x[places * 0 - 1], x.gather(0, places[:, None])

    lowered = aot.lower(Picks(), (rand(7, 2),), dynamic_shapes=({0: Dim("n", min=5, max=9)},), backend="reference")
    for n in (5, 6, 7, 8, 9):
        check(lowered, Picks(), (rand(n, 2),))


class Of(nn.Module):
    """A function as a model."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: torch.Tensor) -> Any:
        return self.function(*args)


def lowered_as(function: Callable[..., Any], make: Make, dims: Any, start: int, padded: bool, sizes: Any) -> None:
    """A function's results for these sizes are eager's, and it is padded or is not."""
    lowered = aot.lower(Of(function), make(*[start] * len(sizes[0])), dynamic_shapes=(dims,), backend="reference")
    assert lowered.program.meta().padded == padded, lowered.program.meta().reason
    for one in sizes:
        check(lowered, Of(function), make(*one))


ROWS: Make = lambda n: (rand(n, 4),)  # noqa: E731
WHOLE: Make = lambda n: ((torch.arange(4 * n) % 7 + 3).view(n, 4), (torch.arange(4 * n) % 5 - 7).view(n, 4))  # noqa: E731


@pytest.mark.parametrize(
    ("function", "make"),
    [
        (lambda x, y: (x // y, x % y, torch.fmod(x, y)), WHOLE),
        (lambda x, y: (torch.div(x, y, rounding_mode="trunc"), torch.div(x, y, rounding_mode="floor"), 7 % y), WHOLE),
        (lambda x, y: (x // (y * y), (x % y).sum(0), x // 3, x // x), WHOLE),
        (lambda x: ((x > 0).amax(0), (x > 0).amin(0), (x > 9).max(0).values, (x < 9).min(0).values), ROWS),
        (lambda x: (torch.frexp(x).mantissa, torch.frexp(x).exponent.sum(0)), ROWS),
        (lambda x: (x.view(x.shape[0] * 4).sum(), x.mean(0), x.mean(), torch.arange(x.shape[0]) + x[:, 0]), ROWS),
        (lambda x: (x.reshape(-1, 2).sum(0), x[None].expand(3, -1, -1).reshape(-1, 4).amax(0)), ROWS),
    ],
)
def test_operators_whose_padding_is_exact(function: Callable[..., Any], make: Make) -> None:
    dims = ({0: Dim("n", max=16)},) * len(make(3))
    lowered_as(function, make, dims, 3, True, [(1,), (3,), (5,), (8,), (9,), (16,)])


# -- where padding would change results --------------------------------------------------------------------------------
@pytest.mark.parametrize("engine", ENGINES)
def test_where_it_is_not_exact_there_is_a_variant_per_size(engine: str) -> None:
    model = Reverse()
    lowered = aot.lower(model, (rand(3, 2),), dynamic_shapes=({0: Dim("n", max=5)},), backend=engine)
    meta = lowered.program.meta()
    assert not meta.padded
    assert "aten.flip.default has no rule" in meta.reason
    assert [one.name for one in meta.variants] == [f"forward@{n}" for n in range(1, 6)]
    assert "inputs are not padded: aten.flip.default has no rule" in lowered.report()
    for n in range(1, 6):
        check(lowered, model, (rand(n, 2),))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * ((x.shape[0] + 1) // 2),
        lambda x: x * (x.shape[0] // 10),
        lambda x: x * min(x.shape[0], 5),
        lambda x: x.clamp(max=(x.shape[0] + 1) // 2),
        lambda x: x.sum(0) * (x.shape[0] + x.shape[0] % 2),
        lambda x: torch.ones((x.shape[0] + 1) // 2, 4).sum() + x,
        lambda x: torch.arange((x.shape[0] + 1) // 2),
        lambda x: torch.arange(x.shape[0], x.shape[0] + 4) + x,
        lambda x: torch.arange(x.shape[0] - 4, x.shape[0]) + x,
    ],
)
def test_what_is_computed_from_sizes_is_no_padding_s(function: Callable[..., Any]) -> None:
    """Numbers that are equal for the bucket and for the size that it is compared with, but not for every size."""
    lowered_as(function, ROWS, ({0: Dim("n", min=3, max=16)},), 7, False, [(3,), (5,), (9,), (15,), (16,)])


def _pairs(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two dimensions made one, in both orders."""
    return x.reshape(-1, 1, 4), y.reshape(-1, 1, 4)


def _fused(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    return nn.functional.scaled_dot_product_attention(q[:, None], k[:, None], (k * 2)[:, None], attn_mask=mask)


@pytest.mark.parametrize(
    ("function", "padded"),
    [
        (lambda p, q: torch.bmm(p, q.transpose(1, 2)), False),
        (lambda p, q: torch.matmul(p, q.transpose(1, 2)), False),
        (lambda p, q: torch.addmm(q[:, 0], p[:, 0], torch.ones(4, 4)), False),
        (lambda p, q: torch.baddbmm(q, p, (p * 2).transpose(1, 2) @ p), False),
        (_fused, False),
        (lambda p, q: _fused(p, p * 3, q[:, None, :, :1]), False),
        (
            lambda p, q: torch.bmm(p, (p * 2).transpose(1, 2)) + torch.addmm(p[:, 0], p[:, 0], torch.ones(4, 4)).sum(),
            True,
        ),
        (lambda p, q: torch.baddbmm(p, p, (p * 2).transpose(1, 2) @ p), True),
        (lambda p, q: _fused(p, p * 3, p[:, None, :, :1]), True),
    ],
)
def test_dimensions_that_were_joined_in_different_orders_are_not_put_together(
    function: Callable[..., Any], padded: bool
) -> None:
    b, t = Dim("b", max=3), Dim("t", max=5)
    lowered_as(
        lambda x, y: function(*_pairs(x, y)),
        lambda b, t: (rand(b, t, 4), rand(t, b, 4)),
        ({0: b, 1: t}, {0: t, 1: b}),
        2,
        padded,
        [(2, 3), (3, 5), (1, 4), (3, 2)],
    )


def test_sizes_that_are_given_and_others() -> None:
    model = Reverse()
    lowered = aot.lower(model, (rand(4, 2),), dynamic_shapes=({0: Dim("n")},), backend="reference", buckets=[16, 4])
    check(lowered, model, (rand(4, 2),))
    check(lowered, model, (rand(16, 2),))
    with pytest.raises(MethodError, match=r"no variant for n=5, .*flip.*; there are: n=4; n=16"):
        lowered(rand(5, 2))
    with pytest.raises(MethodError, match="n is from 4 to 16"):
        lowered(rand(3, 2))


def test_a_size_that_is_computed_from_another() -> None:
    class Doubled(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
            return x.repeat_interleave(2) + y, x.shape[0] + 3

    half = Dim("half", max=6)
    model = Doubled()
    lowered = aot.lower(model, (rand(3), rand(6)), dynamic_shapes=({0: half}, {0: 2 * half}), backend="reference")
    assert [str(one) for one in lowered.program.meta().inputs] == ["float32[half=1..6]", "float32[2*half=2..12]"]
    for n in (1, 4, 6):
        check(lowered, model, (rand(n), rand(2 * n)))
    with pytest.raises(MethodError, match=r"'y': dimension 0 \(2\*half\) is 8, but half is 3 by input 'x'"):
        lowered(rand(3), rand(8))
    with pytest.raises(MethodError, match=r"'y': dimension 0 \(2\*half\) is 7, but half is from 1 to 6"):
        lowered(rand(3), rand(7))


@pytest.mark.parametrize(
    ("model", "dims", "more", "error", "says"),
    [
        (Mlp(), ({0: Dim("n")},), {}, ConfigError, r"write torch.export.Dim\('n', max=…\)"),
        (Reverse(), ({0: Dim("n", max=100)},), {}, UnsupportedOp, "flip.*too many.*buckets=.*methods="),
        (Mlp(), ({0: Dim("n", min=20, max=40)},), {"buckets": [4, 8]}, ConfigError, "no bucket is as large"),
        (Mlp(), ({0: Dim("n", max=8)},), {"buckets": True}, ConfigError, "list of sizes"),
        (Mlp(), ({0: Dim("n", max=8)},), {"buckets": [0]}, ConfigError, "whole numbers above 1"),
        (Mlp(), None, {"buckets": [8]}, ConfigError, "there are none; give dynamic_shapes="),
        (Mlp(), ({0: Dim("n", max=1000)},), {"buckets": list(range(2, 100))}, ConfigError, "more than 64 sets"),
    ],
)
def test_what_is_refused(model: nn.Module, dims: Any, more: Any, error: type[Exception], says: str) -> None:
    rows = 30 if "least" in says or "as large" in says else 3
    with pytest.raises(error, match=says):
        aot.lower(model, (rand(rows, 4),), dynamic_shapes=dims,
                  backend="reference", **more)  # fmt: skip


def test_a_number_that_changes_is_refused_in_words() -> None:
    class Scale(nn.Module):
        def forward(self, x: torch.Tensor, n: int) -> torch.Tensor:
            return x * n

    with pytest.raises(UnsupportedOp, match="'n' of method 'forward' is a number that changes; give it as a 0-dim"):
        aot.lower(Scale(), (rand(3), 5), dynamic_shapes=(None, Dim.DYNAMIC), backend="reference")


def test_a_whole_program_keeps_its_promise() -> None:
    lowered = aot.lower(MLP, (rand(3, 4),), dynamic_shapes=({0: BATCH},), partitioners=[WholeProgram("reference")])
    check(lowered, MLP, (rand(5, 4),))
    with pytest.raises(UnsupportedOp, match="cannot be lowered whole"):
        aot.lower(MLP, (rand(3, 4),), dynamic_shapes=({0: BATCH},), partitioners=[WholeProgram("add_sub")])
    left = aot.lower(MLP, (rand(3, 4),), dynamic_shapes=({0: BATCH},), partitioners=[Supported("add_sub")])
    check(left, MLP, (rand(5, 4),))


# -- one program -------------------------------------------------------------------------------------------------------
def test_an_exported_program_and_several_methods_share_constants_and_buffers(tmp_path: Path) -> None:
    model = Running()
    rows, given = Dim("rows", max=20), copy.deepcopy(model)
    forward = torch.export.export(given, (rand(4, 3),), dynamic_shapes=({0: rows},))
    lowered = aot.lower(
        given,
        (rand(4, 3),),
        dynamic_shapes=({0: rows},),
        methods={"read": (rand(3),), "again": forward},
        backend="reference",
    )
    assert lowered.methods == ("forward", "read", "again")
    for n in (3, 12, 8, 20, 1):
        x = rand(n, 3)
        check(lowered, model, (x,))
        torch.testing.assert_close(lowered.run("read", torch.zeros(3)), model.total)
    saved = lowered.save(tmp_path / "m.pt2")
    assert saved.weights < 2 * (9 + 3) * 4 + 200, "variants have the weights once"
    program = runtime.load(tmp_path / "m.pt2")
    first = program.load_method()
    assert first.state["total"].tolist() == [0, 0, 0]
    read = program.load_method("read", state=first.state)
    again = program.load_method("again", state=first.state)
    total = torch.zeros(3)
    for n, method in ((3, first), (12, again), (18, first)):
        x = rand(n, 3)
        method(x)
        total += x.sum(0)
        torch.testing.assert_close(read(torch.zeros(3))[0], total)
    first.state.reset()
    assert first.state["total"].tolist() == [0, 0, 0]


def test_the_file_is_still_an_exported_program(mlp: Any, tmp_path: Path) -> None:
    mlp.save(tmp_path / "mlp.pt2")
    exported = torch.export.load(tmp_path / "mlp.pt2")
    for n in (2, 17):
        torch.testing.assert_close(exported.module()(rand(n, 4)), MLP(rand(n, 4)))
    method = runtime.load(tmp_path / "mlp.pt2").load_method()
    (array,) = method(rand(5, 4).numpy())
    assert isinstance(array, np.ndarray)
    np.testing.assert_allclose(array, MLP(rand(5, 4)).detach().numpy(), rtol=1e-4, atol=1e-5)


def test_reports_graphs_and_inspection(mlp: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from torchport.cli import main

    report = mlp.report()
    for part in ("sizes batch=1..64; inputs are padded", "forward@8 ", "forward@64 ", "method forward: 4 operators"):
        assert part in report
    assert mlp.graph().startswith("method forward@64")
    assert mlp.graph("forward@8").startswith("method forward@8")
    with pytest.raises(MethodError, match="sizes that change") as caught:
        mlp.graph_module()
    assert caught.value.code == ErrorCode.NOT_SUPPORTED
    mlp.save(tmp_path / "mlp.pt2")
    assert main(["inspect", str(tmp_path / "mlp.pt2")]) == 0
    shown = capsys.readouterr().out
    for part in ("input  x: float32[batch=1..64, 4]", "4 variants (inputs are padded", "variant forward@16"):
        assert part in shown
    assert str(mlp.program.meta().outputs[0]) == "float32[batch=1..64, 2]"


def test_operators_keep_their_places(mlp: Any) -> None:
    handles = mlp._debug.handles
    assert {place.module for place in handles.values()} == {f"layers.{n}" for n in range(4)}
    assert all("test_aot_dynamic.py" in place.source or "nn/modules" in place.source for place in handles.values())
    graph = mlp.pieces["forward@8"][0].graph.graph
    assert {node.meta["debug_handle"] for node in graph.nodes if node.op == "call_function"} <= set(handles)


def test_operators_of_other_methods_keep_their_places_where_one_is_taken_apart() -> None:
    """A convolution has a rule when it is decomposed only, and that graph has debug handles of its own."""
    images = torch.export.export(Images().eval(), (rand(3, 3, 8, 8),), dynamic_shapes=({0: Dim("n", max=9)},))
    lowered = aot.lower(MLP, (rand(3, 4),), methods={"images": images, "last": MLP_4}, backend="reference")
    handles = lowered._debug.handles
    for name, modules in (("forward", "layers."), ("images@9", "layers."), ("last", "layers.")):
        nodes = lowered.pieces[name][0].graph.graph.nodes
        used = {node.meta["debug_handle"] for node in nodes if node.op == "call_function"}
        assert used <= set(handles), name
        assert all(handles[one].module.startswith(modules) or not handles[one].module for one in used)
    used = [{node.meta["debug_handle"] for node in lowered.pieces[name][0].graph.graph.nodes if "debug_handle" in
             node.meta} for name in ("forward", "images@9", "last")]  # fmt: skip
    assert not used[0] & used[1]
    assert not used[1] & used[2]
    assert not used[0] & used[2]


def test_a_delegate_is_a_variant_s() -> None:
    lowered = aot.lower(MLP, (rand(3, 4),), dynamic_shapes=({0: BATCH},), backend="reference")
    assert lowered.program.delegate_data("forward@8", 0)
    with pytest.raises(MethodError, match="has variants; name one: forward@8, forward@16"):
        lowered.program.delegate_data("forward", 0)


def test_results_are_laid_out_as_usual() -> None:
    """The true part of a padded inner dimension is made contiguous: users take views of results."""
    fn = nn.Sequential(nn.ReLU())
    lowered = aot.lower(fn, (rand(2, 3),), dynamic_shapes=({1: Dim("n", max=8)},), backend=fresh().name)
    assert lowered(rand(2, 5)).view(-1).shape == (10,)
    flipped = lowered(rand(5, 2).t())
    torch.testing.assert_close(flipped, rand(5, 2).t().relu())


RUN = """
import sys
import numpy
import torchport.runtime as runtime
method = runtime.load({path!r}).load_method()
for size in (1, 3, 8, 11):
    x = numpy.arange(size, dtype=numpy.float32)
    (result,) = method(x, x * 2)
    assert result.tolist() == [3.0 * n for n in range(size)], result
print(sorted(sys.modules))
"""


def test_a_program_that_needs_no_torch_imports_none(tmp_path: Path) -> None:
    class Sum(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x + y

    n = Dim("n", max=12)
    lowered = aot.lower(Sum(), (rand(3), rand(3)), dynamic_shapes=({0: n}, {0: n}), backend="add_sub")
    lowered.save(tmp_path / "sum.pt2")
    code = RUN.format(path=str(tmp_path / "sum.pt2"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name in (
        "torch",
        "torchport.aot",
        "torchport.frontend",
        "torchport.trace",
        "torchport.run",
        "torchport.backend.masking",
    ):
        assert f"'{name}'" not in done.stdout


# -- a model of Hugging Face's -----------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES[:2])
def test_bert(engine: str) -> None:
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                        intermediate_size=64, max_position_embeddings=64)  # fmt: skip
    bert = BertModel(config).eval()

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert = bert

        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> Any:
            found = self.bert(input_ids=ids, attention_mask=mask)
            return found.last_hidden_state, found.pooler_output

    def make(batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        mask = torch.ones(batch, length, dtype=torch.int64)
        mask[0, length // 2 + 1 :] = 0
        return torch.arange(batch * length).reshape(batch, length) % 100, mask

    dims = {0: Dim("batch", max=8), 1: Dim("length", max=64)}
    model = Encoder().eval()
    lowered = aot.lower(model, make(2, 7), dynamic_shapes=(dims, dims), backend=engine)
    assert len(lowered.pieces["forward@8,64"]) == 1, "positions and masks of constants leave the graph whole"
    assert [one.name for one in lowered.program.meta().variants] == [f"forward@8,{n}" for n in (8, 16, 32, 64)]
    for batch, length in ((2, 7), (1, 5), (8, 64), (3, 33), (1, 1), (5, 16)):
        check(lowered, model, make(batch, length))


class Calls(nn.Module):
    def __init__(self, fn: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: torch.Tensor) -> Any:
        return self.fn(x)


def lower_fn(fn: Callable[[torch.Tensor], Any], example: torch.Tensor) -> Any:
    return aot.lower(Calls(fn), (example,), backend="reference", dynamic_shapes=({0: Dim("b", max=16)},))


def test_a_number_that_is_computed_from_a_size_is_no_output() -> None:
    for fn in (lambda x: (x * 2, x.shape[0] / 2), lambda x: (x * 2, x.shape[0] % 2 == 0)):
        with pytest.raises(UnsupportedOp, match="computed from a size that changes"):
            lower_fn(fn, torch.rand(5, 4))


@pytest.mark.parametrize(
    ("fn", "example"),
    [
        (lambda x: x.sum(0) * x.sum().item(), torch.rand(5, 4)),  # has no masks, and does not come apart
        (lambda x: x * 2, torch.rand(4).expand(5, 4)),  # an example whose elements share memory
    ],
)
def test_odd_methods_with_sizes_that_change(fn: Any, example: torch.Tensor) -> None:
    lowered = lower_fn(fn, example)
    for size in (2, 5, 8, 9):
        x = torch.rand(size, 4)
        torch.testing.assert_close(lowered(x), fn(x))
