"""Graphs of PyTorch's own front ends in normal form: by values, by rule, and what is left with a reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from helpers_graphs import aten
from torch import fx
from torch._functorch.aot_autograd import aot_module_simplified
from torch.fx.experimental.proxy_tensor import make_fx

from torchport import GraphError, Support, TensorSpec, verify_graph
from torchport.backend.fx_normalise import normalise, source_line
from torchport.backend.partition import partition
from torchport.backends.reference import ReferenceBackend


class _Few(ReferenceBackend):
    """Takes pointwise arithmetic and matrix products."""

    name = "few"
    ops = ("aten.add.Tensor", "aten.mul.Tensor", "aten.mm.default", "aten.t.default", "aten.permute.default")

    def supports(self, node: fx.Node) -> Support:
        return Support.yes() if str(node.target) in self.ops else Support.no(f"few has no {node.target}")


def _trace(fn: Callable[..., Any], *args: torch.Tensor, mode: str = "fake") -> fx.GraphModule:
    return make_fx(fn, tracing_mode=mode)(*args)  # type: ignore[arg-type]


def _ops(graph: fx.GraphModule) -> list[str]:
    return [str(n.target) for n in graph.graph.nodes if n.op == "call_function"]


def _check(graph: fx.GraphModule, args: Sequence[torch.Tensor], backend: Any = None) -> fx.GraphModule:
    """Normalised, split, in normal form, and equal in value; returns the normalised graph."""
    made = normalise(graph, backend or ReferenceBackend())
    split = partition(made, [backend or ReferenceBackend()])
    for delegate in split.delegates:
        verify_graph(delegate.module)
    for ours, theirs in zip(split.module(*args), graph(*args), strict=True):
        if isinstance(theirs, torch.Tensor):
            torch.testing.assert_close(ours, theirs)
        else:
            assert ours == theirs
    return made


def test_identities_go_and_copies_of_views_become_views() -> None:
    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        return [aten.t_copy.default(aten.detach.default(aten.alias.default(x))) + 1]

    x = torch.randn(2, 3)
    made = _check(_trace(fn, x), [x])
    assert _ops(made) == ["aten.t.default", "aten.add.Tensor"]


def test_what_is_not_supported_is_decomposed_as_deep_as_need_be() -> None:
    def fn(x: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        return [aten.addcmul.default(b, x, x), aten.rsub.Scalar(x, 1), aten.sin.default(x)]

    x, b = torch.randn(3, 3), torch.randn(3)
    made = _check(_trace(fn, x, b), [x, b], _Few())
    refused = {str(n.target): n.meta["refusal"] for n in made.graph.nodes if "refusal" in n.meta}
    assert refused["aten.sin.default"] == "aten.sin.default: few has no aten.sin.default"
    assert "aten.mul.Tensor" in _ops(made)
    assert "aten.addcmul.default" not in _ops(made)
    assert "aten.rsub.Scalar" in refused, "its decomposition needs sub, which the backend lacks: nothing half done"


def test_the_backends_own_decomposition_comes_first() -> None:
    class Own(ReferenceBackend):
        def decompositions(self) -> Any:
            return {aten.sin.default: lambda x: x * 3}

    x = torch.randn(3)
    made = normalise(_trace(lambda x: [x.sin()], x), Own())
    assert _ops(made) == ["aten.mul.Tensor"]


def test_the_second_backend_gets_what_the_first_refuses() -> None:
    x = torch.randn(2, 2)
    made = normalise(_trace(lambda x: [x.sin() + x], x), [_Few(), ReferenceBackend()])
    assert not any("refusal" in n.meta for n in made.graph.nodes)
    split = partition(made, [_Few(), ReferenceBackend()])
    assert sorted(d.backend.name for d in split.delegates) == ["few", "reference"]


def test_notes_on_nodes_are_kept() -> None:
    seen: list[fx.GraphModule] = []

    def compiler(graph: fx.GraphModule, inputs: Any) -> Any:
        seen.append(normalise(graph, ReferenceBackend()))
        return graph.forward

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.silu(x) * 2

    torch.compile(Model(), backend=lambda m, i: aot_module_simplified(m, i, compiler), fullgraph=True)(torch.randn(3))
    calls = [n for n in seen[0].graph.nodes if n.op == "call_function"]
    assert calls
    assert all(source_line(n).startswith(f"{__file__}:") for n in calls)  # type: ignore[union-attr]
    assert all(isinstance(n.meta["debug_handle"], int) for n in calls)
    assert len({n.meta["debug_handle"] for n in calls}) > 1


def test_writes_inside_the_graph_are_functionalised() -> None:
    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        y = x * 2
        y[0].add_(1)
        return [y]

    x = torch.randn(3, 2)
    made = _check(_trace(fn, x), [x])
    assert not any(op.endswith("add_.Tensor") for op in _ops(made))


def test_a_write_to_an_input_is_refused_with_what_to_do() -> None:
    graph = _trace(lambda x: [x.add_(1)], torch.randn(3))
    with pytest.raises(GraphError, match=r"writes to its input(.|\n)*AOTAutograd"):
        normalise(graph, ReferenceBackend())


def test_constants_stay_and_outputs_may_be_anything() -> None:
    held = torch.arange(3.0)

    def fn(x: torch.Tensor) -> list[Any]:
        return [x + held, x, None, 2]

    x = torch.randn(3)
    made = _check(make_fx(fn, tracing_mode="fake", _allow_non_fake_inputs=True)(x), [x])
    assert made.graph.find_nodes(op="get_attr")


def test_symbolic_sizes_become_the_numbers_given() -> None:
    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        return [x.reshape(x.shape[0] * x.shape[1]) * x.shape[0]]

    graph = _trace(fn, torch.randn(3, 4), mode="symbolic")
    with pytest.raises(GraphError, match="symbolic sizes"):
        normalise(graph, ReferenceBackend())
    for shape in ((3, 4), (5, 7)):
        x = torch.randn(shape)
        made = normalise(graph, ReferenceBackend(), [TensorSpec.of(x)])
        split = partition(made, [ReferenceBackend()])
        assert not split.leftovers
        torch.testing.assert_close(split.module(x)[0], fn(x)[0])


def test_what_depends_on_values_is_left_with_the_reason() -> None:
    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        return [torch.nonzero(x) + 1, x * 2]

    graph = _trace(fn, torch.tensor([0.0, 1.0]), mode="symbolic")
    made = normalise(graph, ReferenceBackend(), [TensorSpec((2,), torch.float32, (1,))])
    split = partition(made, [ReferenceBackend()])
    assert [left.reason for left in split.leftovers] == [
        "the shape of its result depends on values",
        "a shape or number it gets depends on values",
    ]
    x = torch.tensor([3.0, 0.0])
    assert torch.equal(split.module(x)[0], fn(x)[0])


@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning")  # PyTorch's own use of it
def test_exported_programs() -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU()).eval()
    program = torch.export.export(model, (torch.randn(1, 3, 8, 8),)).run_decompositions({})
    made = normalise(program.graph_module, ReferenceBackend())
    split = partition(made, [ReferenceBackend()])
    assert len(split.delegates) == 1
    verify_graph(split.delegates[0].module)
    assert [n.name for n in made.graph.find_nodes(op="placeholder")] == [
        n.name for n in program.graph_module.graph.find_nodes(op="placeholder")
    ]


def test_random_operators_can_be_arithmetic_on_keys() -> None:
    from torchport.backend.random import RANDOM

    class NoRandom(ReferenceBackend):
        def supports(self, node: fx.Node) -> Support:
            return Support.no("no generator") if "bernoulli" in str(node.target) else Support.yes()

    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        return [aten.bernoulli.p(x, 0.5), torch.rand(3)]

    graph = _trace(fn, torch.randn(3))
    refused = normalise(graph, NoRandom(), random=RANDOM)
    always = normalise(graph, ReferenceBackend(), random=RANDOM, always_draw=True)
    assert (refused.meta["random_ops"], always.meta["random_ops"]) == (1, 2)
    for made in (refused, always):
        assert made.graph.find_nodes(op="placeholder")[-1].name == "keys"
    assert "aten.rand.default" in _ops(refused)
    x, keys = torch.randn(3), torch.tensor([1, 2])
    assert torch.equal(always(x, keys)[0], always(x, keys)[0])
    assert not torch.equal(always(x, keys)[1], always(x, keys + 5)[1])


# -- memory of outputs ------------------------------------------------------------------------------------------------
def test_outputs_have_memory_of_their_own_where_the_original_has() -> None:
    """``copy`` becomes what it copies; an output is a copy unless it is read before its memory is written."""

    def fn(h: torch.Tensor, b: torch.Tensor) -> Any:
        y = b * 2
        return aten.copy(h, b.t()), aten.copy(h, y), y, b.t()

    args = torch.zeros(2, 2), torch.ones(2, 2)
    graph = _trace(fn, *args)
    names = [node.name for node in graph.graph.find_nodes(op="placeholder")]
    outputs: Any = normalise(graph, ReferenceBackend()).graph.output_node().args[0]
    assert [str(node.target) for node in outputs] == [
        "aten.clone.default",
        "aten.mul.Tensor",
        "aten.clone.default",
        "aten.t.default",
    ]
    for written, first in (([names[0]], "aten.t.default"), (names, "aten.clone.default")):
        made: Any = normalise(graph, ReferenceBackend(), written={0: written}).graph.output_node().args[0]
        assert str(made[0].target) == first
