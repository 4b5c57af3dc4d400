"""Results that are aliases of inputs: AOTAutograd takes them of the input itself, not of what was computed.

It repeats the views that led to a result where it knows them. Elsewhere it goes by size, strides and storage offset of
the compiled result. Both can be wrong. The views were those of one input, but inputs that share memory are replaced by
one that is all of it (a *synthetic base*). It forgets views by sizes that are symbols. And a backend's result has
memory of its own: no offset, and other strides. So where it would go by those, the views that the graph takes are
repeated here; where the graph takes a result by something else, too, the result gets the looks that eager has.

Of views with several results, such as ``chunk`` and ``unbind``, AOTAutograd hides from autograd that they are aliases:
the graph is to give them. Where the input is written, the graph's are of the new value, not of the input that it is
copied to, so they are taken of the input once it has been written.

Private torch APIs used here: ``torch._guards.TracingContext.fw_metadata`` (what AOTAutograd knows of results),
``torch._C._functionalization.apply_view_meta_sequence`` (repeats views),
``torch._functorch._aot_autograd.descriptors.{SyntheticBaseAOTInput, ViewBaseAOTInput}`` (which inputs are such bases).
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, cast

import torch
from torch import fx
from torch._functorch._aot_autograd.descriptors import SyntheticBaseAOTInput, ViewBaseAOTInput
from torch._guards import TracingContext
from torch.fx.node import map_arg

from ...backend.normal_form import is_view
from ...core.default_state import default_state
from ...core.errors import UnsupportedOp
from ...trace.handle import DEVICE_TYPE
from ..device.strided import seen_as

__all__ = ["OF_RESULT", "Aliases", "aliases_of", "repeated", "writes_to_inputs"]

Numbers: TypeAlias = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Looks:
    """Dtype, size, strides and storage offset of a tensor; each an integer, or a SymPy expression.

    ``conjugate`` and ``negative``: whether it shows its memory so. ``memory`` and ``begins``: dtype and storage offset
    of what it is an alias of. Nothing guards that offset, so another call may bring another one.
    """

    dtype: torch.dtype
    size: Numbers
    strides: Numbers
    offset: Any
    conjugate: bool
    negative: bool
    memory: torch.dtype
    begins: Any

    @classmethod
    def of(cls, tensor: torch.Tensor, base: torch.Tensor) -> Looks:
        """Those of a fake tensor that is an alias of another."""
        sizes, strides = map(_plain, tensor.shape), map(_plain, tensor.stride())
        offset = _plain(tensor.storage_offset())
        look = (tuple(sizes), tuple(strides), offset, tensor.is_conj(), tensor.is_neg())
        return cls(tensor.dtype, *look, base.dtype, _plain(base.storage_offset()))

    @property
    def numbers(self) -> Numbers:
        """All of them, in a row; the storage offset is counted from that of what it is an alias of."""
        return (*self.size, *self.strides, self.offset - self.begins)

    @property
    def is_plain(self) -> bool:
        """Whether it shows its memory as it is."""
        return not (self.conjugate or self.negative or self.dtype is not self.memory)

    def tensor(self, numbers: Sequence[int], begins: int, bytes_of_base: int) -> torch.Tensor:
        """A tensor without memory that looks so, given its numbers as integers and where its base begins."""
        rank = len(self.size)
        size, strides, offset = numbers[:rank], numbers[rank : 2 * rank], begins + numbers[-1]
        if self.is_plain:
            last = offset + sum((n - 1) * step for n, step in zip(size, strides, strict=True)) if 0 not in size else 0
            memory = torch.empty(last + 1, dtype=self.dtype, device="meta")
            with torch._C._AutoDispatchBelowADInplaceOrView():
                return memory.as_strided(size, strides, offset)
        # Autograd knows this view, so AOTAutograd repeats it: the numbers alone would not say how it shows its memory.
        memory = torch.empty(bytes_of_base // self.memory.itemsize, dtype=self.memory, device="meta")
        shown = memory if self.dtype is self.memory else seen_as(memory, self.dtype)
        shown = shown.as_strided(size, strides, offset)
        shown = shown.conj() if self.conjugate else shown
        return torch._neg_view(shown) if self.negative else shown


def _plain(value: Any) -> Any:
    """An integer, or a SymPy expression, of a symbolic integer or of PyTorch's wrapper that compares those."""
    value = getattr(value, "val", value)
    value = value.node.expr if isinstance(value, torch.SymInt) else value
    return int(value) if not isinstance(value, int) and value.is_Integer else value


