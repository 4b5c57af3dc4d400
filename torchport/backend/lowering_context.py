"""For backends that emit code node by node: a graph in normal form, lowered with a table of operators.

The parts are those of ``torch::lazy::LoweringContext`` (``torch/csrc/lazy/backend/lowering_context.h``): parameters are
added, nodes are lowered, results and aliases are declared, and ``build`` turns what was emitted into what the engine
wants. A backend subclasses :class:`LoweringContext`, says how a parameter and a result of its engine look, and fills a
:class:`LoweringTable`; :meth:`LoweringContext.lower_graph` does the walking.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from torch import fx
from torch.fx.node import map_arg

from ..core.errors import CompileError, GraphError, TorchportError, UnsupportedOp
from ..core.specs import TensorSpec
from .interface import Support
from .normal_form import source_of
from .own_kernels import OwnKernel

__all__ = ["Call", "Lowering", "LoweringContext", "LoweringTable"]

Value = TypeVar("Value")
Built = TypeVar("Built")
_getitem: Any = operator.getitem


@dataclass(frozen=True, slots=True)
class Call:
    """What a lowering may know of the node it lowers: its fake result and its arguments as nodes."""

    node: fx.Node
    context: LoweringContext[Any, Any]
    """Who lowers it: the place for what one lowering leaves to another, such as the engine's own builder."""

    @property
    def val(self) -> Any:
        """``meta["val"]``: a fake tensor, or a sequence of them (``None`` for one that is left out)."""
        return self.node.meta["val"]

    def arg(self, position: int) -> Any:
        """The fake tensor of a positional argument, or the argument itself where it is no tensor."""
        value = self.node.args[position]
        return value.meta["val"] if isinstance(value, fx.Node) else value


@dataclass(frozen=True, slots=True)
class Lowering:
    """One row of a table: ``lower(call, *args, **kwargs)`` emits the operator and returns its value or values.

    ``refuses`` tells why a node of the operator cannot be lowered, or nothing where it can. ``topic`` is for people.
    """

    lower: Callable[..., Any]
    refuses: Callable[[fx.Node], str | None] | None = None
    topic: str = ""


