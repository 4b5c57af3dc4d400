"""Inference mode, and devices of an index above 0, which PyTorch treats unlike all others: as on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from everyday_support import ON_PORT
from fakes import Refusing
from torch import nn

pytestmark = pytest.mark.skipif(not ON_PORT, reason="compares port with the CPU; this run is on the CPU")


def _device(index: int) -> torch.device:
    import torchport
    from torchport.run.device_runtime import runtimes

    first = torchport.use("reference")
    return first if index == 0 else torch.device("port", runtimes.bind(torchport.get_backend("reference"), least=index))


@pytest.fixture(params=(0, 1))
def place(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    yield _device(request.param)
    torch.set_default_device(None)


def _written_through(x: torch.Tensor, view: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    view(x).zero_()
    return x


PROGRAMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "linear": lambda x: nn.functional.linear(x, x[:2] * 2, x[0, :2]),
    "matmul of three dimensions": lambda x: x[None] @ x.t(),
    "view": lambda x: x.t().reshape(-1)[2:] + 1,
    "detach": lambda x: x.detach() + 1,
    "in-place composite": lambda x: x.clone().square_(),
    "in-place": lambda x: x.clone().add_(1).lerp_(x, 0.3),
    "in-place on a view": lambda x: _written_through(x.clone(), lambda y: y[1]),
    "a write through a composite's view": lambda x: _written_through(
        x.clone(), lambda y: nn.functional.dropout(y, 0.0)
    ),
    "dropout_": lambda x: nn.functional.dropout(x.clone(), 0.0, training=True, inplace=True),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "inverse": lambda x: torch.linalg.inv(x[:3, :3] + 4 * torch.eye(3, device=x.device)),
    "softmax into a result": lambda x: torch.softmax(
        x, 1, dtype=torch.float64, out=torch.empty(x.shape, dtype=torch.float64, device=x.device)
    ),
    "linear into a result": lambda x: torch._C._nn.linear(  # type: ignore[attr-defined]
        x.expand(2, *x.shape), x[:2], x[0, :2], out=torch.empty(2, x.shape[0], 2, device=x.device)
    ),
    "max_pool1d": lambda x: nn.functional.max_pool1d(x[None], 2),
    "quantile": lambda x: x.quantile(0.3, dim=0),
    "nanmean": lambda x: x.nanmean(0),
}


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("name", PROGRAMS)
def test_values_are_the_cpus(place: torch.device, name: str, mode: Any) -> None:
    x = torch.linspace(-2, 2, 16).sin().reshape(4, 4)
    program = PROGRAMS[name]
    ours = x.to(place)
    with mode():
        expected, actual = program(x), program(ours)
    torch.testing.assert_close(actual.cpu(), expected)
    torch.testing.assert_close(ours.cpu(), x)


def test_a_model_is_the_same_computation_with_and_without_inference_mode(place: torch.device) -> None:
    from torchport import metrics

    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.MultiheadAttention(8, 2, batch_first=True))
    layers, attention = model[:3].to(place).eval(), model[3].to(place).eval()
    x = torch.randn(2, 3, 4).to(place)

    def run() -> torch.Tensor:
        hidden = layers(x)
        return attention(hidden, hidden, hidden, need_weights=False)[0].cpu()

    with torch.no_grad():
        expected = run()
        run()
    before = metrics.snapshot()["counters"].get("Compile", 0)
    with torch.inference_mode():
        torch.testing.assert_close(run(), expected)
    assert metrics.snapshot()["counters"].get("Compile", 0) == before


def test_a_module_made_before_serves_in_inference_mode(place: torch.device) -> None:
    model = nn.Linear(4, 2)
    x = torch.randn(3, 4)
    expected = model(x).detach()
    model.to(place)
    there = x.to(place)
    with torch.inference_mode():
        inside = model(there)
    torch.testing.assert_close(inside.cpu(), expected)
    model(there).sum().backward()  # gradients work as before
    assert model.weight.grad is not None


def test_a_view_below_functionalization_outlives_a_computation() -> None:
    """A composite's own views are values of their own; the next operator may be one that goes to the host."""
    import torchport

    kind = Refusing.install(op="aten.as_strided.default")
    x, w, b = torch.randn(2, 3, 3), torch.randn(4, 3), torch.randn(4)
    try:
        place = torchport.use(kind.name)
        out = torch.empty(2, 3, 4, device=place)
        torch._C._nn.linear(x.to(place), w.to(place), b.to(place), out=out)  # type: ignore[attr-defined]
        torch.testing.assert_close(out.cpu(), nn.functional.linear(x, w, b))
    finally:
        torchport.use("reference")


def test_as_strided_of_a_view_is_right_or_refused(place: torch.device) -> None:
    from torchport.core.errors import UnsupportedOp

    x = torch.arange(24.0).view(4, 6)
    with torch.inference_mode():
        ours = x.to(place)
        torch.testing.assert_close(ours.as_strided((2, 2), (1, 2), 1).cpu(), x.as_strided((2, 2), (1, 2), 1))
        torch.testing.assert_close(ours[1:].as_strided((2, 2), (1, 2)).cpu(), x[1:].as_strided((2, 2), (1, 2)))
        for op in (torch.as_strided, torch.as_strided_copy):
            with pytest.raises(UnsupportedOp, match="where a view begins"):
                op(ours[1:], (2, 2), (1, 2), 1)


def test_a_wrapper_of_another_index_leaves_no_trace_on_this_one() -> None:
    """An operator that reaches index 0's kernel with it is passed on; numbers of its key were noted here."""
    from torchport.frontend.device.install import kernels

    here, there = _device(0), _device(1)
    other, x = torch.ones(3).to(there) + 0, torch.ones(2).to(here)
    for redirect in (True, False):
        y = x * 2.0
        if redirect:
            kernels[torch.ops.aten.mul.Tensor].fast(other, 0.3)
        assert (y * 2.5).tolist() == [5.0, 5.0]
