"""Which operators of an interpreted path may write to the memory of a value that nobody needs afterwards.

A trace holds functional operators only: ``x.mul_(2)`` was recorded as a new value. Interpreted as it stands, each such
value is new memory, which the system has to clear first; in an optimizer's step over large parameters that takes
longer than the arithmetic. Only values that the path itself makes are written to, so that after an error the path can
be run again from its leaves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from typing import Any, Final

import torch

from ..backend.in_place_forms import gives_new_memory, in_place_form
from ..backend.interpret import How
from ..backend.lowering import scalar_role
from ..core.specs import TensorSpec
from ..trace.graph import templates_of
from ..trace.trie import HostScalar, Leaf, Node, RandomKey, Value

__all__ = ["overwriting"]

_FLOATS: Final = frozenset({torch.float32, torch.float64})


def overwriting(
    nodes: Sequence[Node],
    hows: Sequence[How],
    last: Mapping[int, int],
    kept: Set[int],
    leaf_specs: Sequence[TensorSpec],
) -> list[Any]:
    """Per operator of a path its form in place, where it may be called instead; else ``None``.

    ``last``: the position of the operator that uses a value last. ``kept``: the values to bring. The memory that is
    written to was made, and used so far, by operators whose results are sure to be memory of their own. Every tensor
    argument has its dtype and sizes, so that nothing is refused when a part is written already.
    """
    specs: dict[int, TensorSpec | None] = {}
    own: set[int] = set()
    found: list[Any] = []
    for at, (node, how) in enumerate(zip(nodes, hows, strict=True)):
        used = templates_of(node)
        form = None if how.draws or how.shares or how.call is None else in_place_form(node.op)
        if form is not None and not _goes(node, used, at, last, kept, own, specs, leaf_specs):
            form = None
        found.append(form)
        if gives_new_memory(node.op) and not how.shares and scalar_role(node.op) != "filler":
            own.update(range(node.first_id, node.end_id))
        else:
            own.difference_update(one.value_id for one in used if one.__class__ is Value)
        specs.update(zip(range(node.first_id, node.end_id), node.specs, strict=True))
    return found


def _goes(
    node: Node,
    used: Sequence[Any],
    at: int,
    last: Mapping[int, int],
    kept: Set[int],
    own: Set[int],
    specs: Mapping[int, TensorSpec | None],
    leaf_specs: Sequence[TensorSpec],
) -> bool:
    """Whether an operator may write to its first argument."""
    first: Any = node.args[0] if node.args else None
    targets: Sequence[Any] = first if isinstance(first, (list, tuple)) else (first,)
    if not targets or any(one.__class__ is not Value for one in targets):
        return False
    if any(one.__class__ in (HostScalar, RandomKey) for one in used):
        return False
    times = Counter(one.value_id for one in used if one.__class__ is Value)
    for one in targets:
        n = one.value_id
        if n in kept or last[n] != at or n not in own or times[n] != 1:
            return False
    wanted = [specs[one.value_id] for one in targets]
    if any(spec is None or spec.dtype not in _FLOATS for spec in wanted) or tuple(wanted) != tuple(node.specs):
        return False

    def spec_of(template: Any) -> TensorSpec | None:
        return leaf_specs[template.position] if template.__class__ is Leaf else specs[template.value_id]

    def goes(argument: Any) -> bool:
        if argument.__class__ in (Leaf, Value):
            return all(_alike(spec_of(argument), spec) for spec in wanted)
        if isinstance(argument, (list, tuple)) and any(one.__class__ in (Leaf, Value) for one in argument):
            return len(argument) == len(wanted) and all(
                one.__class__ in (Leaf, Value) and _alike(spec_of(one), spec)
                for one, spec in zip(argument, wanted, strict=True)
            )
        return True

    return all(map(goes, (*node.args[1:], *node.kwargs.values())))


def _alike(one: TensorSpec | None, other: TensorSpec | None) -> bool:
    return one is not None and other is not None and one.dtype is other.dtype and one.shape == other.shape
