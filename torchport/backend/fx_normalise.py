"""From a graph of ATen operators by PyTorch's own front ends (AOTAutograd, ``torch.export``) to the normal form.

What comes out is in normal form but for three things, which :func:`~torchport.backend.partition.partition` takes care
of: tensor constants are ``get_attr`` nodes; operators that no backend takes in any form stay as they are, with the
reason in ``meta["refusal"]``, and ``meta["at_once"]`` where no graph of static shapes could hold it; and the output is
as it was, which may hold inputs, ``None`` and numbers.

Per operator, in this order: dropped if it is an identity, else lowered as a trace's operators are
(:meth:`~torchport.backend.builder.GraphBuilder.lower`), by the first backend that takes all of what it becomes: itself,
the backend's own decomposition, or PyTorch's core ATen one. Sizes that were symbols are numbers here: one graph in
normal form is for one set of shapes.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, TypeAlias

import torch
from torch import fx
from torch.fx.node import map_arg
from torch.utils._pytree import tree_any, tree_map

from ..core.errors import GraphError
from ..core.frames import user_frames
from ..core.specs import TensorSpec, is_dense
from .builder import OF_MEMORY, REFUSAL, REFUSED_OP, Capture, GraphBuilder, Refused, capture_of
from .control_flow import CONTROL_FLOW, inner_graph
from .decompositions import DECOMPOSE
from .graph_modules import graph_module
from .infer import DataDependent, Inferred, NoShapeRule, fake_tensor, infer
from .interface import Backend
from .lowering import view_form
from .normal_form import alias_root, at_hint

__all__ = ["Lowering", "has_symbols", "normalise", "source_line"]

aten = torch.ops.aten
_getitem: Any = operator.getitem
_CPU: Final = torch.device("cpu")
_SymbolicNumber: Final = (torch.SymInt, torch.SymFloat, torch.SymBool)

Lowering: TypeAlias = Callable[..., Any]
"""``(builder, key, result spec, *args, **kwargs) -> node``: a random operator as arithmetic on a key."""

_IDENTITIES: Final = {aten.detach.default, aten.alias.default, aten.lift_fresh.default}
_CHECKS: Final = {"_assert_tensor_metadata", "sym_constrain_range", "sym_constrain_range_for_size", "_assert_scalar"}
"""Operators that check what holds already, the shapes being numbers; without results."""


def source_line(node: fx.Node) -> str | None:
    """``file:line in function`` of the user's innermost frame, from the stack trace that PyTorch notes on nodes."""
    known = node.meta.get("source")
    if isinstance(known, str):
        return known
    frames = user_frames(node.meta.get("stack_trace"))
    return frames[-1].place if frames else None


def has_symbols(value: Any) -> bool:
    """Whether a node's ``meta["val"]`` has a size, stride or number that is a symbol."""
    if isinstance(value, torch.Tensor):
        return any(n.__class__ is not int for n in (*value.shape, *value.stride()))
    return isinstance(value, _SymbolicNumber)


