"""A graph in normal form for one set of sizes as one whose sizes are symbols.

It is the graph as PyTorch's own front ends write such graphs: ``meta["val"]`` has fake tensors whose sizes are
``torch.SymInt``, and what computes sizes are nodes (``aten.sym_size.int`` and Python's arithmetic). What its operators
and its compiler ask of the sizes is noted by PyTorch's ``ShapeEnv`` as guards: a condition for its use.

Private PyTorch APIs of this module are listed in ``docs/torch-internals.md``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx
from torch._guards import GuardSource, Source
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._python_dispatch import _disable_current_modes

from ...core.errors import TorchportError
from ..infer import quiet
from .form import Form, Sketch, memory_order, replaced, strides_in
from .guards import NotSymbolic

__all__ = ["SymbolicGraph", "symbolic_graph"]


def _joined(x: torch.Tensor, pad: Sequence[Any], value: Any = 0) -> torch.Tensor:
    """``constant_pad_nd`` without writes: what is beyond the tensor is joined to it, what is to go is cut off."""
    for at in range(len(pad) // 2):
        dim, before, after = x.dim() - 1 - at, pad[2 * at], pad[2 * at + 1]
        start, end = max(0, -before), x.shape[dim] + min(0, after)
        if start or after < 0:
            x = torch.ops.aten.slice.Tensor(x, dim, start, end)
        sides = [(*x.shape[:dim], max(0, count), *x.shape[dim + 1 :]) for count in (before, after)]
        filled = [None if not side[dim] else x.new_full(side, value) for side in sides]
        parts = [part for part in (filled[0], x, filled[1]) if part is not None]
        x = torch.ops.aten.cat.default(parts, dim) if len(parts) > 1 else x
    return x.clone() if not any(pad) else x


def _expanded(op: Any) -> Callable[..., Any]:
    """An elementwise operator on tensors that are expanded to one shape before."""

    def run(*args: Any, **kwargs: Any) -> Any:
        shapes = [one.shape for one in args if isinstance(one, torch.Tensor)]
        if all(shape == shapes[0] for shape in shapes):
            return NotImplemented
        shape = torch.broadcast_shapes(*shapes)
        return op(*(one.expand(shape) if isinstance(one, torch.Tensor) else one for one in args), **kwargs)

    return run


_REWRITES: Final[Mapping[Any, Callable[..., Any]]] = {
    torch.ops.aten.constant_pad_nd.default: _joined,
    torch.ops.aten.lerp.Tensor: _expanded(torch.ops.aten.lerp.Tensor),
    torch.ops.aten.addcmul.default: _expanded(torch.ops.aten.addcmul.default),
    torch.ops.aten.addcdiv.default: _expanded(torch.ops.aten.addcdiv.default),
}
"""Operators whose kernels or shape rules make numbers of symbolic sizes (torch 2.13), written otherwise."""


@dataclass(frozen=True, slots=True)
class SymbolicGraph:
    """A graph whose sizes are symbols, and those symbols in the order of the form's."""

    module: fx.GraphModule
    symbols: tuple[torch.SymInt, ...]
    environment: Any
    """PyTorch's ``ShapeEnv``: it notes what is asked of the symbols from now on, too."""

    def guards(self) -> str:
        """The condition on the symbols (:func:`.guards.hold`) under which what was made of the graph is right."""
        return self.environment.produce_guards_expression(self.symbols) or "True"


class _Resized(fx.Interpreter):
    """Runs a graph with other integers than it holds."""

    def __init__(self, graph: fx.GraphModule, integers: Sequence[Any]) -> None:
        super().__init__(graph)
        self._integers = iter(integers)

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> Any:
        if n.op != "call_function":
            return super().fetch_args_kwargs_from_env(n)

        def other(_: int) -> Any:
            return next(self._integers)

        args = tuple(replaced(one, other) for one in n.args)
        kwargs = {name: replaced(one, other) for name, one in n.kwargs.items()}
        return self.map_nodes_to_values(args, n), self.map_nodes_to_values(kwargs, n)


@dataclass(frozen=True)
class _Symbol(Source):
    """Where a symbol comes from, as PyTorch's shape environment wants to be told: nowhere in Python."""

    number: int

    @functools.cached_property
    def guard_source(self) -> GuardSource:
        return GuardSource.CONSTANT

    @property
    def _name_template(self) -> str:
        return f"size{self.number}"


def symbolic_graph(graph: fx.GraphModule, form: Form, sketch: Sketch) -> SymbolicGraph:
    """The graph, of which ``sketch`` is one, with symbols for what varies. Raises :class:`NotSymbolic`."""
    environment = ShapeEnv(duck_shape=False)
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=environment)
    symbols: list[Any] = []
    for at, value in enumerate(form.values(sketch)):
        source = _Symbol(at)
        expression = environment.create_symbol(value, source=source, dynamic_dim=DimDynamic.DYNAMIC)
        symbols.append(environment.create_symintnode(expression, hint=value, source=source))
    integers = iter(form.integers_at(symbols))
    inputs: list[torch.Tensor] = []
    with _disable_current_modes(), mode:
        for spec in sketch.inputs:
            shape = [next(integers) for _ in spec.shape]
            strides = strides_in(memory_order(spec), shape)
            inputs.append(torch.empty_strided(shape, strides, dtype=spec.dtype, device="cpu"))

    def run(*given: torch.Tensor) -> Any:
        sizes = [size for tensor in given for size in tensor.shape]
        values = [sizes[at] for at in form.sources]
        return _Resized(graph, form.integers_at(values)[sketch.dims :]).run(*given)

    try:
        with _disable_current_modes(), mode, torch.no_grad(), quiet():
            module = make_fx(run, dict(_REWRITES), _allow_non_fake_inputs=True)(*inputs)
    except TorchportError:
        raise
    except Exception as error:
        raise NotSymbolic(f"{type(error).__name__}: {error}") from error
    pairs = zip(graph.graph.find_nodes(op="placeholder"), module.graph.find_nodes(op="placeholder"), strict=True)
    for given, made in pairs:
        if "donated" in given.meta:
            made.meta["donated"] = given.meta["donated"]
    return SymbolicGraph(module, tuple(symbols), environment)
