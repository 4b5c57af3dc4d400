"""The form of a single graph, where the program has said which dimensions of its inputs will vary.

No second graph tells which other integers go with them. Each that equals a size which is known to vary by then is taken
for it, if the operators have shapes for other sizes as well. That is a guess; as with any form, each further graph is
compared with it, and one that does not fit is compiled as if nothing had been said.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeAlias, cast

import torch
from torch import fx
from torch.fx.node import map_arg

from ...core.specs import TensorSpec
from ...core.varying import VaryingDim, marks_of
from ..builder import GraphBuilder
from .form import SMALLEST, Form, Size, Sketch, memory_order, replaced, strides_in, told

__all__ = ["bounds_of", "marked_form"]

Column: TypeAlias = tuple[int, ...]
"""An integer at the sizes of the graph, and at the other sizes that it is tried at."""
_STEPS: Final = ((5, 9, 14, 22, 31, 43), (11, 18, 27, 38, 50, 65))
"""How much larger each symbol is in the two other sets of sizes: no two alike."""
_MOST_GUESSES: Final = 32
"""Of which integers of one operator vary, before it is given up."""
_FAILURES: Final = (RuntimeError, ValueError, TypeError, IndexError)


def bounds_of(sketch: Sketch, form: Form) -> list[tuple[int | None, int | None]]:
    """What was said of each symbol's smallest and largest value, whichever dimension with its value was marked."""
    found: list[tuple[int | None, int | None]] = []
    for number in range(len(form.sources)):
        symbol = Size(((1, (number,)),))
        said = [one for at, one in _marked(sketch) if form.varying.get(at) == symbol]
        lows = [one.low for one in said if one.low is not None]
        highs = [one.high for one in said if one.high is not None]
        found.append((max(lows, default=None), min(highs, default=None)))
    return found


def _marked(sketch: Sketch) -> Iterator[tuple[int, VaryingDim]]:
    """The numbers of the dimensions of inputs that are marked, and their marks."""
    first = 0
    for spec in sketch.inputs:
        for one in marks_of(spec.dtype_name, spec.shape):
            yield first + one.dim, one
        first += len(spec.shape)


def marked_form(graph: fx.GraphModule, sketch: Sketch) -> Form | None:
    """The form, or ``None`` where nothing is marked or no guess has shapes."""
    sizes = list(dict.fromkeys(sketch.integers[at] for at, _ in _marked(sketch)))
    if not sizes or min(sizes) < SMALLEST or len(sizes) > len(_STEPS[0]):
        return None
    columns = {size: (size, *(size + steps[at] for steps in _STEPS)) for at, size in enumerate(sizes)}
    marked = {at for at, _ in _marked(sketch)}
    # Inputs that are as large without having been marked vary with them, such as a mask; or they do not.
    alike = {at for at in range(sketch.dims) if sketch.integers[at] in columns}
    for dims in dict.fromkeys((frozenset(marked), frozenset(alike))):
        found = _Guess(graph, sketch, {at: columns[sketch.integers[at]] for at in dims}).integers()
        if found is not None:
            return _form(sketch, found, list(columns.values()))
    return None


def _form(sketch: Sketch, integers: Sequence[Column], symbols: Sequence[Column]) -> Form | None:
    varying: dict[int, Size] = {}
    for at, column in enumerate(integers):
        if len(set(column)) > 1:
            size = told(column, symbols)
            if size is None:
                return None
            varying[at] = size
    sources = [next(at for at in range(sketch.dims) if integers[at] == symbol) for symbol in symbols]
    return Form(sketch.integers, tuple(sources), varying)


