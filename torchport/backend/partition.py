"""Split a graph between backends, in order of preference; what none takes stays in the outer graph as it is.

A *group* is a set of operators that one backend compiles as one graph. Groups are as large as they can be: no two of
one backend could be joined without a cycle. There is never a cycle, by construction: groups begin as layers in which
every edge between two layers goes up, and are joined only where no path leads out of the two and back.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import fx

from ..core.errors import UnsupportedOp
from .builder import REFUSAL, REFUSED_OP, GraphBuilder, capture_of
from .control_flow import inner_graph
from .graph_modules import graph_module
from .grouping import HOST, group
from .interface import Backend
from .normal_form import is_view, source_of
from .segments import Group, segments

__all__ = [
    "Delegate",
    "Leftover",
    "Partitioned",
    "extracted",
    "inputs_of",
    "is_element",
    "needed_for",
    "partition",
    "shows_all",
]

_getitem: Any = operator.getitem


@dataclass(slots=True)
class Delegate:
    """One group: ``module`` is its graph in normal form, called by the outer graph's node ``name``."""

    name: str
    backend: Any
    module: fx.GraphModule


@dataclass(frozen=True, slots=True)
class Leftover:
    """An operator that stays in the outer graph, and why."""

    node: fx.Node
    reason: str

    @property
    def source(self) -> str | None:
        """The user's line."""
        return source_of(self.node)


@dataclass(slots=True)
class Partitioned:
    """The outer graph, whose ``call_module`` nodes are the delegates, and the operators that are left in it.

    Each ``call_module`` node gives a tuple of tensors. The outer graph's inputs and outputs are the original's.
    """

    module: fx.GraphModule
    delegates: list[Delegate] = field(default_factory=list[Delegate])
    leftovers: list[Leftover] = field(default_factory=list[Leftover])

    def report(self) -> str:
        """One line per reason: how many operators are left for it, which, and where the first comes from."""
        rows: dict[tuple[str, str], list[Leftover]] = {}
        for left in self.leftovers:
            rows.setdefault((str(left.node.target), left.reason), []).append(left)
        lines = [
            f"{len(found):>5} × {op}: {reason}" + (f" (first at {found[0].source})" if found[0].source else "")
            for (op, reason), found in sorted(rows.items(), key=lambda row: -len(row[1]))
        ]
        return "\n".join(lines) or "every operator is taken"

    def require_all(self) -> None:
        """Raise :class:`UnsupportedOp` if an operator is left over, listing each with its reason."""
        if self.leftovers:
            first = self.leftovers[0]
            raise UnsupportedOp(
                f"{len(self.leftovers)} operators are taken by no backend:\n{self.report()}",
                op=str(first.node.target),
                source=first.source,
            )


# -- building ------------------------------------------------------------------------------------------------------
def extracted(
    original: fx.GraphModule, nodes: Sequence[fx.Node], wanted: Sequence[fx.Node]
) -> tuple[fx.GraphModule, list[fx.Node]]:
    """A graph of its own with what these nodes need to bring the ``wanted`` ones, and the nodes that are its inputs."""
    needed = needed_for(nodes, wanted)
    builder = GraphBuilder()
    inside: dict[fx.Node, fx.Node] = {}
    held = torch.nn.Module()
    inputs = inputs_of(needed)
    graphs = {node: graph for node in inputs if (graph := inner_graph(original, node)) is not None}
    inputs = [node for node in inputs if node not in graphs]
    for node in inputs:
        inside[node] = builder.graph.placeholder(node.name)
        inside[node].meta.update(node.meta)
    for node, graph in graphs.items():
        setattr(held, str(node.target), graph)
        inside[node] = builder.graph.get_attr(str(node.target))
    for node in needed:
        inside[node] = builder.graph.node_copy(node, lambda n: inside[n])
    last = needed[-1].meta
    builder.debug_handle, builder.source = last.get("debug_handle", 0), last.get("source")
    results = builder.separate([inside[node] for node in wanted])
    builder.graph.output(tuple(results)).meta["val"] = tuple(builder.val(node) for node in results)
    return graph_module(builder.graph, held), inputs


