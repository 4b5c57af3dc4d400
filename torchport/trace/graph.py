"""Turns a path of the trie into an FX graph in normal form."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Final

import torch
from torch import fx
from torch.utils._pytree import tree_map

from ..backend.builder import OF_MEMORY, Capture, GraphBuilder, Refusal, Refused, refusals
from ..backend.graph_modules import graph_module
from ..backend.random import RANDOM
from ..core import metrics
from ..core.errors import CompileError, GraphError
from ..core.specs import TensorSpec, is_dense
from .joined_writes import JoinedWrites, join, joined_writes
from .trie import HostScalar, Leaf, Node, RandomKey, ScalarInput, Value, is_template

__all__ = [
    "Sources",
    "TraceGraph",
    "build_graph",
    "check_taken",
    "inputs_of",
    "needed",
    "templates_of",
    "write_graph",
]

aten = torch.ops.aten
_WIDE: Final = {torch.float64, torch.complex128}
_TEMPLATES: Final = frozenset({Value, Leaf, ScalarInput, RandomKey, HostScalar})


@dataclass(slots=True, kw_only=True)
class Sources:
    """Where a graph's inputs come from, in placeholder order.

    ``leaves`` are positions in the trace's leaves; then come, if not empty, the float32 and float64 scalar inputs and
    the random keys, each packed into one 1-D tensor, as positions in the trace's lists of them.
    """

    leaves: tuple[int, ...]
    singles: tuple[int, ...]
    doubles: tuple[int, ...]
    random_keys: tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class TraceGraph(Sources):
    """A graph, where its inputs come from, and the operators in it that the backend does not take."""

    module: fx.GraphModule
    refusals: tuple[Refusal, ...] = ()


def _templates(value: Any, found: list[Any]) -> None:
    """Note the templates among a node's arguments, in order. Arguments nest in lists and tuples only."""
    kind = value.__class__
    if kind is list or kind is tuple:
        for one in value:
            _templates(one, found)
    elif kind in _TEMPLATES:
        found.append(value)


def templates_of(node: Node) -> list[Any]:
    """What of a node's arguments stands for something that the trace holds, in order."""
    found: list[Any] = []
    for value in node.args:
        _templates(value, found)
    for value in node.kwargs.values():
        _templates(value, found)
    return found


def inputs_of(node: Node) -> list[tuple[str, int]]:
    """What a node uses, each once: ``("leaf", position)`` or ``("value", value id)``."""
    found: list[tuple[str, int]] = []
    for template in templates_of(node):
        if template.__class__ is Leaf:
            found.append(("leaf", template.position))
        elif template.__class__ is Value:
            found.append(("value", template.value_id))
    return list(dict.fromkeys(found))


def needed(path: Sequence[Node], outputs: Iterable[int]) -> list[Node]:
    """The nodes of a path that the values with these ids depend on, in its order."""
    wanted = set(outputs)
    kept: list[Node] = []
    for node in reversed(path):
        first, end = node.first_id, node.end_id
        if first in wanted if end - first == 1 else any(value_id in wanted for value_id in range(first, end)):
            kept.append(node)
            wanted.update([template.value_id for template in templates_of(node) if template.__class__ is Value])
    kept.reverse()
    return kept


