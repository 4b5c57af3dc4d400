"""Computations in segments: what a backend that takes only part of a graph runs, and what the interpreter runs for it.

To whoever runs it such a computation is one. Its segments run in order, on the thread that runs it; a value that goes
from the backend to the interpreter is brought to the host once, and back once, and neither copies where the backend's
values are in host memory.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from ..backend.builder import capture_of
from ..backend.compiler import computations
from ..backend.execution import Computation, execute, execute_on_host
from ..backend.interface import Backend, BackendData, ExecutionContext, Processed
from ..backend.interpreted_graph import INTERPRETER, interpreted_graph, with_strides
from ..backend.normal_form import input_specs, output_specs
from ..backend.partition import Partitioned, partition
from ..backend.registry import registry, resolve_device
from ..core.config import config
from ..core.specs import CompileSpecs

if TYPE_CHECKING:
    from .device_runtime import DeviceRuntime

__all__ = ["segmented"]


@dataclass(frozen=True, slots=True)
class _Segment:
    """One call: a computation, where its arguments and results are, and which values nobody needs after it."""

    computation: Computation
    on_host: bool
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    ends: tuple[int, ...]


@dataclass(slots=True)
class _Program:
    """The segments of a graph in order, how many values there are, and which of them are the results.

    ``elements``: numbers to take from packs before all else, as (value, the pack, where in it).
    """

    elements: list[tuple[int, int, int]]
    segments: list[_Segment]
    values: int
    results: tuple[int, ...]


class _Segmented(Backend):
    """Runs the segments of graphs. Its values are those of the backend that takes part of them."""

    def __init__(self, runtime: DeviceRuntime) -> None:
        self.backend = backend = runtime.backend
        self.name = backend.name  # type: ignore[misc]  # errors are told of it
        self.capabilities = dataclasses.replace(  # type: ignore[misc]
            backend.capabilities, donation=False, restores_donated=False
        )

    def preprocess(self, graph: fx.GraphModule, specs: CompileSpecs) -> Processed:
        raise NotImplementedError("each segment is compiled by itself")

    def execute(self, handle: _Program, args: Sequence[BackendData], context: ExecutionContext) -> list[BackendData]:
        backend, device = self.backend, context.device
        own: list[Any] = [*args, *[None] * (handle.values - len(args))]
        host: list[torch.Tensor | None] = [None] * handle.values
        for number, pack, place in handle.elements:
            host[number] = backend.from_device(own[pack])[place]
        for segment in handle.segments:
            computation = segment.computation
            if segment.on_host:
                tensors: list[Any] = []
                for at, spec in zip(segment.inputs, computation.parameters, strict=True):
                    if host[at] is None:
                        host[at] = with_strides(backend.from_device(own[at]), spec)
                    tensors.append(host[at])
                if computation.backend is not INTERPRETER:  # which sees to strides itself
                    tensors = [
                        with_strides(one, spec) for one, spec in zip(tensors, computation.parameters, strict=True)
                    ]
                for at, result in zip(segment.outputs, execute_on_host(computation, tensors), strict=True):
                    host[at] = result
            else:
                for at in segment.inputs:
                    if own[at] is None:
                        tensor = host[at]
                        assert tensor is not None
                        own[at] = backend.to_device(tensor, device)
                given = [own[at] for at in segment.inputs]
                for at, result in zip(segment.outputs, execute(computation, given), strict=True):
                    own[at] = result
            for at in segment.ends:
                own[at] = host[at] = None
        return [own[at] if own[at] is not None else backend.to_device(host[at], device) for at in handle.results]  # type: ignore[arg-type]


def _program(parts: Partitioned, made: dict[str, Computation], backend: Backend) -> _Program:
    """The outer graph, which holds calls of segments and nothing else, as numbered values."""
    numbers: dict[fx.Node, int] = {}
    calls: list[tuple[Computation, tuple[int, ...], tuple[int, ...]]] = []
    elements: list[tuple[int, int, int]] = []
    count = 0
    for node in parts.module.graph.nodes:
        if node.op == "placeholder":
            numbers[node] = count
            count += 1
        elif node.op == "call_module":
            computation = made[str(node.target)]
            outputs = tuple(range(count, count + len(computation.results)))
            count += len(outputs)
            for user in node.users:
                numbers[user] = outputs[user.args[1]]
            calls.append((computation, tuple(numbers[arg] for arg in node.args), outputs))
        elif node.op == "call_function" and node.target is not operator.getitem:
            pack, _, place = node.args  # the only operators that are in no segment take an element of an input
            numbers[node] = count
            elements.append((count, numbers[pack], place))
            count += 1
    results = tuple(numbers[node] for node in parts.module.graph.output_node().args[0])  # type: ignore[union-attr, index]
    last: dict[int, int] = {}
    for at, (_, inputs, outputs) in enumerate(calls):
        last.update(dict.fromkeys((*inputs, *outputs), at))
    kept = set(results)
    segments = [
        _Segment(
            computation,
            computation.backend is not backend,
            inputs,
            outputs,
            tuple(number for number, end in last.items() if end == at and number not in kept),
        )
        for at, (computation, inputs, outputs) in enumerate(calls)
    ]
    return _Program(elements, segments, count, results)


def _elsewhere(backend: Backend, graph: fx.GraphModule, source: str | None) -> Computation:
    """The computation of a part that the backend does not take: another's, if one is set that takes all of it."""
    name = config.fallback_backend
    other = registry.get(name) if name else None
    if other is None or other is backend:
        return interpreted_graph(graph)
    capture = capture_of(other)
    calls = [node for node in graph.graph.nodes if node.op == "call_function" and node.target is not operator.getitem]
    if not all(capture.supports(node) for node in calls):
        return interpreted_graph(graph)
    return computations.get(other, resolve_device(other, 0), CompileSpecs(), graph, source)


def segmented(runtime: DeviceRuntime, graph: fx.GraphModule, source: str | None) -> Computation:
    """The computation of a graph some of whose operators the backend does not take. Raises :class:`CompileError`."""
    backend, device = runtime.backend, runtime.device
    parts = partition(graph, [backend], host=INTERPRETER)
    own = [one.module for one in parts.delegates if one.backend is not INTERPRETER]
    compiled = iter(computations.get_all(backend, device, runtime.specs, own, source))
    made = {
        one.name: _elsewhere(backend, one.module, source) if one.backend is INTERPRETER else next(compiled)
        for one in parts.delegates
    }
    inputs, outputs = input_specs(graph), output_specs(graph)
    names = tuple(node.name for node in graph.graph.nodes if node.op == "placeholder")
    return Computation(
        _Segmented(runtime), device, inputs, names, outputs, _program(parts, made, backend),
        ExecutionContext(device, outputs),
        graph_ops=sum(node.op == "call_function" for node in graph.graph.nodes), segments=tuple(made.values()),
    )  # fmt: skip