def inputs_of(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """What nodes use that is not among them, each once, in the order of its first use."""
    among = set(nodes)
    return list(dict.fromkeys(used for node in nodes for used in node.all_input_nodes if used not in among))


class _Splitter:
    """Writes the outer graph and one module per group. The original graph is not changed."""

    def __init__(self, original: fx.GraphModule, views_outside: bool) -> None:
        self.original = original
        self.views_outside = views_outside
        self.outer = fx.Graph()
        self.values: dict[fx.Node, fx.Node] = {}
        self.root = torch.nn.Module()
        self.delegates: list[Delegate] = []
        self.leftovers: list[Leftover] = []

    def copy(self, node: fx.Node) -> fx.Node:
        """A node of the original in the outer graph."""
        if node.op == "get_attr":
            setattr(self.root, str(node.target), getattr(self.original, str(node.target)))
        made = self.outer.node_copy(node, lambda n: self.values[n])
        if node.op == "placeholder":
            made.name = node.name
        self.values[node] = made
        return made

    def _outputs(self, members: set[fx.Node], nodes: Sequence[fx.Node]) -> list[fx.Node]:
        """Tensors of the group that others use."""
        return [
            node
            for node in nodes
            if isinstance(node.meta.get("val"), torch.Tensor) and any(user not in members for user in node.users)
        ]

    def _views(self, node: fx.Node, members: set[fx.Node]) -> list[fx.Node]:
        """The view operators of the group between a value and where its memory comes from, first to last."""
        chain: list[fx.Node] = []
        while node in members and (
            is_view(node.target) or (node.target is _getitem and is_view(node.args[0].target))  # type: ignore[union-attr]
        ):
            chain.append(node)
            node = node.args[0]  # type: ignore[assignment]
        return chain[::-1]

    def delegate(self, backend: Any, nodes: Sequence[fx.Node]) -> None:
        """Add one group."""
        members = set(nodes)
        wanted = self._outputs(members, nodes)
        outside: dict[fx.Node, None] = {}
        same: dict[fx.Node, Any] = {}
        if self.views_outside:
            # A view is not computed: the group gives what it is a view of, and the view is taken of that.
            roots: dict[fx.Node, None] = {}
            for node in wanted:
                chain = self._views(node, members)
                root: Any = chain[0].args[0] if chain else node
                if chain and root not in wanted and root not in roots and shows_all(root, chain):
                    same[node] = root  # nobody else gets the value: two results are never one object
                else:
                    outside.update(dict.fromkeys(chain))
                if root in members:
                    roots[root] = None
            wanted = list(roots)
        if wanted:
            self._call(backend, nodes, wanted)
        for node, root in same.items():
            self.values[node] = self.values[root]
        for node in outside:
            self.copy(node)

    def _call(self, backend: Any, nodes: Sequence[fx.Node], wanted: Sequence[fx.Node]) -> None:
        name = f"delegate_{len(self.delegates)}"
        module, inputs = extracted(self.original, nodes, wanted)
        self.delegates.append(Delegate(name, backend, module))
        self.root.add_module(name, module)
        call = self.outer.call_module(name, tuple(self.values[node] for node in inputs))
        results: Any = module.graph.output_node().args[0]
        last = next(node for node in reversed(module.graph.nodes) if node.op == "call_function")
        handle = last.meta.get("debug_handle", 0)
        call.meta.update(val=tuple(result.meta["val"] for result in results), debug_handle=handle)
        for position, node in enumerate(wanted):
            item = self.outer.call_function(_getitem, (call, position))
            item.meta.update(node.meta, val=results[position].meta["val"])
            self.values[node] = item

    def finish(self) -> Partitioned:
        """The result, once every group was added."""
        self.copy(self.original.graph.output_node())
        for node in self.outer.find_nodes(op="get_attr"):
            if not node.users and inner_graph(self.root, node) is not None:
                self.outer.erase_node(node)
        self.outer.lint()
        return Partitioned(graph_module(self.outer, self.root), self.delegates, self.leftovers)


_REARRANGING: Final = {
    torch.ops.aten.t.default,
    torch.ops.aten.transpose.int,
    torch.ops.aten.permute.default,
    torch.ops.aten.view.default,
    torch.ops.aten.unsqueeze.default,
    torch.ops.aten.squeeze.default,
    torch.ops.aten.squeeze.dim,
    torch.ops.aten.squeeze.dims,
    torch.ops.aten.expand.default,
}


def shows_all(root: fx.Node, chain: Sequence[fx.Node]) -> bool:
    """Whether views of a value end where they began, as two transpositions do: same shape, same strides, all of it."""
    first, last = root.meta.get("val"), chain[-1].meta["val"]
    return (
        isinstance(first, torch.Tensor)
        and all(node.target in _REARRANGING for node in chain)
        and (first.shape, first.stride(), first.dtype) == (last.shape, last.stride(), last.dtype)
        and 0 not in first.stride()
    )


def needed_for(nodes: Sequence[fx.Node], wanted: Sequence[fx.Node]) -> list[fx.Node]:
    """The nodes of a group that its results depend on, in order."""
    found = set(wanted)
    for node in reversed(nodes):
        if node in found:
            found.update(node.all_input_nodes)
    return [node for node in nodes if node in found]


def partition(
    graph: fx.GraphModule,
    backends: Sequence[Backend] = (),
    *,
    tags: Mapping[fx.Node, Hashable] | None = None,
    kernel: Callable[[fx.Node], str | None] | None = None,
    views_outside: bool = False,
    host: Backend | None = None,
) -> Partitioned:
    """Split a graph that :func:`~torchport.backend.fx_normalise.normalise` made; ``graph`` is not changed.

    ``backends`` are asked in order what they support. With ``tags`` they are not asked: each tag is a group's (or,
    where one group would be a cycle, several groups') and becomes :attr:`Delegate.backend`. ``kernel(node)`` may
    say why an operator must run alone although a backend supports it. ``views_outside``: results that are views of
    other results or of inputs are taken in the outer graph, which copies nothing; else the group copies them. ``host``:
    who gets operators that no backend takes, in groups too (:mod:`.segments`), as far as a graph can hold them.
    """
    reasons: dict[fx.Node, str] = {}

    def colour(node: fx.Node) -> Hashable | None:
        if tags is not None:
            if node not in tags:
                reasons[node] = node.meta.get(REFUSAL) or "no partitioner took it"
            return tags.get(node)
        why = node.meta.get(REFUSAL) or (kernel(node) if kernel is not None else None)
        if why is None:
            refused: list[str] = []
            for position, backend in enumerate(backends):
                support = capture_of(backend).supports(node)
                if support:
                    return position
                refused.append(f"{backend.name}: {support.reason or 'not supported'}")
            why = "; ".join(refused) or "there is no backend to ask"
        reasons[node] = why
        return None

    groups = None if host is None else _with_host(graph, colour, kernel, reasons)
    graph, groups = groups or (graph, group(graph.graph, colour))
    splitter = _Splitter(graph, views_outside)
    for node in graph.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            splitter.copy(node)
    for taker, nodes in groups:
        if taker is None:
            copies = [splitter.copy(node) for node in nodes]
            splitter.leftovers.append(Leftover(copies[0], reasons[nodes[0]]))
        elif taker is HOST:
            splitter.delegate(host, nodes)
        else:
            splitter.delegate(backends[taker] if tags is None else taker, nodes)  # type: ignore[index]
    return splitter.finish()


def _with_host(
    graph: fx.GraphModule,
    colour: Callable[[fx.Node], Hashable | None],
    kernel: Callable[[fx.Node], str | None] | None,
    reasons: dict[fx.Node, str],
) -> tuple[fx.GraphModule, list[Group]] | None:
    """The graph and its groups where the interpreter gets what no backend takes; ``None`` if there is nothing for it.

    ``reasons``, which ``colour`` writes, are those of the graph that is returned. Elements of inputs
    (:func:`is_element`) stay in the outer graph.
    """
    colours: dict[fx.Node, Hashable | None] = {}
    for node in graph.graph.nodes:
        if node.op == "call_function" and node.target is not _getitem:
            taker = colour(node)
            alone = (kernel is not None and kernel(node) is not None) or is_element(node)
            colours[node] = HOST if taker is None and not alone and _can_be_interpreted(node) else taker
    if HOST not in colours.values():
        return None
    made, groups, copies = segments(graph, colours)
    for node, reason in list(reasons.items()):
        copies[node].meta.setdefault(REFUSAL, reason)
        reasons[copies[node]] = reason
    return made, groups


def is_element(node: fx.Node) -> bool:
    """Whether a node is a number from an input's pack of them, which the backend cannot take out itself."""
    source = node.args[0] if node.args else None
    mine = node.meta.get(REFUSED_OP, node) is None and node.target is torch.ops.aten.select.int
    return mine and isinstance(source, fx.Node) and source.op == "placeholder"


def _can_be_interpreted(node: fx.Node) -> bool:
    """Whether a node is an operator on tensors of known shapes."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.meta.get("at_once"):
        return False
    value = node.meta.get("val")
    values = [one for one in (value if isinstance(value, (list, tuple)) else [value]) if one is not None]
    return all(isinstance(one, torch.Tensor) and all(n.__class__ is int for n in one.shape) for one in values)