def _mutates(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _functional(graph: fx.GraphModule, specs: Sequence[Any]) -> fx.GraphModule:
    """The graph without writes. Raises :class:`GraphError` if it writes to an input: the caller has to do that."""
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.traceback import preserve_node_meta

    fakes = [fake_tensor(spec) if isinstance(spec, TensorSpec) else spec for spec in specs]

    def run(*args: Any) -> Any:
        return _Interpreted(graph).run(*args)

    with preserve_node_meta(), torch.no_grad():
        traced = make_fx(torch.func.functionalize(run, remove="mutations"), tracing_mode="fake")(*fakes)
    for node in traced.graph.find_nodes(op="call_function", target=aten.copy_.default):
        raise GraphError(
            f"the graph writes to its input {node.args[0]}; give it to AOTAutograd or to "
            "ExportedProgram.run_decompositions() first, which return the new value instead"
        )
    return traced


_OF_SEVERAL: Final = (operator.add, operator.mul)
"""What PyTorch writes as one node with several arguments: sums and products of symbolic sizes."""


def _of_several(fn: Callable[[Any, Any], Any], args: Sequence[Any]) -> Any:
    return functools.reduce(fn, args)


class _Interpreted(fx.Interpreter):
    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target in _OF_SEVERAL and len(args) > 2:
            return _of_several(target, args)
        return super().call_function(target, args, kwargs)


class _Normaliser:
    """Writes one graph. ``values`` maps nodes of the original to nodes or numbers, or lists of nodes."""

    def __init__(
        self,
        original: fx.GraphModule,
        backends: Sequence[Backend],
        random: Mapping[Any, Lowering],
        always: bool,
        written: Mapping[int, Collection[str]],
    ) -> None:
        self.original = original
        self.written = written
        self.backends = backends
        self.captures = [capture_of(backend) for backend in backends]
        self.random = random
        self.always = always
        self.builder = GraphBuilder(strict=True)
        self.values: dict[fx.Node, Any] = {}
        self.root = torch.nn.Module()
        self.keys: fx.Node | None = None
        self.drawn = 0

    # -- inputs and constants --------------------------------------------------------------------------------
    def placeholder(self, node: fx.Node, spec: Any) -> None:
        """An input; a number among the inputs keeps its place, but its uses are the number itself."""
        made = self.builder.graph.placeholder(str(node.target))
        made.name = node.name  # front ends refer to inputs by name; FX would rename one that is called ``input``
        made.meta.update({name: node.meta[name] for name in ("constant", "tensor_dict") if name in node.meta})
        if isinstance(spec, TensorSpec):
            made.meta["val"] = fake_tensor(spec)
            self.values[node] = made
        else:
            made.meta["val"] = spec
            self.values[node] = made if spec is None or not isinstance(spec, (int, float, bool)) else spec

    def attribute(self, node: fx.Node) -> None:
        """A tensor the graph holds, or a graph that a higher-order operator calls."""
        name = str(node.target).replace(".", "_")
        held: Any = operator.attrgetter(str(node.target))(self.original)
        setattr(self.root, name, held)
        made = self.builder.graph.get_attr(name)
        made.meta.update(node.meta)
        if isinstance(held, torch.Tensor):
            made.meta["val"] = fake_tensor(TensorSpec.of(held))
        self.values[node] = made

    # -- operators -------------------------------------------------------------------------------------------
    def call(self, node: fx.Node, number: int) -> None:
        """One operator of the original."""
        handle = node.meta.get("debug_handle")
        b = self.builder
        b.debug_handle = handle if isinstance(handle, int) else number
        b.source = source_line(node)
        b.origin = {name: node.meta[name] for name in ("stack_trace", "nn_module_stack") if name in node.meta}
        known: tuple[Any, Any] = map_arg((node.args, node.kwargs), lambda n: self.values[n])
        args, kwargs = known
        if node.target is _getitem:
            self.values[node] = b.item(args[0], args[1]) if isinstance(args[0], fx.Node) else args[0][args[1]]
        elif node.target in _IDENTITIES:
            self.values[node] = args[0]
        elif not isinstance(node.target, torch._ops.OpOverload):
            self.values[node] = self._python(node, args, kwargs)
        elif node.target._schema.name.removeprefix("aten::").split(".")[0] in _CHECKS:
            self.values[node] = None
        else:
            if node.target in OF_MEMORY and isinstance(node.args[0], fx.Node):
                args = (self._laid_out_as(node.args[0].meta.get("val"), args[0]), *args[1:])
            self.values[node] = self._operator(node, node.target, args, kwargs)

    def _laid_out_as(self, original: Any, node: fx.Node) -> fx.Node:
        """A value in the order of memory that it had in the original: a rewrite may have given it another.

        The value itself where the orders are equal, or the original's is none of a dense tensor.
        """
        value = self.builder.val(node)
        if not isinstance(original, torch.Tensor) or original.dim() != value.dim():
            return node
        shape, strides = [at_hint(size) for size in original.shape], [at_hint(step) for step in original.stride()]
        if None in shape or None in strides or not is_dense(shape, strides):
            return node
        return self.builder.laid_out(node, strides)

    def _python(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        """Arithmetic on sizes, which are numbers here; anything else is left to whoever runs the outer graph."""
        higher_order = isinstance(node.target, torch._ops.HigherOrderOperator)
        if not higher_order and not tree_any(lambda v: isinstance(v, fx.Node), (args, kwargs)):
            assert callable(node.target)
            return _of_several(node.target, args) if node.target in _OF_SEVERAL else node.target(*args, **kwargs)
        if node.target in CONTROL_FLOW:
            return self._control_flow(node, args, kwargs)
        what = "a higher-order operator" if higher_order else "a Python function"
        return self._left(node, args, kwargs, f"{node.target} is {what}; graphs of backends hold ATen operators")

    def _control_flow(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        """A branch or a loop, for the first backend that takes it with all that its graphs hold."""
        refused: list[str] = []
        held = [inner_graph(self.root, arg) for arg in args if isinstance(arg, fx.Node)]
        graphs = [graph for graph in held if graph is not None]
        given = [leaf for arg in args if isinstance(arg, (list, tuple)) for leaf in arg]
        if kwargs or not all(map(_is_tensor, given)):
            return self._left(node, args, kwargs, f"{node.target} was given something else than tensors")
        specs = [_spec(leaf) for leaf in given]
        for backend, capture in zip(self.backends, self.captures, strict=True):
            if not backend.capabilities.control_flow:
                refused.append(f"{backend.name} has no control flow in its graphs")
                continue
            inner = [normalise(graph, backend, specs) for graph in graphs]
            reason = next((why for why in map(_not_whole, inner) if why), None)
            if reason is None:
                made = self._call_graphs(node, args, inner)
                support = capture.supports(made)
                if support:
                    return made
                self.builder.graph.erase_node(made)
                reason = support.reason
            refused.append(f"{backend.name}: {reason}")
        return self._left(node, args, kwargs, "; ".join(refused) or "there is no backend to ask")

    def _call_graphs(self, node: fx.Node, args: Any, inner: Sequence[fx.GraphModule]) -> fx.Node:
        """The call, with these graphs in place of the original's."""
        held = iter(inner)

        def named(arg: Any) -> Any:
            if not isinstance(arg, fx.Node) or inner_graph(self.root, arg) is None:
                return arg
            name = f"{arg.target}_normal"
            while hasattr(self.root, name):
                name += "_"
            setattr(self.root, name, next(held))
            return self.builder.graph.get_attr(name)

        made = self.builder.graph.call_function(node.target, tuple(named(arg) for arg in args))  # type: ignore[arg-type]
        made.meta.update(self.builder.origin, debug_handle=self.builder.debug_handle, source=self.builder.source)
        made.meta["val"] = tuple(result.meta["val"] for result in _results(inner[-1]))
        return made

    def _operator(self, node: fx.Node, op: torch._ops.OpOverload, args: Any, kwargs: Any) -> Any:
        if op._schema.name.startswith("aten::sym_"):
            value = args[0].meta["val"]
            if not has_symbols(value):
                return op(value, *args[1:], **kwargs)
        kwargs = {k: _CPU if isinstance(v, torch.device) else v for k, v in kwargs.items()}
        if tree_any(_is_data_dependent, (args, kwargs)):
            return self._left(node, args, kwargs, "a shape or number it gets depends on values", at_once=True)
        specs = map_arg((tuple(args), dict(kwargs)), _spec)
        try:
            inferred = _infer(DECOMPOSE.get(op) or view_form(op), *specs)
        except (DataDependent, NoShapeRule) as error:
            return self._left(node, args, kwargs, str(error), at_once=True)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            return self._left(node, args, kwargs, f"PyTorch's shape inference refused it: {error}")
        if op in self.random and self.always:
            return self._draw(op, inferred, args, kwargs)
        refused: list[str] = []
        for capture in self.captures:
            try:
                return self._attempt(capture, lambda: self.builder.lower(op, inferred.specs, args, kwargs), inferred)
            except Refused as error:
                refused.append(error.reason)
        if op in self.random:
            return self._draw(op, inferred, args, kwargs)
        return self._left(node, args, kwargs, "; ".join(dict.fromkeys(refused)) or "there is no backend to ask")

    def _attempt(self, capture: Capture | None, lower: Callable[[], Any], inferred: Inferred) -> Any:
        """The nodes of an operator on behalf of a backend; on :class:`Refused` the graph is as before."""
        return self.builder.attempt(capture, lambda: self._lowered(lower, inferred))

    def _lowered(self, lower: Callable[[], Any], inferred: Inferred) -> Any:
        made = lower()
        if inferred.container is not None:
            return made
        (spec,) = inferred.specs
        return self._checked(made, spec) if spec is not None else made

    def _checked(self, made: fx.Node, spec: TensorSpec) -> fx.Node:
        value = self.builder.val(made)
        if tuple(value.shape) != spec.shape:
            raise GraphError(f"an operator that gives {spec} was lowered to {TensorSpec.of(value)}")
        return self.builder.cast(made, spec.dtype)

    def _draw(self, op: Any, inferred: Inferred, args: Any, kwargs: Any) -> Any:
        """A random operator as arithmetic on the next key."""
        dropped = {"device", "layout", "pin_memory", "generator"}
        kwargs = {name: value for name, value in kwargs.items() if name not in dropped}
        assert self.keys is not None
        key = self.builder(aten.select.int, self.keys, 0, self.drawn)
        self.drawn += 1

        def lower() -> Any:
            return self.random[op](self.builder, key, inferred.specs[0], *args, **kwargs)

        try:
            return self._attempt(self.captures[0], lower, inferred)
        except Refused as refused:  # the host draws the same numbers
            return self.builder.for_the_host(op, refused.reason, lambda: self._lowered(lower, inferred))

    def _left(self, node: fx.Node, args: Any, kwargs: Any, reason: str, at_once: bool = False) -> fx.Node:
        """The operator as it was, for whoever runs the outer graph. ``at_once``: no graph of static shapes holds it."""
        made = self.builder.graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
        made.meta.update(node.meta)
        made.meta.update(debug_handle=self.builder.debug_handle, source=self.builder.source)
        made.meta.update({REFUSAL: reason, REFUSED_OP: node.target, "at_once": at_once})
        made.meta["val"] = tree_map(_on_cpu, node.meta.get("val"))
        if isinstance(node.target, torch._ops.OpOverload):
            try:
                inferred = infer(node.target, *map_arg((tuple(args), dict(kwargs)), _spec))
                values = [None if spec is None else fake_tensor(spec) for spec in inferred.specs]
                made.meta["val"] = values[0] if inferred.container is None else inferred.container(values)
            except Exception:  # what was recorded stands: a shape that depends on values, or symbols
                pass
        return made

    # -- outputs ---------------------------------------------------------------------------------------------
    def results(self, output: fx.Node) -> Any:
        """The outputs: what has memory of its own in the original has it here, too.

        Lowering makes one value of two that are equal: ``copy(a, b)`` becomes ``b``. Inside a graph nobody can tell,
        as nothing is written there. At its end somebody can: AOTAutograd and the user write to results and to inputs,
        and know what shares memory with what from the original.
        """
        given: Any = output.args[0]
        if not isinstance(given, (list, tuple)):
            return map_arg(given, lambda n: self.values[n])
        owners: dict[fx.Node, fx.Node] = {}
        return tuple(self._owned(value, self.written.get(at), owners) for at, value in enumerate(given))

    def _owned(self, original: Any, written: Collection[str] | None, owners: dict[fx.Node, fx.Node]) -> Any:
        """One output: a copy of the value where the value shares memory and the original does not.

        ``owners`` says for memory that was given out already whose it is in the original.
        """
        value = map_arg(original, lambda n: self.values[n])
        if not isinstance(original, fx.Node) or not _is_tensor(value):
            return value
        source, memory = _source_of_memory(original), alias_root(value)
        if source.op != "call_function":
            return value  # an input, a constant, or a view of one, as in the original
        if written is not None and memory.name not in written:
            return value
        owns = memory.op == "call_function" and owners.setdefault(memory, source) is source
        if owns and not _repeats_elements(self.values[source]):
            return value
        # The memory is copied, not what is seen of it: results that are views of one another stay so.
        if owners.get(alias_root(self.values[source])) is not source or _repeats_elements(self.values[source]):
            copy = self.values[source] = self._operator(source, aten.clone.default, (self.values[source],), {})
            owners[alias_root(copy)] = source
        for view in _views_between(source, original):
            self.call(view, view.meta.get("debug_handle", 0))
        return self.values[original]

    # -- the whole -------------------------------------------------------------------------------------------
    def run(self, inputs: Sequence[Any]) -> fx.GraphModule:
        """The graph in normal form."""
        given = iter(inputs)
        nodes = list(self.original.graph.nodes)
        for node in nodes:
            if node.op == "placeholder":
                self.placeholder(node, next(given))
        count = sum(node.op == "call_function" and node.target in self.random for node in nodes)
        if count:
            self.keys = self.builder.placeholder("keys", TensorSpec((count,), torch.int64, (1,)))
        for number, node in enumerate(nodes):
            if node.op == "get_attr":
                self.attribute(node)
            elif node.op == "call_function":
                self.call(node, number)
            elif node.op == "output":
                output = self.builder.graph.output(self.results(node))
                output.meta.update(node.meta)
            elif node.op != "placeholder":
                raise GraphError(f"a {node.op} node ({node.format_node()}); expected a graph of ATen operators")
        if self.keys is not None and not self.keys.users:
            self.builder.graph.erase_node(self.keys)
        self.builder.graph.eliminate_dead_code()
        made = graph_module(self.builder.graph, self.root)
        made.meta["random_ops"] = self.drawn
        return made


def _repeats_elements(node: fx.Node) -> bool:
    """Whether elements of a value are one place in memory, as where ``copy(a, b)`` became an expanded ``b``."""
    value = node.meta["val"]
    return any(step == 0 and size > 1 for size, step in zip(value.shape, value.stride(), strict=True))


def _source_of_memory(node: fx.Node) -> fx.Node:
    """Where the memory that a node of the original shows comes from: also what ``_unsafe_view`` gives is a view."""
    while (root := alias_root(node)).target is aten._unsafe_view.default and isinstance(root.args[0], fx.Node):
        node = root.args[0]
    return root


def _views_between(source: fx.Node, node: fx.Node) -> list[fx.Node]:
    """The operators of the original that make ``node`` a view of ``source``, first to last."""
    chain: list[fx.Node] = []
    while node is not source:
        chain.append(node)
        viewed = node.args[0] if node.args else node.kwargs["self"]
        assert isinstance(viewed, fx.Node)
        node = viewed
    return chain[::-1]


def _infer(op: Any, args: Any, kwargs: Any) -> Inferred:
    """What an operator gives. A ``view`` of what a rewrite gave other strides copies: the builder sees to that."""
    try:
        return infer(op, args, kwargs)
    except (RuntimeError, ValueError):
        if op is not aten.view.default:
            raise
        return infer(aten.reshape.default, args, kwargs)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, fx.Node) and isinstance(value.meta.get("val"), torch.Tensor)


def _results(graph: fx.GraphModule) -> tuple[Any, ...]:
    found: Any = graph.graph.output_node().args[0]
    return (found,) if isinstance(found, fx.Node) else tuple(found)


def _not_whole(graph: fx.GraphModule) -> str | None:
    """Why a graph inside a graph cannot be compiled with it; nothing where it can."""
    for node in graph.graph.nodes:
        if REFUSAL in node.meta:
            return f"{node.target} in it: {node.meta[REFUSAL]}"
        if node.op == "get_attr" and inner_graph(graph, node) is None:
            return f"a graph in it holds the tensor {node.target}"
    if not all(map(_is_tensor, _results(graph))):
        return "a graph in it gives something else than tensors"
    return None


def _spec(node: fx.Node) -> Any:
    return TensorSpec.of(node.meta["val"])


def _is_data_dependent(value: Any) -> bool:
    """Whether an argument is a number that an operator computes, or a tensor whose shape is not known."""
    if not isinstance(value, fx.Node):
        return False
    val = value.meta.get("val")
    return not isinstance(val, torch.Tensor) or has_symbols(val) or val.layout is not torch.strided


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and not has_symbols(value) and value.layout is torch.strided:
        return fake_tensor(TensorSpec.of(value))
    return value


def _inputs_of(graph: fx.GraphModule) -> list[Any]:
    found: list[Any] = []
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            value = node.meta.get("val")
            if has_symbols(value):
                raise GraphError(
                    f"input {node.target} has symbolic sizes ({value}), and a graph in normal form is for one set of "
                    "shapes: pass inputs=[...] with a TensorSpec per tensor and a number per symbolic number"
                )
            found.append(TensorSpec.of(value) if isinstance(value, torch.Tensor) else value)
    return found


def normalise(
    graph: fx.GraphModule,
    backends: Backend | Sequence[Backend],
    inputs: Sequence[Any] | None = None,
    *,
    random: Mapping[Any, Lowering] | None = None,
    always_draw: bool = False,
    written: Mapping[int, Collection[str]] | None = None,
) -> fx.GraphModule:
    """The graph in normal form for these backends, first choice first (see the module for what is left open).

    ``inputs``: a :class:`TensorSpec`, a number or ``None`` per placeholder; needed where sizes are symbols. ``random``:
    operators that may be written as arithmetic on a key; they are where no backend takes them, or ``always_draw``. The
    result then has one more input, ``keys`` (int64, 1-D), of as many keys as its ``meta["random_ops"]`` says.
    ``written``: per output that is only read, and then forgotten, the names of the inputs that are written before.
    Every other output has memory of its own where it has in ``graph``.
    ``graph`` is not changed. Raises :class:`GraphError` for a graph that is not one of ATen operators, or that writes
    to its inputs.
    """
    specs = _inputs_of(graph) if inputs is None else list(inputs)
    if any(node.op == "call_function" and _mutates(node) for node in graph.graph.nodes):
        graph = _functional(graph, specs)
    chosen = [backends] if isinstance(backends, Backend) else list(backends)
    return _Normaliser(graph, chosen, random or {}, always_draw, written or {}).run(specs)
