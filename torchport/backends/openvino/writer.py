"""What the rules of the translation share: the table they are in, and the writer that they are called with.

OpenVINO's CPU plugin computes 64-bit integers in 32 bits and float64 in float32. So a value of 64-bit elements is held
as 32-bit words, one more dimension of two: it can be moved without being looked at, its low word is what an operator
reads as an index, and numbers are made of both. Arithmetic is done in float32 only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy
import torch
from torch import fx

from .modules import openvino_module
from .sizes import Sizes, is_symbolic, known

__all__ = [
    "CHECKS", "COMPUTED", "KINDS", "MOVED", "RULES", "TAKES", "WORDS", "Check", "Takes", "Writer", "arg_of", "both",
    "float_result", "held_shape", "rule", "same_shape", "val",
]  # fmt: skip

COMPUTED: Final = frozenset({torch.float32, torch.bool})
WORDS: Final = frozenset({torch.int64, torch.float64, torch.complex64})
"""Dtypes that are held as words."""
MOVED: Final = COMPUTED | WORDS | {torch.int32, torch.int16, torch.uint8, torch.int8, torch.float16}

KINDS: Final = {
    torch.float32: numpy.float32, torch.bool: numpy.bool_, torch.int64: numpy.int64, torch.float64: numpy.float64,
    torch.int32: numpy.int32, torch.uint8: numpy.uint8, torch.int8: numpy.int8, torch.complex64: numpy.complex64,
    torch.int16: numpy.int16, torch.float16: numpy.float16,
}  # fmt: skip
"""Dtypes of constants, as NumPy has them."""

Check = Callable[[fx.Node], str]


@dataclass(frozen=True)
class Takes:
    """Which values other than float32 and bool an operator takes."""

    moves: bool = False
    """It moves elements and does not look at them."""
    numbers: bool = False
    """Its arguments may be int64: they are read as float32, as PyTorch reads them."""
    reads: frozenset[int] = frozenset()
    """Positions of arguments that are indices, of 64 or 32 bits."""
    gives: frozenset[int] = frozenset()
    """Results that are integers of 64 or 32 bits, and small: indices and counts."""
    empty: bool = False
    """Tensors without elements, too. OpenVINO ends the process over some, such as what it gathers of them."""


RULES: Final[dict[Any, Callable[..., Any]]] = {}
CHECKS: Final[dict[Any, Check]] = {}
TAKES: Final[dict[Any, Takes]] = {}


def rule(
    *ops: Any,
    check: Check | None = None,
    moves: bool = False,
    numbers: bool = False,
    reads: Sequence[int] = (),
    gives: Sequence[int] = (),
    empty: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function ``(writer, node)`` that translates ``ops``. ``check`` says of a node what it cannot."""
    takes = Takes(moves, numbers, frozenset(reads), frozenset(gives), empty)

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for op in ops:
            RULES[op] = function
            TAKES[op] = takes
            if check is not None:
                CHECKS[op] = check
        return function

    return register


