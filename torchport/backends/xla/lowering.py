"""A graph in normal form as a function of JAX arrays, to be traced by ``jax.jit``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torchport.backend.lowering_context import Call, LoweringContext
from torchport.backend.normal_form import input_specs, is_view
from torchport.backend.partition import shows_all
from torchport.core.errors import CompileError
from torchport.core.specs import TensorSpec

from .dtypes import jax_dtype
from .ops import TABLE
from .ops.support import Array, cast, jnp

__all__ = ["JaxFunction", "Updates", "shapes_of"]

_clone: Any = torch.ops.aten.clone.default


class JaxLowering(LoweringContext[Array, tuple[tuple[Array, ...], tuple[int, ...]]]):
    """Lowers inside a trace of JAX: parameters are the traced function's arguments.

    ``build`` gives the values to compute, each once, and where every result comes from: the position of a value, or
    ``-1 - i`` for argument ``i`` as it is. Values never change, so results may share them; a copy would cost time.
    """

    def __init__(
        self,
        arguments: Sequence[Array],
        name: str = "forward",
        again: Mapping[int, Array] | None = None,
        updating: frozenset[fx.Node] = frozenset(),
    ) -> None:
        super().__init__(TABLE, name)
        self._arguments = arguments
        self._again = {id(arguments[at]): array for at, array in (again or {}).items()}
        self._updating = updating

    def lower(self, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if node in self._updating:
            args = [self._again.get(id(arg), arg) for arg in args]
        return super().lower(node, args, kwargs)

    def parameter(self, position: int, spec: TensorSpec, name: str) -> Array:
        return self._arguments[position]

    def value_of(self, result: fx.Node) -> fx.Node:
        """Of views that end where they began, such as a transposed transpose, and copies of them: where they began.

        A gradient of a weight is such a view, and what it is a view of is often a result, too.
        """
        node, chain = result, list[fx.Node]()
        while node.op == "call_function" and (is_view(node.target) or node.target is _clone):
            if not isinstance(node.args[0], fx.Node):
                return result
            chain.append(node)
            node = node.args[0]
        chain = [view for view in reversed(chain) if view.target is not _clone]
        return node if chain and shows_all(node, chain) else result

    def inner_results(self, graph: fx.GraphModule, arguments: Sequence[Array]) -> tuple[Array, ...]:
        """The results of a graph inside the graph (a branch, a loop's body) on these arrays."""
        context = JaxLowering(arguments)
        context.lower_graph(graph)
        return tuple(context.results)

    def build(self) -> tuple[tuple[Array, ...], tuple[int, ...]]:
        origin = {id(argument): -1 - position for position, argument in enumerate(self._arguments)}
        origin |= {id(again): origin[first] for first, again in self._again.items()}
        values: list[Array] = []
        for result in self.results:
            if id(result) not in origin:
                origin[id(result)] = len(values)
                values.append(result)
        return tuple(values), tuple(origin[id(result)] for result in self.results)

    def finish(self, call: Call, value: Any) -> Any:
        """Dtypes as ``meta["val"]`` says, and shapes checked against it: a lowering that is wrong must not go on."""
        val = call.val
        if not isinstance(val, (list, tuple)):
            return _finished(call, value, val)
        if len(value) != len(val):
            raise CompileError(f"{call.node.target} gives {len(val)} results, its lowering {len(value)}")
        # Shape inference may give a result for what a mask leaves out; nobody uses it.
        return [
            None if v is None or one is None else _finished(call, one, v) for one, v in zip(value, val, strict=True)
        ]


def _finished(call: Call, value: Any, val: Any) -> Array:
    value = cast(value, jax_dtype(val.dtype))
    if tuple(value.shape) != tuple(val.shape):
        raise CompileError(f"{call.node.target} gives {tuple(val.shape)}, its lowering {tuple(value.shape)}")
    return jnp.asarray(value)


@dataclass(frozen=True, slots=True)
class Updates:
    """Which results are the next values of inputs: parameters and an optimizer's state, found without being told.

    A result is that of the input which a chain of element-wise operators begins with, each of whose first arguments is
    the result before: ``p - lr * step``, ``exp_avg * b + grad * (1 - b)``.
    """

    of: Mapping[fx.Node, int]
    """Result to input."""
    calls: frozenset[fx.Node]
    """The calls of the chains, and the element-wise ones of the same shape that they compute from: what takes an input
    there can take it as it lies on several devices, when everything else computes from the whole of it."""
    inputs: tuple[int, ...]
    """The inputs that a call among :attr:`calls` takes."""

    @classmethod
    def in_graph(cls, graph: fx.GraphModule) -> Updates:
        inputs = {node: at for at, node in enumerate(graph.graph.find_nodes(op="placeholder"))}
        results: Any = graph.graph.output_node().args[0]
        of: dict[fx.Node, int] = {}
        calls = set[fx.Node]()
        for result in results:
            if not isinstance(result, fx.Node) or result in of or result in inputs:
                continue
            chain, spec = [result], TensorSpec.of(result.meta["val"])
            while chain[-1] not in inputs:
                before = next((arg for arg in chain[-1].args if isinstance(arg, fx.Node)), None)
                if not _element_wise(chain[-1].target) or before is None or not _is_like(before, spec):
                    break
                chain.append(before)
            of[result] = inputs.get(chain[-1], -1)
            if of[result] >= 0:
                _add_what_leads_to(chain[:-1], spec, calls)
        taken = {inputs[arg] for call in calls for arg in call.args if isinstance(arg, fx.Node) and arg in inputs}
        return cls(of, frozenset(calls), tuple(sorted(taken)))

    def by_value(self, graph: fx.GraphModule, origins: Sequence[int]) -> tuple[int, ...]:
        """Per value that is computed, the input whose next value it is, -1 for none."""
        results: Any = graph.graph.output_node().args[0]
        updates = [-1] * (1 + max(origins, default=-1))
        for result, origin in zip(results, origins, strict=True):
            if origin >= 0 and isinstance(result, fx.Node):
                updates[origin] = self.of.get(result, -1)
        return tuple(updates)


def _is_like(node: fx.Node, spec: TensorSpec) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.shape == spec.shape and value.dtype is spec.dtype


def _add_what_leads_to(chain: Sequence[fx.Node], spec: TensorSpec, calls: set[fx.Node]) -> None:
    """Add a chain's calls, and the element-wise ones of the spec's shape that they compute from."""
    ready = list(chain)
    while ready:
        node = ready.pop()
        if node not in calls and node.op == "call_function" and _element_wise(node.target) and _is_like(node, spec):
            calls.add(node)
            ready += [arg for arg in node.args if isinstance(arg, fx.Node)]


class JaxFunction:
    """A graph as a function for ``jax.jit``; once it is traced, :attr:`origins` says where results come from.

    The inputs that results are the next values of, :attr:`again`, are taken a second time at the end, for the updates.
    """

    def __init__(self, graph: fx.GraphModule) -> None:
        self._graph = graph
        self._updates = Updates.in_graph(graph)
        self.again = self._updates.inputs
        self.origins: tuple[int, ...] = ()

    def shapes(self) -> list[tuple[tuple[int, ...], Any]]:
        """Shape and dtype of every argument. Raises :class:`CompileError` for a dtype that XLA does not have."""
        shapes = shapes_of(self._graph)
        return [*shapes, *(shapes[at] for at in self.again)]

    def updates(self) -> tuple[int, ...]:
        """Per value that the traced function returns, the input whose next value it is, -1 for none."""
        return self._updates.by_value(self._graph, self.origins)

    def __call__(self, *arguments: Array) -> tuple[Array, ...]:
        first = len(arguments) - len(self.again)
        again = dict(zip(self.again, arguments[first:], strict=True))
        context = JaxLowering(arguments[:first], again=again, updating=self._updates.calls)
        context.lower_graph(self._graph)
        values, self.origins = context.build()
        return values


def _element_wise(op: Any) -> bool:
    return isinstance(op, torch._ops.OpOverload) and (torch.Tag.pointwise in op.tags or op is _clone)


def shapes_of(graph: fx.GraphModule) -> list[tuple[tuple[int, ...], Any]]:
    """Shape and dtype of every input. Raises :class:`CompileError` for a dtype that XLA does not have."""
    try:
        return [(spec.shape, jax_dtype(spec.dtype)) for spec in input_specs(graph)]
    except KeyError as error:
        raise CompileError(
            f"XLA has no dtype {error.args[0]}; convert the tensor before it goes to the device"
        ) from error
