"""Graphs in normal form ↔ bytes: canonical JSON, no pickle, equal graphs give equal bytes.

The encoding serves as the content of the ``reference`` backend's blobs and as the compile cache's key. Node names,
debug handles and source lines are left out of the key (:func:`fingerprint`) and kept in the blob (:func:`encode`).
"""

from __future__ import annotations

import hashlib
import json
import keyword
import math
import operator
from typing import Any

import torch
from torch import fx

from ..core.errors import GraphError
from ..core.specs import TensorSpec
from .arguments import check_arguments
from .control_flow import CONTROL_FLOW, inner_graph
from .graph_modules import graph_module

__all__ = ["check_calls", "decode", "decode_arg", "encode", "encode_arg", "fingerprint", "resolve_op"]

_getitem: Any = operator.getitem
_TORCH_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format)


def encode_arg(value: Any, number: dict[fx.Node, int]) -> Any:
    """JSON for one argument: nodes as ``{"n": i}``, torch constants by name, non-finite floats by repr."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, fx.Node):
        return {"n": number[value]}
    if isinstance(value, float):
        return value if math.isfinite(value) else {"f": repr(value)}
    if isinstance(value, complex):
        return {"c": [repr(value.real), repr(value.imag)]}
    if isinstance(value, (list, tuple)):
        return [encode_arg(item, number) for item in value]
    if isinstance(value, _TORCH_CONSTANTS):
        return {"t": str(value)}
    if isinstance(value, torch.device):
        return {"d": str(value)}
    raise GraphError(f"a {type(value).__name__} cannot be an argument in normal form: {value!r}")


def _torch_constant(name: str) -> Any:
    constant = vars(torch).get(name.removeprefix("torch."))  # not getattr: some names import modules
    if not isinstance(constant, _TORCH_CONSTANTS):
        raise ValueError(f"torch.{name} is not a dtype, layout or memory format")
    return constant


def _keyword(name: str) -> str:
    # Names of keyword arguments become Python source when FX compiles the graph, so a file must not choose them freely.
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ValueError(f"{name!r} cannot name an argument")
    return name


def decode_arg(value: Any, nodes: Any) -> Any:
    """The argument that :func:`encode_arg` wrote; ``nodes[i]`` stands for node *i*. Raises what bad input causes."""
    if isinstance(value, list):
        return [decode_arg(item, nodes) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, payload),) = value.items()
    if kind == "n":
        return nodes[payload]
    if kind == "f":
        return float(payload)
    if kind == "c":
        return complex(float(payload[0]), float(payload[1]))
    if kind == "t":
        return _torch_constant(payload)
    if kind == "d":
        return torch.device(payload)
    raise ValueError(f"an argument of unknown kind {kind!r}")


def _encode_spec(value: torch.Tensor) -> list[Any]:
    spec = TensorSpec.of(value)
    return [list(spec.shape), str(spec.dtype), list(spec.strides)]


def _document(graph: fx.GraphModule, debug: bool) -> dict[str, Any]:
    number: dict[fx.Node, int] = {}
    inputs: list[Any] = []
    calls: list[Any] = []
    outputs: Any = None
    for node in graph.graph.nodes:
        number[node] = len(number)
        if node.op == "placeholder":
            inputs.append(_encode_spec(node.meta["val"]))
        elif node.op == "call_function":
            target = "getitem" if node.target is _getitem else str(node.target)
            args = encode_arg(node.args, number)
            kwargs = {key: encode_arg(value, number) for key, value in node.kwargs.items()}
            own = node.meta.get("kernel")  # which one it is depends on the program, not on the graph
            extra = [node.meta.get("debug_handle"), node.meta.get("source")] if debug else [own.digest] if own else []
            calls.append([target, args, kwargs, *extra])
        elif (inner := inner_graph(graph, node)) is not None:
            calls.append(["graph", _document(inner, debug)])
        elif node.op == "output":
            outputs = encode_arg(node.args[0], number)
        else:
            raise GraphError(f"a {node.op} node cannot be encoded; run verify_graph first")
    document = {"inputs": inputs, "calls": calls, "outputs": outputs}
    placeholders = graph.graph.find_nodes(op="placeholder")
    donated = [position for position, node in enumerate(placeholders) if node.meta.get("donated")]
    return {**document, "donated": donated} if donated else document


def encode(graph: fx.GraphModule) -> bytes:
    """The graph as JSON bytes, debug handles and source lines included. Raises :class:`GraphError`."""
    return json.dumps(_document(graph, debug=True), separators=(",", ":")).encode()


def fingerprint(graph: fx.GraphModule) -> str:
    """A hash that is equal for graphs that compute the same thing from the same specs in the same way."""
    text = json.dumps(_document(graph, debug=False), separators=(",", ":"), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def resolve_op(name: str) -> torch._ops.OpOverload:
    """The ``OpOverload`` of a name like ``aten.add.Tensor``. Raises :class:`GraphError` if torch has none."""
    for op in CONTROL_FLOW:
        if str(op) == name:
            return op
    found: Any = torch.ops
    parts = name.split(".")
    for part in parts if len(parts) == 3 else ("",):
        found = getattr(found, part, None) if part.isidentifier() else None
    if not isinstance(found, torch._ops.OpOverload):
        raise GraphError(f"this torch has no operator {name!r}")
    return found


def decode(data: bytes | memoryview) -> fx.GraphModule:
    """The graph that :func:`encode` wrote, without ``meta["val"]`` on calls. Raises :class:`GraphError`.

    Before a graph from a file runs, :func:`check_calls` must have seen it.
    """
    try:
        return _decoded(json.loads(bytes(data)))
    except GraphError:
        raise
    except (KeyError, ValueError, TypeError, IndexError, AttributeError, RuntimeError) as error:
        raise GraphError(f"not an encoded graph: {type(error).__name__}: {error}") from error


class _Numbered(list[fx.Node]):
    """The nodes so far, by number: nothing else, such as -1 or True, names one."""

    def __getitem__(self, number: Any) -> Any:
        if type(number) is not int or number < 0:
            raise ValueError(f"{str(number)[:80]!r} is not the number of a value")
        return super().__getitem__(number)


def _is_node(value: object) -> bool:
    return isinstance(value, fx.Node)


def _is_plain(value: Any) -> bool:
    """Whether an argument of control flow is a value or a list of them."""
    return isinstance(value, fx.Node) or (isinstance(value, (list, tuple)) and all(map(_is_node, value)))


def check_calls(graph: fx.GraphModule) -> None:
    """Raise :class:`GraphError` where a decoded graph gives a call what its target does not take."""
    for node in graph.graph.find_nodes(op="get_attr"):
        inner = inner_graph(graph, node)
        if inner is not None:
            check_calls(inner)
    for node in graph.graph.nodes:
        if node.op != "call_function":
            continue
        target, args = node.target, node.args
        if target is _getitem:
            fits = len(args) == 2 and not node.kwargs and _is_node(args[0]) and type(args[1]) is int and args[1] >= 0
        elif target in CONTROL_FLOW:
            fits = all(map(_is_plain, (*args, *node.kwargs.values())))
        else:
            check_arguments(target, args, node.kwargs, _is_node)
            continue
        if not fits:
            raise GraphError(f"{getattr(target, '__name__', target)} is given arguments that it does not take")


def _decoded(document: Any) -> fx.GraphModule:
    """The graph of a document; raises whatever bad input causes."""
    root = torch.nn.Module()
    graph = fx.Graph()
    nodes = _Numbered()
    for position, (shape, dtype, strides) in enumerate(document["inputs"]):
        node = graph.placeholder(f"arg{position}")
        node.meta["spec"] = TensorSpec(tuple(shape), _torch_constant(dtype), tuple(strides))
        if position in document.get("donated", ()):
            node.meta["donated"] = True
        nodes.append(node)
    for name, *call in document["calls"]:
        if name == "graph":
            held = f"graph_{len(nodes)}"
            setattr(root, held, _decoded(call[0]))
            nodes.append(graph.get_attr(held))
            continue
        args, kwargs, handle, source = call
        target = _getitem if name == "getitem" else resolve_op(name)
        decoded = {_keyword(key): decode_arg(value, nodes) for key, value in kwargs.items()}
        node = graph.call_function(target, tuple(decode_arg(args, nodes)), decoded)
        node.meta.update(debug_handle=handle, source=source)
        nodes.append(node)
    outputs = decode_arg(document["outputs"], nodes)
    if not isinstance(outputs, list) or not all(map(_is_node, outputs)):  # pyright: ignore[reportUnknownArgumentType]
        raise GraphError("its outputs are not a list of values")
    graph.output(tuple(outputs))  # pyright: ignore[reportUnknownArgumentType]
    return graph_module(graph, root)