@dataclass(frozen=True, slots=True)
class Views:
    """A result that the graph takes of an input, or of its new value, by view operators."""

    position: int
    base: int
    views: tuple[fx.Node, ...]

    @property
    def numbers(self) -> list[Any]:
        """The views' numbers that are no constants: SymPy expressions."""
        return [_number(node) for view in self.views for node in view.all_input_nodes[1:]]

    def of(self, base: torch.Tensor, values: dict[Any, int]) -> torch.Tensor:
        """The same of a tensor. Raises ``KeyError`` for a symbol that no input has."""
        return self._taken(base, lambda node: _evaluated(_number(node), values))

    def gives(self, base: torch.Tensor, like: torch.Tensor) -> bool:
        """Whether a fake tensor can be viewed so, and looks like another then. The graph's views may be of a new value
        that lies in memory otherwise than the input."""
        try:
            found = self._taken(base, lambda node: node.meta["val"])
            return found.dtype is like.dtype and list(map(_plain, found.shape)) == list(map(_plain, like.shape))
        except Exception:
            return False

    def _taken(self, base: torch.Tensor, number: Callable[[fx.Node], Any]) -> torch.Tensor:
        value: Any = base
        for view in self.views:
            before, taken = view.all_input_nodes[0], value

            def given(node: fx.Node, before: fx.Node = before, taken: Any = taken) -> Any:
                return taken if node is before else number(node)

            args, kwargs = map_arg((view.args, view.kwargs), given)  # type: ignore[misc]
            value = view.target(*args, **kwargs)  # type: ignore[operator]
        return value


REPEATED: Final = "torchport_views"
"""The attribute of a result without memory that says by which views it is taken of the input."""


def repeated(base: torch.Tensor, like: torch.Tensor, requires_grad: bool) -> torch.Tensor | None:
    """The alias of an input that ``like`` stands for; ``None`` where that does not know its views."""
    views = getattr(like, REPEATED, None)
    if views is None:
        return None
    made: torch.Tensor = views(base)
    if base.requires_grad and not requires_grad:
        return made.detach()
    return made.requires_grad_() if requires_grad and not base.requires_grad else made


def _number(node: fx.Node) -> Any:
    return _plain(node.meta["val"])


@dataclass(frozen=True, slots=True)
class Alias:
    """A result that is an alias of an input, or of another result.

    ``views``: by which it is taken here; else AOTAutograd goes by its looks, or repeats the views that it knows.
    """

    position: int
    base: int
    looks: Looks
    views: Views | None

    @property
    def numbers(self) -> Sequence[Any]:
        """What depends on the inputs: SymPy expressions, or integers."""
        return self.looks.numbers if self.views is None else [*self.looks.size, *self.views.numbers]

    def standing_for(self, base: torch.Tensor, values: dict[Any, int]) -> torch.Tensor:
        """A tensor without memory that AOTAutograd takes for the result. Raises ``KeyError`` for an unknown symbol."""
        if self.views is None:
            numbers = [_evaluated(number, values) for number in self.looks.numbers]
            begins = int(base.storage_offset())
            return self.looks.tensor(numbers, begins, (begins + base.numel()) * base.itemsize)
        size = [_evaluated(number, values) for number in self.looks.size]
        for number in self.views.numbers:
            _evaluated(number, values)
        made = torch.empty(size, dtype=self.looks.dtype, device="meta")
        setattr(made, REPEATED, functools.partial(self.views.of, values=values))
        return made


