"""Elementwise operators: their forms in place, and which are sure to give new memory."""

from __future__ import annotations

import functools
from typing import Any, Final

import torch

__all__ = ["gives_new_memory", "in_place_form"]

aten = torch.ops.aten
_FRESH: Final[frozenset[Any]] = frozenset(
    {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.clone.default, aten._to_copy.default}
)
"""Besides elementwise ones, operators whose result is always new memory; of others, such as ``_unsafe_view`` and
composites that may return their argument, the schema does not tell."""

_ON_LISTS: Final = frozenset(
    {"add", "sub", "mul", "div", "addcmul", "addcdiv", "lerp", "sqrt", "neg", "reciprocal", "abs", "exp", "sign"}
)
"""What of operators on lists is arithmetic, element by element."""


def _is_arithmetic_on_lists(op: Any) -> bool:
    name = op._schema.name
    return name.startswith("aten::_foreach_") and name.removeprefix("aten::_foreach_").rstrip("_") in _ON_LISTS


@functools.cache
def gives_new_memory(op: Any) -> bool:
    """Whether an operator's results are always memory that nothing else has."""
    if not isinstance(op, torch._ops.OpOverload):
        return False
    pointwise = torch.Tag.core in op.tags and torch.Tag.pointwise in op.tags
    return op in _FRESH or pointwise or _is_arithmetic_on_lists(op)


@functools.cache
def in_place_form(op: Any) -> Any:
    """The form in place, with the same arguments, of an operator that computes each element by itself; or ``None``."""
    if not isinstance(op, torch._ops.OpOverload):
        return None
    packet = getattr(aten, f"{op._schema.name.removeprefix('aten::')}_", None)
    found = getattr(packet, op._overloadname, None)
    if found is None or not (torch.Tag.pointwise in op.tags or _is_arithmetic_on_lists(op)):
        return None
    ours, theirs = op._schema.arguments, found._schema.arguments
    return found if [a.name for a in ours] == [a.name for a in theirs] else None
