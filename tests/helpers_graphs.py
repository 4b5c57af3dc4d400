"""Graphs in FX normal form for tests, made from plain functions without torchport's own tracer."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from torchport.backend.interface import (
    Backend,
    BackendData,
    BackendDevice,
    ExecutionContext,
    FreeableBuffer,
    InitContext,
    TensorData,
)
from torchport.backend.normal_form import alias_root, input_specs, output_specs, verify_graph
from torchport.backends.reference import ReferenceBackend
from torchport.core.specs import CompileSpecs, TensorSpec

CPU = BackendDevice("cpu", 0)
aten = torch.ops.aten
_IDENTITIES = (aten.detach.default, aten.alias.default, aten.lift_fresh.default, aten.lift_fresh_copy.default)

Decompositions = Mapping[torch._ops.OpOverload, Callable[..., Any]]


def _lift_constants(graph: fx.GraphModule) -> list[torch.Tensor]:
    """Turn ``get_attr`` nodes into placeholders after the others; returns their values."""
    values: list[torch.Tensor] = []
    last = [node for node in graph.graph.nodes if node.op == "placeholder"]
    for node in list(graph.graph.nodes):
        if node.op != "get_attr":
            continue
        value = getattr(graph, node.target)
        where = graph.graph.inserting_after(last[-1]) if last else graph.graph.inserting_before()
        with where:
            lifted = graph.graph.placeholder(f"lifted_{len(values)}")
        lifted.meta["val"] = node.meta.get("val", value)
        node.replace_all_uses_with(lifted)
        graph.graph.erase_node(node)
        last.append(lifted)
        values.append(value)
    return values


def _separate_outputs(graph: fx.GraphModule) -> None:
    """Clone every output that shares memory with an input or an earlier output."""
    output = graph.graph.output_node()
    seen: set[fx.Node] = set()
    results: list[fx.Node] = []
    with graph.graph.inserting_before(output):
        for value in output.args[0]:  # type: ignore[union-attr]
            root = alias_root(value)
            if root.op == "placeholder" or root in seen:
                copy = graph.graph.call_function(aten.clone.default, (value,))
                copy.meta["val"] = aten.clone.default(value.meta["val"])
                value = copy
            seen.add(alias_root(value))
            results.append(value)
    output.args = (tuple(results),)


def normalise(graph: fx.GraphModule) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    """Bring a functional ATen graph into normal form; returns it and the values of the inputs it gained."""
    values = _lift_constants(graph)
    for node in list(graph.graph.nodes):
        if node.op == "call_function" and node.target in _IDENTITIES:
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
        elif node.op == "call_function" and node.meta.get("val") is None and not node.users:
            graph.graph.erase_node(node)  # a check, such as _linalg_check_errors: it returns nothing
        elif node.target is aten.diagonal_copy.default:
            node.target = aten.diagonal.default
    output = graph.graph.output_node()
    results = output.args[0]
    output.args = (tuple(results) if isinstance(results, (list, tuple)) else (results,),)
    graph.graph.eliminate_dead_code()
    _separate_outputs(graph)
    for number, node in enumerate(graph.graph.nodes):
        if node.op == "call_function":
            node.meta = {"val": node.meta.get("val"), "debug_handle": number, "source": f"test.py:{number} in test"}
    graph.recompile()
    verify_graph(graph)
    return graph, values


def normal_form(
    fn: Callable[..., Any], args: Sequence[torch.Tensor], decompositions: Decompositions | None = None
) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    """Trace ``fn(*args)`` (autograd inside ``fn`` included); returns the graph and its arguments."""
    table = dict(decompositions or {})
    traced = make_fx(fn, table, tracing_mode="fake", _allow_non_fake_inputs=True)(*args)
    constants = _lift_constants(traced)
    traced.recompile()
    args = [*(arg.detach() for arg in args), *constants]
    functional = make_fx(torch.func.functionalize(traced, remove="mutations"), tracing_mode="fake")(*args)
    graph, lifted = normalise(functional)
    return graph, [*args, *lifted]


def build(
    nodes: Callable[[fx.Graph, list[fx.Node]], Sequence[fx.Node]], args: Sequence[torch.Tensor]
) -> fx.GraphModule:
    """A graph from explicit nodes; ``meta["val"]`` is filled in by running it on fake tensors."""
    from torch._subclasses import FakeTensorMode

    graph = fx.Graph()
    inputs = [graph.placeholder(f"arg{number}") for number in range(len(args))]
    graph.output(tuple(nodes(graph, inputs)))
    module = fx.GraphModule(torch.nn.Module(), graph)
    mode = FakeTensorMode()
    env: dict[fx.Node, Any] = {}
    fakes = iter([mode.from_tensor(arg) for arg in args])
    with mode:
        for number, node in enumerate(graph.nodes):
            if node.op == "output":
                continue
            if node.op == "placeholder":
                value = next(fakes)
            else:
                value = node.target(*fx.map_arg(node.args, env.get), **fx.map_arg(node.kwargs, env.get))  # type: ignore
                node.meta.update(debug_handle=number, source=None)
            env[node] = node.meta["val"] = value
    verify_graph(module)
    return module


def data_of(tensors: Sequence[torch.Tensor]) -> list[BackendData]:
    """The tensors as ``TensorData`` on CPU."""
    return [TensorData(CPU, TensorSpec.of(tensor), tensor) for tensor in tensors]


def load(backend: Backend, graph: fx.GraphModule, specs: CompileSpecs | None = None) -> tuple[Any, ExecutionContext]:
    """``init(preprocess(graph))``; returns the handle and the context for ``execute``."""
    specs = specs or CompileSpecs()
    inputs, outputs = input_specs(graph), output_specs(graph)
    processed = backend.preprocess(graph, specs)
    handle = backend.init(FreeableBuffer(processed.data), specs, InitContext(CPU, inputs, outputs))
    return handle, ExecutionContext(CPU, outputs)


def tensors_of(results: Sequence[BackendData]) -> list[torch.Tensor]:
    """The tensors inside ``TensorData``."""
    tensors = [result.tensor for result in results if isinstance(result, TensorData)]
    assert len(tensors) == len(results)
    return [tensor for tensor in tensors if tensor is not None]


def run(backend: Backend, graph: fx.GraphModule, args: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Compile, run once and destroy."""
    handle, context = load(backend, graph)
    results = tensors_of(backend.execute(handle, data_of(args), context))
    backend.destroy(handle)
    return results


