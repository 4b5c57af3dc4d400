"""Running one operator at a time: every operator of eager mode, and each operator of a computation that failed.

Where the backend has a boxed kernel, the operator's graph is walked and each node handed to that kernel, so nothing is
compiled. Elsewhere the graph is compiled like any other and the computation kept. Either way the operator means what it
means in a larger graph: same lowering, same random numbers, same scalar inputs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from torch import fx
from torch.fx.node import map_arg

from ..backend.execution import Computation
from ..backend.interface import Backend, BackendData, ExecutionContext, Processed
from ..backend.normal_form import input_specs, output_specs
from ..core.specs import CompileSpecs

if TYPE_CHECKING:
    from ..trace.graph import TraceGraph
    from .device_runtime import DeviceRuntime

__all__ = ["walked"]

Boxed = Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]


class _Walk(Backend):
    """Runs graphs node by node through another backend's boxed kernel. Its handles are graphs."""

    name: ClassVar[str] = "op by op"

    def __init__(self, backend: Backend, boxed: Boxed) -> None:
        self.of = backend
        self.boxed = boxed

    def preprocess(self, graph: fx.GraphModule, specs: CompileSpecs) -> Processed:
        raise NotImplementedError("graphs are walked as they are")

    def execute(self, handle: fx.Graph, args: Sequence[BackendData], context: ExecutionContext) -> list[BackendData]:
        values: dict[fx.Node, Any] = {}
        given = iter(args)
        for node in handle.nodes:
            if node.op == "placeholder":
                values[node] = next(given)
            elif node.op == "output":
                return list(map_arg(node.args[0], values.__getitem__))
            else:
                inner_args, inner_kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
                target: Any = node.target
                if target is operator.getitem:
                    values[node] = inner_args[0][inner_args[1]]
                else:
                    values[node] = made = self.boxed(target, inner_args, inner_kwargs)
                    for one in made if isinstance(made, (list, tuple)) else (made,):
                        if isinstance(one, BackendData):
                            one.exported = True  # a kernel's result may be another name of its argument's memory
        raise AssertionError("a graph in normal form ends in its output")


def walked(runtime: DeviceRuntime, made: TraceGraph, boxed: Boxed) -> Computation:
    """A computation that walks the graph through a boxed kernel; nothing is compiled."""
    graph = made.module
    inputs, outputs = input_specs(graph), output_specs(graph)
    names = tuple(node.name for node in graph.graph.nodes if node.op == "placeholder")
    context = ExecutionContext(runtime.device, outputs)
    return Computation(
        _Walk(runtime.backend, boxed), runtime.device, inputs, names, outputs, graph.graph, context, graph_ops=1
    )  # fmt: skip
