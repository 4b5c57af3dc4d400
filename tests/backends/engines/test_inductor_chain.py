"""Libraries of ``inductor`` that are called in order by C++: the same values as by Python, whatever the order is."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers_graphs import CPU, normal_form
from native_support import compiles
from torch import nn

import torchport
from torchport.backend.interface import BackendData, ExecutionContext, FreeableBuffer, InitContext, TensorData
from torchport.backend.optional import Chain, ChainCall, ChainRun
from torchport.backends.inductor import InductorBackend, queue
from torchport.core.errors import ExecutionError
from torchport.core.specs import CompileSpecs, TensorSpec

backend = InductorBackend()
pytestmark = [compiles, pytest.mark.skipif(not backend.is_available(), reason=backend.unavailable_reason())]
Tensors = list[torch.Tensor]


def _two(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x * scale[0] + scale[1], x.sin()


def _one(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x - y).cos()


FUNCTIONS: tuple[Callable[..., Any], ...] = (_two, _one)


@pytest.fixture(scope="module")
def handles() -> list[Any]:
    """Both functions compiled, each run once."""
    x = torch.arange(6.0).reshape(2, 3)
    found: list[Any] = []
    for function, args in ((_two, [x, torch.tensor([2.0, 1.0])]), (_one, [x, x + 1])):
        graph, _ = normal_form(function, args)
        processed = backend.preprocess(graph, CompileSpecs())
        found.append(backend.init(FreeableBuffer(processed.data), CompileSpecs(), InitContext(CPU)))
        backend.execute(found[-1], _data(args), ExecutionContext(CPU))
    return found


def _data(tensors: Tensors) -> list[BackendData]:
    return [TensorData(CPU, TensorSpec.of(tensor), tensor) for tensor in tensors]


def _context(results: Tensors, donated: frozenset[int] = frozenset()) -> ExecutionContext:
    return ExecutionContext(CPU, tuple(map(TensorSpec.of, results)), donated)


def _by_hand(chain: Chain, which: list[int], inputs: Tensors) -> Tensors:
    values = [*inputs, *(inputs[source][list(places)] for source, places in chain.parts)]
    for call, function in zip(chain.calls, which, strict=True):
        made = FUNCTIONS[function](*[values[at] for at in call.inputs])
        values += made if isinstance(made, tuple) else [made]
    return [values[at] for at in chain.results]


def _random_chain(handles: list[Any], seed: int) -> tuple[Chain, list[int], Tensors]:
    """Some calls on inputs, parts and each other's results; values may be used often or never."""
    draw = random.Random(seed)
    inputs = [torch.randn(2, 3) for _ in range(draw.randint(1, 3))] + [torch.randn(8)]
    pack = len(inputs) - 1
    parts = tuple((pack, tuple(sorted(draw.sample(range(8), 2)))) for _ in range(3))
    matrices, values, calls, which = list(range(pack)), len(inputs) + len(parts), list[ChainCall](), list[int]()
    for _ in range(draw.randint(1, 6)):
        function = draw.randrange(2)
        given = (draw.choice(matrices), len(inputs) + draw.randrange(3)) if function == 0 else None
        given = given or (draw.choice(matrices), draw.choice(matrices))
        made = tuple(range(values, values + (2 if function == 0 else 1)))
        values += len(made)
        matrices += made
        calls.append(ChainCall(handles[function], given, made))
        which.append(function)
    results = tuple(draw.choices(matrices, k=3))
    return Chain(len(inputs), parts, tuple(calls), values, results), which, inputs


@pytest.mark.parametrize("seed", range(30))
def test_any_order_gives_what_pytorch_does(handles: list[Any], seed: int) -> None:
    torch.manual_seed(seed)
    chain, which, inputs = _random_chain(handles, seed)
    expected = _by_hand(chain, which, inputs)
    before = [tensor.clone() for tensor in inputs]
    run = backend.chained(chain)
    assert run is not None
    for _ in range(2):
        data = _data(inputs)
        results = run(data, _context(expected))
        for one, result, wanted in zip(chain.results, results, expected, strict=True):
            torch.testing.assert_close(result.tensor, wanted)  # type: ignore[attr-defined]
            assert (one < chain.inputs) == any(result is given for given in data)
    for tensor, was in zip(inputs, before, strict=True):
        assert torch.equal(tensor, was)


def _simple(handles: list[Any]) -> ChainRun:
    calls = (ChainCall(handles[1], (0, 0), (1,)), ChainCall(handles[1], (1, 1), (2,)))
    run = backend.chained(Chain(1, (), calls, 3, (2,)))
    assert run is not None
    return run


def test_an_input_with_other_strides_is_copied(handles: list[Any]) -> None:
    x = torch.randn(3, 2).t()
    expected = torch.ones(2, 3)
    (result,) = _simple(handles)(_data([x]), _context([expected]))
    torch.testing.assert_close(result.tensor, expected)  # type: ignore[attr-defined]


