"""The form of graphs that are equal but for sizes: every integer in them, by the sizes of their inputs.

The graphs that were seen are anti-unified: where all have one integer it is a constant, and where the dimensions of
inputs differ each set of values is a symbol. Any other integer that differs has to be a constant times a product of
symbols, or a sum of two of these, at all sizes that were seen. That is a guess for others; it is checked for each.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import fx

from ...core.specs import TensorSpec
from ..normal_form import input_specs, output_specs
from ..serialize import encode_arg

__all__ = [
    "SMALLEST", "Form", "Size", "Sketch", "form_of", "memory_order", "replaced", "sketch_of", "strides_in", "told",
]  # fmt: skip

MOST_SYMBOLS: Final = 6
"""Sizes that may vary independently in one form."""
MOST_FACTORS: Final = 3
"""Symbols that are multiplied in one integer."""
SMALLEST: Final = 2
"""Of a size that varies. Dimensions of 0 and 1 mean other things: they are empty, and are repeated."""


@dataclass(frozen=True, slots=True)
class Size:
    """An integer by the values of symbols: a sum of constants times products, ``(factor, symbols)`` each."""

    terms: tuple[tuple[int, tuple[int, ...]], ...]

    def at(self, values: Sequence[Any]) -> Any:
        """The integer for these values of the symbols; symbolic ones may be among them."""
        total: Any = 0
        for factor, symbols in self.terms:
            product: Any = factor
            for symbol in symbols:
                product = product * values[symbol]
            total = total + product
        return total


def replaced(value: Any, size: Callable[[int], Any]) -> Any:
    """An argument of a node with each integer in it, in order, as what ``size`` makes of it."""
    if value.__class__ is int:
        return size(value)
    if isinstance(value, (list, tuple)):
        return [replaced(one, size) for one in value]
    return value


@dataclass(frozen=True, slots=True)
class Sketch:
    """A graph as what does not depend on sizes, a digest, and its integers: first of its inputs' dimensions."""

    digest: str
    body: str
    """The digest without which values are results."""
    integers: tuple[int, ...]
    dims: int
    """How many of them are dimensions of inputs."""
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    def varies_from(self, other: Sketch) -> bool:
        """Whether inputs of another graph with this digest have other dimensions, and none of these is 0 or 1."""
        pairs = zip(self.integers[: self.dims], other.integers, strict=False)
        different = [pair for pair in pairs if pair[0] != pair[1]]
        return bool(different) and min(map(min, different)) >= SMALLEST


def _order(spec: TensorSpec) -> Any:
    """How a tensor lies in memory, whatever its sizes are; ``None`` where that cannot be told from its strides."""
    if spec.is_contiguous:
        return "contiguous"
    order = memory_order(spec)
    dense = strides_in(order, spec.shape)
    # Along a dimension of one element there is no step: a row of a table has the table's.
    same = all(one == other or size == 1 for one, other, size in zip(dense, spec.strides, spec.shape, strict=True))
    return order if same else None


def strides_in(order: Sequence[int], shape: Sequence[Any]) -> tuple[Any, ...]:
    """Strides of a dense tensor whose dimensions lie in memory in this order, the outermost first."""
    strides, step = [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim], step = step, step * shape[dim]
    return tuple(strides)


def memory_order(spec: TensorSpec) -> list[int]:
    """The dimensions of a tensor by how far apart their elements lie in memory, farthest first."""
    dims = range(len(spec.shape))
    return list(dims) if spec.is_contiguous else sorted(dims, key=lambda dim: (-spec.strides[dim], dim))


def sketch_of(graph: fx.GraphModule) -> Sketch | None:
    """The sketch of a graph in normal form. ``None`` for one that cannot be compared: it holds other graphs, kernels of
    the program, or inputs that are no dense tensors. Takes time linear in the graph's length."""
    inputs = input_specs(graph)
    integers = [size for spec in inputs for size in spec.shape]
    dims = len(integers)
    given = iter(inputs)
    number: dict[fx.Node, int] = {}
    digest = hashlib.blake2b(digest_size=20)

    def mark(_: int) -> str:
        integers.append(_)
        return "size"

    body = ""
    for node in graph.graph.nodes:
        number[node] = len(number)
        if node.op == "placeholder":
            spec = next(given)
            order = _order(spec)
            if order is None:
                return None
            said: Any = [str(spec.dtype), len(spec.shape), order, bool(node.meta.get("donated"))]
        elif node.op == "call_function" and "kernel" not in node.meta:
            args = encode_arg([replaced(one, mark) for one in node.args], number)
            kwargs = {name: encode_arg(replaced(one, mark), number) for name, one in node.kwargs.items()}
            said = [str(node.target), args, kwargs]
        elif node.op == "output":
            said, body = encode_arg(node.args[0], number), digest.hexdigest()
        else:
            return None
        digest.update(repr(said).encode())
    return Sketch(digest.hexdigest(), body, tuple(integers), dims, inputs, output_specs(graph))


