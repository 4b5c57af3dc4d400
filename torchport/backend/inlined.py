"""What decompositions were found to call, by the call that they take apart: layers that repeat are traced once.

PyTorch's tracer imports Dynamo and Inductor, so this is kept for other processes, too (:mod:`.inferences`).
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import fx
from torch.fx.node import map_arg

from ..core.errors import GraphError
from .infer import exact_key, fake_mode

__all__ = ["Inlined", "NotTakenApart", "Ref", "inlined", "taken_apart"]

_getitem: Any = operator.getitem
_REMEMBER: Final = 4_096


class NotTakenApart(Exception):
    """A decomposition returned ``NotImplemented``: not for these arguments."""


@dataclass(frozen=True, slots=True)
class Ref:
    """Stands in a call's arguments for a value: the tensors that were given first, then the calls' results."""

    position: int


@dataclass(frozen=True, slots=True)
class Inlined:
    """What a decomposition calls, in order, as operator, arguments and keyword arguments, and what it returns.

    ``None`` in an operator's place stands for an element of a result.
    """

    calls: tuple[tuple[Any, Any, Any], ...]
    returns: Any


inlined: Final[OrderedDict[Any, Inlined]] = OrderedDict()
"""What is remembered, oldest first."""


def taken_apart(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    tensors: Sequence[fx.Node],
    specs: tuple[Any, Any],
    known_as: Any,
) -> Inlined:
    """What a decomposition written with tensors calls for these arguments.

    ``tensors``: the nodes among the arguments, in order; ``specs``: the arguments with specs in their place.
    ``known_as``: what the function is known by in other processes; ``None`` if it must not be remembered.
    Raises :class:`NotTakenApart`.
    """
    if known_as is None:
        return _traced(fn, args, kwargs, tensors)
    same = tuple([tensors.index(node) for node in tensors])
    try:
        key = (same, exact_key(known_as, *specs))
        found = inlined.get(key)
    except TypeError:  # something unhashable among the arguments
        return _traced(fn, args, kwargs, tensors)
    if found is None:
        found = _traced(fn, args, kwargs, tensors)
        if all(target is None or isinstance(target, torch._ops.OpOverload) for target, _, _ in found.calls):
            inlined[key] = found
            if len(inlined) > _REMEMBER:
                inlined.popitem(last=False)
    return found


def _traced(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[fx.Node]
) -> Inlined:
    from torch.fx.experimental.proxy_tensor import make_fx

    def flat(*given: Any) -> Any:
        table = dict(zip(tensors, given, strict=True))
        real_args, real_kwargs = map_arg((tuple(args), dict(kwargs)), lambda n: table[n])
        # Decompositions may write into the lists they are given; FX makes immutable ones.
        result = fn(*_thawed(real_args), **_thawed(real_kwargs))
        if result is NotImplemented:
            raise NotTakenApart
        return _plain(result)

    with fake_mode(), torch.no_grad():
        traced = make_fx(flat, tracing_mode="real")(*(n.meta["val"] for n in tensors))
    refs: dict[fx.Node, Ref] = {}
    calls: list[tuple[Any, Any, Any]] = []

    def described(value: Any) -> Any:
        as_ref: Any = refs.__getitem__
        return _thawed(map_arg(value, as_ref))

    for node in traced.graph.nodes:
        if node.op == "output":
            return Inlined(tuple(calls), described(node.args[0]))
        refs[node] = Ref(len(refs))
        if node.op != "placeholder":
            target = None if node.target is _getitem else node.target
            calls.append((target, described(node.args), described(node.kwargs)))
    raise GraphError("a decomposition returned nothing")


def _thawed(value: Any) -> Any:
    """Arguments with plain lists and dictionaries in place of FX's immutable ones."""
    if isinstance(value, dict):
        return {name: _thawed(one) for name, one in cast("dict[str, Any]", value).items()}
    if isinstance(value, list):
        return [_thawed(one) for one in cast("list[Any]", value)]
    return tuple(_thawed(one) for one in cast("tuple[Any, ...]", value)) if type(value) is tuple else value


def _plain(value: Any) -> Any:
    """Results with plain tuples in place of named ones, which FX would write as a call of their class."""
    if isinstance(value, tuple):
        return tuple(_plain(one) for one in cast("tuple[Any, ...]", value))
    return [_plain(one) for one in cast("list[Any]", value)] if isinstance(value, list) else value
