"""Delta debugging on graphs in normal form: any of the operators, fed with the CPU's values, are a graph again."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx
from torch.fx.node import map_arg

from ..backend.infer import fake_mode, fake_tensor
from ..backend.normal_form import alias_root
from ..core.specs import TensorSpec

__all__ = ["GraphSample", "operators_of", "shrink", "with_inputs"]

_getitem: Any = operator.getitem
_clone: Final = torch.ops.aten.clone.default


@dataclass(frozen=True)
class GraphSample:
    """A graph in normal form and the CPU tensors to run it on."""

    graph: fx.GraphModule
    inputs: tuple[torch.Tensor, ...]

    @property
    def size(self) -> tuple[int, int, int]:
        """Operators, outputs, elements of all inputs: what gets smaller."""
        outputs: Any = self.graph.graph.output_node().args[0]
        return len(operators_of(self.graph)), len(outputs), sum(t.numel() for t in self.inputs)


Fails = Callable[[GraphSample], bool]


def operators_of(graph: fx.GraphModule) -> list[fx.Node]:
    """The operator calls, without ``getitem``."""
    return [n for n in graph.graph.nodes if n.op == "call_function" and n.target is not _getitem]


def values_of(program: GraphSample) -> dict[fx.Node, Any]:
    """Every node's value on the CPU."""
    values: dict[fx.Node, Any] = {}
    given = iter(program.inputs)
    with torch.no_grad():
        for node in program.graph.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(given)
            elif node.op == "call_function":
                args, kwargs = map_arg((node.args, node.kwargs), lambda n: values[n])
                values[node] = node.target(*args, **kwargs)
    return values


class _Builder:
    """A new graph of some nodes of an old one; what they need from the others becomes an input."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.placeholders: list[fx.Node] = []
        self.inputs: list[torch.Tensor] = []
        self.made: dict[fx.Node, fx.Node] = {}

    def declare(self, node: fx.Node, value: torch.Tensor) -> None:
        value = value.detach().clone()
        made = self.graph.placeholder(f"x{len(self.inputs)}")
        made.meta["val"] = fake_tensor(TensorSpec.of(value))
        self.inputs.append(value)
        self.made[node] = made

    def call(self, target: Any, args: Any, kwargs: Any, like: fx.Node) -> fx.Node:
        made = self.graph.call_function(target, args, kwargs)
        fakes, fake_kwargs = map_arg((args, kwargs), lambda n: n.meta["val"])
        with fake_mode(), torch.no_grad():
            value = target(*fakes, **fake_kwargs)
        made.meta.update(val=value, debug_handle=like.meta.get("debug_handle") or 0, source=like.meta.get("source"))
        return made

    def finish(self, outputs: Sequence[fx.Node]) -> GraphSample:
        taken: set[fx.Node] = set()
        results: list[fx.Node] = []
        for node in outputs:
            root = alias_root(node)
            if root.op == "placeholder" or root in taken:
                node = root = self.call(_clone, (node,), {}, node)
            taken.add(root)
            results.append(node)
        self.graph.output(tuple(results)).meta["val"] = tuple(n.meta["val"] for n in results)
        self.graph.eliminate_dead_code()
        return GraphSample(fx.GraphModule(torch.nn.Module(), self.graph), tuple(self.inputs))


def part(program: GraphSample, keep: set[fx.Node], outputs: set[fx.Node] | None = None) -> GraphSample:
    """The program of the kept operators. Raises what shape inference raises if they do not fit together any more."""
    values = values_of(program)
    nodes = list(program.graph.graph.nodes)
    keep = {n for n in nodes if n in keep or (n.target is _getitem and n.args[0] in keep)}
    needed: dict[fx.Node, None] = {}
    for node in nodes:
        if node in keep:
            needed.update(dict.fromkeys(n for n in node.all_input_nodes if n not in keep))
    builder = _Builder()
    for node in needed:
        builder.declare(node, values[node])
    for node in nodes:
        if node in keep:
            args, kwargs = map_arg((node.args, node.kwargs), lambda n: builder.made[n])
            builder.made[node] = builder.call(node.target, tuple(args), dict(kwargs), node)
    if outputs is None:
        outputs = {n for n in keep if isinstance(values[n], torch.Tensor) and _leaves(n, keep)}
    return builder.finish([builder.made[n] for n in nodes if n in outputs])


def _leaves(node: fx.Node, keep: set[fx.Node]) -> bool:
    return not node.users or any(user not in keep for user in node.users)


def _try(make: Callable[[], GraphSample], fails: Fails) -> GraphSample | None:
    """The candidate if it can be made and still fails."""
    try:
        candidate = make()
        values_of(candidate)
    except Exception:
        return None  # the parts do not fit together: not a candidate
    return candidate if fails(candidate) else None


def _fewer_operators(program: GraphSample, fails: Fails) -> GraphSample:
    """Zeller and Hildebrandt's ddmin (2002) over the operators."""
    chunks = 2
    while True:
        nodes = operators_of(program.graph)
        if len(nodes) < 2:
            return program
        chunks = min(chunks, len(nodes))
        smaller = _one_round(program, nodes, chunks, fails)
        if smaller is not None:
            program, chunks = smaller, 2
        elif chunks == len(nodes):
            return program
        else:
            chunks = min(len(nodes), chunks * 2)


