"""Buckets: sizes that change are padded up to one of a few, so that few computations serve many shapes.

Only where that is exact (:mod:`.masking`); else each set of shapes is compiled for itself, and a warning says why.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import fx

from ...core.errors import ConfigError
from ...core.specs import TensorSpec
from .masking import Inexact, Layout

__all__ = ["Buckets", "PaddedProgram", "Symbols"]

_SMALLEST: Final = 8
_KNOWN: Final = 256
"""Sets of sizes whose outputs' specs a program remembers."""
_Run = Callable[[list[Any]], Sequence[Any]]


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
        return max(_SMALLEST, 1 << (size - 1).bit_length())


def _expression(number: Any) -> Any:
    """The sympy expression of a symbolic number; a plain one as it is."""
    return number.node.expr if isinstance(number, torch.SymInt) else number


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


def _restored(tensor: torch.Tensor, layout: Layout, sizes: Sequence[int], wanted: TensorSpec) -> torch.Tensor:
    """The true part of a result, with the strides that were recorded."""
    if tuple(tensor.shape) == wanted.shape and tensor.stride() == wanted.strides:
        return tensor
    factors = [factor for dim in layout for factor in dim or ((1, None),)]
    tensor = tensor.reshape([size for size, _ in factors])
    for at, (size, symbol) in enumerate(factors):
        if symbol is not None and sizes[symbol] != size:
            tensor = tensor.narrow(at, 0, sizes[symbol])
    tensor = tensor.reshape(wanted.shape)
    if tensor.stride() != wanted.strides and 0 not in wanted.strides:
        tensor = torch.empty_strided(wanted.shape, wanted.strides, dtype=wanted.dtype).copy_(tensor)
    return tensor


class PaddedProgram:
    """A program for the sizes of a bucket, called with arguments of any smaller sizes; empties them."""

    def __init__(self, run: _Run, symbols: Symbols, sizes: Sequence[int], layouts: Sequence[Layout | None]) -> None:
        self._run = run
        self._symbols = symbols
        self._layouts = tuple(layouts)
        specs = [symbols.spec(value, sizes) for value in symbols.inputs]
        self._pads = {
            at: spec
            for at, (value, spec) in enumerate(zip(symbols.inputs, specs, strict=True))
            if isinstance(value, torch.Tensor) and any(isinstance(size, torch.SymInt) for size in value.shape)
        }

        self._wanted = functools.lru_cache(_KNOWN)(self._outputs)

    def _outputs(self, sizes: tuple[int, ...]) -> list[Any]:
        """Specs and numbers of the outputs for these values of the symbols."""
        return [self._symbols.spec(value, sizes) for value in self._symbols.outputs]

    def __call__(self, args: list[Any]) -> list[Any]:
        sizes = self._symbols.values(args)
        given = [_padded(arg, self._pads[at]) if at in self._pads else arg for at, arg in enumerate(args)]
        args.clear()
        results = self._run([*given, *(torch.tensor(size) for size in sizes)])
        return [
            _restored(result, layout, sizes, wanted)
            if isinstance(wanted, TensorSpec) and layout is not None
            else wanted
            for result, layout, wanted in zip(results, self._layouts, self._wanted(sizes), strict=True)
        ]


def _padded(tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    if tuple(tensor.shape) == spec.shape:
        return tensor
    made = torch.empty_strided(spec.shape, spec.strides, dtype=spec.dtype).zero_()
    made[tuple(slice(size) for size in tensor.shape)].copy_(tensor)
    return made
