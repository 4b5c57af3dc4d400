"""The example of ``docs/write-a-backend.md``: it trains, and each of its operators is right."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import pytest
import torch
from torch import nn

import torchport

EXAMPLE = Path(__file__).parents[3] / "examples" / "tiny_backend.py"
aten = torch.ops.aten


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("tiny_backend", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    torchport.registry.unregister("tiny")


@pytest.fixture
def device(example: ModuleType) -> torch.device:
    return torchport.device("tiny")


def _train(device: Any, make: Callable[[], nn.Module], optimizer: Any, loss_of: Any, target: torch.Tensor) -> Any:
    """Losses of ten steps, and the parameters after them."""
    torch.manual_seed(0)
    model = make().to(device)
    steps = optimizer(model.parameters())
    x, y = torch.randn(32, 6).to(device), target.to(device)
    losses: list[float] = []
    for _ in range(10):
        steps.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        steps.step()
        losses.append(loss.item())
    return losses, [parameter.detach().cpu() for parameter in model.parameters()]


def _count(name: str) -> int:
    return torchport.metrics.counter(name)


def test_trains_like_the_cpu_in_one_computation_per_step(device: torch.device) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    target = torch.linspace(-1, 1, 96).view(32, 3)
    expected = _train("cpu", make, sgd, nn.functional.mse_loss, target)
    before = {name: _count(name) for name in ("Execute", "Fallback")}
    actual = _train(device, make, sgd, nn.functional.mse_loss, target)
    torch.testing.assert_close(actual, expected)
    assert expected[0][-1] < 0.9 * expected[0][0]
    # Ten steps; reading each of four parameters at the end needs no computation of its own.
    assert _count("Execute") - before["Execute"] == 10
    assert _count("Fallback") == before["Fallback"]


def test_what_it_does_not_take_runs_on_the_host_and_is_counted(device: torch.device) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.Sigmoid(), nn.LayerNorm(8), nn.Linear(8, 4))

    def adam(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=0.05)

    target = torch.arange(32) % 4
    expected = _train("cpu", make, adam, nn.functional.cross_entropy, target)
    before = _count("Fallback")
    actual = _train(device, make, adam, nn.functional.cross_entropy, target)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert _count("Fallback") > before


def _ramp(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=torch.float64) - count / 3).view(shape).to(dtype)


X, Y, INTS = _ramp(3, 4), _ramp(4) / 7, _ramp(3, 4, dtype=torch.int64)
CALLS: dict[Any, list[tuple[Any, ...]]] = {
    aten.add.Tensor: [(X, Y), (X, 2.5), (INTS, X), (INTS, 2), (X > 0, X < 2)],
    aten.sub.Tensor: [(X, Y), (X, -1.5), (INTS, INTS[0])],
    aten.mul.Tensor: [(X, Y), (X, 3), (INTS, Y), (X > 0, X)],
    aten.div.Tensor: [(X, Y + 5), (X, 0.0), (INTS, 4), (INTS, INTS)],
    aten.pow.Tensor_Scalar: [(X, 2), (X.abs(), 0.5), (INTS, 3), (X, -1)],
    aten.neg.default: [(X,), (INTS,)],
    aten.exp.default: [(X,), (INTS,)],
    aten.tanh.default: [(X,)],
    aten.relu.default: [(X,), (INTS,)],
    aten.le.Scalar: [(X, 0.5), (INTS, 1)],
    aten.where.self: [(X > 0, X, Y), (INTS > 1, INTS, X)],
    aten.mean.default: [(X,), (X.double(),)],
    aten.sum.dim_IntList: [(X, [0]), (X, [-1], True), (X, [0, 1]), (X, []), (X, None), (INTS, [1]), (X > 0, [0])],
    aten.mm.default: [(X, X.t()), (INTS, INTS.t())],
    aten.addmm.default: [(Y[:3], X, X.t())],
    aten.permute.default: [(X, [1, 0]), (X[None], [2, 0, 1])],
    aten.view.default: [(X, [2, 6]), (X, [-1]), (X, [4, -1, 1])],
    aten.expand.default: [(Y, [2, 4]), (X[None], [5, -1, -1]), (X.sum(), [2, 2])],
    aten.select.int: [(X, 0, 1), (X, -1, -2)],
    aten.clone.default: [(X,), (X.t(),)],
    aten.scalar_tensor.default: [(2.5,), (float("inf"),), (3,)],
}
FACTORIES: dict[Any, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {
    aten.full.default: [(([2, 3], 1.5), {}), (([], 7), {"dtype": torch.int64}), (([2], float("-inf")), {})],
    aten.full_like.default: [((X, 2.0), {}), ((X, 3), {"dtype": torch.int32})],
    aten._to_copy.default: [((X,), {"dtype": dtype}) for dtype in (torch.int64, torch.float64, torch.bool)],
}


def _cases() -> list[Any]:
    cases = [(op, args, {}) for op, calls in CALLS.items() for args in calls]
    cases += [(op, args, kwargs) for op, calls in FACTORIES.items() for args, kwargs in calls]
    return [pytest.param(*case, id=f"{case[0]}-{number}") for number, case in enumerate(cases)]


@pytest.mark.parametrize(("op", "args", "kwargs"), _cases())
def test_operator(device: torch.device, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    def on_device(value: Any) -> Any:
        return value.to(device) if isinstance(value, torch.Tensor) else value

    made = not any(isinstance(value, torch.Tensor) for value in args)
    expected = op(*args, **kwargs)
    with torchport.config.override(fallback="error"):
        actual = op(*map(on_device, args), **kwargs, **({"device": device} if made else {}))
        torch.testing.assert_close(actual.cpu(), expected, equal_nan=True)


def test_every_operator_of_the_table_is_tested(example: ModuleType) -> None:
    assert {*CALLS, *FACTORIES} == set(example.NUMPY)


def test_factors_and_dtypes_it_cannot_express_are_refused(device: torch.device) -> None:
    x = X.to(device)
    with torchport.config.override(fallback="error"):
        with pytest.raises(torchport.UnsupportedOp, match="there is no NumPy text for it"):
            torch.addmm(x[0, :3], x, x.t(), beta=2)
        with pytest.raises(torchport.UnsupportedOp, match="NumPy: no"):
            _ = x.to(torch.bfloat16)
    torch.testing.assert_close(torch.addmm(x[0, :3], x, x.t(), beta=2).cpu(), torch.addmm(X[0, :3], X, X.t(), beta=2))


def test_bytes_are_all_that_another_process_needs(example: ModuleType, device: torch.device) -> None:
    made: list[torchport.Processed] = []
    backend = torchport.get_backend("tiny")
    preprocess = backend.preprocess

    def spy(graph: torch.fx.GraphModule, specs: torchport.CompileSpecs) -> torchport.Processed:
        made.append(preprocess(graph, specs))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "preprocess", spy)
        expected = ((X.to(device) * 0.75).tanh() - 1.25).cpu()
    (processed,) = made
    here = torchport.BackendDevice("cpu")
    other = example.TinyBackend()
    handle = other.init(
        torchport.FreeableBuffer(bytes(processed.data)), torchport.CompileSpecs(), torchport.InitContext(here)
    )
    values = [other.to_device(value, here) for value in (X, torch.tensor([0.75, 1.25]))]
    (result,) = other.execute(handle, values, torchport.ExecutionContext(here))
    torch.testing.assert_close(result.tensor, expected)


@pytest.mark.parametrize("mode", ["lazy", "eager"])
def test_what_a_factory_on_the_host_makes_can_be_written_and_viewed(
    device: torch.device, mode: Literal["lazy", "eager"]
) -> None:
    with torchport.mode(mode):
        made = [
            torch.ones(3, 2, device=device),
            torch.zeros(2, device=device),
            torch.full((2,), 3.0, device=device),
            torch.arange(1.0, 6.0, device=device),
            torch.randn(3, device=device),
            torch.empty(3, device=device),
            torch.empty_strided((2, 2), (2, 1), device=device),
            torch.eye(3, device=device),
            torch.linspace(0, 1, 5, device=device),
            torch.randperm(5, device=device),
            torch.tril_indices(3, 3, device=device),
            torch.scalar_tensor(2.0, device=device),
            aten.ones.default([2], device=device),
        ]
        for tensor in made:
            assert torch._is_functional_tensor(tensor)
            tensor.view(-1)[:1].zero_()
            assert tensor.add_(1).view(-1)[0].item() == 1


def test_a_write_to_a_large_expanded_tensor_is_refused_at_once(device: torch.device) -> None:
    wide = torch.ones(1, device=device).expand(100_000, 100_000)
    with pytest.raises(RuntimeError, match="single memory location"):
        wide.add_(1)


def test_operators_that_the_cpu_has_by_other_names(device: torch.device) -> None:
    """Off the CPU, PyTorch calls fused kernels for recurrent cells; the host takes them apart."""
    torch.manual_seed(0)
    for cell in (nn.LSTM(3, 4), nn.GRUCell(3, 4)):
        x = torch.randn(2, 3)
        with torch.no_grad():
            expected = cell(x)
        found = cell.to(device)(x.to(device))
        ours, theirs = (one[0] if isinstance(cell, nn.LSTM) else one for one in (found, expected))
        torch.testing.assert_close(ours.detach().cpu(), theirs)