@dataclass(slots=True)
class LoweringTable(Mapping[Any, Lowering]):
    """Operator overload → :class:`Lowering`. An operator that is entered twice raises :class:`TorchportError`."""

    rows: dict[Any, Lowering] = field(default_factory=dict[Any, Lowering])

    def __call__(
        self, *ops: Any, refuses: Callable[[fx.Node], str | None] | None = None, topic: str = ""
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """A decorator: the function lowers these operators."""

        def enter(lower: Callable[..., Any]) -> Callable[..., Any]:
            for op in ops:
                if op in self.rows:
                    raise TorchportError(f"{op} has two lowerings; keep one")
                self.rows[op] = Lowering(lower, refuses, topic or lower.__module__.rpartition(".")[2])
            return lower

        return enter

    def __getitem__(self, op: Any) -> Lowering:
        return self.rows[op]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def supports(self, node: fx.Node) -> Support:
        """An answer for :meth:`Backend.supports`: whether the node's operator is here and its row does not refuse."""
        row = self.rows.get(node.target)
        if row is None:
            return Support.no(f"there is no lowering of {node.target}")
        reason = row.refuses(node) if row.refuses is not None else None
        return Support.yes() if reason is None else Support.no(reason)


def _row_of(own: OwnKernel) -> Lowering:
    """A row for an operator that the program gave a kernel for."""
    return Lowering(lambda call, *args, **kwargs: own.fn(*args, **kwargs))


class LoweringContext(ABC, Generic[Value, Built]):
    """Lowers one graph. ``Value`` is the engine's value while code is emitted, ``Built`` what :meth:`build` gives."""

    def __init__(self, table: Mapping[Any, Lowering], name: str = "forward") -> None:
        self.table = table
        self.name = name
        self.results: list[Value] = []
        self.aliases: dict[int, int] = {}
        """Result position → position of the parameter whose memory it may take."""
        self._parameter_count = 0
        self._emitted = 0
        self._specs: list[TensorSpec] = []

    # -- what a backend says -----------------------------------------------------------------------------------
    @abstractmethod
    def parameter(self, position: int, spec: TensorSpec, name: str) -> Value:
        """The engine's value of a new parameter."""

    @abstractmethod
    def build(self) -> Built:
        """What was emitted, in the engine's own form."""

    def finish(self, call: Call, value: Any) -> Any:
        """What a lowering returned, brought to the node's dtype and shape. Default: as it is."""
        return value

    def value_of(self, result: fx.Node) -> fx.Node:
        """The node whose value is returned for a result. Default: its own; another's where both are the same."""
        return result

    # -- torch::lazy::LoweringContext --------------------------------------------------------------------------
    def add_parameter(self, spec: TensorSpec, name: str) -> Value:
        """A new parameter, in order (``AddParameter``)."""
        self._parameter_count += 1
        return self.parameter(self._parameter_count - 1, spec, name)

    def add_result(self, value: Value, spec: TensorSpec) -> int:
        """Declare a result; returns its position (``AddResult``)."""
        self.results.append(value)
        self._specs.append(spec)
        return len(self.results) - 1

    def result_shape(self, position: int) -> TensorSpec:
        """The spec of a result (``GetResultShape``). Raises ``IndexError``."""
        return self._specs[position]

    def set_up_alias(self, result: int, parameter: int) -> None:
        """Let a result take the memory of a parameter that nobody reads again (``SetUpAlias``).

        Raises :class:`GraphError` for positions that do not exist and for a parameter that is taken.
        """
        if not (0 <= result < len(self.results) and 0 <= parameter < self._parameter_count):
            raise GraphError(
                f"cannot alias result {result} to parameter {parameter}: there are {len(self.results)} results "
                f"and {self._parameter_count} parameters"
            )
        if parameter in self.aliases.values():
            raise GraphError(f"parameter {parameter} already gives its memory to another result")
        self.aliases[result] = parameter

    @property
    def emitted_node_count(self) -> int:
        """How many calls were lowered so far (``GetEmittedNodeCount``)."""
        return self._emitted

    # -- lowering ----------------------------------------------------------------------------------------------
    def lower(self, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Emit one call, its tensor arguments given as the engine's values.

        Raises :class:`UnsupportedOp` for an operator without a row, :class:`CompileError` when the row fails.
        """
        own = node.meta.get("kernel")
        row = self.table.get(node.target) if own is None else _row_of(own)
        if row is None:
            raise UnsupportedOp(f"there is no lowering of {node.target}", op=str(node.target), source=source_of(node))
        call = Call(node, self)
        try:
            value = self.finish(call, row.lower(call, *args, **kwargs))
        except TorchportError:
            raise
        except Exception as error:
            raise CompileError(
                f"lowering failed: {type(error).__name__}: {error}", op=str(node.target), source=source_of(node)
            ) from error
        self._emitted += 1
        return value

    def lower_graph(self, graph: fx.GraphModule) -> None:
        """Lower a whole graph in normal form: parameters, calls and results in order."""
        values: dict[fx.Node, Any] = {}
        for node in graph.graph.nodes:
            if node.op == "placeholder":
                values[node] = self.add_parameter(TensorSpec.of(node.meta["val"]), node.name)
            elif node.op == "call_function":
                args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = args[0][args[1]] if node.target is _getitem else self.lower(node, args, kwargs)
            elif node.op == "get_attr" and isinstance(inner := getattr(graph, str(node.target)), fx.GraphModule):
                values[node] = inner  # what a higher-order operator calls
            elif node.op == "output":
                results: Any = node.args[0]
                for result in (results,) if isinstance(results, fx.Node) else results:
                    self.add_result(values[self.value_of(result)], TensorSpec.of(result.meta["val"]))
            else:
                raise GraphError(f"a {node.op} node cannot be lowered; run verify_graph first")
