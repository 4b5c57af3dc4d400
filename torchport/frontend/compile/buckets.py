"""Buckets: sizes that change are padded up to one of a few, so that few computations serve many shapes.

Only where that is exact (:mod:`torchport.backend.masking`); else each set of shapes is compiled for itself, and a
warning says why.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from ...backend.buckets import Symbols
from ...backend.masker import Layout
from ...core.specs import TensorSpec
from .tiered import TieredProgram

__all__ = ["PaddedProgram"]

_KNOWN: Final = 256
"""Sets of sizes whose outputs' specs a program remembers."""
_Run = Callable[[list[Any]], Sequence[Any]]


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
        if isinstance(run, TieredProgram):
            run.then = self._settle
        self._symbols = symbols
        self._layouts = tuple(layouts)
        specs = [symbols.spec(value, sizes) for value in symbols.inputs]
        self._pads = {
            at: spec
            for at, (value, spec) in enumerate(zip(symbols.inputs, specs, strict=True))
            if isinstance(value, torch.Tensor) and any(isinstance(size, torch.SymInt) for size in value.shape)
        }

        self._wanted = functools.lru_cache(_KNOWN)(self._outputs)

    def _settle(self, final: _Run) -> None:
        self._run = final

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
