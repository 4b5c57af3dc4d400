"""From a graph in normal form to OpenVINO's opset 13.

Who translates an operator: a rule of this package where there is one (:data:`.writer.RULES`), else OpenVINO's own
PyTorch front end, for the operators that :mod:`.front_end` lists; what neither knows is not supported.
"""

from __future__ import annotations

import operator
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy
import torch
from torch import fx

from torchport.backend.host import register_attention_at_once
from torchport.backend.interface import Support
from torchport.backend.sizes.guards import NotSymbolic
from torchport.core.errors import CompileError

from . import (  # noqa: F401 - their rules
    convolution_gradients,
    elementwise,
    factories,
    images,
    indices,
    losses,
    matrices,
    reductions,
    scans,
    scatters,
    shapes,
    special,
)
from .decomposed import decompositions
from .front_end import FRONT_END, converted, why_not
from .left import why_left
from .modules import openvino_module
from .sizes import is_symbolic, known
from .writer import CHECKS, COMPUTED, KINDS, MOVED, RULES, TAKES, WORDS, Takes, Writer, held_shape, val

__all__ = ["decompositions", "register_attention_at_once", "supports", "to_ir", "to_symbolic_ir"]

_getitem: Any = operator.getitem

_TYPES: Final = {
    "float32": "f32", "float16": "f16", "bfloat16": "bf16", "bool": "boolean", "int32": "i32", "uint8": "u8",
    "int8": "i8", "int16": "i16",
}  # fmt: skip


def _refused(node: fx.Node, takes: Takes) -> str:
    """The dtype that an operator does not take here, in words, or nothing."""
    values = node.meta["val"]
    for at, value in enumerate(values if isinstance(values, (list, tuple)) else [values]):
        if value is None or value.dtype in COMPUTED or (takes.moves and value.dtype in MOVED):
            continue
        if value.dtype not in (torch.int64, torch.int32) or at not in takes.gives:
            return str(value.dtype)
    for position, arg in enumerate((*node.args, *node.kwargs.values())):
        for leaf in arg if isinstance(arg, (list, tuple)) else [arg]:
            if not isinstance(leaf, fx.Node):
                continue
            dtype = val(leaf).dtype
            if dtype in COMPUTED or (takes.moves and dtype in MOVED) or (takes.numbers and dtype is torch.int64):
                continue
            if dtype not in (torch.int64, torch.int32) or position not in takes.reads:
                return str(dtype)
    return ""


def _results(node: fx.Node) -> list[torch.Tensor]:
    values: Any = node.meta["val"]
    return [value for value in values if value is not None] if isinstance(values, (list, tuple)) else [values]


def _is_nothing(node: fx.Node) -> bool:
    """Whether all that an operator gives is without elements: constants then, whatever the operator is."""
    held = all(val(source).dtype in MOVED for source in node.all_input_nodes)
    return held and all(value.numel() == 0 and value.dtype in KINDS for value in _results(node))


def _empty(node: fx.Node) -> bool:
    """Whether an argument or the result is without elements. One of several results may be."""
    values = node.meta["val"]
    results = [] if isinstance(values, (list, tuple)) else [values]
    return any(0 in value.shape for value in (*results, *(val(source) for source in node.all_input_nodes)))


def supports(node: fx.Node) -> Support:
    """Whether :func:`to_ir` translates a node."""
    op = node.target
    if op is _getitem:
        return Support.yes()
    if op not in RULES and op not in FRONT_END:
        return Support.no(why_left(op))
    if _is_nothing(node):
        return Support.yes()
    takes = TAKES[op] if op in RULES else FRONT_END[op]
    refused = _refused(node, takes)
    if refused:
        return Support.no(f"OpenVINO computes {refused} in fewer bits")
    if not takes.empty and _empty(node):
        return Support.no("a tensor is empty")
    reason = CHECKS[op](node) if op in CHECKS else ""
    if not reason and op not in RULES:
        reason = why_not(node)
    return Support.no(f"there is no translation {reason}") if reason else Support.yes()


def to_ir(graph: fx.GraphModule) -> tuple[bytes, bytes]:
    """The graph as OpenVINO IR: XML and weights. Raises :class:`CompileError`."""
    return _written(graph.graph, _translated)