class _TraceBuilder:
    """Builds one graph for the given outputs of a trace path."""

    def __init__(self, path: Sequence[Node], leaf_specs: Sequence[TensorSpec], builder: GraphBuilder) -> None:
        self.path = path
        self.leaf_specs = leaf_specs
        self.b = builder
        self.values: dict[int, Any] = {}
        self.leaves: dict[int, fx.Node] = {}
        self.packs: dict[str, tuple[fx.Node, dict[int, int]]] = {}
        self.specs = {
            node.first_id + offset: spec for node in path for offset, spec in enumerate(node.specs) if spec is not None
        }

    # -- which inputs are needed -------------------------------------------------------------------------
    def declare_inputs(self, nodes: Sequence[Node], donated: Set[int]) -> TraceGraph:
        """Placeholders for what the nodes use, and the record of where each comes from."""
        leaves: set[int] = set()
        singles: set[int] = set()
        doubles: set[int] = set()
        keys: set[int] = set()
        for node in nodes:
            wide = self._is_wide(node)
            for template in templates_of(node):
                if isinstance(template, HostScalar):
                    template = template.value
                if isinstance(template, Leaf):
                    leaves.add(template.position)
                elif isinstance(template, ScalarInput):
                    (doubles if wide else singles).add(template.position)
                elif isinstance(template, RandomKey):
                    keys.add(template.position)
        for position in sorted(leaves):
            self.leaves[position] = self.b.placeholder(f"arg{position}", self.leaf_specs[position])
            if position in donated:
                self.leaves[position].meta["donated"] = True
        kinds = (("singles", singles, torch.float32), ("doubles", doubles, torch.float64), ("keys", keys, torch.int64))
        for name, positions, dtype in kinds:
            if positions:
                spec = TensorSpec((len(positions),), dtype, (1,))
                places = {position: place for place, position in enumerate(sorted(positions))}
                self.packs[name] = self.b.placeholder(name, spec), places
        unused = graph_module(fx.Graph())
        ordered = {"leaves": leaves, "singles": singles, "doubles": doubles, "random_keys": keys}
        return TraceGraph(
            module=unused, refusals=(), **{name: tuple(sorted(positions)) for name, positions in ordered.items()}
        )

    def _is_wide(self, node: Node) -> bool:
        """Whether the node computes in double precision, so that its scalar inputs must come as float64."""
        if any(spec is not None and spec.dtype in _WIDE for spec in node.specs):
            return True
        return any(isinstance(t, HostScalar) and t.dtype in _WIDE for t in templates_of(node))

    # -- operators -------------------------------------------------------------------------------------------
    def emit_all(self, nodes: Sequence[Node], outputs: Sequence[int]) -> None:
        """Add traced ops to the graph, for the given values; writes in a row as one."""
        used = Counter(one.value_id for node in nodes for one in templates_of(node) if isinstance(one, Value))
        joined = joined_writes(nodes, outputs, self._spec, used)
        put_off = {node for writes in joined.values() for node in writes.nodes[:-1]}
        written = {node: given for writes in joined.values() for node, given in writes.reads}
        for node in nodes:
            if node in joined:
                self._emit_joined(joined[node])
            elif node in written:
                self.values[node.first_id] = self._argument(written[node], False)
            elif node not in put_off:
                self.emit(node)

    def _spec(self, template: Any) -> TensorSpec | None:
        if isinstance(template, Leaf):
            return self.leaf_specs[template.position]
        return self.specs.get(template.value_id) if isinstance(template, Value) else None

    def _emit_joined(self, writes: JoinedWrites) -> None:
        last = writes.nodes[-1]
        self.b.debug_handle, self.b.source = last.depth, last.source
        try:
            made = self.b.attempt(self.b.capture, lambda: join(self.b, writes, lambda one: self._argument(one, False)))
        except Refused:
            for node in writes.nodes:
                self.emit(node)
            return
        (spec,) = last.specs
        assert spec is not None
        self.values[last.first_id] = self._checked(last, made, spec)

    # -- one traced op ---------------------------------------------------------------------------------------
    def _packed(self, pack: str, position: int) -> fx.Node:
        node, places = self.packs[pack]
        return self.b.taken_out(node, places[position])

    def _argument(self, template: Any, wide: bool) -> Any:
        if isinstance(template, Leaf):
            return self.leaves[template.position]
        if isinstance(template, ScalarInput):
            return self._packed("doubles" if wide else "singles", template.position)
        if isinstance(template, RandomKey):
            return self._packed("keys", template.position)
        if isinstance(template, Value):
            return self.values[template.value_id]
        if isinstance(template, HostScalar):
            return self.b.cast(self._argument(template.value, wide), template.dtype)
        return template

    def emit(self, node: Node) -> None:
        """Add one traced op to the graph."""
        self.b.debug_handle, self.b.source = node.depth, node.source
        self.values.update(self.b.whole(node.op, lambda: self._results(node)))

    def _results(self, node: Node) -> dict[int, fx.Node]:
        """What a traced op is lowered to, by value id."""
        wide = self._is_wide(node)
        args, kwargs = tree_map(
            lambda t: self._argument(t, wide), (list(node.args), dict(node.kwargs)), is_leaf=is_template
        )
        first = node.args[0] if node.args and node.op in OF_MEMORY else None
        if isinstance(first, Value):
            spec = self.specs[first.value_id]
            if is_dense(spec.shape, spec.strides):
                args[0] = self.b.laid_out(args[0], spec.strides)
        result = self._lower(node, args, kwargs)
        made: dict[int, fx.Node] = {}
        for offset, spec in enumerate(node.specs):
            if spec is not None:
                one = result if node.container is None else self.b.item(result, offset)
                made[node.first_id + offset] = self._checked(node, one, spec)
        return made

    def _lower(self, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
        b, op = self.b, node.op
        if op in RANDOM:
            kwargs = {k: v for k, v in kwargs.items() if k not in {"device", "layout", "pin_memory", "generator"}}
            return RANDOM[op](b, kwargs.pop("random_key"), node.specs[0], *args, **kwargs)
        return b.lower(op, node.specs, args, kwargs)

    def _checked(self, node: Node, made: fx.Node, spec: TensorSpec) -> fx.Node:
        """The value with the dtype the trace promised. Raises :class:`GraphError` on another shape."""
        value = self.b.val(made)
        if tuple(value.shape) != spec.shape:
            raise GraphError(f"{node.op} was traced as {spec} but lowers to {TensorSpec.of(value)} ({node.source})")
        return self.b.cast(made, spec.dtype)

    # -- outputs ---------------------------------------------------------------------------------------------
    def outputs(self, value_ids: Sequence[int]) -> list[fx.Node]:
        """The output nodes; what would share memory with an input or another output is cloned."""
        return self.b.whole(None, lambda: self._separate(value_ids))

    def _separate(self, value_ids: Sequence[int]) -> list[fx.Node]:
        results: list[fx.Node] = []
        for value_id in value_ids:
            node = self.values[value_id]
            spec = self.specs.get(value_id)
            if spec is not None and self.b.val(node).stride() != spec.strides:
                # A later trace takes the value as a leaf, and goes by where the spec says that it lies in memory.
                if spec.is_contiguous and not self.b.val(node).is_contiguous():
                    node = self.b(aten.clone.default, node, memory_format=torch.contiguous_format)
                elif not spec.is_contiguous and is_dense(spec.shape, spec.strides):
                    node = self.b.laid_out(node, spec.strides)
            results.append(node)
        return self.b.separate(results)


def _emitted(
    path: Sequence[Node],
    outputs: Sequence[int],
    leaf_specs: Sequence[TensorSpec],
    builder: GraphBuilder,
    donated: Set[int],
) -> tuple[TraceGraph, list[fx.Node]]:
    """A builder's graph with everything but its output, and the nodes that are to be that."""
    trace_builder = _TraceBuilder(path, leaf_specs, builder)
    nodes = needed(path, outputs)
    made = trace_builder.declare_inputs(nodes, donated)
    trace_builder.emit_all(nodes, outputs)
    return made, trace_builder.outputs(outputs)


def check_taken(
    path: Sequence[Node], outputs: Sequence[int], leaf_specs: Sequence[TensorSpec], capture: Capture
) -> None:
    """Raise :class:`~torchport.backend.builder.Refused` if a path's graph would hold what the backend does not take."""
    _emitted(path, outputs, leaf_specs, GraphBuilder(capture, strict=True), frozenset())


def build_graph(
    path: Sequence[Node],
    outputs: Sequence[int],
    leaf_specs: Sequence[TensorSpec],
    capture: Capture,
    donated: Set[int] = frozenset(),
) -> TraceGraph:
    """The graph in normal form that computes the values with the ids ``outputs`` at the end of a trace path.

    What the backend takes in no form is marked (``meta[REFUSAL]``).
    ``donated``: leaves that are likely to be donated, whose placeholders get ``meta["donated"]``.
    Time and memory are linear in the path's length.
    """
    builder = GraphBuilder(capture)
    made, results = _emitted(path, outputs, leaf_specs, builder, donated)
    output = builder.graph.output(tuple(results))
    output.meta["val"] = tuple(builder.val(node) for node in results)
    builder.graph.eliminate_dead_code()
    made.module = graph_module(builder.graph)
    if not capture.takes_all:
        made.refusals = refusals(made.module)
    return made


def write_graph(
    path: Sequence[Node],
    outputs: Sequence[int],
    leaf_specs: Sequence[TensorSpec],
    capture: Capture,
    donated: Set[int] = frozenset(),
) -> TraceGraph:
    """:func:`build_graph` for compiling: timed, and what it raises is a :class:`CompileError` that says where."""
    start = perf_counter()
    try:
        made = build_graph(path, outputs, leaf_specs, capture, donated=donated)
    except Exception as error:
        raise CompileError(
            f"the trace could not be written as a graph: {type(error).__name__}: {error}",
            op=str(path[-1].op),
            source=path[-1].source,
        ) from error
    metrics.metrics.add_time("GraphTime", perf_counter() - start)
    return made