@dataclass(frozen=True, slots=True)
class Form:
    """What graphs of one digest have in common: an integer each, or an expression of the symbols.

    ``sources``: for each symbol the number of a dimension of an input that it is. ``varying``: expressions, by the
    integer's number; all others are as in ``constants``.
    """

    constants: tuple[int, ...]
    sources: tuple[int, ...]
    varying: Mapping[int, Size]

    def values(self, sketch: Sketch) -> tuple[int, ...]:
        """The symbols' values in a graph."""
        return tuple(sketch.integers[at] for at in self.sources)

    def integers_at(self, values: Sequence[Any]) -> list[Any]:
        """Every integer for these values of the symbols; symbolic ones may be among them."""
        found: list[Any] = list(self.constants)
        for at, size in self.varying.items():
            found[at] = size.at(values)
        return found

    def describes(self, sketch: Sketch) -> bool:
        """Whether a graph with the same digest is of this form."""
        values = self.values(sketch)
        return min(values, default=SMALLEST) >= SMALLEST and self.integers_at(values) == list(sketch.integers)


def form_of(sketches: Sequence[Sketch]) -> Form | None:
    """The form of graphs with one digest, of which at least two differ; ``None`` where an integer cannot be told."""
    columns = list(zip(*(one.integers for one in sketches), strict=True))
    varying = {at: column for at, column in enumerate(columns) if len(set(column)) > 1}
    symbols: dict[tuple[int, ...], int] = {}
    for at in range(sketches[0].dims):
        if at in varying:
            symbols.setdefault(varying[at], at)
    if not symbols or len(symbols) > MOST_SYMBOLS or min(map(min, symbols)) < SMALLEST:
        return None
    known = {column: Size(((1, (number,)),)) for number, column in enumerate(symbols)}
    found: dict[int, Size] = {}
    for at, column in varying.items():
        size = known.get(column) or told(column, list(symbols))
        if size is None:
            return None
        found[at] = known[column] = size
    return Form(sketches[0].integers, tuple(symbols.values()), found)


def told(column: tuple[int, ...], symbols: Sequence[tuple[int, ...]]) -> Size | None:
    """An integer that varies, by symbols: a multiple of a product, else a product and a constant, else a sum of two."""
    products = [
        (chosen, tuple(math.prod(values) for values in zip(*(symbols[one] for one in chosen), strict=True)))
        for count in range(1, MOST_FACTORS + 1)
        for chosen in itertools.combinations_with_replacement(range(len(symbols)), count)
    ]
    for chosen, values in products:
        factor = _ratio(column, values)
        if factor is not None:
            return Size(((factor, chosen),))
    for chosen, values in products:
        found = _line(column, values)
        if found is not None:
            factor, rest = found
            return Size(((factor, chosen), (rest, ())))
    for (one, first), (other, second) in itertools.combinations(products[: len(symbols)], 2):
        for sign in (1, -1):
            rest = {number - a - sign * b for number, a, b in zip(column, first, second, strict=True)}
            if len(rest) == 1:
                return Size(((1, one), (sign, other), (rest.pop(), ())))
    return None


def _ratio(column: Sequence[int], values: Sequence[int]) -> int | None:
    """The integer that all of some values have to be multiplied by."""
    factor, rest = divmod(column[0], values[0])
    fits = not rest and factor and all(number == factor * value for number, value in zip(column, values, strict=True))
    return factor if fits else None


def _line(column: Sequence[int], values: Sequence[int]) -> tuple[int, int] | None:
    """Factor and constant of a straight line through all points."""
    other = next((at for at, value in enumerate(values) if value != values[0]), None)
    if other is None:
        return None
    factor, rest = divmod(column[other] - column[0], values[other] - values[0])
    if rest or not factor:
        return None
    constant = column[0] - factor * values[0]
    fits = all(number == factor * value + constant for number, value in zip(column, values, strict=True))
    return (factor, constant) if fits else None
