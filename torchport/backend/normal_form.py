"""The FX normal form: what every backend's ``preprocess`` is given, as an executable specification.

A graph in normal form

1. holds only ``placeholder``, ``call_function`` and ``output`` nodes, placeholders first;
2. calls only ``OpOverload``s (or ``operator.getitem`` on a node that returns several tensors);
3. never mutates: no called operator writes to an argument, none is a ``*_copy`` form of a view operator;
4. has ``meta["val"]`` on every node: a fake tensor, or a list or tuple of them where the operator returns several;
5. has ``meta["debug_handle"]``, an ``int``, on every ``call_function`` node, and ``meta["source"]``, the user's line;
6. ends in one output node whose argument is a flat tuple of nodes, each a tensor;
7. returns nothing that shares memory with an input or with another output, as far as view operators tell.

For a backend with :attr:`Capabilities.control_flow` it may also call ``cond`` and ``while_loop``. Their graphs are
named by ``get_attr`` nodes after the placeholders, and are in normal form but for rule 7.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from ..core.errors import GraphError
from ..core.specs import TensorSpec
from .control_flow import CONTROL_FLOW, inner_graph

__all__ = [
    "alias_root",
    "alias_roots",
    "at_hint",
    "input_specs",
    "is_view",
    "output_specs",
    "source_of",
    "verify_graph",
]

_getitem: Any = operator.getitem


def is_view(op: object) -> bool:
    """Whether an operator returns a view of an argument (it has an alias annotation that is not a write)."""
    if not isinstance(op, torch._ops.OpOverload):
        return False
    infos = [argument.alias_info for argument in op._schema.arguments]
    return any(info is not None and not info.is_write for info in infos)


def _viewed(node: fx.Node) -> Any:
    """What a view operator's node is a view of."""
    return node.args[0] if node.args else node.kwargs.get("self")


def _shown(node: fx.Node) -> fx.Node | None:
    """The node whose memory a node shows, if it is a view operator's or one of its results; else ``None``."""
    if node.op != "call_function":
        return None
    if node.target is _getitem:
        parent = node.args[0]
        return parent if isinstance(parent, fx.Node) and is_view(parent.target) else None
    base = _viewed(node) if is_view(node.target) else None
    return base if isinstance(base, fx.Node) else None


def alias_root(node: fx.Node) -> fx.Node:
    """The node whose memory ``node`` shows: follows view operators and ``getitem`` to where the value was made."""
    while (shown := _shown(node)) is not None:
        node = shown
    return node


def alias_roots(nodes: Iterable[fx.Node]) -> dict[fx.Node, fx.Node]:
    """The :func:`alias_root` of each of a graph's nodes, in time linear in their number."""
    roots: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        shown = _shown(node)
        roots[node] = node if shown is None else roots[shown]
    return roots


def at_hint(number: Any) -> Any:
    """An integer, or what a symbolic one is in the program's first call; ``None`` where that is not known."""
    return number.node.hint if isinstance(number, torch.SymInt) else number


def _specs(values: Any, what: str) -> tuple[TensorSpec, ...]:
    for value in values:
        if not isinstance(value, torch.Tensor):
            raise GraphError(f'{what} has meta["val"] of type {type(value).__name__}; the normal form has only tensors')
    return tuple(
        TensorSpec(tuple(map(at_hint, value.shape)), value.dtype, tuple(map(at_hint, value.stride())))
        for value in values
    )


