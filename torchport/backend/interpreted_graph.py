"""A graph in normal form that the interpreter runs: its operators are called one by one on CPU tensors.

It is what stands between the segments of a backend that takes only part of a program. Lowered as they are for backends,
operators mean the same here, and random ones draw the same numbers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, Final

import torch
from torch import fx

from ..core.specs import CompileSpecs, TensorSpec
from .execution import Computation
from .interface import Backend, BackendData, BackendDevice, ExecutionContext, Processed, TensorData
from .interpret import settled
from .normal_form import input_specs, output_specs

__all__ = ["INTERPRETER", "can_interpret", "interpreted_graph", "with_strides"]

Run = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]


def with_strides(tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """The tensor, or a copy where its strides are not those of the spec."""
    if tensor.stride() == spec.strides or not tensor.numel():
        return tensor
    told = [
        (one, other) for size, one, other in zip(spec.shape, tensor.stride(), spec.strides, strict=True) if size > 1
    ]
    if all(one == other for one, other in told):
        return tensor
    if any(other == 0 for _, other in told):
        return tensor.contiguous()
    return torch.empty_strided(spec.shape, spec.strides, dtype=tensor.dtype).copy_(tensor)


def _function(module: fx.GraphModule) -> Run:
    """The graph as a function of a list, which it empties; each value goes with its last use."""
    graph = fx.Graph()
    given = graph.placeholder("given")
    copies: dict[fx.Node, fx.Node] = {}
    nodes = list(module.graph.nodes)
    for node in reversed([node for node in nodes if node.op == "placeholder"]):
        copies[node] = graph.call_method("pop", (given,))
    for node in nodes:
        if node.op != "placeholder":
            copies[node] = graph.node_copy(node, lambda used: copies[used])
    return fx.GraphModule(module, graph).forward


class InterpretedGraph:
    """What the interpreter runs: called with CPU tensors, it gives others, with the strides of the graph's specs."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.inputs = input_specs(module)
        self.outputs = output_specs(module)
        self._run = _function(module)

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        given = [with_strides(tensor, spec) for tensor, spec in zip(tensors, self.inputs, strict=True)]
        taken = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        made: list[torch.Tensor] = []
        with torch.no_grad():
            for value, spec in zip(self._run(given), self.outputs, strict=True):
                value = with_strides(settled(value), spec)
                place = value.untyped_storage().data_ptr()
                if place in taken and value.numel():
                    value = value.clone()
                    place = value.untyped_storage().data_ptr()
                taken.add(place)
                made.append(value)
        return made


class Interpreter(Backend):
    """Takes every operator that PyTorch's CPU has. Nothing is compiled, so nothing is kept.

    ``name``: the backend on whose behalf it runs, which is what errors are told as.
    """

    def __init__(self, name: str = "interpreter") -> None:
        self.name = name  # type: ignore[misc]

    def preprocess(self, graph: fx.GraphModule, specs: CompileSpecs) -> Processed:
        raise NotImplementedError("graphs are interpreted as they are")

    def execute(
        self, handle: InterpretedGraph, args: Sequence[BackendData], context: ExecutionContext
    ) -> list[BackendData]:
        results = handle([arg.tensor for arg in args])  # type: ignore[attr-defined]
        return [TensorData(context.device, TensorSpec.of(result), result) for result in results]

    def execute_on_host(
        self,
        handle: InterpretedGraph,
        tensors: list[torch.Tensor],
        specs: Sequence[TensorSpec],
        context: ExecutionContext,
    ) -> Sequence[torch.Tensor]:
        """Run on CPU tensors as they are."""
        return handle(tensors)


INTERPRETER: Final = Interpreter()
_CPU: Final = BackendDevice("cpu")


def can_interpret(module: fx.GraphModule) -> bool:
    """Whether PyTorch's CPU has every operator of a graph that was made for a backend, and may run it instead."""
    return all(
        node.target is _getitem
        or (
            isinstance(node.target, torch._ops.OpOverload)
            and "kernel" not in node.meta  # the program's own, which the backend is to call
            and torch._C._dispatch_has_computed_kernel_for_dispatch_key(node.target.name(), "CPU")
        )
        for node in module.graph.nodes
        if node.op == "call_function"
    )


_getitem: Any = operator.getitem


def interpreted_graph(module: fx.GraphModule, interpreter: Interpreter = INTERPRETER) -> Computation:
    """The computation of a graph that the interpreter runs."""
    start = perf_counter()
    handle = InterpretedGraph(module)
    calls = sum(node.op == "call_function" for node in module.graph.nodes)
    names = tuple(node.name for node in module.graph.nodes if node.op == "placeholder")
    context = ExecutionContext(_CPU, handle.outputs)
    return Computation(
        interpreter, _CPU, handle.inputs, names, handle.outputs, handle, context, graph_ops=calls,
        compile_seconds=perf_counter() - start,
    )  # fmt: skip
