"""The ``xla`` backend on CPU tensors that are lent to it: whose memory is whose, and when it is read."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers_graphs import CPU, normal_form

from torchport.backend.compiler import finish
from torchport.backend.execution import Computation, execute_on_host
from torchport.backend.interface import ExecutionContext, FreeableBuffer, InitContext
from torchport.backend.normal_form import output_specs
from torchport.backend.prepare import prepare
from torchport.backends.xla import XlaBackend
from torchport.backends.xla.container import decode, encode
from torchport.core.errors import ExecutionError
from torchport.core.specs import CompileSpecs, TensorSpec
from torchport.run.tiers import loader

backend = XlaBackend()
pytestmark = pytest.mark.skipif(not backend.is_available(), reason=backend.unavailable_reason())
Call = Callable[..., list[torch.Tensor]]


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def compiled(fn: Callable[..., Any], *args: torch.Tensor) -> Call:
    """The computation as a function of lent tensors."""
    graph, _ = normal_form(fn, [arg.clone() for arg in args])
    handle = backend.init(
        FreeableBuffer(backend.preprocess(graph, CompileSpecs()).data), CompileSpecs(), InitContext(CPU)
    )
    specs = tuple(TensorSpec.of(arg) for arg in args)
    computation = Computation(backend, CPU, specs, (), output_specs(graph), handle, ExecutionContext(CPU), checked=True)

    def call(*tensors: torch.Tensor) -> list[torch.Tensor]:
        return list(execute_on_host(computation, list(tensors)))

    return call


def test_writes_between_calls_are_seen_and_results_stay() -> None:
    """From the third call on the parameter is not handed over again; its memory is read at each call all the same."""
    weight, x = rand(64, 64), rand(8, 64)
    run = compiled(lambda w, x: x @ w, weight, x)
    results = []
    for step in range(5):
        expected = x @ weight
        (result,) = run(weight, x)
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
        results.append((result, expected))
        weight.add_(1)
        x = rand(8, 64) + step
    for result, expected in results:
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


def test_results_never_share_memory_with_what_was_lent() -> None:
    x = rand(16, 16)
    run = compiled(lambda x: (x.clone(), x + 1, (x + 1).clone()), x)
    for _ in range(3):
        results = run(x)
        before = [result.clone() for result in results]
        x.zero_()
        results[1].fill_(7)
        torch.testing.assert_close(results[0], before[0])
        torch.testing.assert_close(results[2], before[2])
        results[2].fill_(3)
        assert results[1].eq(7).all()
        x.copy_(rand(16, 16))


@pytest.mark.parametrize(
    "make",
    [
        lambda: rand(8, 8).t(),
        lambda: rand(8, 16)[:, ::2],
        lambda: rand(9, 8)[1:],
        lambda: rand(65)[1:].view(8, 8),
        lambda: rand(8, 1).expand(8, 8),
        lambda: torch.view_as_complex(rand(8, 8, 2)).conj(),
        lambda: rand(8, 8).bfloat16(),
        lambda: rand(8, 8) > 0,
        lambda: rand(0, 8),
        lambda: rand(1).reshape(()),
    ],
)
def test_any_layout_and_dtype(make: Callable[[], torch.Tensor]) -> None:
    x = make()
    run = compiled(lambda x: torch.where(x != 0, x, x), x)
    for _ in range(3):
        (result,) = run(x)
        torch.testing.assert_close(result, x.resolve_conj())


def test_the_same_memory_with_other_strides() -> None:
    square = rand(16, 16)
    run = compiled(lambda x: x * 2, square)
    for x in (square, square, square, square.t(), square, square.t()):
        torch.testing.assert_close(run(x)[0], x * 2)


def test_memory_is_kept_only_while_it_comes_again() -> None:
    run = compiled(lambda x: x * 2, rand(64, 64))
    for size in range(6):
        x = rand(64, 64) * size
        torch.testing.assert_close(run(x)[0], x * 2)
        torch.testing.assert_close(run(x)[0], x * 2)


def test_threads_of_two_computations() -> None:
    weight = rand(64, 64)
    runs = [compiled(lambda w, x: x @ w, weight, rand(8, 64)) for _ in range(2)]
    failed: list[BaseException] = []

    def work(run: Call, seed: int) -> None:
        try:
            for step in range(20):
                x = rand(8, 64) * seed + step
                torch.testing.assert_close(run(weight, x)[0], x @ weight, rtol=1e-4, atol=1e-3)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(run, seed)) for seed, run in enumerate(runs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed


def test_a_wrong_shape_is_an_error_of_ours() -> None:
    run = compiled(lambda x: x + 1, rand(8, 8))
    with pytest.raises(ExecutionError, match="XLA failed"):
        run(rand(4, 8))


# -- a rehearsal ----------------------------------------------------------------------------------------------------
def _rehearsed(monkeypatch: pytest.MonkeyPatch, graph: Any, beside: bool = True) -> tuple[Any, list[Any]]:
    """A program that the engine was told to make while the host's goes on, and what it was run on meanwhile."""
    from torchport.backends.xla.program import executable_of, jax_device

    artifact = decode(backend.preprocess(graph, CompileSpecs()).data)
    given: list[Any] = []
    found = executable_of(artifact, jax_device(CPU))[0]

    def noted(*arrays: Any) -> Any:
        given.append(arrays)
        return found(*arrays)

    monkeypatch.setattr("torchport.backends.xla.program.executable_of", lambda *_: (noted, ""))
    handle = backend.init(FreeableBuffer(encode(artifact)), CompileSpecs(), InitContext(CPU, beside=beside))
    return handle, given


