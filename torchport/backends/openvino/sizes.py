"""Sizes that are symbols, as nodes of a model: they are read from its inputs' shapes whenever it runs.

A rule writes sizes as ever: what is a number becomes a constant, what is a symbolic one is computed. Where a rule makes
a number of a symbolic size after all, PyTorch's shape environment notes that the size is that number, and
:meth:`Sizes.fixed` tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy
import torch

from torchport.backend.sizes.guards import NotSymbolic

__all__ = ["Sizes", "is_symbolic", "known"]

_EXACT: Final = 1 << 24
"""Below it a quotient of integers is exact: the CPU plugin divides in float32."""
_LONGEST: Final = 64
"""Numbers of a shape; more are places, which are known."""
_MOST: Final = (1 << 31) - 1
"""The CPU plugin computes sizes in 32 bits."""


def known(size: Any) -> Any:
    """A size as a number where it is one, also where it was computed from symbols that cancelled out."""
    return int(size) if isinstance(size, torch.SymInt) and size.node.expr.is_number else size


def is_symbolic(sizes: Any) -> bool:
    """Whether one of some sizes, or a single one, is none that is known."""
    given = sizes if isinstance(sizes, (list, tuple)) else [sizes]
    return any(isinstance(known(size), torch.SymInt) for size in given)


class Sizes:
    """Writes the sizes of one graph. ``ops`` is OpenVINO's opset."""

    def __init__(self, ops: Any) -> None:
        self.ops = ops
        self._sources: dict[Any, tuple[Any, int]] = {}
        """For each symbol an input and the dimension that it is."""
        self._shapes: dict[int, Any] = {}
        self._made: dict[Any, Any] = {}
        self._symbols: list[torch.SymInt] = []
        self._environment: Any = None
        self._conditions = 0

    def note(self, value: torch.Tensor, made: Any) -> None:
        """An input and its output in the model."""
        for dim, size in enumerate(value.shape):
            if not isinstance(size, torch.SymInt):
                continue
            if size.node.expr.is_number:
                raise NotSymbolic(f"PyTorch's shapes of an operator need the number that a size is ({size})")
            self._environment = size.node.shape_env
            self._conditions = len(self._environment.guards)
            expression = size.node.expr
            if expression.is_Symbol and expression not in self._sources:
                self._sources[expression] = made, dim
                self._symbols.append(size)

    def fixed(self) -> str:
        """What was made a number since the last call, in words, or nothing."""
        if self._environment is None:
            return ""
        guards: list[Any] = self._environment.guards
        new, self._conditions = guards[self._conditions :], len(guards)
        for guard in new:
            asked: Any = guard.expr
            if getattr(asked, "rel_op", "") == "==" and (asked.lhs.is_number or asked.rhs.is_number):
                return f"it needs the number that a size is ({asked})"
        return "it needs the number that a size is" if any(size.node.expr.is_number for size in self._symbols) else ""

    # -- nodes -------------------------------------------------------------------------------------------------------
    def ints(self, numbers: Any) -> Any:
        """int64: a vector of sizes, or a scalar for a single one."""
        if isinstance(numbers, (list, tuple)) and len(numbers) > _LONGEST:
            return self._constant(numbers)
        if not is_symbolic(numbers):
            plain = [known(one) for one in numbers] if isinstance(numbers, (list, tuple)) else known(numbers)
            return self.ops.constant(numpy.array(plain, dtype=numpy.int64)).output(0)
        if not isinstance(numbers, (list, tuple)):
            return self.ops.squeeze(self._vector(numbers), self._constant([0])).output(0)
        parts: list[Any] = []
        plain: list[int] = []
        for one in map(known, numbers):
            if not isinstance(one, torch.SymInt):
                plain.append(int(one))
                continue
            if plain:
                parts.append(self._constant(plain))
                plain = []
            parts.append(self._vector(one))
        parts += [self._constant(plain)] if plain else []
        return parts[0] if len(parts) == 1 else self.ops.concat(parts, 0).output(0)

    def shape(self, sizes: Sequence[Any]) -> Any:
        """int64: the shape that a value is given; what alone is symbolic follows from the rest."""
        found = [known(size) for size in sizes]
        open_ones = [at for at, size in enumerate(found) if isinstance(size, torch.SymInt)]
        if len(open_ones) == 1 and 0 not in found:
            found[open_ones[0]] = -1
        return self.ints(found)

    def _constant(self, numbers: Sequence[int]) -> Any:
        return self.ops.constant(numpy.array(numbers, dtype=numpy.int64)).output(0)

    def _vector(self, size: torch.SymInt) -> Any:
        """One size, as a vector."""
        return self._written(size.node.expr, size)

    def _written(self, expression: Any, size: torch.SymInt | None = None) -> Any:
        made = self._made.get(expression)
        if made is None:
            if size is not None and not expression.is_Symbol and not bool(size <= _MOST):
                raise NotSymbolic(f"a size, {expression}, is larger than 32 bits hold")
            made = self._made[expression] = self._computed(expression)
        return made

    def _computed(self, expression: Any) -> Any:
        kind, args = type(expression).__name__, expression.args
        if expression.is_Integer:
            return self._constant([int(expression)])
        if expression.is_Symbol:
            if expression not in self._sources:
                raise NotSymbolic(f"a size, {expression}, is no dimension of an input")
            return self._dimension(*self._sources[expression])
        if expression.is_Pow and args[1].is_Integer and 0 < int(args[1]) < 8:
            return self._joined("multiply", [args[0]] * int(args[1]))
        if expression.is_Add or expression.is_Mul:
            return self._joined("add" if expression.is_Add else "multiply", args)
        if kind in ("Max", "Min"):
            return self._joined("maximum" if kind == "Max" else "minimum", args)
        if kind in ("FloorDiv", "CleanDiv") and args[1].is_Integer and int(args[1]) > 0:
            self._require(args[0])
            return self.ops.divide(self._written(args[0]), self._written(args[1])).output(0)
        if kind in ("Mod", "PythonMod") and args[1].is_Integer and int(args[1]) > 0:
            self._require(args[0])
            times = self.ops.divide(self._written(args[0]), self._written(args[1]))
            return self.ops.subtract(self._written(args[0]), self.ops.multiply(times, self._written(args[1]))).output(0)
        raise NotSymbolic(f"a size is computed as {expression}")

    def _require(self, expression: Any) -> None:
        """Have what is divided be small enough, and not below 0."""
        number = self._environment.create_symintnode(expression, hint=None)
        if not bool(number >= 0) or not bool(number < _EXACT):
            raise NotSymbolic(f"a size is computed of {expression}, which may be too large to be divided exactly")

    def _joined(self, name: str, expressions: Sequence[Any]) -> Any:
        made = self._written(expressions[0])
        for one in expressions[1:]:
            made = getattr(self.ops, name)(made, self._written(one)).output(0)
        return made

    def _dimension(self, value: Any, dim: int) -> Any:
        key = id(value)
        if key not in self._shapes:
            self._shapes[key] = self.ops.shape_of(value, "i64").output(0)
        return self.ops.gather(self._shapes[key], self._constant([dim]), self._constant([0])).output(0)
