"""How padding is followed through a graph: layouts of dimensions, masks, and the walk that asks a rule per operator.

See :mod:`.masking`, where the rules are.
"""

from __future__ import annotations

import math
import operator
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from torch import fx
from torch.fx.node import map_arg
from torch.utils._pytree import tree_map

from ..core.specs import TensorSpec
from .builder import Capture, GraphBuilder
from .partition import REFUSAL

__all__ = [
    "TRUE_SIZE",
    "Dim",
    "Factor",
    "Inexact",
    "Layout",
    "Masked",
    "Masker",
    "arguments",
    "broadcast",
    "dim_of",
    "in_its_shape",
    "is_padded",
    "regrouped",
    "rule_for",
    "size_of",
    "whole",
]

aten = torch.ops.aten
_MOST_KNOWN: Final = 1 << 17
"""Elements of a constant that is computed to see which places it picks."""
_getitem: Any = operator.getitem

Factor: TypeAlias = tuple[int, int | None]
"""A size and the number of the symbol that it is, if it is one."""
Dim: TypeAlias = tuple[Factor, ...]
Layout: TypeAlias = tuple[Dim, ...]


class Inexact(Exception):
    """Why a graph cannot be padded."""


@dataclass(frozen=True, slots=True)
class Masked:
    """``module`` takes the true size of each symbol, too (0-dim); ``results`` are the outputs' layouts.

    ``sums``: symbols beyond the given ones, each another symbol and a constant.
    """

    module: fx.GraphModule
    results: tuple[Layout | None, ...]
    sums: tuple[tuple[int, int], ...] = ()


def dim_of(factors: Sequence[Factor]) -> Dim:
    """Factors with those that are no symbol joined, without ones."""
    made: list[Factor] = []
    for size, symbol in factors:
        if symbol is None and size == 1:
            continue
        if symbol is None and made and made[-1][1] is None:
            made[-1] = (made[-1][0] * size, None)
        else:
            made.append((size, symbol))
    return tuple(made)


def size_of(dim: Sequence[Factor]) -> int:
    """The size of a dimension, padding included."""
    return math.prod(size for size, _ in dim)


def is_padded(dim: Dim) -> bool:
    """Whether a factor of a dimension is a symbol."""
    return any(symbol is not None for _, symbol in dim)