def test_what_is_made_beside_the_program_is_run_once_on_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = rand(3, 4), torch.arange(4)
    graph, _ = normal_form(lambda x, y: (x + 1, x[:, y]), [x, y])
    program, given = _rehearsed(monkeypatch, graph)
    assert [[bool(array.any()) for array in arrays] for arrays in given] == [[False, False]]
    results = program.run_on_host([x, y])
    assert results is not None
    for one, other in zip(results, (x + 1, x[:, y]), strict=True):
        torch.testing.assert_close(one, other)
    assert len(given) == 2


def test_what_the_program_waits_for_is_not_rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, _ = normal_form(lambda x: x + 1, [rand(3)])
    assert _rehearsed(monkeypatch, graph, beside=False)[1] == []


def test_a_rehearsal_takes_no_scarce_memory_and_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, _ = normal_form(lambda x: x + 1, [rand(3)])
    program, given = _rehearsed(monkeypatch, graph)
    monkeypatch.setattr("torchport.backends.xla.program._SPARE", 1e18)
    program.rehearse()
    assert len(given) == 1
    monkeypatch.undo()

    def fails(*arrays: Any) -> Any:
        raise RuntimeError("no memory")

    program._plain = fails
    program.rehearse()
    with pytest.raises(ExecutionError, match="no memory"):
        program.run_on_host([rand(3)])


def test_loops_are_not_rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ends a loop may be a number that is zero in a rehearsal."""
    graph, _ = normal_form(lambda x: torch.linalg.inv(x), [rand(3, 3)])
    program, given = _rehearsed(monkeypatch, graph, beside=False)
    program._artifact.module += b"while"
    program.rehearse()
    assert given == []


def test_the_compile_services_thread_makes_programs_beside_the_others() -> None:
    told: list[bool] = []

    class Told(XlaBackend):
        def init(self, processed: FreeableBuffer, specs: CompileSpecs, context: InitContext) -> Any:
            told.append(context.beside)
            return super().init(processed, specs, context)

    graph, _ = normal_form(lambda x: x * 3 - 1, [rand(5)])
    here = Told()
    answer: Any = prepare(here, CompileSpecs(), graph, "rehearsed", None)
    loader(here, CPU, CompileSpecs())(answer)
    finish(here, CPU, CompileSpecs(), answer)
    assert told == [True, False]
