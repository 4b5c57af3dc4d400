"""Buckets and symbols: which sizes that change are padded up to which, and where their values are found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from ..core.errors import ConfigError
from ..core.specs import TensorSpec
from .masker import Factor, Inexact

__all__ = ["SMALLEST", "Buckets", "Symbols", "other_size", "product", "require_products"]

SMALLEST: Final = 8
"""The smallest bucket where none are given."""
_NUMBERS: Final = (torch.SymInt, torch.SymFloat, torch.SymBool)
_OPERATORS: Final = (torch._ops.OpOverload, torch._ops.HigherOrderOperator)


@dataclass(frozen=True)
class Buckets:
    """The sizes to pad to, ascending; empty: powers of two from 8 on."""

    sizes: tuple[int, ...]

    @classmethod
    def parse(cls, value: Any) -> Buckets | None:
        """The option ``buckets``: ``True``, or a list of sizes. Raises :class:`ConfigError`."""
        if value is None or value is False:
            return None
        if value is True:
            return cls(())
        found = cast("list[Any]", list(value)) if isinstance(value, (list, tuple)) else []
        if not found or not all(isinstance(size, int) and size > 1 for size in found):
            raise ConfigError(f'option "buckets" is {value!r}, but must be True, or a list of whole numbers above 1')
        return cls(tuple(sorted(set(found))))

    def of(self, size: int) -> int | None:
        """The bucket for a size; ``None`` for one beyond the largest."""
        if self.sizes:
            return next((bucket for bucket in self.sizes if bucket >= size), None)
        return max(SMALLEST, 1 << (size - 1).bit_length())


def _expression(number: Any) -> Any:
    """The sympy expression of a symbolic number; a plain one as it is."""
    return number.node.expr if isinstance(number, _NUMBERS) else number


def product(expression: Any, symbols: Sequence[Any]) -> tuple[Factor, ...] | None:
    """A size as factors, a symbol with size 0; ``None`` for one that is computed otherwise."""
    found: list[Factor] = []
    pending = [expression]
    while pending:
        one = pending.pop(0)
        if isinstance(one, int) or getattr(one, "is_Integer", False):
            if int(one) < 0:
                return None
            found.append((int(one), None))
        elif one in symbols:
            found.append((0, symbols.index(one)))
        elif getattr(one, "is_Mul", False):
            pending = [*one.args, *pending]
        elif getattr(one, "is_Pow", False) and one.exp.is_Integer and 0 < int(one.exp) < 16:
            pending = [*[one.base] * int(one.exp), *pending]
        else:
            return None
    return tuple(found)


def _is_product_of_sums(expression: Any, symbols: Sequence[Any]) -> bool:
    """Whether an expression is a product of whole numbers, symbols, and symbols and constants (``2 * (T - 1)``)."""
    if product(expression, symbols) is not None:
        return True
    import sympy  # on demand: padding needs it where a part of what varies is taken

    expression = expression.replace(lambda one: one.func.__name__ == "FloorDiv", _divided_exactly)
    if not expression.is_polynomial(*symbols):
        return False
    found: Any = sympy.factor_list(expression, *(one for one in symbols if expression.has(one)))
    constant, factors = found
    return bool(constant.is_Integer) and all(
        one in symbols or (one.is_Add and len(one.args) == 2 and one.args[0].is_Integer and one.args[1] in symbols)
        for one, _ in factors
    )


def _divided_exactly(quotient: Any) -> Any:
    """The polynomial that a quotient of PyTorch's is, such as ``T`` for ``T * T // T``; the same where it is none."""
    import sympy  # on demand, as above

    base, divisor = quotient.args
    exact = sympy.cancel(base / divisor)
    whole = exact.is_polynomial(*exact.free_symbols) and all(
        c.is_Integer for c in exact.as_coefficients_dict().values()
    )
    return exact if whole else quotient


