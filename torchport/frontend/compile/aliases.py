"""Results that are aliases of inputs: AOTAutograd takes them of the input itself, not of what was computed.

It repeats the views that led to a result where it knows them. Elsewhere it goes by size, strides and storage offset of
the compiled result. Both can be wrong. The views were those of one input, but inputs that share memory are replaced by
one that is all of it (a *synthetic base*). And a backend's result has memory of its own: no offset, and other strides.
So the views of a synthetic base are forgotten, and results get the looks that eager has.

Private torch APIs used here: ``torch._guards.TracingContext.fw_metadata`` (what AOTAutograd knows of results),
``torch._C._functionalization.apply_view_meta_sequence`` (repeats views),
``torch._functorch._aot_autograd.descriptors.{SyntheticBaseAOTInput, ViewBaseAOTInput}`` (which inputs are such bases).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, cast

import torch
from torch import fx
from torch._functorch._aot_autograd.descriptors import SyntheticBaseAOTInput, ViewBaseAOTInput
from torch._guards import TracingContext

from ...core.default_state import default_state

__all__ = ["Aliases", "aliases_of"]

Numbers: TypeAlias = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Looks:
    """Dtype, size, strides and storage offset of a tensor; each an integer, or a SymPy expression."""

    dtype: torch.dtype
    size: Numbers
    strides: Numbers
    offset: Any

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Looks:
        """Those of a fake tensor."""
        sizes, strides = map(_plain, tensor.shape), map(_plain, tensor.stride())
        return cls(tensor.dtype, tuple(sizes), tuple(strides), _plain(tensor.storage_offset()))

    @property
    def numbers(self) -> Numbers:
        """All of them, in a row."""
        return (*self.size, *self.strides, self.offset)

    def with_(self, numbers: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        """Size, strides and offset from a row of integers."""
        rank = len(self.size)
        return tuple(numbers[:rank]), tuple(numbers[rank : 2 * rank]), numbers[-1]


def _plain(value: Any) -> Any:
    """An integer, or a SymPy expression, of a symbolic integer or of PyTorch's wrapper that compares those."""
    value = getattr(value, "val", value)
    value = value.node.expr if isinstance(value, torch.SymInt) else value
    return int(value) if not isinstance(value, int) and value.is_Integer else value


class Aliases:
    """The results of one graph that are aliases of inputs: (position, the input's position, looks)."""

    def __init__(self, graph: fx.GraphModule, found: Sequence[tuple[int, int, Looks]]) -> None:
        self._found = tuple(found)
        inputs = [node.meta.get("val") for node in graph.graph.find_nodes(op="placeholder")]
        self._readers = _readers(inputs)
        self._static = all(isinstance(number, int) for _, _, looks in found for number in looks.numbers)

    def take(self, args: Sequence[Any]) -> dict[int, torch.Tensor]:
        """Per position of a result, a tensor without memory that looks as eager's, where that can be told.

        AOTAutograd looks at what it is like, and not at what is in it.
        """
        if self._static:
            return self._always
        taken: dict[int, torch.Tensor] = {}
        values = {symbol: read(args) for symbol, read in self._readers.items()}
        for position, base, looks in self._found:
            if args[base].device.type != "cpu":
                continue  # handles have no offsets that a symbol could be read off; there the views are repeated
            try:
                numbers = [_evaluated(number, values) for number in looks.numbers]
            except KeyError:
                continue
            taken[position] = _made(looks.dtype, *looks.with_(numbers))
        return taken

    @functools.cached_property
    def _always(self) -> dict[int, torch.Tensor]:
        """What is taken where no number is a symbol. The first call makes it, whatever modes of the caller are on."""
        with default_state():
            return {at: _made(looks.dtype, *looks.with_(looks.numbers)) for at, _, looks in self._found}


def _made(dtype: torch.dtype, size: Sequence[int], strides: Sequence[int], offset: int) -> torch.Tensor:
    """A tensor without memory that looks so. Autograd is told by AOTAutograd what is a view."""
    last = offset + sum((n - 1) * step for n, step in zip(size, strides, strict=True)) if 0 not in size else 0
    with torch._C._AutoDispatchBelowADInplaceOrView():
        return torch.empty(last + 1, dtype=dtype, device="meta").as_strided(size, strides, offset)


def _readers(inputs: Sequence[Any]) -> dict[Any, Callable[[Sequence[Any]], int]]:
    """How the value of each symbol is read off the arguments."""
    readers: dict[Any, Callable[[Sequence[Any]], int]] = {}

    def note(number: Any, read: Callable[[Sequence[Any]], int]) -> None:
        symbol = _plain(number) if isinstance(number, torch.SymInt) else number
        if getattr(symbol, "is_Symbol", False):
            readers.setdefault(symbol, read)

    for at, value in enumerate(inputs):
        if isinstance(value, torch.Tensor):
            note(value.storage_offset(), lambda args, at=at: args[at].storage_offset())
            for dim in range(value.dim()):
                note(value.shape[dim], lambda args, at=at, dim=dim: args[at].shape[dim])
                note(value.stride()[dim], lambda args, at=at, dim=dim: args[at].stride()[dim])
        else:
            note(value, lambda args, at=at: args[at])
    return readers


def _evaluated(number: Any, values: dict[Any, int]) -> int:
    """A number with the symbols' values put in. Raises ``KeyError`` for a symbol that no input has."""
    if isinstance(number, int):
        return number
    return int(number.xreplace({symbol: values[symbol] for symbol in number.free_symbols}))


def aliases_of(graph: fx.GraphModule) -> Aliases | None:
    """What is to be done about a forward's results that are aliases of inputs; ``None`` if there are none.

    Called while AOTAutograd compiles the forward; it forgets the views of synthetic bases.
    """
    tracing = TracingContext.try_get()
    known = None if tracing is None else tracing.fw_metadata
    if known is None:
        return None
    places = graph.graph.find_nodes(op="placeholder")
    outputs: Any = graph.graph.output_node().args[0]
    first = len(known.tokens) + known.num_mutated_inp_runtime_indices
    found: list[tuple[int, int, Looks]] = []
    for at, info in enumerate(cast("list[Any]", known.output_info)):
        node = outputs[first + at] if first + at < len(outputs) else None
        if info.output_type.name != _ALIAS or not isinstance(node, fx.Node):
            continue
        place = places[len(known.tokens) + info.base_idx]
        base, val, views = place.meta.get("val"), node.meta.get("val"), info.view_meta_sequence
        if not isinstance(base, torch.Tensor) or not isinstance(val, torch.Tensor):
            continue
        if isinstance(place.meta.get("desc"), (SyntheticBaseAOTInput, ViewBaseAOTInput)):
            known.output_info[at] = dataclasses.replace(info, view_meta_sequence=None)
            views = None
        found.append((first + at, len(known.tokens) + info.base_idx, _looks(base, views) or Looks.of(val)))
    return Aliases(graph, found) if found else None


_ALIAS: Final = "alias_of_input"


def _looks(base: torch.Tensor, views: Any) -> Looks | None:
    """What the views of an input look like. Where the input was written, the graph's own views are of the new value."""
    if views is None:
        return None
    try:
        return Looks.of(torch._C._functionalization.apply_view_meta_sequence(base, views.sequence))  # type: ignore[attr-defined]
    except Exception:  # a view that fake tensors cannot take again: the graph's own result is the next best
        return None
