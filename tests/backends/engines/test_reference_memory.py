"""What the ``reference`` backend does for memory: the order of operators, results in place, arguments let go of."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from helpers_graphs import CPU, aten, normal_form, run
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn

import torchport
from torchport import aot
from torchport.backend.interface import ExecutionContext, FreeableBuffer, InitContext
from torchport.backends.reference import ReferenceBackend
from torchport.backends.reference.in_place import write_over
from torchport.backends.reference.order import is_sure, peak, reordered
from torchport.core.errors import ExecutionError
from torchport.core.specs import CompileSpecs


def build(fn: Any, *inputs: torch.Tensor) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    """A function's graph, and the values of the inputs it gained."""
    graph, given_values = normal_form(fn, inputs)
    return graph, given_values[len(inputs) :]


class Whole(nn.Module):
    def __init__(self, fn: Any) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fn(x)


def targets(graph: Any) -> list[str]:
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]


def adamw(count: int, size: int) -> Any:
    """An optimizer's update of some parameters as list operators do it: each for all of them before the next."""

    def update(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        p, g, m, v = (list(values[at::4]) for at in range(4))
        far = [grad - one for one, grad in zip(m, g, strict=True)]
        far = [one * 0.1 for one in far]
        m = [one + more for one, more in zip(m, far, strict=True)]
        squares = [grad * grad for grad in g]
        v = [one * 0.99 + square for one, square in zip(v, squares, strict=True)]
        roots = [one.sqrt() for one in v]
        roots = [one + 1e-8 for one in roots]
        steps = [one / root for one, root in zip(m, roots, strict=True)]
        p = [one - step for one, step in zip(p, steps, strict=True)]
        return *p, *m, *v

    inputs = [torch.rand(size) for _ in range(4 * count)]
    graph, _ = build(update, *inputs)
    return graph, inputs, update


def test_an_optimizers_lists_are_finished_one_parameter_at_a_time() -> None:
    graph, inputs, update = adamw(8, 1000)
    made = reordered(graph)
    # Old and new values, gradients, and what is on the way: of all eight parameters before, of one after.
    assert peak(list(graph.graph.nodes)) - peak(list(made.graph.nodes)) >= 6 * 1000 * 4
    assert sorted(targets(made)) == sorted(targets(graph))
    for ours, theirs in zip(run(ReferenceBackend(), graph, inputs), update(*inputs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_an_order_that_would_need_more_is_not_taken() -> None:
    def large_values_become_small_results(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple((x * at).sum(0, keepdim=True) + 1 for at in range(4))

    graph, _ = build(large_values_become_small_results, torch.rand(100, 4), torch.rand(4))
    assert peak(list(reordered(graph).graph.nodes)) <= peak(list(graph.graph.nodes))


def test_results_are_written_over_arguments_that_nobody_reads_again() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a = x + 1  # of an input: new memory
        b = a * y  # a is read again
        c = b.exp()  # over b
        d = c + b.size(0)  # over c
        return d, a.t().relu() * 2  # a view's result is new, what follows is over it

    graph, _ = build(fn, torch.rand(3, 3), torch.rand(3, 3))
    write_over(graph)
    assert targets(graph) == [
        "aten.add.Tensor", "aten.mul.Tensor", "aten.exp_.default", "aten.add_.Tensor",
        "aten.t.default", "aten.relu.default", "aten.mul_.Tensor",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, y: (x + 1) * (y + 1).to(torch.float64),  # the result has another dtype
        lambda x, y: (x[0] + 1) * y,  # or another shape
        lambda x, y: aten._unsafe_view(x, [9]) * 2 + x.reshape(9),  # memory of an input, which the schema does not say
        lambda x, y: (z := x + 1) * z.t(),  # read in another order while it is written
        lambda x, y: (x + 1).expand(2, 3, 3) * y,  # one element in two places
    ],
)
def test_what_is_not_written_over(fn: Any) -> None:
    inputs = [torch.rand(3, 3), torch.rand(3, 3)]
    graph, values = build(fn, *inputs)
    kept = [value.clone() for value in inputs]
    write_over(graph)
    assert not any(target.split(".")[1].endswith("_") for target in targets(graph)[:-1])
    (result,) = run(ReferenceBackend(), build(fn, *inputs)[0], [*inputs, *values])
    torch.testing.assert_close(result, fn(*inputs), rtol=0, atol=0)
    assert all(torch.equal(a, b) for a, b in zip(inputs, kept, strict=True))


@pytest.mark.parametrize(
    "views",
    [
        lambda a: torch.unsafe_split(a, 3, 1)[0],
        lambda a: torch.unsafe_chunk(a, 3, 1)[1],
        lambda a: torch.einsum("ij->ji", a),
        lambda a: torch.einsum("ii->i", a),
        lambda a: torch.meshgrid(a[0], a[1], indexing="ij")[0],
    ],
)
def test_what_views_show_without_a_schemas_saying_so_is_not_written_over(views: Any) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        a = x * 2
        shown = views(a)
        b = a + 1
        return shown * b

    torchport.use("reference")
    x = torch.rand(3, 3)
    assert torch.equal(fn(x.to("port")).cpu(), fn(x))
    lowered = aot.lower(Whole(fn), (x,), backend="reference")
    assert torch.equal(lowered(x), fn(x))


STEPS = (
    lambda a, b: a + b, lambda a, b: a * b, lambda a, b: (a - b).abs(), lambda a, b: a.t() + b, lambda a, b: a.exp(),
    lambda a, b: a @ b, lambda a, b: torch.where(a > b, a, b), lambda a, b: a[1:2] * b,
    lambda a, b: a.flatten()[:4].sum() + b,
)  # fmt: skip


@pytest.mark.slow
def test_a_view_of_a_view_of_a_view_and_so_on() -> None:
    """Who shows a value's memory is followed by a loop: views of views are not limited by Python's stack."""

    def far(x: torch.Tensor) -> torch.Tensor:
        y = far = x + 1
        for _ in range(1500):
            far = aten.t.default(far)
        return y * (far + 1)

    graph, _ = build(far, torch.zeros(2, 3))
    assert len(targets(graph)) > 1500
    torch.testing.assert_close(run(ReferenceBackend(), graph, [torch.zeros(2, 3)])[0], torch.full((2, 3), 2.0))


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=14),
    st.data(),
)
def test_any_program_has_the_same_results(steps: Any, data: st.DataObject) -> None:
    chosen = data.draw(st.sets(st.integers(0, len(steps) - 1), min_size=1))

    def fn(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = list(inputs)
        for step, a, b in steps:
            values.append(step(values[a % len(values)] * 0.5, values[b % len(values)]).expand(3, 3).tanh())
        return tuple(values[len(inputs) + at] for at in sorted(chosen))

    inputs = [torch.rand(3, 3), torch.rand(3, 3)]
    kept = [value.clone() for value in inputs]
    graph, values = build(fn, *inputs)
    for ours, theirs in zip(run(ReferenceBackend(), graph, [*inputs, *values]), fn(*inputs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert all(torch.equal(a, b) for a, b in zip(inputs, kept, strict=True))


# -- letting go --------------------------------------------------------------------------------------------------------
def test_what_is_given_away_goes_with_its_last_use() -> None:
    """Seen from inside: while the graph runs, an operator of our own looks which of the inputs are still there."""
    backend, there = ReferenceBackend(), list[list[bool]]()
    x, y = torch.rand(4), torch.rand(4)
    graph, _ = build(lambda x, y: (y.cumsum(0) + x * 2).neg() + y, x, y)
    handle = backend.init(
        FreeableBuffer(backend.preprocess(graph, CompileSpecs()).data), CompileSpecs(), InitContext(CPU)
    )
    args = [backend.to_device(value, CPU) for value in (x, y)]
    memory = [weakref.ref(args[at].tensor) for at in range(2)]  # type: ignore[attr-defined]
    del x, y

    class Looking(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            there.append([one() is not None for one in memory])
            return func(*args, **(kwargs or {}))

    with Looking():
        backend.execute(handle, args, ExecutionContext(CPU, donated=frozenset({0, 1})))
    gc.collect()
    assert there[0] == [True, True]
    assert there[-2][0] is False, "x was last used before the negation"
    assert [one() for one in memory] == [None, None]
    assert not any(arg.has_value for arg in args)


def test_what_is_given_away_is_there_again_when_an_operator_fails() -> None:
    """So that the others can be run one by one: only what cannot fail runs on memory that goes."""
    backend = ReferenceBackend()
    graph, _ = build(lambda x, at: (x * 2).index_select(0, at) + 1, torch.rand(4), torch.tensor([0, 1]))
    handle = backend.init(
        FreeableBuffer(backend.preprocess(graph, CompileSpecs()).data), CompileSpecs(), InitContext(CPU)
    )
    args = [backend.to_device(value, CPU) for value in (torch.rand(4), torch.tensor([0, 9]))]
    with pytest.raises(IndexError):
        backend.execute(handle, args, ExecutionContext(CPU, donated=frozenset({0, 1})))
    assert all(arg.has_value for arg in args)


def test_one_bad_operator_takes_only_what_depends_on_it_with_donated_inputs() -> None:
    torchport.use("reference")
    x = torch.arange(4.0).to("port")
    good, bad = x * 2, (x + 1).index_select(0, torch.tensor([7]).to("port"))
    del x
    with pytest.raises(ExecutionError, match="index_select"):
        bad.tolist()
    assert good.tolist() == [0, 2, 4, 6]


def test_integer_division_may_fail_and_that_of_floats_may_not() -> None:
    graph, _ = build(lambda x, n: (x / x, n // n, n % n), torch.rand(2), torch.tensor([1, 2]))
    sure = {str(node.target): is_sure(node) for node in graph.graph.nodes if node.op == "call_function"}
    assert sure.pop("aten.div.Tensor")
    assert len(sure) == 2
    assert not any(sure.values())


def test_a_training_step_on_the_device_holds_no_old_and_new_parameters_at_once() -> None:
    """The most bytes of CPU tensors that are there at a time while steps run, counted at each allocation."""
    torchport.use("reference")
    net = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(8)]).to("port")
    opt = torch.optim.AdamW(net.parameters())
    x = torch.rand(4, 64).to("port")

    def step() -> None:
        opt.zero_grad()
        net(x).square().mean().backward()
        opt.step()
        torchport.sync()

    for _ in range(3):
        step()
    torchport.metrics.reset()
    step()
    assert torchport.metrics.counter("Donated") >= 3 * 8, "parameters and both moments"