class Aliases:
    """The results of one graph that are aliases of inputs: those that AOTAutograd takes, and parts."""

    def __init__(self, graph: fx.GraphModule, found: Sequence[Alias], parts: Sequence[Views] = ()) -> None:
        self._found = tuple(found)
        self._parts = tuple(parts)
        inputs = [node.meta.get("val") for node in graph.graph.find_nodes(op="placeholder")]
        self._readers = _readers(inputs)
        numbers = [*(alias.numbers for alias in found), *(part.numbers for part in parts)]
        self._static = all(isinstance(number, int) for several in numbers for number in several)
        # Without symbols, and without views that autograd knows, the same is taken wherever inputs begin as before.
        self._lasts = self._static and all(alias.views or alias.looks.is_plain for alias in found)
        self._seen = [alias.base for alias in found if alias.views is None]
        self._last: tuple[list[int], dict[int, torch.Tensor]] | None = None

    def __bool__(self) -> bool:
        return bool(self._found or self._parts)

    def parts(self, args: Sequence[Any]) -> dict[int, Callable[[], torch.Tensor]]:
        """Per position of a result, how it is taken of an input once that has been written."""
        if not self._parts:
            return {}
        values = {} if self._static else self._values(args)
        return {part.position: functools.partial(part.of, args[part.base], values) for part in self._parts}

    def _values(self, args: Sequence[Any]) -> dict[Any, int]:
        return {symbol: read(args) for symbol, read in self._readers.items()}

    def take(self, args: Sequence[Any]) -> dict[int, torch.Tensor]:
        """Per position of a result, a tensor without memory that looks as eager's, where that can be told.

        AOTAutograd looks at what it is like, and not at what is in it.
        """
        if self._lasts:
            begins, last = [args[at].storage_offset() for at in self._seen], self._last
            if last is None or last[0] != begins:
                with default_state():  # whatever modes of the caller are on
                    made = {alias.position: alias.standing_for(args[alias.base], {}) for alias in self._found}
                last = self._last = begins, made
            return last[1]
        taken: dict[int, torch.Tensor] = {}
        values = {} if self._static else self._values(args)
        for alias in self._found:
            try:
                taken[alias.position] = alias.standing_for(args[alias.base], values)
            except KeyError:
                continue  # not of a synthetic base, which begins at 0: AOTAutograd repeats the views
        return taken


def _readers(inputs: Sequence[Any]) -> dict[Any, Callable[[Sequence[Any]], int]]:
    """How the value of each symbol is read off the arguments."""
    readers: dict[Any, Callable[[Sequence[Any]], int]] = {}

    def note(number: Any, read: Callable[[Sequence[Any]], int]) -> None:
        symbol = _plain(number) if isinstance(number, torch.SymInt) else number
        if getattr(symbol, "is_Symbol", False):
            readers.setdefault(symbol, read)

    for at, value in enumerate(inputs):
        if isinstance(value, torch.Tensor):
            if value.device.type == "cpu":  # a handle has no offset that a symbol could be read off
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


def writes_to_inputs() -> bool:
    """Whether the forward that AOTAutograd is compiling, or what it does after it, writes to inputs."""
    tracing = TracingContext.try_get()
    known = None if tracing is None else tracing.fw_metadata
    return known is not None and any(info.mutates_data for info in known.input_info)


def aliases_of(graph: fx.GraphModule) -> Aliases | None:
    """What is to be done about a forward's results that are aliases of inputs; ``None`` if there are none.

    Called while AOTAutograd compiles the forward; it forgets the views of synthetic bases.
    """
    tracing = TracingContext.try_get()
    if tracing is None or tracing.fw_metadata is None:
        return None
    shapes = None if tracing.fake_mode is None else tracing.fake_mode.shape_env
    # Views that are taken again find out nothing new, and a guard may be on a size of a base, which no input has.
    with nullcontext() if shapes is None else shapes.suppress_guards():
        return _found(graph, tracing.fw_metadata)


def _found(graph: fx.GraphModule, known: Any) -> Aliases | None:
    places = graph.graph.find_nodes(op="placeholder")
    outputs: Any = graph.graph.output_node().args[0]
    first = len(known.tokens) + known.num_mutated_inp_runtime_indices
    found: list[Alias] = []
    parts: list[Views] = []
    for at, info in enumerate(cast("list[Any]", known.output_info)):
        node = outputs[first + at] if first + at < len(outputs) else None
        if info.base_idx is None or not isinstance(node, fx.Node):
            continue
        if info.output_type.name.startswith(OF_RESULT):
            found += _of_result(node, _base_result(outputs, known, first, info), first + at, info)
            continue
        place = places[len(known.tokens) + info.base_idx] if info.output_type.name in (_ALIAS, _HIDDEN) else None
        if place is not None and info.output_type.name == _HIDDEN:
            views = _views(node, _written(graph, known, info.base_idx, place))
            if views:
                parts.append(Views(first + at, len(known.tokens) + info.base_idx, views))
            continue
        if place is None:
            continue
        base, val, known_views = place.meta.get("val"), node.meta.get("val"), info.view_meta_sequence
        if not isinstance(base, torch.Tensor) or not isinstance(val, torch.Tensor):
            continue
        if isinstance(place.meta.get("desc"), (SyntheticBaseAOTInput, ViewBaseAOTInput)):
            known.output_info[at] = dataclasses.replace(info, view_meta_sequence=None)
            known_views = None
        new = _written(graph, known, info.base_idx, place)
        # The input itself, as it is after the write: the new value need not lie in memory as the input does.
        looks = _looks(base, known_views) or Looks.of(base if node in (new, place) else val, base)
        position, views = len(known.tokens) + info.base_idx, None
        if known_views is None or any(view.has_symbolic_inputs for view in known_views.sequence):
            taken = _views(node, new) or _views(node, place)
            views = Views(first + at, position, tuple(view for view in taken if view.target not in _IDENTITIES))
            views = views if views.views and views.gives(base, val) else None
        found.append(Alias(first + at, position, looks, views))
    return Aliases(graph, found, parts) if found or parts else None