def arg_of(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    """An argument that may be given by position or by name."""
    return node.args[position] if position < len(node.args) else node.kwargs.get(name, default)


def val(node: Any) -> torch.Tensor:
    """A node's fake tensor."""
    return node.meta["val"]


def float_result(node: fx.Node) -> str:
    """A check: that the result is float32."""
    return "" if val(node).dtype is torch.float32 else f"with a result of {val(node).dtype}"


def both(*checks: Check) -> Check:
    """A check: the first reason of several."""
    return lambda node: next((why for check in checks if (why := check(node))), "")


_COUNTED: Final = {"f32": numpy.float32, "i32": numpy.int32, "i64": numpy.int64}


def _words(array: Any) -> Any:
    """The 32-bit words of an array of 64-bit elements, in one more dimension."""
    return numpy.ascontiguousarray(array).reshape(*array.shape, 1).view(numpy.int32)


class Writer:
    """Translates one graph. Rules are called as ``rule(writer, node)`` and give an OpenVINO output, or several."""

    def __init__(self) -> None:
        self.ops: Any = openvino_module("openvino.opset13")
        self.values: dict[fx.Node, Any] = {}
        self.sizes = Sizes(self.ops)

    def value(self, arg: Any) -> Any:
        """The OpenVINO output of an argument: a node as it is held, or a number as float32."""
        if isinstance(arg, fx.Node):
            return self.values[arg]
        if isinstance(arg, torch.SymInt) and is_symbolic(arg):
            return self.ops.convert(self.ints(arg), "f32").output(0)
        if isinstance(arg, bool):
            return self.ops.constant(numpy.array(arg)).output(0)
        return self.ops.constant(numpy.float32(arg)).output(0)

    def numeric(self, arg: Any) -> Any:
        """The same as float32."""
        made = self.value(arg)
        if not isinstance(arg, fx.Node) or val(arg).dtype is torch.float32:
            return made if not isinstance(arg, bool) else self.value(float(arg))
        return self.number(made) if val(arg).dtype is torch.int64 else self.ops.convert(made, "f32").output(0)

    def number(self, words: Any) -> Any:
        """int64 as float32: what fits 32 bits is converted at once, so that it is rounded once."""
        low, high = self.word(words, 0), self.word(words, 1)
        negative = self.ops.less(low, self.word_of(0))
        sign = self.ops.select(negative, self.word_of(-1), self.word_of(0))
        near = self.ops.convert(low, "f32")
        unsigned = self.ops.add(near, self.ops.select(negative, self.value(2.0**32), self.value(0.0)))
        far = self.ops.add(self.ops.multiply(self.ops.convert(high, "f32"), self.value(2.0**32)), unsigned)
        return self.ops.select(self.ops.equal(high, sign), near, far).output(0)

    def index(self, arg: fx.Node) -> Any:
        """Integers of 32 bits: of int64 the low word, which is all there is of an index."""
        return self.word(self.value(arg), 0) if val(arg).dtype in WORDS else self.value(arg)

    def word(self, words: Any, which: int) -> Any:
        """One of the words of each element."""
        return self.ops.gather(words, self.ints(which), self.ints(-1)).output(0)

    def word_of(self, number: Any) -> Any:
        """A number of 32 bits: a constant, or a size."""
        if is_symbolic(number):
            return self.ops.convert(self.ints(number), "i32").output(0)
        return self.ops.constant(numpy.int32(int(number))).output(0)

    def wide(self, value: Any) -> Any:
        """int64 of integers of other widths, or of float32 that hold small ones."""
        low = self.ops.convert(value, "i32").output(0)
        high = self.ops.select(self.ops.less(low, self.word_of(0)), self.word_of(-1), self.word_of(0)).output(0)
        last = self.ints(-1)
        return self.ops.concat([self.ops.unsqueeze(one, last).output(0) for one in (low, high)], -1).output(0)

    def array(self, array: Any) -> Any:
        """A constant as a value of its dtype is held."""
        held = _words(array) if array.dtype.itemsize == 8 else array
        return self.ops.constant(numpy.ascontiguousarray(held).reshape(held.shape)).output(0)

    def ints(self, numbers: Any) -> Any:
        """Axes, shapes, a single size, as int64: a constant as far as they are known."""
        return self.sizes.ints(numbers)

    def filled(self, shape: Sequence[Any], element: Any) -> Any:
        """A tensor of one number, an array of no dimension, as a value of its dtype is held."""
        if not is_symbolic(list(shape)):
            return self.array(numpy.full(tuple(map(known, shape)), element, element.dtype))
        # Of as many dimensions: OpenVINO ends the process over some broadcasts of a scalar.
        one = self.array(element.reshape([1] * len(shape)))
        words = [2] if element.dtype.itemsize == 8 else []
        return self.ops.broadcast(one, self.ints([*shape, *words])).output(0)

    def counted(self, count: Any, kind: str = "f32", start: Any = 0, step: int = 1) -> Any:
        """A vector of ``start``, ``start + step``, ... with this many elements, exact below 2^24; ``kind``: f32, i32
        or i64."""
        if not is_symbolic([count, start]):
            numbers = known(start) + step * numpy.arange(known(count), dtype=numpy.int64)
            return self.ops.constant(numbers.astype(_COUNTED[kind])).output(0)
        made = self.ops.range(self.ints(start), self.ints(start + step * count), self.ints(step), "i64").output(0)
        return made if kind == "i64" else self.ops.convert(made, kind).output(0)

    def reshape(self, value: Any, shape: Sequence[Any]) -> Any:
        """A reshape; ``shape`` is whole."""
        if not shape:  # OpenVINO ends the process over a product that is reshaped to a scalar
            return self.ops.squeeze(value, self.ints(list(range(len(value.get_partial_shape()))))).output(0)
        return self.ops.reshape(value, self.sizes.shape(shape), False).output(0)

    def axes(self, given: Any, rank: int) -> list[int]:
        """Axes from 0 on; none given, or an empty list, are all."""
        chosen = [given] if isinstance(given, int) else list(given or range(rank))
        return [axis % rank for axis in chosen] if rank else []


def held_shape(value: torch.Tensor) -> list[Any]:
    """The shape in which a value is held."""
    return [*value.shape, *([2] if value.dtype in WORDS else [])]


def same_shape(shape: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether two shapes are the same; where one is symbolic, for whichever sizes."""
    return len(shape) == len(other) and all(
        (a.node.expr if isinstance(a, torch.SymInt) else a) == (b.node.expr if isinstance(b, torch.SymInt) else b)
        for a, b in zip(shape, other, strict=True)
    )
