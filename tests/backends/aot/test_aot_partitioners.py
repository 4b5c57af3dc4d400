"""Partitioners: what they may tag, what becomes of the tags, and cycles that cannot be."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
import torch
from aot_support import Chain, W, X, fresh
from torch import fx, nn

from torchport import aot
from torchport.aot import DelegationSpec, OpList, Partitioner, PartitionResult, Pattern, Supported, WholeProgram
from torchport.core.errors import ConfigError, GraphError, UnsupportedOp
from torchport.core.specs import CompileSpecs

aten = torch.ops.aten


def delegate_ops(lowered: aot.LoweredProgram) -> list[list[str]]:
    return [
        [str(node.target) for node in piece.graph.graph.nodes if node.op == "call_function"]
        for piece in lowered.pieces["forward"]
    ]


def test_op_list() -> None:
    backend = fresh()
    lowered = aot.lower(Chain(), (X, W), partitioners=[OpList(backend.name, ["aten.matmul", aten.mm.default])])
    assert delegate_ops(lowered) == [["aten.matmul.default"], ["aten.matmul.default"]]
    torch.testing.assert_close(lowered(X, W), Chain()(X, W))
    reasons = {one.op: one.reason for one in lowered.left["forward"]}
    assert "not in the list" in reasons["aten.sin.default"]
    with pytest.raises(ConfigError, match="no operator"):
        OpList(backend.name, ["aten.nothing_like_it"])


def test_pattern() -> None:
    backend = fresh()
    pattern = Pattern(backend.name, lambda a, b: torch.relu(a @ b), (X, W))
    lowered = aot.lower(Chain(), (X, W), partitioners=[pattern])
    assert (
        delegate_ops(lowered) == [["aten.matmul.default", "aten.relu.default"]] * 1 or len(delegate_ops(lowered)) == 2
    )
    torch.testing.assert_close(lowered(X, W), Chain()(X, W))
    for ops in delegate_ops(lowered):
        assert ops == ["aten.matmul.default", "aten.relu.default"]


def test_whole_program() -> None:
    lowered = aot.lower(Chain(), (X, W), partitioners=[WholeProgram(fresh().name)])
    assert len(lowered.pieces["forward"]) == 1
    assert lowered.program.meta().kernels == {}
    with pytest.raises(UnsupportedOp, match="cannot be lowered whole") as caught:
        aot.lower(Chain(), (X, W), partitioners=[WholeProgram("add_sub")])
    assert "aot_support.py" in str(caught.value)


class Scripted(Partitioner):
    """Tags what a function says."""

    def __init__(self, backend: str, tag: Any, bind: bool = False, spoil: Any = None) -> None:
        super().__init__(backend)
        self.tag = tag
        self.bind = bind
        self.spoil = spoil

    def partition(self, graph: fx.GraphModule, taken: Collection[fx.Node]) -> PartitionResult:
        tags = {node: tag for node in graph.graph.nodes if (tag := self.tag(node)) is not None}
        if self.spoil is not None:
            self.spoil(graph)
        delegates = {tag: DelegationSpec(self.backend, CompileSpecs({"tag": tag})) for tag in set(tags.values())}
        return PartitionResult(tags, delegates, self.bind)


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(2, 4))
        self.register_buffer("total", torch.zeros(2, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total += x
        return torch.sin(x + self.w) * torch.cos(x - self.w) + self.total


def lower_tagged(tag: Any, **more: Any) -> aot.LoweredProgram:
    return aot.lower(Weighted(), (X,), partitioners=[Scripted(fresh().name, tag, **more)])


def calls(*names: str) -> Any:
    return lambda node: "t" if any(f"aten.{name}." in str(node.target) for name in names) else None


def test_untagged_constants_are_arguments_and_tagged_ones_belong_to_the_delegate() -> None:
    lowered = lower_tagged(calls("sin", "add", "cos", "sub"))
    (delegate, *_) = lowered.program.meta().delegates
    assert delegate.constants == ()
    expected = Weighted()(X)
    torch.testing.assert_close(lowered(X), expected)

    def with_constant(node: fx.Node) -> str | None:
        return "t" if node.name == "p_w" else calls("sin", "add", "cos", "sub", "mul")(node)

    lowered = lower_tagged(with_constant)
    assert [one.constants for one in lowered.program.meta().delegates] == [("w",)]
    torch.testing.assert_close(lowered(X), expected)


@pytest.mark.parametrize(
    ("tag", "says"),
    [
        (lambda node: "t" if node.op == "output" else None, "tagged the output"),
        (lambda node: "t" if node.name == "x" else None, "an input that the user gives"),
        (lambda node: "t" if node.name == "b_total" else None, "a buffer that the program changes"),
        (lambda node: "t" if node.name == "p_w" or "sub" in node.name else None, "uses it under None"),
        (
            lambda node: "a" if node.name == "p_w" or "sub" in node.name else ("b" if "add" in node.name else None),
            "uses it under 'b'",
        ),
    ],
    ids=["output", "user input", "buffer", "constant with an untagged user", "constant with another tag's user"],
)
def test_what_must_not_be_tagged(tag: Any, says: str) -> None:
    with pytest.raises(GraphError, match=says):
        lower_tagged(tag)


@pytest.mark.parametrize("how", ["target", "argument", "order", "new node", "removed", "meta"])
def test_a_partitioner_must_not_change_the_graph(how: str) -> None:
    def spoil(graph: fx.GraphModule) -> None:
        nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
        if how == "target":
            nodes[0].target = aten.sub.Tensor
        elif how == "argument":
            nodes[-1].args = (nodes[-1].args[1], nodes[-1].args[0])
        elif how == "order":
            nodes[2].append(nodes[1])
        elif how == "new node":
            with graph.graph.inserting_after(nodes[0]):
                graph.graph.call_function(aten.neg.default, (nodes[0],))
        elif how == "removed":
            graph.graph.output_node().args = ((nodes[0], nodes[0]),)
            graph.graph.erase_node(nodes[-1])
        else:
            nodes[0].meta["delegation_tag"] = "t"

    with pytest.raises(GraphError, match="changed the graph"):
        lower_tagged(calls("sin"), spoil=spoil)


def test_tags_that_tempt_a_cycle_become_two_delegates() -> None:
    """``sin`` lies between ``add`` and ``mul`` of one tag: in one delegate they would wait for themselves."""
    lowered = lower_tagged(calls("add", "mul"))
    names = [one.backend for one in lowered.program.meta().delegates]
    assert len(names) >= 2
    torch.testing.assert_close(lowered(X), Weighted()(X))


def test_a_partitioner_that_comes_first_wins() -> None:
    first, second = fresh(), fresh()
    lowered = aot.lower(Chain(), (X, W), partitioners=[OpList(first.name, ["aten.sin"]), Supported(second.name)])
    assert [piece.backend.name for piece in lowered.pieces["forward"]] == [second.name, first.name, second.name]
    torch.testing.assert_close(lowered(X, W), Chain()(X, W))
