"""Backends that take part of PyTorch: what they get instead, and how one finds out why."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fakes import Fake
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

import torchport
from torchport import CompileSpecs, Processed, Support, metrics
from torchport.backends.reference import ReferenceBackend

aten = torch.ops.aten


# -- decompositions that return named tuples ---------------------------------------------------------------------------
def _checked_preprocess(self: Any, graph: fx.GraphModule, specs: CompileSpecs) -> Processed:
    torchport.verify_graph(graph)
    return ReferenceBackend.preprocess(self, graph, specs)


_NAMED = (aten.nll_loss_forward, aten.native_layer_norm, aten.nll_loss_backward, aten.native_layer_norm_backward)


@pytest.mark.parametrize("own", [False, True], ids=["core", "own"])
def test_a_decomposition_that_returns_a_named_tuple(own: bool) -> None:
    """``cross_entropy`` and ``layer_norm`` on a backend that has neither, by PyTorch's decompositions."""
    more: dict[str, Any] = {}
    refused = {op.default for op in _NAMED}
    if own:
        more["decompositions"] = lambda self: torch._decomp.get_decompositions(list(_NAMED))
    else:
        refused = {aten.nll_loss_forward.default}  # the others are in the core set, or not decomposed

    def supports(self: Any, node: fx.Node) -> Support:
        return Support.no("not here") if node.target in refused else Support.yes()

    fake = Fake.install(supports=supports, preprocess=_checked_preprocess, **more)

    def loss(device: Any) -> Tensor:
        x = torch.arange(20.0).reshape(4, 5).to(device).requires_grad_()
        normal = F.layer_norm(x, [5], torch.ones(5, device=device), torch.zeros(5, device=device))
        F.cross_entropy(normal, torch.tensor([0, 1, 2, 3]).to(device)).backward()
        assert x.grad is not None
        return x.grad.cpu()

    metrics.reset()
    torch.testing.assert_close(loss(fake.device), loss("cpu"))
    assert metrics.counter("Fallback") == 0, metrics.report()


# -- decompositions that are not for all arguments ---------------------------------------------------------------------
@pytest.mark.parametrize("taken", [True, False], ids=["the backend takes it", "it does not"])
def test_an_operator_that_its_decomposition_declines_stays(taken: bool) -> None:
    def clamped(x: Tensor, lo: Any = None, hi: Any = None) -> Any:
        return NotImplemented if x.dtype is torch.float64 else x.maximum(torch.full_like(x, lo))

    def picked(x: Tensor, places: Tensor) -> Tensor:
        return x.reshape(-1)[int(places)] if not places.dim() else x.reshape(-1).index_select(0, places)

    def supports(self: Any, node: fx.Node) -> Support:
        asked.append((str(node.target), node.meta["val"].dtype))
        refused = node.target in (aten.clamp.default, aten.take.default) and not taken
        return Support.no("not here") if refused else Support.yes()

    asked: list[Any] = []
    table = {aten.clamp.default: clamped, aten.take.default: picked}
    fake = Fake.install(supports=supports, decompositions=lambda self: table)
    x, places = torch.arange(-4.0, 4.0), torch.tensor([1, 3])
    metrics.reset()
    for dtype in (torch.float32, torch.float64):
        y = x.to(dtype)
        assert torch.equal(y.to(fake.device).clamp(1, 9).cpu(), y.clamp(1, 9))
    for one in (places, places[0]):  # of one without dimensions the decomposition asks for its value
        assert torch.equal(x.to(fake.device).take(one.to(fake.device)).cpu(), x.take(one))
    assert metrics.counter("Fallback") == (0 if taken else 2), metrics.report()
    assert ("aten.clamp.default", torch.float64) in asked
    assert ("aten.clamp.default", torch.float32) not in asked


# -- random numbers ----------------------------------------------------------------------------------------------------
def _without_int64(self: Any, node: fx.Node) -> Support:
    values = tree_leaves([node.meta["val"], *(one.meta["val"] for one in node.all_input_nodes)])
    if any(isinstance(value, torch.Tensor) and value.dtype is torch.int64 for value in values):
        return Support.no("there are no 64-bit integers")
    return Support.yes()


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: F.dropout(x, 0.5),
        torch.rand_like,
        lambda x: torch.randn(3, device=x.device),
        lambda x: torch.bernoulli(torch.full_like(x, 0.3)),
        lambda x: x.clone().uniform_(-1, 1),
    ],
    ids=["dropout", "rand_like", "randn", "bernoulli", "uniform_"],
)
def test_an_engine_without_int64_draws_the_same_numbers(draw: Callable[[Tensor], Tensor]) -> None:
    fakes = [Fake.install(), Fake.install(supports=_without_int64)]
    drawn: list[list[Tensor]] = []
    for fake in fakes:
        torch.manual_seed(3)
        x = torch.ones(64, device=fake.device)
        drawn.append([draw(x).cpu() for _ in range(3)])
    for one, other in zip(*drawn, strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(drawn[0][0], drawn[0][1])


# -- explain -----------------------------------------------------------------------------------------------------------


def _refuses_silu(self: Any, node: fx.Node) -> Support:
    taken = node.target not in (aten.silu.default, aten.sigmoid.default)
    return Support.yes() if taken else Support.no("no sigmoid today")


def test_explain_names_the_operator_inside_that_is_refused() -> None:
    fake = Fake.install(supports=_refuses_silu)
    x = torch.ones(2, 2, device=fake.device)
    reason = "for float32[2, 2]: no; aten.sigmoid.default: no sigmoid today"
    assert reason in str(torchport.explain(aten.silu.default, x))
    with torchport.config.override(fallback="error"), pytest.raises(torchport.UnsupportedOp, match=r"aten\.sigmoid"):
        F.silu(x)
    assert "for float32[4, 4]: no; aten.sigmoid.default: no sigmoid today" in str(
        torchport.explain("aten::silu", str(fake.device))
    )
    assert "for float32[2, 2], float32[2, 2]: yes" in str(torchport.explain(aten.add.Tensor, x, x))


@pytest.mark.parametrize("device", ["port", "reference"])
def test_the_command_in_a_fresh_process(device: str) -> None:
    command = [sys.executable, "-m", "torchport.cli", "explain", "aten::add.Tensor", "--device", device]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "in this order:" in done.stdout
    assert device == "port" or "(reference on cpu:0)" in done.stdout


# -- a backend in a file -----------------------------------------------------------------------------------------------
def test_a_backend_in_a_file_imports_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "torchport_test_neighbour.py").write_text("NAME = 'from_a_file'\n")
    (tmp_path / "torchport_test_file.py").write_text(
        "from torchport_test_neighbour import NAME\n"
        "from torchport.backends.reference import ReferenceBackend\n\n"
        "class Mine(ReferenceBackend):\n    name = NAME\n"
    )
    code = (
        "from torchport.testing import load_backend\n"
        f"print(load_backend({str(tmp_path / 'torchport_test_file.py') + ':Mine'!r}).name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, cwd="/")
    assert done.stdout.strip() == "from_a_file", done.stderr