def input_specs(graph: fx.GraphModule) -> tuple[TensorSpec, ...]:
    """The specs of the placeholders, in order; where sizes are symbols, those of the sizes that it was written for."""
    return _specs([node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"], "a placeholder")


def output_specs(graph: fx.GraphModule) -> tuple[TensorSpec, ...]:
    """The specs of the outputs, in order; symbols as in :func:`input_specs`."""
    outputs: Any = graph.graph.output_node().args[0]
    return _specs([node.meta["val"] for node in outputs], "an output")


def source_of(node: fx.Node) -> str | None:
    """The user's source line a node came from, ``file:line in function``, if it is known."""
    source = node.meta.get("source")
    return source if isinstance(source, str) else None


def _fail(node: fx.Node, rule: str) -> GraphError:
    source = source_of(node)
    where = f" (from {source})" if source else ""
    return GraphError(f"not in FX normal form: node {node.format_node()}{where}: {rule}")


def _verify_call(node: fx.Node) -> None:
    if node.target in CONTROL_FLOW:
        pass
    elif node.target is not _getitem:
        if not isinstance(node.target, torch._ops.OpOverload):
            raise _fail(node, "only OpOverloads may be called, such as torch.ops.aten.add.Tensor")
        schema = node.target._schema
        if schema.is_mutable:
            raise _fail(node, "the operator mutates an argument; use its functional form")
        if schema.name.endswith("_copy") and hasattr(torch.ops.aten, schema.name.removeprefix("aten::")[:-5]):
            base = getattr(torch.ops.aten, schema.name.removeprefix("aten::")[:-5])
            if any(is_view(getattr(base, name)) for name in base.overloads()):
                raise _fail(node, "a *_copy form of a view operator; use the view operator itself")
    elif not (isinstance(node.args[0], fx.Node) and isinstance(node.args[0].meta.get("val"), (list, tuple))):
        raise _fail(node, "getitem of a node that does not return several tensors")
    if not isinstance(node.meta.get("debug_handle"), int):
        raise _fail(node, 'meta["debug_handle"] is not an int')


def _verify_val(node: fx.Node) -> None:
    value = node.meta.get("val")
    if isinstance(value, (list, tuple)):
        # An operator leaves out some of its tensors where they are not wanted (output masks of backward operators).
        fine = bool(value) and all(leaf is None or isinstance(leaf, torch.Tensor) for leaf in value)
    else:
        fine = isinstance(value, torch.Tensor)
    if not fine:
        raise _fail(node, 'meta["val"] is not a tensor or a sequence of tensors')


def _verify_output(node: fx.Node, inner: bool) -> None:
    outputs = node.args[0] if len(node.args) == 1 else None
    if not isinstance(outputs, tuple):
        raise _fail(node, "the output is not one flat tuple")
    seen: dict[fx.Node, fx.Node] = {}
    for value in outputs:
        if not isinstance(value, fx.Node) or not isinstance(value.meta.get("val"), torch.Tensor):
            raise _fail(node, f"output {value!r} is not a node that holds one tensor")
        root = alias_root(value)
        if inner:
            continue
        if root.op == "placeholder":
            raise _fail(node, f"output {value} shares memory with input {root}; clone it")
        if root in seen:
            raise _fail(node, f"outputs {seen[root]} and {value} share memory; clone one")
        seen[root] = value


def _verify_inner(graph: fx.GraphModule, node: fx.Node) -> None:
    held = inner_graph(graph, node)
    if held is None or not all(user.target in CONTROL_FLOW for user in node.users):
        raise _fail(node, "a get_attr node that is no graph of a branch or loop; what a graph uses is an input")
    verify_graph(held, inner=True)


def verify_graph(graph: fx.GraphModule, inner: bool = False) -> None:
    """Raise :class:`GraphError`, naming the node and the rule, unless the graph is in normal form.

    ``inner``: the graph is one that a branch or loop calls, which may return its inputs.
    """
    past_placeholders = False
    nodes = list(graph.graph.nodes)
    if not nodes or nodes[-1].op != "output":
        raise GraphError("not in FX normal form: the last node is not the output")
    for node in nodes:
        if node.op == "placeholder":
            if past_placeholders:
                raise _fail(node, "placeholders come first")
            _verify_val(node)
        elif node.op == "call_function":
            past_placeholders = True
            _verify_call(node)
            _verify_val(node)
        elif node.op == "output":
            _verify_output(node, inner)
        elif node.op == "get_attr":
            past_placeholders = True
            _verify_inner(graph, node)
        else:
            raise _fail(node, f"a {node.op} node; the normal form has placeholder, call_function and output")
    try:
        graph.graph.lint()
    except RuntimeError as error:
        raise GraphError(f"not in FX normal form: {error}") from error