def _one_round(program: GraphSample, nodes: list[fx.Node], chunks: int, fails: Fails) -> GraphSample | None:
    step = -(-len(nodes) // chunks)
    pieces = [nodes[start : start + step] for start in range(0, len(nodes), step)]
    subsets = [set(piece) for piece in pieces]
    if chunks > 2:
        subsets += [set(nodes).difference(piece) for piece in pieces]
    for subset in subsets:
        found = _try(lambda kept=subset: part(program, kept), fails)
        if found is not None and found.size < program.size:
            return found
    return None


def _fewer_outputs(program: GraphSample, fails: Fails) -> GraphSample:
    """One output if one is enough."""
    outputs: Any = program.graph.graph.output_node().args[0]
    kept = {n for n in program.graph.graph.nodes if n.op == "call_function"}
    for output in outputs if len(outputs) > 1 else ():
        found = _try(lambda one=output: part(program, kept, {one}), fails)
        if found is not None:
            return found
    return program


def with_inputs(program: GraphSample, inputs: Sequence[torch.Tensor]) -> GraphSample:
    """The same operators on other inputs; shapes are inferred again."""
    builder = _Builder()
    nodes = list(program.graph.graph.nodes)
    for node, value in zip((n for n in nodes if n.op == "placeholder"), inputs, strict=True):
        builder.declare(node, value)
    for node in nodes:
        if node.op == "call_function":
            args, kwargs = map_arg((node.args, node.kwargs), lambda n: builder.made[n])
            builder.made[node] = builder.call(node.target, tuple(args), dict(kwargs), node)
    outputs: Any = program.graph.graph.output_node().args[0]
    return builder.finish([builder.made[n] for n in outputs])


def _narrowed(inputs: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Every size in turn made 1, then halved, in all inputs at once, so that shapes still fit together."""
    for size in sorted({s for t in inputs for s in t.shape if s > 1}, reverse=True):
        for smaller in dict.fromkeys((1, size // 2)):
            if smaller < size:
                yield [_narrow(t, size, smaller) for t in inputs]


def _narrow(tensor: torch.Tensor, size: int, smaller: int) -> torch.Tensor:
    for dim, length in enumerate(tensor.shape):
        if length == size:
            tensor = tensor.narrow(dim, 0, smaller)
    return tensor


def _simpler(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    yield torch.ones_like(tensor)
    if tensor.is_floating_point() or tensor.is_complex():
        yield tensor.round()
        yield (tensor * 8).round() / 8


def _smaller_inputs(program: GraphSample, fails: Fails) -> GraphSample:
    changed = True
    while changed:
        changed = False
        for inputs in _narrowed(program.inputs):
            found = _try(lambda given=inputs, p=program: with_inputs(p, given), fails)
            if found is not None:
                program, changed = found, True
                break
    return program


def _simpler_values(program: GraphSample, fails: Fails) -> GraphSample:
    for position in range(len(program.inputs)):
        for value in _simpler(program.inputs[position]):
            inputs = list(program.inputs)
            inputs[position] = value
            found = _try(lambda given=inputs, p=program: with_inputs(p, given), fails)
            if found is not None:
                program = found
                break
    return program


def shrink(program: GraphSample, fails: Fails) -> GraphSample:
    """The smallest program found that still fails: fewer operators, one output, smaller inputs, simpler values."""
    program = _fewer_outputs(program, fails)
    program = _fewer_operators(program, fails)
    program = _fewer_outputs(program, fails)
    program = _smaller_inputs(program, fails)
    return _simpler_values(program, fails)