def storage(tensor: torch.Tensor) -> int:
    """The address of a tensor's memory."""
    return tensor.untyped_storage().data_ptr()


def assert_same(
    backend: Backend,
    graph: fx.GraphModule,
    args: Sequence[torch.Tensor],
    rtol: float = 1e-4,
    atol: float = 1e-5,
) -> list[torch.Tensor]:
    """The backend's results equal the reference's: values, dtypes, shapes; strides as in the graph; nothing aliases."""
    expected = run(ReferenceBackend(), graph, [arg.clone() for arg in args])
    before = [arg.clone() for arg in args]
    actual = run(backend, graph, args)
    assert len(actual) == len(expected)
    for number, (got, want) in enumerate(zip(actual, expected, strict=True)):
        exact = not (want.is_floating_point() or want.is_complex())
        tolerance = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": rtol, "atol": atol}
        torch.testing.assert_close(got, want, equal_nan=True, msg=lambda m, n=number: f"output {n}: {m}", **tolerance)
    for got, spec in zip(actual, output_specs(graph), strict=True):
        assert TensorSpec.of(got) == spec
    for arg, copy in zip(args, before, strict=True):
        torch.testing.assert_close(arg, copy, rtol=0, atol=0, equal_nan=True)
    addresses = [storage(tensor) for tensor in actual if tensor.numel()]
    assert len(set(addresses)) == len(addresses), "outputs share memory"
    taken = {storage(tensor) for tensor in args if tensor.numel()}
    assert not taken.intersection(addresses), "an output shares memory with an input"
    return actual


getitem: Any = operator.getitem
