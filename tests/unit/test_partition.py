"""Splitting graphs between backends: same results, no cycle, groups as large as they can be, the original untouched."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import pytest
import torch
from helpers_graphs import aten, build
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from torchport import Support, UnsupportedOp, verify_graph
from torchport.backend import segments
from torchport.backend.builder import refusals
from torchport.backend.grouping import group
from torchport.backend.interpreted_graph import INTERPRETER
from torchport.backend.partition import Partitioned, partition
from torchport.backends.reference import ReferenceBackend


class _Only(ReferenceBackend):
    """Takes the named operators only."""

    def __init__(self, name: str, *ops: str) -> None:
        self.label = name
        self.ops = ops

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.label

    def supports(self, node: fx.Node) -> Support:
        return Support.yes() if str(node.target) in self.ops else Support.no(f"{self.label} has no {node.target}")


def _graph(edges: Sequence[Sequence[int]], outputs: Sequence[int]) -> fx.GraphModule:
    """Two inputs; operator i adds its predecessors (0 and 1 are the inputs) to 1; some give two results."""

    def nodes(graph: fx.Graph, args: list[fx.Node]) -> Sequence[fx.Node]:
        made = list(args)
        for position, before in enumerate(edges):
            if position % 4 == 3:  # several results
                pair = graph.call_function(aten.aminmax.default, (made[before[0]],), {"dim": 0, "keepdim": True})
                items = [graph.call_function(operator.getitem, (pair, i)) for i in (0, 1)]
                value = graph.call_function(aten.add.Tensor, (items[0], made[before[-1]]))
                value = graph.call_function(aten.sub.Tensor, (value, items[1]))
            else:
                value = graph.call_function(aten.add.Tensor, (made[before[0]], 1.0 + position))
                for other in before[1:]:
                    value = graph.call_function(aten.mul.Tensor, (value, made[other]))
            made.append(value)
        return list(dict.fromkeys(made[2 + n] for n in outputs))

    return build(nodes, [torch.arange(3.0), torch.ones(3)])


@st.composite
def _programs(draw: st.DrawFn) -> tuple[fx.GraphModule, dict[fx.Node, Hashable]]:
    """A random graph, and a random colour (or none) for most of its operators: long ways round tempt to cycles."""
    size = draw(st.integers(1, 14))
    edges = [draw(st.lists(st.integers(0, n + 1), min_size=1, max_size=3)) for n in range(size)]
    outputs = draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=3))
    graph = _graph(edges, outputs)
    colours = draw(st.integers(1, 3))
    tags: dict[fx.Node, Hashable] = {}
    for node in graph.graph.nodes:
        if node.op == "call_function" and node.target is not operator.getitem:
            colour = draw(st.integers(-1, colours - 1))
            if colour >= 0:
                tags[node] = colour
    return graph, tags


def _acyclic(after: dict[int, set[int]]) -> bool:
    done: set[int] = set()
    while ready := [g for g in after if g not in done and not any(g in after[h] for h in after if h not in done)]:
        done.update(ready)
    return len(done) == len(after)


def _edges(groups: list[tuple[Hashable, list[fx.Node]]], joined: tuple[int, int] | None = None) -> dict[int, set[int]]:
    of = {node: position for position, (_, nodes) in enumerate(groups) for node in nodes}
    if joined is not None:
        of = {node: joined[0] if g == joined[1] else g for node, g in of.items()}
    after: dict[int, set[int]] = {g: set() for g in of.values()}
    for node, g in of.items():
        for user in node.users:
            if user in of and of[user] != g:
                after[g].add(of[user])
    return after


@given(_programs())
@settings(max_examples=150, deadline=None)
def test_groups_have_no_cycle_and_cannot_be_larger(program: tuple[fx.GraphModule, dict[fx.Node, Hashable]]) -> None:
    graph, tags = program
    groups = group(graph.graph, tags.get)
    assert sorted(n.name for _, nodes in groups for n in nodes) == sorted(
        n.name for n in graph.graph.nodes if n.op == "call_function"
    )
    assert _acyclic(_edges(groups))
    for first, (colour, nodes) in enumerate(groups):
        assert {tags.get(n) for n in nodes if n.target is not operator.getitem} == {colour}
        if colour is None:
            assert len([n for n in nodes if n.target is not operator.getitem]) == 1
            continue
        for second in range(first + 1, len(groups)):
            if groups[second][0] == colour:
                assert not _acyclic(_edges(groups, (first, second))), "two groups of one colour could be one"


@given(_programs(), st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_split_graph_computes_the_same(
    program: tuple[fx.GraphModule, dict[fx.Node, Hashable]], outside: bool
) -> None:
    graph, tags = program
    before = graph.print_readable(print_output=False)
    made = partition(graph, tags=tags, views_outside=outside)
    assert graph.print_readable(print_output=False) == before
    for delegate in made.delegates:
        verify_graph(delegate.module)
        assert delegate.backend in tags.values()
    assert len(made.leftovers) == sum(
        n.op == "call_function" and n.target is not operator.getitem and n not in tags for n in graph.graph.nodes
    )
    args = [torch.randn(3), torch.randn(3)]
    for ours, theirs in zip(made.module(*args), graph(*args), strict=True):
        assert torch.equal(ours, theirs)


def _chain(*ops: Any) -> fx.GraphModule:
    def nodes(graph: fx.Graph, args: list[fx.Node]) -> Sequence[fx.Node]:
        value = args[0]
        for op in ops:
            value = graph.call_function(op, (value,))
        return [value]

    return build(nodes, [torch.randn(2, 3)])


def test_backends_are_asked_in_order() -> None:
    first, second = _Only("first", "aten.sin.default"), _Only("second", "aten.sin.default", "aten.cos.default")
    made = partition(_chain(aten.sin.default, aten.cos.default, aten.exp.default), [first, second])
    assert [(d.name, d.backend.name) for d in made.delegates] == [("delegate_0", "first"), ("delegate_1", "second")]
    (left,) = made.leftovers
    assert left.reason == "first: first has no aten.exp.default; second: second has no aten.exp.default"
    assert made.report().startswith("    1 × aten.exp.default: first: first has no")
    with pytest.raises(UnsupportedOp, match=r"1 operators are taken by no backend(.|\n)*aten\.exp\.default"):
        made.require_all()


def test_a_way_round_through_another_backend_is_no_cycle() -> None:
    """sin feeds both cos and, through exp, the sum: cos and the sum could be one group, sin and the sum could not."""

    def nodes(graph: fx.Graph, args: list[fx.Node]) -> Sequence[fx.Node]:
        sin = graph.call_function(aten.sin.default, (args[0],))
        exp = graph.call_function(aten.exp.default, (sin,))
        cos = graph.call_function(aten.cos.default, (sin,))
        return [graph.call_function(aten.add.Tensor, (exp, cos))]

    graph = build(nodes, [torch.randn(2)])
    backend = _Only("one", "aten.sin.default", "aten.cos.default", "aten.add.Tensor")
    made = partition(graph, [backend])
    inside = [[str(n.target) for n in d.module.graph.nodes if n.op == "call_function"] for d in made.delegates]
    assert inside == [["aten.sin.default", "aten.cos.default"], ["aten.add.Tensor"]]
    x = torch.randn(2)
    torch.testing.assert_close(made.module(x), (x.sin().exp() + x.sin().cos(),))


def _views(graph: fx.Graph, args: list[fx.Node]) -> Sequence[fx.Node]:
    product = graph.call_function(aten.mul.Tensor, (args[0], 2.0))
    flipped = graph.call_function(aten.t.default, (product,))
    weight = graph.call_function(aten.t.default, (args[0],))
    parts = graph.call_function(aten.split.Tensor, (product, 1))
    part = graph.call_function(operator.getitem, (parts, 1))
    return [graph.call_function(aten.clone.default, (n,)) for n in (product, flipped, weight, part)]


def _strip_clones(graph: fx.GraphModule) -> fx.GraphModule:
    """Outputs that alias each other and an input, as front ends give them."""
    for node in graph.graph.find_nodes(op="call_function", target=aten.clone.default):
        node.replace_all_uses_with(node.args[0])
        graph.graph.erase_node(node)
    graph.recompile()
    return graph


@pytest.mark.parametrize("outside", [False, True])
def test_results_that_are_views(outside: bool) -> None:
    graph = _strip_clones(build(_views, [torch.randn(2, 3)]))
    made = partition(graph, [ReferenceBackend()], views_outside=outside)
    (delegate,) = made.delegates
    verify_graph(delegate.module)
    assert len(delegate.module.graph.output_node().args[0]) == (1 if outside else 4)  # type: ignore[arg-type]
    x = torch.randn(2, 3)
    results = made.module(x)
    expected = graph(x)
    for ours, theirs in zip(results, expected, strict=True):
        assert torch.equal(ours, theirs)
    assert (results[2].data_ptr() == x.data_ptr()) is outside
    assert (results[1].data_ptr() == results[0].data_ptr()) is outside
    assert not made.leftovers


def test_outputs_may_be_inputs_numbers_and_nothing() -> None:
    graph = _chain(aten.sin.default)
    output = graph.graph.output_node()
    (x,) = graph.graph.find_nodes(op="placeholder")
    output.args = ((output.args[0][0], x, None, 3),)  # type: ignore[index]
    graph.recompile()
    made = partition(graph, [ReferenceBackend()])
    value = torch.randn(2, 3)
    sin, same, nothing, three = made.module(value)
    assert torch.equal(sin, value.sin())
    assert same is value
    assert (nothing, three) == (None, 3)


def _kernel(op: Any) -> Callable[[fx.Node], str | None]:
    return lambda node: "it has a kernel of its own" if node.target is op else None


def test_an_operator_may_have_to_run_alone() -> None:
    graph = _chain(aten.sin.default, aten.cos.default, aten.exp.default)
    made: Partitioned = partition(graph, [ReferenceBackend()], kernel=_kernel(aten.cos.default))
    assert [str(left.node.target) for left in made.leftovers] == ["aten.cos.default"]
    assert made.leftovers[0].reason == "it has a kernel of its own"
    assert len(made.delegates) == 2


def test_many_operators_are_grouped_in_reasonable_time() -> None:
    """A thousand operators that alternate between backend and leftover, in two strands."""
    edges = [[max(0, n)] for n in range(600)]
    graph = _graph([[e[0]] if n % 4 != 3 else [e[0], e[0]] for n, e in enumerate(edges)], [599, 598])
    tags = {
        n: 0
        for position, n in enumerate(graph.graph.nodes)
        if n.op == "call_function" and n.target is not operator.getitem and position % 3
    }
    made = partition(graph, tags=tags)
    assert made.delegates


@pytest.mark.parametrize("both", [False, True])
def test_views_that_lead_back_are_the_value_itself(both: bool) -> None:
    def nodes(graph: fx.Graph, args: list[fx.Node]) -> Sequence[fx.Node]:
        product = graph.call_function(aten.mul.Tensor, (args[0], 2.0))
        back = graph.call_function(aten.t.default, (graph.call_function(aten.t.default, (product,)),))
        results = (back, product) if both else (back,)
        return [graph.call_function(aten.clone.default, (n,)) for n in results]

    graph = _strip_clones(build(nodes, [torch.randn(3, 3)]))
    made = partition(graph, [ReferenceBackend()], views_outside=True)
    left = made.module.graph.find_nodes(op="call_function", target=aten.t.default)
    assert len(left) == (2 if both else 0), "two results are two objects"
    x = torch.randn(3, 3)
    for result in made.module(x):
        assert torch.equal(result, x * 2)


# -- the interpreter's part --------------------------------------------------------------------------------------------
@given(_programs(), st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_graph_in_segments_computes_the_same(
    program: tuple[fx.GraphModule, dict[fx.Node, Hashable]], islands: bool
) -> None:
    graph, tags = program
    backend = _Only("some", *{str(node.target) for node in list(tags)[::2]})
    before = graph.print_readable(print_output=False)
    with pytest.MonkeyPatch.context() as patch:
        if not islands:
            patch.setattr(segments, "CALL", 0.0)
        made = partition(graph, [backend], host=INTERPRETER)
    assert graph.print_readable(print_output=False) == before
    assert not made.leftovers
    for delegate in made.delegates:
        verify_graph(delegate.module)
        refused = [
            n
            for n in delegate.module.graph.nodes
            if n.op == "call_function" and n.target is not operator.getitem and str(n.target) not in backend.ops
        ]
        assert delegate.backend is INTERPRETER or not refused
    args = [torch.randn(3), torch.randn(3)]
    for ours, theirs in zip(made.module(*args), graph(*args), strict=True):
        assert torch.equal(ours, theirs)


def _inside(made: Partitioned) -> list[tuple[str, list[str]]]:
    return [
        (
            delegate.backend.name,
            [str(n.target).split(".")[1] for n in delegate.module.graph.nodes if n.op == "call_function"],
        )
        for delegate in made.delegates
    ]


def test_views_and_constants_belong_to_their_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "CALL", 0.0)

    def nodes(graph: fx.Graph, args: list[fx.Node]) -> Sequence[fx.Node]:
        flipped = graph.call_function(aten.t.default, (args[0],))
        one = graph.call_function(aten.ones.default, ([3, 2],), {"device": torch.device("cpu")})
        sin = graph.call_function(aten.sin.default, (flipped,))
        total = graph.call_function(aten.add.Tensor, (sin, one))
        back = graph.call_function(aten.t.default, (total,))
        return [
            graph.call_function(aten.exp.default, (back,)),
            graph.call_function(aten.mul.Tensor, (back, args[0])),
            graph.call_function(aten.mul.Tensor, (flipped, 2.0)),
        ]

    graph = build(nodes, [torch.randn(2, 3)])
    some = _Only("some", "aten.t.default", "aten.ones.default", "aten.add.Tensor", "aten.mul.Tensor")
    made = partition(graph, [some], host=INTERPRETER)
    assert _inside(made) == [
        ("interpreter", ["t", "sin"]),
        ("some", ["t", "ones", "add", "t", "mul", "mul"]),
        ("interpreter", ["t", "exp"]),
    ]
    outer = [len(node.args) for node in made.module.graph.find_nodes(op="call_module", target="delegate_2")]
    assert outer == [1], "the sum crosses, and its transposition does not"
    x = torch.randn(2, 3)
    for ours, theirs in zip(made.module(x), graph(x), strict=True):
        assert torch.equal(ours, theirs)


def test_few_cheap_operators_between_two_host_segments() -> None:
    some = _Only("some", "aten.exp.default", "aten.abs.default")
    chain = (aten.exp.default, aten.sin.default, aten.abs.default, aten.cos.default, aten.exp.default)
    assert _inside(partition(_chain(*chain), [some], host=INTERPRETER)) == [
        ("some", ["exp"]),
        ("interpreter", ["sin", "abs", "cos"]),
        ("some", ["exp"]),
    ]
    large = build(
        lambda graph, args: [
            graph.call_function(
                aten.cos.default,
                (graph.call_function(aten.mm.default, (graph.call_function(aten.sin.default, (args[0],)), args[0])),),
            )
        ],
        [torch.empty(512, 512)],
    )
    taken = partition(large, [_Only("some", "aten.mm.default")], host=INTERPRETER)
    assert [name for name, _ in _inside(taken)] == ["interpreter", "some", "interpreter"]


def test_operators_that_are_refused_are_known_by_name() -> None:
    made = partition(_chain(aten.exp.default, aten.sin.default), [_Only("some", "aten.exp.default")], host=INTERPRETER)
    (one,) = [found for delegate in made.delegates for found in refusals(delegate.module)]
    assert (one.op, one.reason) == (aten.sin.default, "some: some has no aten.sin.default")