def regrouped(layout: Layout, shape: Sequence[int]) -> Layout:
    """The layout after a ``view`` to this shape. Raises :class:`Inexact` where a padded factor would be cut."""
    if 0 in shape and not any(map(is_padded, layout)):
        return tuple(dim_of([(size, None)]) for size in shape)
    left = [factor for dim in layout for factor in dim]
    made: list[Dim] = []
    for wanted in shape:
        taken: list[Factor] = []
        while size_of(taken) < wanted:
            if not left:
                raise Inexact("a view that does not keep the padded dimension together")
            size, symbol = left.pop(0)
            need, odd = divmod(wanted, size_of(taken))
            if odd:
                raise Inexact("a view cuts the padded dimension")
            if size > need:
                if symbol is not None or size % need:
                    raise Inexact("a view cuts the padded dimension")
                left.insert(0, (size // need, None))
                size = need
            taken.append((size, symbol))
        made.append(dim_of(taken))
    if left:
        raise Inexact("a view that does not keep the padded dimension together")
    return tuple(made)


def broadcast(layouts: Sequence[Layout]) -> Layout:
    """The layout of an elementwise operator's result."""
    rank = max(map(len, layouts), default=0)
    made: list[Dim] = []
    for back in range(rank, 0, -1):
        found = {layout[-back] for layout in layouts if len(layout) >= back and layout[-back]}
        if len(found) > 1:
            raise Inexact("an operator puts dimensions together that are padded in different ways")
        made.append(found.pop() if found else ())
    return tuple(made)


def arguments(node: fx.Node, *names: str) -> list[Any]:
    """Arguments by name, with the schema's defaults."""
    found: list[Any] = []
    for name in names:
        at, argument = next((i, a) for i, a in enumerate(node.target._schema.arguments) if a.name == name)  # type: ignore[union-attr]
        found.append(node.args[at] if at < len(node.args) else node.kwargs.get(name, argument.default_value))
    return found


def in_its_shape(node: fx.Node) -> Iterator[fx.Node]:
    """The users of a value, and of what is computed from it in its shape; nearest first."""
    shape = node.meta["val"].shape
    ahead, seen = deque([node]), {node}
    while ahead:
        for user in ahead.popleft().users:
            if user not in seen:
                seen.add(user)
                yield user
                value = user.meta.get("val")
                if isinstance(value, torch.Tensor) and value.shape == shape:
                    ahead.append(user)


Rule: TypeAlias = Callable[["Masker", fx.Node, Sequence[fx.Node]], Any]
_RULES: Final[dict[Any, Rule]] = {}


def rule_for(*ops: Any) -> Callable[[Rule], Rule]:
    """Enter a rule: ``(masker, node, the node in the other graphs) -> (new node, layout)``."""

    def enter(rule: Rule) -> Rule:
        _RULES.update(dict.fromkeys(ops, rule))
        return rule

    return enter


TRUE_SIZE: Final = "true_size_"
"""How the inputs of a masked graph are named that are the true sizes."""


class Masker:
    """Writes the graph. ``variants`` are the nodes that a node is in the other graphs."""

    def __init__(
        self,
        sizes: Sequence[int],
        others: Sequence[int],
        capture: Capture,
        smallest: int = 2,
        strict: bool = True,
        number: torch.dtype = torch.int64,
        constants: Collection[str] = (),
        sums: bool = False,
    ) -> None:
        self.constants = constants
        self.known: dict[fx.Node, torch.Tensor] = {}
        self.sizes = list(sizes)
        self.others = list(others)
        self.sums: list[tuple[int, int]] = []
        """Symbols after the given ones, each of these and a constant: ``T - 1`` is as good a size as ``T``."""
        self.may_sum = sums
        self.smallest = smallest
        self.strict = strict
        self.number = number
        self.builder = GraphBuilder(capture, strict=strict)
        self.values: dict[fx.Node, fx.Node] = {}
        self.layouts: dict[fx.Node, Any] = {}
        self.true: list[fx.Node] = []
        self._masks: dict[Dim, fx.Node] = {}

    # -- layouts ---------------------------------------------------------------------------------------------
    def symbol(self, size: int, variants: Sequence[int]) -> Dim:
        """A dimension that is a symbol or none. Raises :class:`Inexact` for what is computed from one."""
        moved = [at for at, other in enumerate(variants) if other != size]
        if not moved:
            return dim_of([(size, None)])
        (at, *more) = moved
        if not more and size - self.sizes[at] == variants[at] - self.others[at]:
            if size == self.sizes[at]:
                return ((size, at),)
            if self.may_sum and self.true and size > 0:
                return ((size, self._sum(at, size - self.sizes[at])),)
        raise Inexact(f"a size is computed from one that changes ({size})")

    def _sum(self, at: int, constant: int) -> int:
        """The symbol that is a given one and a constant."""
        given = len(self.sizes) - len(self.sums)
        if (at, constant) in self.sums:
            return given + self.sums.index((at, constant))
        self.sums.append((at, constant))
        self.sizes.append(self.sizes[at] + constant)
        self.true.append(self.builder(aten.add.Tensor, self.true[at], constant))
        return len(self.sizes) - 1

    def in_variant(self, symbol: int | None, size: int, at: int) -> int:
        """A factor's size in the graph that has another size for symbol ``at``."""
        given = len(self.others)
        base, constant = self.sums[symbol - given] if symbol is not None and symbol >= given else (symbol, 0)
        return self.others[at] + constant if base == at else size

    def true_number(self, number: Any, variants: Sequence[Any], dtype: torch.dtype) -> fx.Node:
        """A number that is a constant times symbols, of the true sizes, in this dtype. Raises :class:`Inexact` for any
        other."""
        moved = [at for at, other in enumerate(variants) if other != number]
        rest, b, factors = number, self.builder, list[int]()
        for at in moved:
            symbol = self._factor(number, variants[at], at) if number.__class__ is int else None
            if symbol is None or rest % self.sizes[symbol]:
                raise Inexact("a number is computed from a size that changes")
            rest //= self.sizes[symbol]
            factors.append(symbol)
        made = b(aten.full.default, [], rest, dtype=dtype, device=torch.device("cpu"))
        for symbol in factors:
            made = b(aten.mul.Tensor, made, b.cast(self.true[symbol], dtype))
        return made

    def _factor(self, number: int, other: int, at: int) -> int | None:
        """Which symbol a number is a multiple of that changes with symbol ``at``: this one, or a sum of it."""
        size, instead = self.sizes[at], self.others[at]
        if other * size == number * instead:
            return at
        times, left = divmod(number - other, size - instead)
        if not self.may_sum or left or not times or number % times or number // times <= 0:
            return None
        return self._sum(at, number // times - size)

    def from_shapes(self, node: fx.Node, variants: Sequence[fx.Node]) -> Layout:
        """The layout of a tensor all whose dimensions are symbols or none."""
        shapes = [tuple(one.meta["val"].shape) for one in variants]
        return tuple(self.symbol(n, [shape[d] for shape in shapes]) for d, n in enumerate(node.meta["val"].shape))

    def of_any_order(self, node: fx.Node, variants: Sequence[fx.Node]) -> Layout:
        """The layout of a value that is right whichever sizes a dimension is taken to be a product of.

        Of a size such as that of ``[B * T, 8]`` only what the value is put together with tells.
        """
        try:
            return self.from_shapes(node, variants)
        except Inexact:
            shape = node.meta["val"].shape
            for user in in_its_shape(node):
                for other in user.all_input_nodes:
                    known: Any = self.layouts.get(other)
                    if known.__class__ is tuple and other.meta["val"].shape == shape:
                        return known
            raise

    def is_there(self, count: int) -> bool:
        """Whether a dimension has so many places whatever its true size is, so that the last of these may be taken.

        Where sizes may be sums, conditions on the sizes come with the graph, that each place is there among them.
        """
        return count > 0 and (self.may_sum or count <= self.smallest)

    def check(self, layout: Any, value: Any, variants: Sequence[Any]) -> None:
        """Whether a layout explains the shapes that every graph has."""
        if isinstance(value, torch.Tensor):
            for at, other in enumerate(variants):
                sizes = [math.prod(self.in_variant(s, n, at) for n, s in dim) for dim in layout]
                if sizes != list(other.shape):
                    raise Inexact("a shape that the masks do not explain")
        elif isinstance(value, (list, tuple)):
            for position, one in enumerate(value):
                self.check(layout[position], one, [other[position] for other in variants])

    def layout(self, node: Any) -> Layout:
        return self.layouts[node]

    # -- nodes -----------------------------------------------------------------------------------------------
    def copy(self, node: fx.Node, instead: Mapping[fx.Node, fx.Node] | None = None) -> fx.Node:
        """The node as it is, on other values where ``instead`` says so."""
        known = {**self.values, **(instead or {})}
        return self.builder.graph.node_copy(node, lambda n: known[n])

    def same_constants(self, node: fx.Node, variants: Sequence[fx.Node]) -> None:
        """Raises :class:`Inexact` where an argument that is no tensor is computed from a size that changes."""

        def constants(one: fx.Node) -> Any:
            return tree_map(lambda v: None if isinstance(v, fx.Node) else v, (list(one.args), dict(one.kwargs)))

        if any(repr(constants(one)) != repr(constants(node)) for one in variants):
            raise Inexact(f"a number is computed from a size that changes, for {node.target}")

    def mask_of(self, dim: Dim) -> fx.Node:
        """Which places of a dimension are true ones: bool, 1-D."""
        if dim in self._masks:
            return self._masks[dim]
        b, found = self.builder, None
        shape = [size for size, _ in dim]
        for at, (size, symbol) in enumerate(dim):
            if symbol is not None:
                place = b(aten.arange.start_step, 0, size, 1, dtype=torch.int64, device=torch.device("cpu"))
                # Positions are compared as what sizes are: engines that compute in floats only have no integers.
                holds = b(aten.lt.Tensor, b.cast(place, self.number), self.true[symbol])
                if len(dim) > 1:
                    holds = b(aten.view.default, holds, [size if one == at else 1 for one in range(len(dim))])
                found = holds if found is None else b(aten.logical_and.default, found, holds)
        if len(dim) > 1:
            found = b(aten.clone.default, b(aten.expand.default, found, shape), memory_format=torch.contiguous_format)
            found = b(aten.view.default, found, [size_of(dim)])
        assert found is not None
        self._masks[dim] = found
        return found

    def masked(self, node: fx.Node, fill: Any, dims: Sequence[int] | None = None) -> fx.Node:
        """The node's value with ``fill`` beyond the true sizes of these dimensions (default: of all)."""
        layout, b = self.layout(node), self.builder
        rank = len(layout)
        if node.op == "placeholder" and fill == 0:
            return self.values[node]  # callers pad with zeros
        chosen = {d % rank for d in dims} if dims is not None else set(range(rank))
        value = self.values[node]
        for d in sorted(chosen):
            if is_padded(layout[d]):
                shape = [size_of(layout[d]) if at == d else 1 for at in range(rank)]
                mask = b(aten.view.default, self.mask_of(layout[d]), shape)
                dtype = b.val(value).dtype
                value = b.cast(b(aten.where.ScalarOther, mask, value, fill), dtype)
        return value

    def remember(self, node: fx.Node, made: Any) -> None:
        """Compute what depends on constants alone, for rules that ask which places are picked by number.

        What was masked depends on true sizes, and is no constant.
        """
        inputs = node.all_input_nodes
        as_is = isinstance(made, fx.Node) and made.all_input_nodes == [self.values[one] for one in inputs]
        if as_is and all(one in self.known for one in inputs) and isinstance(node.target, torch._ops.OpOverload):
            value, op = node.meta["val"], node.target
            small = isinstance(value, torch.Tensor) and value.numel() <= _MOST_KNOWN
            if not small or op._schema.is_mutable or torch.Tag.nondeterministic_seeded in op.tags:
                return
            args, kwargs = map_arg((node.args, node.kwargs), self.known.__getitem__)
            try:
                with torch.no_grad():
                    self.known[node] = op(*args, **kwargs)
            except (RuntimeError, ValueError, TypeError, IndexError):
                return  # it fails when the program runs, if it is run

    def picks_in_order(self, index: fx.Node, size: int) -> bool:
        """Whether an index is known to be within a dimension, counted from its beginning."""
        found = self.known.get(index)
        return found is not None and (found.numel() == 0 or bool((found >= 0).all() and (found < size).all()))

    def any_padded(self, *nodes: Any) -> bool:
        return any(is_padded(dim) for node in nodes if isinstance(node, fx.Node) for dim in self.layout(node))

    # -- the whole -------------------------------------------------------------------------------------------
    def call(self, node: fx.Node, variants: Sequence[fx.Node]) -> None:
        """One operator."""
        self.builder.debug_handle, self.builder.source = node.meta["debug_handle"], node.meta.get("source")
        self.builder.origin = {
            name: node.meta[name] for name in ("stack_trace", "nn_module_stack") if name in node.meta
        }
        if any((REFUSAL in one.meta) != (REFUSAL in node.meta) for one in variants):
            raise Inexact("the graph is another one for another size")
        if REFUSAL in node.meta and (self.strict or node.meta.get("at_once")):
            raise Inexact(f"{node.target} runs outside of the graph")
        rule = _RULES.get(node.target)
        if rule is None and torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise Inexact("random numbers depend on where they stand in a tensor")
        inputs = [n for n in node.all_input_nodes if isinstance(self.layouts[n], tuple)]
        if rule is not None:
            made, layout = rule(self, node, variants)
        elif node.target is _getitem:
            made, layout = self.copy(node), self.layouts[node.args[0]][node.args[1]]  # type: ignore[index]
        elif torch.Tag.pointwise in getattr(node.target, "tags", ()):
            self.same_constants(node, variants)
            made, layout = self.copy(node), broadcast([self.layout(n) for n in inputs])
            if not isinstance(node.meta["val"], torch.Tensor):
                layout = [layout] * len(node.meta["val"])  # several results, such as those of frexp
        elif not self.any_padded(*inputs):
            self.same_constants(node, variants)
            made, layout = self.copy(node), tree_map(whole, node.meta["val"])
        else:
            raise Inexact(f"{node.target} has no rule")
        self.check(layout, node.meta["val"], [one.meta["val"] for one in variants])
        self.values[node], self.layouts[node] = made, layout
        self.remember(node, made)

    def run(self, graphs: Sequence[fx.GraphModule]) -> Masked:
        """The graph; ``graphs`` are the one to mask, and one per symbol."""
        rows = [list(graph.graph.nodes) for graph in graphs]
        if len({len(row) for row in rows}) > 1:
            raise Inexact("the graph is another one for another size")
        root = torch.nn.Module()
        results: tuple[Layout | None, ...] = ()
        inputs = sum(node.op == "placeholder" for node in rows[0])
        for position, (node, *variants) in enumerate(zip(*rows, strict=True)):
            if any((one.op, one.target) != (node.op, node.target) for one in variants):
                raise Inexact("the graph is another one for another size")
            if node.op == "placeholder":
                made = self.values[node] = self.copy(node)
                made.name = node.name  # FX would rename one that is called ``input``
                tensor = isinstance(node.meta["val"], torch.Tensor)
                if node.name in self.constants:
                    self.known[node] = node.meta["constant"]
                self.layouts[node] = self.from_shapes(node, variants) if tensor else ()
                if position == inputs - 1:
                    spec = TensorSpec((), self.number, ())
                    self.true = [self.builder.placeholder(f"{TRUE_SIZE}{at}", spec) for at in range(len(self.sizes))]
            elif node.op == "get_attr":
                held = getattr(graphs[0], str(node.target))
                if not isinstance(held, torch.Tensor):
                    raise Inexact("control flow")
                setattr(root, str(node.target), held)
                self.values[node], self.layouts[node] = self.copy(node), whole(held)
            elif node.op == "output":
                self.copy(node)
                outputs: Any = node.args[0]
                results = tuple(self.layouts[o] if isinstance(o, fx.Node) else None for o in outputs)
            else:
                self.call(node, variants)
        masked = fx.GraphModule(root, self.builder.graph)
        masked.meta["random_ops"] = graphs[0].meta.get("random_ops", 0)
        return Masked(masked, results, tuple(self.sums))


def whole(value: Any) -> Any:
    """The layout of a tensor without padding."""
    return tuple(dim_of([(n, None)]) for n in value.shape) if isinstance(value, torch.Tensor) else ()