def _base_result(outputs: Sequence[Any], known: Any, first: int, info: Any) -> Any:
    """The result that another one is an alias of: one of the program's, or one that AOTAutograd added behind them."""
    of_users = info.output_type.name == _OF_USERS_RESULT
    return outputs[first + info.base_idx + (0 if of_users else len(known.output_info))]


def _of_result(node: fx.Node, base: Any, position: int, info: Any) -> list[Alias]:
    """How a result that is an alias of another one is taken of that; none where AOTAutograd knows.

    On the device AOTAutograd would go by the storage offset, and every tensor of the device begins at 0. Everywhere it
    repeats the views from the first value of that memory on, also where the other result came later, by
    ``_unsafe_view`` (``reshape`` that copies): to autograd that is no view, so a write to one would not reach the
    other's history. Raises :class:`UnsupportedOp` where the graph does not tell by which views.
    """
    val, known = node.meta.get("val"), info.view_meta_sequence
    forgotten = known is None or any(view.has_symbolic_inputs for view in known.sequence)
    apart = known is not None and any(type(view).__name__ == _UNSAFE_VIEW for view in known.sequence)
    if not isinstance(val, torch.Tensor):
        return []
    if not apart and (not forgotten or node is base or val.device.type != DEVICE_TYPE):
        return []
    if not isinstance(base, fx.Node) or not _views(node, base):
        raise UnsupportedOp("a result is a view of another one, by views that the compiled graph does not have")
    return [Alias(position, 0, Looks.of(val, val), Views(position, 0, _views(node, base)))]


_UNSAFE_VIEW: Final = "_unsafe_view_ViewMeta"
OF_RESULT: Final = "alias_of_intermediate"
"""How the names of the kinds of results begin whose ``base_idx`` counts results, not inputs."""
_OF_USERS_RESULT: Final = "alias_of_intermediate_base_is_user_output"
_ALIAS: Final = "alias_of_input"
_IDENTITIES: Final = {torch.ops.aten.detach.default, torch.ops.aten.alias.default}
_HIDDEN: Final = "non_alias"
"""With the position of an input: an alias that autograd is not told of."""


def _written(graph: fx.GraphModule, known: Any, base: int, place: fx.Node) -> fx.Node | None:
    """The new value of an input; ``None`` if it is not written."""
    if base in known.mutated_inp_runtime_indices:
        outputs: Any = graph.graph.output_node().args[0]
        return outputs[len(known.tokens) + known.mutated_inp_runtime_indices.index(base)]
    copies = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    return next((node.args[1] for node in reversed(copies) if node.args[0] is place), None)


def _views(node: fx.Node, value: fx.Node | None) -> tuple[fx.Node, ...]:
    """The view operators by which a node is made of that value, first to last; none if it is not."""
    views: list[fx.Node] = []
    while value is not None and node is not value:
        if node.op != "call_function" or not (is_view(node.target) or node.target is operator.getitem):
            return ()
        views.append(node)
        node = node.all_input_nodes[0]
    return tuple(reversed(views))


def _looks(base: torch.Tensor, views: Any) -> Looks | None:
    """What the views of an input look like. Where the input was written, the graph's own views are of the new value."""
    if views is None:
        return None
    try:
        shown = torch._C._functionalization.apply_view_meta_sequence(base, views.sequence)  # type: ignore[attr-defined]
        return Looks.of(shown, base)
    except Exception:  # a view that fake tensors cannot take again: the graph's own result is the next best
        return None