def require_products(graph: fx.GraphModule, symbols: Sequence[Any], sums: bool = False) -> None:
    """Raises :class:`Inexact` where an operator gets or makes a size or number that is no product of symbols.

    ``sums``: a symbol and a constant counts as a symbol.

    Padding compares graphs for two values of a symbol, which tells products from constants. Anything else may be equal
    for both and another one for a third: ``(s + 1) // 2`` for 15 and 16. What is computed from sizes counts where an
    operator gets it, not on its way there.
    """

    def otherwise(value: Any) -> bool:
        expression = _expression(value)
        free = getattr(expression, "free_symbols", set())
        if free.isdisjoint(symbols):
            return False
        return not _is_product_of_sums(expression, symbols) if sums else product(expression, symbols) is None

    for node in graph.graph.nodes:
        # Arithmetic on sizes is functions of Python, and what only checks sizes has no users.
        if node.op != "call_function" or not isinstance(node.target, _OPERATORS) or not node.users:
            continue
        made = [leaf for leaf in tree_leaves(node.meta.get("val")) if isinstance(leaf, torch.Tensor)]
        wrong = next((size for tensor in made for size in tensor.shape if otherwise(size)), None)
        if wrong is not None:
            raise Inexact(f"a size is computed from one that changes: {wrong}, of {node.target}")
        given = [
            arg.meta.get("val") if isinstance(arg, fx.Node) else arg for arg in tree_leaves((node.args, node.kwargs))
        ]
        wrong = next((number for number in given if isinstance(number, _NUMBERS) and otherwise(number)), None)
        if wrong is not None:
            raise Inexact(f"a number is computed from a size that changes: {wrong}, for {node.target}")


class Symbols:
    """The symbols in a graph's inputs: where their values are found, and what the inputs are for others."""

    def __init__(self, graph: fx.GraphModule) -> None:
        """Raises :class:`Inexact` for a symbol whose value is not a size or number among the inputs."""
        self.inputs = [node.meta.get("val") for node in graph.graph.nodes if node.op == "placeholder"]
        outputs: Any = graph.graph.output_node().args[0]
        self.outputs = [node.meta.get("val") if isinstance(node, fx.Node) else node for node in outputs]
        self._sources: dict[Any, tuple[int, int | None]] = {}
        free: set[Any] = set()
        for at, value in enumerate(self.inputs):
            if isinstance(value, (torch.SymFloat, torch.SymBool)):
                raise Inexact("a number that is no size changes")
            sizes = [(None, value)] if not isinstance(value, torch.Tensor) else list(enumerate(value.shape))
            for dim, size in sizes:
                expression = _expression(size)
                if not isinstance(size, torch.SymInt):
                    continue
                free |= expression.free_symbols
                if expression.is_Symbol:
                    self._sources.setdefault(expression, (at, dim))
        if free - set(self._sources):
            raise Inexact("an input has a size that is computed from one that changes")
        self.names = tuple(self._sources)

    def values(self, args: Sequence[Any]) -> tuple[int, ...]:
        """The symbols' values in a call."""
        return tuple(args[at] if dim is None else args[at].shape[dim] for at, dim in self._sources.values())

    def number(self, value: Any, values: Sequence[int]) -> Any:
        """A size or number for these values of the symbols."""
        if not isinstance(value, torch.SymInt):
            return value
        return int(_expression(value).xreplace(dict(zip(self.names, values, strict=True))))

    def spec(self, value: Any, values: Sequence[int]) -> Any:
        """The spec of a tensor, or the number that another value is, for these values of the symbols."""
        if not isinstance(value, torch.Tensor):
            return self.number(value, values)
        shape = tuple(self.number(size, values) for size in value.shape)
        strides = tuple(self.number(stride, values) for stride in value.stride())
        return TensorSpec(shape, value.dtype, strides)


def other_size(size: int) -> int:
    """Another size for a symbol, to see what depends on it (:func:`~torchport.backend.masking.mask_padding`)."""
    return size - 1 if size > 3 else size + 1
