"""From a path in the trie to an FX graph in normal form."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx
from torch.fx.node import map_arg
from torch.utils._pytree import tree_iter, tree_map

from ..backend.normal_form import alias_root
from ..core.errors import GraphError
from ..core.specs import TensorSpec
from .decompositions import DECOMPOSE
from .infer import fake_mode, fake_tensor, infer
from .lowering import LOWER, foreach_target, lower_foreach, lower_varying, view_form
from .random import RANDOM
from .trace import HostScalar, Leaf, Node, Number, RandomKey, Value, is_template

__all__ = ["GraphBuilder", "TraceGraph", "build_graph"]

aten = torch.ops.aten
_CPU: Final = torch.device("cpu")
_WIDE: Final = {torch.float64, torch.complex128}
_getitem: Any = operator.getitem


@dataclass(slots=True)
class TraceGraph:
    """A graph and where its inputs come from, in placeholder order.

    ``leaves`` are positions in the trace's leaves; then come, if not empty, the float32 and float64 numbers and the
    random keys, each packed into one 1-D tensor, as positions in the trace's numbers and keys.
    """

    module: fx.GraphModule
    leaves: tuple[int, ...]
    singles: tuple[int, ...]
    doubles: tuple[int, ...]
    keys: tuple[int, ...]


def _spec_of_node(node: fx.Node) -> Any:
    return TensorSpec.of(node.meta["val"])


class GraphBuilder:
    """Adds operators to an FX graph, inferring ``meta["val"]``, on behalf of one traced op at a time."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.debug_handle = 0
        self.source: str | None = None
        self.decompositions: Mapping[Any, Callable[..., Any]] = {}

    # -- what lowerings use ----------------------------------------------------------------------------------
    def __call__(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        return self.call(op, args, kwargs)

    @staticmethod
    def is_node(value: Any) -> bool:
        """Whether an argument is a node of the graph, rather than a Python number."""
        return isinstance(value, fx.Node)

    @staticmethod
    def val(node: fx.Node) -> torch.Tensor:
        """The fake tensor of a node that holds one tensor."""
        return node.meta["val"]

    def call(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A node that calls ``op``; goes through the backend's decompositions and through varying numbers' rewrites."""
        if _has_node_as_scalar(op, args, kwargs):
            lower = lower_varying(op)
            if lower is None:
                raise GraphError(f"{op} was given a number that varies, but has no form that takes one")
            return lower(self, *args, **kwargs)
        if op in self.decompositions:
            return self.inline(self.decompositions[op], args, kwargs)
        return self._add(op, args, kwargs)

    def cast(self, value: Any, dtype: torch.dtype) -> fx.Node:
        """A node of this dtype: a number becomes a 0-dim tensor."""
        if not self.is_node(value):
            return self(aten.full.default, [], value, dtype=dtype, device=_CPU)
        if self.val(value).dtype == dtype:
            return value
        return self(aten._to_copy.default, value, dtype=dtype)

    def times(self, factor: Any, value: Any) -> Any:
        """The product of two things of which ``value`` is a Python number."""
        return self(aten.mul.Tensor, factor, value) if self.is_node(factor) else factor * value

    def item(self, node: Any, position: int) -> Any:
        """One result of an op that returns several."""
        if isinstance(node, (list, tuple)):
            return node[position]
        value = node.meta["val"][position]
        if value is None:
            return None
        made = self.graph.call_function(_getitem, (node, position))
        return self._describe(made, value)

    def filled(self, spec: TensorSpec, value: Any) -> fx.Node:
        """A constant tensor with this spec's shape and, where they are those of a permuted dense tensor, strides."""
        order = sorted(range(len(spec.shape)), key=lambda d: (-spec.strides[d], d))
        shape = [spec.shape[d] for d in order]
        node = self(aten.full.default, shape, value, dtype=spec.dtype, device=_CPU)
        if order == list(range(len(order))):
            return node
        return self(aten.permute.default, node, [order.index(d) for d in range(len(order))])

    # -- adding nodes ----------------------------------------------------------------------------------------
    def placeholder(self, name: str, spec: TensorSpec) -> fx.Node:
        """An input."""
        node = self.graph.placeholder(name)
        node.meta["val"] = fake_tensor(spec)
        return node

    def _describe(self, node: fx.Node, value: Any) -> fx.Node:
        node.meta.update(val=value, debug_handle=self.debug_handle, source=self.source)
        return node

    def _add(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> fx.Node:
        try:
            value = self._run(op, args, kwargs)
        except (RuntimeError, ValueError):
            if op is not aten.view.default:
                raise
            # A rewrite gave the input other strides than the trace saw; a contiguous copy always has a view.
            contiguous = self._add(aten.clone.default, [args[0]], {"memory_format": torch.contiguous_format})
            return self._add(op, [contiguous, *args[1:]], kwargs)
        return self._describe(self.graph.call_function(op, tuple(args), dict(kwargs)), value)

    def _run(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The fake results of an operator, from the specs of its arguments."""
        spec_args, spec_kwargs = map_arg((tuple(args), dict(kwargs)), _spec_of_node)
        inferred = infer(op, spec_args, spec_kwargs)
        values = [None if spec is None else fake_tensor(spec) for spec in inferred.specs]
        return values[0] if inferred.container is None else inferred.container(values)

    def inline(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The nodes that a decomposition written with tensors amounts to, added to the graph."""
        from torch.fx.experimental.proxy_tensor import make_fx

        nodes = [leaf for leaf in tree_iter((list(args), dict(kwargs))) if isinstance(leaf, fx.Node)]

        def flat(*tensors: Any) -> Any:
            table = dict(zip(nodes, tensors, strict=True))
            real_args, real_kwargs = map_arg((tuple(args), dict(kwargs)), lambda n: table[n])
            return fn(*real_args, **real_kwargs)

        with fake_mode(), torch.no_grad():
            traced = make_fx(flat, tracing_mode="real")(*(n.meta["val"] for n in nodes))
        values: dict[fx.Node, Any] = {}
        inputs = iter(nodes)
        for node in traced.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(inputs)
            elif node.op == "output":
                return map_arg(node.args[0], lambda n: values[n])
            elif node.target is _getitem:
                values[node] = self.item(values[node.args[0]], node.args[1])
            else:
                inner_args, inner_kwargs = map_arg((node.args, node.kwargs), lambda n: values[n])
                values[node] = self.call(node.target, inner_args, inner_kwargs)
        raise GraphError("a decomposition returned nothing")


def _has_node_as_scalar(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    if not isinstance(op, torch._ops.OpOverload):
        return False
    for position, argument in enumerate(op._schema.arguments):
        if str(argument.real_type) in {"number", "Optional[number]"}:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            if isinstance(value, fx.Node):
                return True
    return False


class _TraceBuilder:
    """Builds one graph for the given outputs of a trace path."""

    def __init__(self, path: Sequence[Node], leaf_specs: Sequence[TensorSpec], builder: GraphBuilder) -> None:
        self.path = path
        self.leaf_specs = leaf_specs
        self.b = builder
        self.values: dict[int, Any] = {}
        self.leaves: dict[int, fx.Node] = {}
        self.packs: dict[str, tuple[fx.Node, dict[int, int]]] = {}
        self.contiguous = {
            node.number + offset: spec.is_contiguous
            for node in path
            for offset, spec in enumerate(node.specs)
            if spec is not None
        }

    # -- which ops and inputs are needed ---------------------------------------------------------------------
    def needed(self, outputs: Sequence[int]) -> list[Node]:
        """The nodes the outputs depend on, in path order."""
        wanted = set(outputs)
        kept: list[Node] = []
        for node in reversed(self.path):
            if any(number in wanted for number in range(node.number, node.end)):
                kept.append(node)
                for template in tree_iter((node.args, node.kwargs), is_leaf=is_template):
                    if template.__class__ is Value:
                        wanted.add(template.number)
        kept.reverse()
        return kept

    def declare_inputs(self, nodes: Sequence[Node]) -> TraceGraph:
        """Placeholders for what the nodes use, and the record of where each comes from."""
        leaves: set[int] = set()
        singles: set[int] = set()
        doubles: set[int] = set()
        keys: set[int] = set()
        for node in nodes:
            wide = self._is_wide(node)
            for template in tree_iter((node.args, node.kwargs), is_leaf=is_template):
                if isinstance(template, HostScalar):
                    template = template.value
                if isinstance(template, Leaf):
                    leaves.add(template.number)
                elif isinstance(template, Number):
                    (doubles if wide else singles).add(template.number)
                elif isinstance(template, RandomKey):
                    keys.add(template.number)
        for position in sorted(leaves):
            self.leaves[position] = self.b.placeholder(f"arg{position}", self.leaf_specs[position])
        kinds = (("singles", singles, torch.float32), ("doubles", doubles, torch.float64), ("keys", keys, torch.int64))
        for name, positions, dtype in kinds:
            if positions:
                spec = TensorSpec((len(positions),), dtype, (1,))
                places = {position: place for place, position in enumerate(sorted(positions))}
                self.packs[name] = self.b.placeholder(name, spec), places
        unused = fx.GraphModule(torch.nn.Module(), fx.Graph())
        ordered = [tuple(sorted(p)) for p in (leaves, singles, doubles, keys)]
        return TraceGraph(unused, *ordered)

    def _is_wide(self, node: Node) -> bool:
        """Whether the node computes in double precision, so that its numbers must come as float64."""
        if any(spec is not None and spec.dtype in _WIDE for spec in node.specs):
            return True
        return any(isinstance(t, HostScalar) and t.dtype in _WIDE for t in tree_iter(node.args, is_leaf=is_template))

    # -- one traced op ---------------------------------------------------------------------------------------
    def _packed(self, pack: str, position: int) -> fx.Node:
        node, places = self.packs[pack]
        return self.b(aten.select.int, node, 0, places[position])

    def _argument(self, template: Any, wide: bool) -> Any:
        if isinstance(template, Leaf):
            return self.leaves[template.number]
        if isinstance(template, Number):
            return self._packed("doubles" if wide else "singles", template.number)
        if isinstance(template, RandomKey):
            return self._packed("keys", template.number)
        if isinstance(template, Value):
            return self.values[template.number]
        if isinstance(template, HostScalar):
            return self.b.cast(self._argument(template.value, wide), template.dtype)
        return template

    def emit(self, node: Node) -> None:
        """Add one traced op to the graph."""
        b = self.b
        b.debug_handle, b.source = node.depth, node.source
        wide = self._is_wide(node)
        args, kwargs = tree_map(
            lambda t: self._argument(t, wide), (list(node.args), dict(node.kwargs)), is_leaf=is_template
        )
        kwargs.pop("generator", None)
        result = self._lower(node, args, kwargs)
        for offset, spec in enumerate(node.specs):
            if spec is not None:
                one = result if node.container is None else b.item(result, offset)
                self.values[node.number + offset] = self._checked(node, one, spec)

    def _lower(self, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
        b, op = self.b, node.op
        if op in RANDOM:
            kwargs = {k: v for k, v in kwargs.items() if k not in {"device", "layout", "pin_memory"}}
            return RANDOM[op](b, kwargs.pop("random_key"), node.specs[0], *args, **kwargs)
        if op in LOWER:
            return LOWER[op](b, node.specs, *args, **kwargs)
        if op in DECOMPOSE:
            return b.inline(DECOMPOSE[op], args, kwargs)
        if foreach_target(op) is not None:
            return lower_foreach(b, op, node.specs, args, kwargs)
        names = {argument.name for argument in op._schema.arguments}
        if node.is_factory and "device" in names:
            kwargs["device"] = _CPU
        elif "device" in kwargs:
            del kwargs["device"]
        kwargs.pop("pin_memory", None)
        return b.call(view_form(op), args, kwargs)

    def _checked(self, node: Node, made: fx.Node, spec: TensorSpec) -> fx.Node:
        """The value with the dtype the trace promised. Raises :class:`GraphError` on another shape."""
        value = self.b.val(made)
        if tuple(value.shape) != spec.shape:
            raise GraphError(f"{node.op} was traced as {spec} but lowers to {TensorSpec.of(value)} ({node.source})")
        return self.b.cast(made, spec.dtype)

    # -- outputs ---------------------------------------------------------------------------------------------
    def outputs(self, numbers: Sequence[int]) -> list[fx.Node]:
        """The output nodes; what would share memory with an input or another output is cloned."""
        taken: set[fx.Node] = set()
        results: list[fx.Node] = []
        for number in numbers:
            node = self.values[number]
            root = alias_root(node)
            if self.contiguous.get(number) and not self.b.val(node).is_contiguous():
                # A later trace takes the value as a leaf, and may view it as contiguous memory.
                node = root = self.b(aten.clone.default, node, memory_format=torch.contiguous_format)
            if root.op == "placeholder" or root in taken:
                node = self.b(aten.clone.default, node)
                root = node
            taken.add(root)
            results.append(node)
        return results


def build_graph(
    path: Sequence[Node],
    outputs: Sequence[int],
    leaf_specs: Sequence[TensorSpec],
    decompositions: Mapping[Any, Callable[..., Any]],
) -> TraceGraph:
    """The graph in normal form that computes the values numbered ``outputs`` at the end of a trace path.

    Time and memory are linear in the path's length.
    """
    builder = GraphBuilder()
    builder.decompositions = decompositions
    trace_builder = _TraceBuilder(path, leaf_specs, builder)
    nodes = trace_builder.needed(outputs)
    made = trace_builder.declare_inputs(nodes)
    for node in nodes:
        trace_builder.emit(node)
    results = trace_builder.outputs(outputs)
    output = builder.graph.output(tuple(results))
    output.meta["val"] = tuple(builder.val(node) for node in results)
    builder.graph.eliminate_dead_code()
    made.module = fx.GraphModule(torch.nn.Module(), builder.graph)
    return made