class _Guess:
    """The graph at its own sizes and at two other sets of sizes side by side, operator by operator."""

    def __init__(self, graph: fx.GraphModule, sketch: Sketch, dims: dict[int, Column]) -> None:
        self.graph = graph
        self.sketch = sketch
        self.dims = dims
        self.builders = [GraphBuilder() for _ in (0, *_STEPS)]
        self.values: dict[fx.Node, list[Any]] = {}
        """What a node is in each of them."""
        self.known: dict[int, list[Column]] = {}
        """Sizes that vary, by what they are in the graph, the latest last."""

    def integers(self) -> list[Column] | None:
        """Every integer of the graph; ``None`` where the operators have no shapes for other sizes."""
        found: list[Column] = []
        given = iter(self.sketch.inputs)
        for node in self.graph.graph.nodes:
            if node.op == "placeholder":
                found += self._placeholder(node, next(given), len(found))
            elif node.op == "call_function":
                columns = self._call(node)
                if columns is None:
                    return None
                found += columns
        return found

    def _placeholder(self, node: fx.Node, spec: TensorSpec, first: int) -> list[Column]:
        columns = [self.dims.get(first + at, (size,) * len(self.builders)) for at, size in enumerate(spec.shape)]
        made: list[Any] = []
        for which, builder in enumerate(self.builders):
            shape = tuple(column[which] for column in columns)
            made.append(
                builder.placeholder(node.name, TensorSpec(shape, spec.dtype, strides_in(memory_order(spec), shape)))
            )
        self._keep(node, made)
        return columns

    def _keep(self, node: fx.Node, made: list[Any]) -> None:
        self.values[node] = made
        tensors = [one.meta["val"] for one in made if isinstance(one, fx.Node)]
        if len(tensors) == len(made) and all(isinstance(one, torch.Tensor) for one in tensors):
            for column in zip(*(one.shape for one in tensors), strict=True):
                if len(set(column)) > 1:
                    known = self.known.setdefault(column[0], [])
                    if column in known:
                        known.remove(column)
                    known.append(column)

    def _call(self, node: fx.Node) -> list[Column] | None:
        """The operator's integers; it is added to each graph."""
        numbers: list[int] = []

        def note(number: int) -> int:
            numbers.append(number)
            return number

        for one in (*node.args, *node.kwargs.values()):
            replaced(one, note)
        if not isinstance(node.target, torch._ops.OpOverload):  # an item: its number is none of the sizes
            source, position = cast("tuple[fx.Node, int]", node.args)
            self._keep(node, [b.item(self.values[source][at], position) for at, b in enumerate(self.builders)])
            return [(number,) * len(self.builders) for number in numbers]
        joined = self._joined(node)
        choices = [
            dict.fromkeys(
                (*reversed(self.known.get(number, [])), *joined.get(number, []), (number,) * len(self.builders))
            )
            for number in numbers
        ]
        for guess in itertools.islice(itertools.product(*choices), _MOST_GUESSES):
            try:
                made = [self._made(node, at, [column[at] for column in guess]) for at in range(len(self.builders))]
            except _FAILURES:
                continue
            self._keep(node, made)
            return list(guess)
        return None

    def _joined(self, node: fx.Node) -> dict[int, list[Column]]:
        """What dimensions of an operator's inputs are when they are put together, as a view does."""
        found: dict[int, list[Column]] = {}
        for source in node.all_input_nodes:
            made = self.values[source]
            if not all(isinstance(one, fx.Node) and isinstance(one.meta["val"], torch.Tensor) for one in made):
                continue
            shapes = [one.meta["val"].shape for one in made]
            for start, end in itertools.combinations(range(len(shapes[0]) + 1), 2):
                column = tuple(math.prod(shape[start:end]) for shape in shapes)
                if end - start > 1 and len(set(column)) > 1:
                    found.setdefault(column[0], []).append(column)
        return found

    def _made(self, node: fx.Node, which: int, integers: Sequence[int]) -> Any:
        given = iter(integers)

        def other(_: int) -> int:
            return next(given)

        args = map_arg(tuple(replaced(one, other) for one in node.args), lambda one: self.values[one][which])
        kwargs = map_arg(
            {name: replaced(one, other) for name, one in node.kwargs.items()}, lambda one: self.values[one][which]
        )
        return self.builders[which].call(node.target, args, kwargs)
