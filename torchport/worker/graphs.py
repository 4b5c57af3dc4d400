"""A graph in normal form as plain data, and back: what ``torch.compile`` has to compile.

The graph itself is :mod:`torchport.backend.serialize`'s bytes. The specs of every node's results come along, so that
the other process need not infer them again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from ..backend.control_flow import inner_graph
from ..backend.infer import fake_tensor
from ..backend.serialize import decode, encode
from ..core.errors import GraphError
from ..core.specs import TensorSpec
from .paths import NotSendable

__all__ = ["graph_from_data", "graph_to_data", "operators"]


def _graphs(graph: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """The graph, and those that its branches and loops call."""
    yield graph
    for node in graph.graph.find_nodes(op="get_attr"):
        inner = inner_graph(graph, node)
        if inner is not None:
            yield from _graphs(inner)


def operators(graph: fx.GraphModule) -> list[Any]:
    """Every operator that a graph calls, those of its branches and loops included."""
    calls = (node.target for one in _graphs(graph) for node in one.graph.nodes)
    return list(dict.fromkeys(target for target in calls if isinstance(target, torch._ops.OpOverload)))


def _specs(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return TensorSpec.of(value)
    if isinstance(value, (list, tuple)):
        return [_specs(one) for one in value] if isinstance(value, list) else tuple(map(_specs, value))
    if value is None:
        return None
    raise NotSendable(f"a value of the graph is a {type(value).__name__}")


def _values(specs: Any) -> Any:
    if isinstance(specs, TensorSpec):
        return fake_tensor(specs)
    if isinstance(specs, (list, tuple)):
        return type(specs)(map(_values, specs))
    return None


def _calls(graph: fx.GraphModule) -> Iterator[fx.Node]:
    return (node for one in _graphs(graph) for node in one.graph.nodes if node.op == "call_function")


def graph_to_data(graph: fx.GraphModule) -> tuple[bytes, list[Any]]:
    """The graph's bytes and its calls' specs. Raises :class:`NotSendable`."""
    try:
        return encode(graph), [_specs(node.meta["val"]) for node in _calls(graph)]
    except GraphError as error:
        raise NotSendable(str(error)) from error


def graph_from_data(data: bytes, specs: list[Any]) -> fx.GraphModule:
    """The graph that :func:`graph_to_data` wrote, with ``meta["val"]`` on every node."""
    graph = decode(data)
    for one in _graphs(graph):
        for node in one.graph.find_nodes(op="placeholder"):
            node.meta["val"] = fake_tensor(node.meta["spec"])
    for node, spec in zip(_calls(graph), specs, strict=True):
        node.meta["val"] = _values(spec)
    return graph
