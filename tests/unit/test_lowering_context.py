"""The op-by-op lowering base class, by way of a compiler that emits lines of Python."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from helpers_graphs import aten, build
from torch import fx

from torchport.backend.lowering_context import Call, LoweringContext, LoweringTable
from torchport.core.errors import CompileError, GraphError, TorchportError, UnsupportedOp
from torchport.core.specs import TensorSpec

getitem: Any = operator.getitem
lowers = LoweringTable()


class Lines(LoweringContext[str, str]):
    """Emits one line of Python per call."""

    def __init__(self) -> None:
        super().__init__(lowers, "run")
        self.lines: list[str] = []

    def parameter(self, position: int, spec: TensorSpec, name: str) -> str:
        return f"p{position}"

    def emit(self, text: str) -> str:
        self.lines.append(f"v{len(self.lines)} = {text}")
        return f"v{len(self.lines) - 1}"

    def finish(self, call: Call, value: Any) -> Any:
        return [self.emit(one) for one in value] if isinstance(value, list) else self.emit(value)

    def build(self) -> str:
        return "\n".join([*self.lines, f"return {', '.join(self.results)}"])


@lowers(aten.add.Tensor, aten.add.Scalar, topic="arithmetic")
def add(call: Call, x: str, y: Any, alpha: Any = 1) -> str:
    return f"{x} + {y}"


@lowers(aten.split.Tensor)
def split(call: Call, x: str, size: int, dim: int = 0) -> list[str]:
    return [f"{x}[{number}]" for number in range(len(call.val))]


@lowers(aten.exp.default, refuses=lambda node: "no double precision" if node.meta["val"].dtype.itemsize == 8 else None)
def exp(call: Call, x: str) -> str:
    if call.arg(0).dim() == 0:
        raise ValueError("a scalar")
    return f"exp({x})"


def _graph(op: Any, *arguments: torch.Tensor, extra: tuple[Any, ...] = ()) -> fx.GraphModule:
    def nodes(graph: fx.Graph, inputs: list[fx.Node]) -> list[fx.Node]:
        return [graph.call_function(op, (*inputs, *extra))]

    return build(nodes, arguments)


def test_parameters_calls_and_results_in_order() -> None:
    def nodes(graph: fx.Graph, inputs: list[fx.Node]) -> list[fx.Node]:
        total = graph.call_function(aten.add.Tensor, (inputs[0], inputs[1]))
        halves = graph.call_function(aten.split.Tensor, (total, 2))
        return [graph.call_function(aten.exp.default, (graph.call_function(getitem, (halves, 1)),)), total]

    context = Lines()
    context.lower_graph(build(nodes, [torch.ones(4, 3), torch.ones(3)]))
    assert context.build() == "v0 = p0 + p1\nv1 = v0[0]\nv2 = v0[1]\nv3 = exp(v2)\nreturn v3, v0"
    assert context.emitted_node_count == 3
    assert context.result_shape(0) == TensorSpec((2, 3), torch.float32, (3, 1))
    with pytest.raises(IndexError):
        context.result_shape(2)


def test_aliases_are_checked() -> None:
    context = Lines()
    context.lower_graph(_graph(aten.add.Tensor, torch.ones(2), torch.ones(2)))
    context.set_up_alias(0, 1)
    assert context.aliases == {0: 1}
    for result, parameter, message in ((1, 0, "there are 1 results and 2 parameters"), (0, 1, "already gives")):
        with pytest.raises(GraphError, match=message):
            context.set_up_alias(result, parameter)


def test_what_cannot_be_lowered_is_named_with_its_operator() -> None:
    with pytest.raises(UnsupportedOp, match=r"no lowering of aten.sin.default"):
        Lines().lower_graph(_graph(aten.sin.default, torch.ones(2)))
    with pytest.raises(CompileError, match="lowering failed: ValueError: a scalar") as caught:
        Lines().lower_graph(_graph(aten.exp.default, torch.ones(())))
    assert caught.value.op == "aten.exp.default"
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_table_answers_supports() -> None:
    def call(graph: fx.GraphModule) -> fx.Node:
        return next(node for node in graph.graph.nodes if node.op == "call_function")

    assert lowers.supports(call(_graph(aten.exp.default, torch.ones(2))))
    assert lowers.supports(call(_graph(aten.exp.default, torch.ones(2).double()))).reason == "no double precision"
    assert "no lowering of aten.sin.default" in lowers.supports(call(_graph(aten.sin.default, torch.ones(2)))).reason
    assert lowers[aten.add.Scalar].topic == "arithmetic"
    assert len(lowers) == len(list(lowers)) == 4


def test_an_operator_has_one_lowering() -> None:
    with pytest.raises(TorchportError, match="two lowerings"):
        lowers(aten.add.Tensor)(add)