def to_symbolic_ir(graph: fx.GraphModule) -> tuple[bytes, bytes]:
    """The same of a graph whose sizes are symbols, for all of them. Raises :class:`.NotSymbolic`."""
    return _written(_with_sizes(graph.graph), _translated_for_sizes)


def _with_sizes(graph: fx.Graph) -> fx.Graph:
    """The graph's operators on tensors: where one is given a size that was computed, the size itself stands."""
    made = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}

    def at(node: fx.Node) -> Any:
        return copies[node] if node in copies else node.meta["val"]

    for node in graph.nodes:
        computes = node.op == "call_function"
        if not computes and node.op not in ("placeholder", "output"):
            raise NotSymbolic(f"the graph holds {node.op}")
        if computes and not _is_of_tensors(node.meta.get("val")):
            continue  # a size, or a check of one
        copy = copies[node] = made.create_node(node.op, node.target, name=node.name)
        copy.args, copy.kwargs = fx.map_arg(node.args, at), fx.map_arg(node.kwargs, at)  # type: ignore[assignment]
        copy.meta.update(node.meta)
    return made


def _is_of_tensors(value: Any) -> bool:
    """Of several results some may be nothing."""
    return any(isinstance(one, torch.Tensor) for one in (value if isinstance(value, (list, tuple)) else [value]))


def _translated_for_sizes(w: Writer, node: fx.Node) -> Any:
    """A node whose sizes may be symbols: none of them may be taken for a number."""
    try:
        allowed = supports(node)
        made = _translated(w, node) if allowed else None
        why = w.sizes.fixed() or allowed.reason
    except NotSymbolic as error:
        why, made = str(error), None
    except Exception as error:  # of OpenVINO's, or of a rule that takes a shape for numbers
        why, made = f"{type(error).__name__}: {str(error).strip().splitlines()[-1] if str(error).strip() else ''}", None
    if why:
        raise NotSymbolic(f"{node.target}: {why}")
    return made


def _dimensions(value: torch.Tensor) -> Any:
    """A value's shape as a model's input has it: any size from the smallest on, where it is symbolic."""
    ov: Any = openvino_module("openvino")
    return ov.PartialShape([-1 if is_symbolic(size) else known(size) for size in held_shape(value)])


def _written(graph: fx.Graph, translated: Callable[[Writer, fx.Node], Any]) -> tuple[bytes, bytes]:
    ov: Any = openvino_module("openvino")
    w = Writer()
    parameters: list[Any] = []
    results: list[Any] = []
    for node in graph.nodes:
        if node.op == "placeholder":
            value = val(node)
            kind = "i32" if value.dtype in WORDS else _TYPES[str(value.dtype).removeprefix("torch.")]
            parameters.append(w.ops.parameter(_dimensions(value), getattr(ov.Type, kind), name=node.name))
            w.values[node] = parameters[-1].output(0)
            w.sizes.note(value, w.values[node])
        elif node.op == "call_function":
            w.values[node] = translated(w, node)
        else:
            results = [w.ops.result(w.values[value]) for value in node.args[0]]
    model = ov.Model(results, parameters, "torchport")
    with tempfile.TemporaryDirectory(prefix="torchport-openvino-") as folder:
        path = Path(folder) / "model.xml"
        ov.serialize(model, str(path), str(path.with_suffix(".bin")))
        return path.read_bytes(), path.with_suffix(".bin").read_bytes()


def _translated(w: Writer, node: fx.Node) -> Any:
    """The OpenVINO output of a node, or a list of them."""
    op: Any = node.target
    if op is _getitem:
        source: Any = node.args[0]
        return w.values[source][node.args[1]]
    if _is_nothing(node):
        made: Any = [w.filled(one.shape, numpy.array(0, KINDS[one.dtype])) for one in _results(node)]
        made = made if isinstance(node.meta["val"], (list, tuple)) else made[0]
    elif op in RULES:
        made = RULES[op](w, node)
    elif op in FRONT_END:
        made = converted(w, node)
    else:
        raise CompileError("there is no translation to OpenVINO", op=str(op))
    return made if isinstance(made, list) else made.output(0) if hasattr(made, "output") else made