def test_what_does_not_fit_is_an_error(handles: list[Any]) -> None:
    run, results = _simple(handles), [torch.ones(2, 3)]
    with pytest.raises(ExecutionError, match="not as it should be"):
        run(_data([torch.randn(3, 3)]), _context(results))
    with pytest.raises(ExecutionError, match="not a TensorData with a value"):
        run([TensorData(CPU, TensorSpec.of(results[0]), None)], _context(results))
    with pytest.raises(ExecutionError, match="not a TensorData with a value"):
        run([BackendData(CPU, TensorSpec.of(results[0]))], _context(results))
    for data in ([], _data(results * 2)):
        with pytest.raises(ExecutionError, match=f"takes 1 arguments, but got {len(data)}"):
            run(data, _context(results))
    (result,) = run(_data([torch.randn(2, 3)]), _context(results))
    torch.testing.assert_close(result.tensor, results[0])  # type: ignore[attr-defined]


def test_results_are_no_views_to_autograd(handles: list[Any]) -> None:
    """Compiled code runs below autograd: what it makes of its own memory says nothing of views."""
    x = torch.randn(2, 3)
    (result,) = _simple(handles)(tuple(_data([x])), _context([torch.ones(2, 3)]))
    made = result.tensor  # type: ignore[attr-defined]
    assert not made._is_view()
    assert not made.requires_grad
    made.requires_grad_()
    (made * 2).sum().backward()
    assert torch.equal(made.grad, torch.full((2, 3), 2.0))
    with torch.no_grad():
        made.add_(1)
    assert made._version == 1


def test_what_is_donated_is_given_up_unless_it_is_a_result(handles: list[Any]) -> None:
    calls = (ChainCall(handles[1], (0, 1), (2,)),)
    run = backend.chained(Chain(2, (), calls, 3, (2, 1)))
    assert run is not None
    data = _data([torch.randn(2, 3), torch.randn(2, 3)])
    results = run(data, _context([torch.ones(2, 3)] * 2, frozenset({0, 1})))
    assert data[0].tensor is None  # type: ignore[attr-defined]
    assert results[1] is data[1]
    assert data[1].tensor is not None  # type: ignore[attr-defined]


def test_what_the_queue_has_computed_is_an_argument(handles: list[Any]) -> None:
    """Such a value makes a tensor of its own when it is asked for one."""
    run, x = _simple(handles), torch.randn(2, 3)
    data = _data([x, x + 1])
    started = queue.start(handles[1], data, _context([x]))
    started.wait()
    (between,) = started.results
    assert type(between) is not TensorData
    (result,) = run([between], _context([x]))
    torch.testing.assert_close(result.tensor, torch.ones(2, 3))  # type: ignore[attr-defined]
    assert between.has_value
    (result,) = run([between], _context([x], frozenset({0})))
    torch.testing.assert_close(result.tensor, torch.ones(2, 3))  # type: ignore[attr-defined]
    assert not between.has_value


def test_a_library_that_was_closed_is_an_error(handles: list[Any]) -> None:
    x = torch.randn(2, 3)
    graph, _ = normal_form(_one, [x, x])
    processed = backend.preprocess(graph, CompileSpecs())
    handle = backend.init(FreeableBuffer(processed.data), CompileSpecs(), InitContext(CPU))
    assert backend.chained(Chain(1, (), (ChainCall(handle, (0, 0), (1,)),), 2, (1,))) is None  # it has not run
    backend.execute(handle, _data([x, x]), ExecutionContext(CPU))
    run = backend.chained(Chain(1, (), (ChainCall(handle, (0, 0), (1,)),), 2, (1,)))
    assert run is not None
    backend.destroy(handle)
    with pytest.raises(ExecutionError, match="destroyed"):
        run(_data([x]), _context([x]))


def test_the_pieces_of_a_model_run_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first run nothing of Python's is called per piece."""
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(16)]
    model = nn.Sequential(*layers).train()
    x = torch.randn(2, 4, 8)
    expected = model(x)
    with torchport.config.override(tiers="off"):
        torchport.use("inductor")
        model, there = model.to("port"), x.to("port")
        called: list[object] = []
        execute = InductorBackend.execute
        monkeypatch.setattr(
            InductorBackend, "execute", lambda self, *args: (called.append(args), execute(self, *args))[1]
        )
        before = torchport.metrics.counter("PiecesCalled")
        with torch.no_grad():
            for step in range(3):
                torch.testing.assert_close(model(there).cpu(), expected)
                if step == 0:
                    assert torchport.metrics.counter("PiecesCalled") > before, "the model is one piece"
                    assert called
                    called.clear()
        assert not called
        torchport.use("reference")
