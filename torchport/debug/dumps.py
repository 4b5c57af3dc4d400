"""Pending graphs, computations and the trie as text, FX, DOT or the backend's own code."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch
from torch import fx
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from ..backend.optional import optional_of
from ..core.errors import ConfigError, UnsupportedOp
from ..core.specs import TensorSpec
from ..frontend.device import module
from ..run.device_runtime import runtimes
from ..run.flush import by_value_id
from ..run.plans import ExecutionPlan
from ..trace.graph import build_graph
from ..trace.handle import LazyTensor
from ..trace.threads import threads
from ..trace.trace import Trace, lock
from ..trace.wrapping import unwrap

__all__ = ["FORMATS", "dump", "dump_trie"]

FORMATS: Final = ("text", "fx", "dot", "backend")


def dump(value: Any = None, format: str = "text") -> str:
    """What is pending, or a graph, as text.

    ``value``: a tensor, or a nest of them, whose pending graph is wanted; an ``fx.GraphModule``; nothing for everything
    the calling thread has pending. ``format``: ``text`` (one line per operator, with specs and the user's lines),
    ``fx`` (Python), ``dot`` (Graphviz) or ``backend`` (the backend's code; the graph is compiled for it). With tiers
    on, the text begins with the tier in which the values would be computed. Nothing is computed. Raises
    :class:`ConfigError` for another format, :class:`UnsupportedOp` for tensors of other devices.
    """
    if format not in FORMATS:
        raise ConfigError(f"there is no format {format!r}; there are {', '.join(FORMATS)}")
    if isinstance(value, fx.GraphModule):
        return _render(value, format, None)
    parts = [_with_tier(_render(graph, format, runtime), format, tier) for runtime, graph, tier in _pending(value)]
    return "\n".join(parts) if parts else "nothing is pending"


def _with_tier(text: str, format: str, tier: str) -> str:
    return f"# tier: {tier}\n{text}" if tier and format == "text" else text


def _tier(trace: Trace, value_ids: tuple[int, ...]) -> str:
    """How these pending values would be computed, where they are not compiled at once."""
    if not trace.runtime.interprets:
        return ""
    plan = (trace.cursor.plans or {}).get(value_ids)
    return plan.tier if isinstance(plan, ExecutionPlan) else "interpreted, not seen before"


def _pending(value: Any) -> Iterable[tuple[Any, fx.GraphModule, str]]:
    """Device by device, the graph of the pending values among these, or of all of the thread's, and its tier."""
    module.init()
    wanted: list[Any] | None = None
    if value is not None:
        wanted = [unwrap(leaf) for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
        for handle in wanted:
            if not isinstance(handle, LazyTensor):
                raise UnsupportedOp(f"dump() takes tensors on port, got one on {handle.device}")
    with lock:
        for trace in threads.mine():
            handles = trace.live() if trace.cursor.parent is not None else []
            if wanted is not None:
                handles = [handle for handle in handles if any(handle is other for other in wanted)]
            value_ids = tuple(by_value_id(handles))
            if value_ids:
                specs = [leaf.spec or TensorSpec.of(leaf) for leaf in trace.leaves]
                built = build_graph(trace.cursor.path(), value_ids, specs, trace.runtime.capture)
                yield trace.runtime, built.module, _tier(trace, value_ids)


def _render(module: fx.GraphModule, format: str, runtime: Any) -> str:
    if format == "fx":
        return module.print_readable(print_output=False)
    if format == "dot":
        return _dot(module)
    if format == "text":
        return _text(module)
    if runtime is None:
        runtime = runtimes.get(0)
    processed = runtime.backend.preprocess(module, runtime.specs)
    shown = optional_of(runtime.backend).text
    return f"<{len(processed.data)} bytes>" if shown is None else shown.text(processed)


# -- text ----------------------------------------------------------------------------------------------------------
def _spec(node: fx.Node) -> str:
    value = node.meta.get("val")
    values: Sequence[Any] = value if isinstance(value, (list, tuple)) else [value]
    return ", ".join(str(TensorSpec.of(one)) if isinstance(one, torch.Tensor) else str(one) for one in values)


def _call(node: fx.Node, name: Callable[[fx.Node], str]) -> str:
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: _Name(name(n)))
    if node.target is operator.getitem:
        return f"{args[0]}[{args[1]}]"
    given = [repr(arg) for arg in args] + [f"{key}={value!r}" for key, value in kwargs.items()]
    return f"{node.target}({', '.join(given)})"


class _Name(str):
    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _text(module: fx.GraphModule) -> str:
    """One line per node: ``%name = operator(arguments) : spec  # the user's line``."""
    lines: list[str] = []
    for node in module.graph.nodes:
        source = node.meta.get("source")
        if node.op == "placeholder":
            lines.append(f"%{node.name} : {_spec(node)}")
        elif node.op == "output":
            lines.append("return " + ", ".join(f"%{result.name}" for result in node.all_input_nodes))
        else:
            called = _call(node, lambda n: f"%{n.name}")
            lines.append(f"%{node.name} = {called} : {_spec(node)}" + (f"  # {source}" if source else ""))
    return "\n".join(lines)


# -- DOT -----------------------------------------------------------------------------------------------------------
def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def _dot(module: fx.GraphModule) -> str:
    """Graphviz: a box per operator, an ellipse per input, an edge per use."""
    lines = ["digraph G {", "  node [shape=box];"]
    for node in module.graph.nodes:
        shape = ", shape=ellipse" if node.op in ("placeholder", "output") else ""
        title = str(node.target) if node.op == "call_function" else node.name
        label = "\n".join(part for part in (title, _spec(node), node.meta.get("source")) if part)
        lines.append(f"  {node.name} [label={_quoted(label)}{shape}];")
        lines += [f"  {used.name} -> {node.name};" for used in node.all_input_nodes]
    return "\n".join([*lines, "}"])


def dump_trie(device: Any = None, limit: int = 2_000) -> str:
    """The calling thread's trie on a device as DOT: every op it has seen, by place; nodes with plans have two rings.

    ``limit``: at most so many nodes.
    """
    module.init()
    index = (torch.device(device).index or 0) if device is not None else 0
    lines = ["digraph trie {", "  node [shape=box];", '  n0 [label="start", shape=ellipse];']
    queue = [(threads.of(index).root, 0)]
    count = 0
    while queue:
        node, at = queue.pop()
        for child in dict.values(node.children):
            count += 1
            if count > limit:
                break
            rings = ", peripheries=2" if child.plans else ""
            tiers = [plan.tier for plan in (child.plans or {}).values() if isinstance(plan, ExecutionPlan)]
            label = "\n".join(part for part in (str(child.op), child.source, *dict.fromkeys(tiers)) if part)
            lines.append(f"  n{count} [label={_quoted(label)}{rings}];")
            lines.append(f"  n{at} -> n{count};")
            queue.append((child, count))
    return "\n".join([*lines, "}"])
