"""A graph in normal form as a function of JAX arrays, to be traced by ``jax.jit``."""

from __future__ import annotations

from collections.abc import Sequence
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

__all__ = ["JaxFunction", "shapes_of", "updates_of"]

_clone: Any = torch.ops.aten.clone.default


class JaxLowering(LoweringContext[Array, tuple[tuple[Array, ...], tuple[int, ...]]]):
    """Lowers inside a trace of JAX: parameters are the traced function's arguments.

    ``build`` gives the values to compute, each once, and where every result comes from: the position of a value, or
    ``-1 - i`` for argument ``i`` as it is. Values never change, so results may share them; a copy would cost time.
    """

    def __init__(self, arguments: Sequence[Array], name: str = "forward") -> None:
        super().__init__(TABLE, name)
        self._arguments = arguments

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


class JaxFunction:
    """A graph as a function for ``jax.jit``; once it is traced, :attr:`origins` says where results come from."""

    def __init__(self, graph: fx.GraphModule) -> None:
        self._graph = graph
        self.origins: tuple[int, ...] = ()

    def __call__(self, *arguments: Array) -> tuple[Array, ...]:
        context = JaxLowering(arguments)
        context.lower_graph(self._graph)
        values, self.origins = context.build()
        return values


def updates_of(graph: fx.GraphModule, origins: Sequence[int]) -> tuple[int, ...]:
    """Per value that is computed, the input whose next value it is, -1 for none.

    That is the input which a chain of element-wise operators begins with, each of whose first arguments is the result
    before: ``p - lr * step``, ``exp_avg * b + grad * (1 - b)``. So parameters and an optimizer's state are found
    without being told.
    """
    inputs = {node: at for at, node in enumerate(graph.graph.find_nodes(op="placeholder"))}
    results: Any = graph.graph.output_node().args[0]
    updates = [-1] * (1 + max(origins, default=-1))
    for result, origin in zip(results, origins, strict=True):
        if origin < 0 or not isinstance(result, fx.Node):
            continue
        node, spec = result, TensorSpec.of(result.meta["val"])
        while node not in inputs:
            before = next((arg for arg in node.args if isinstance(arg, fx.Node)), None)
            if not _element_wise(node.target) or before is None:
                break
            value = before.meta.get("val")
            if not isinstance(value, torch.Tensor) or value.shape != spec.shape or value.dtype is not spec.dtype:
                break
            node = before
        updates[origin] = inputs.get(node, -1)
    return tuple(updates)


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
