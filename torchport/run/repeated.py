"""Large values that only repeat a small one: where a computation is cut in the middle, the small one is kept instead.

An ``expand`` that is still held when a barrier runs (autograd saves the index of a ``scatter_add`` as it was given)
would be written out in full, and read again by what follows. The value that it repeats is kept instead, and the next
trace begins with the same ``expand`` of it: there it is a view again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from ..core.errors import TorchportError
from ..core.specs import TensorSpec
from ..trace.handle import LazyTensor, make_handle
from ..trace.kernels import by_op
from ..trace.trace import Trace
from ..trace.trie import NONE, Leaf, Node, Value

__all__ = ["Repeated", "expand_again", "put_off"]

_EXPANDS: Final = frozenset({torch.ops.aten.expand.default, torch.ops.aten.expand_copy.default})
LARGE: Final = 1 << 16
"""Bytes below which a value is written out: a larger graph for it next time would cost more."""
TIMES: Final = 8
"""How often a value has to be repeated at least."""


@dataclass(frozen=True, slots=True)
class Repeated:
    """A handle whose value is ``op`` of another handle's: what it is called with after that, too."""

    handle: LazyTensor
    source: LazyTensor
    op: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def put_off(trace: Trace, handles: Sequence[LazyTensor]) -> tuple[Sequence[LazyTensor], list[Repeated]]:
    """The handles to compute now, in the order of their ids, and those that are expanded again afterwards."""
    wide = {h.value_id for h in handles if 0 in h.stride() and h.numel() * h.itemsize >= LARGE}
    if not wide or trace.eager:
        return handles, []
    nodes = {node.first_id: node for node in trace.cursor.path() if node.op in _EXPANDS and node.first_id in wide}
    specs = {node.first_id + at: spec for node in trace.cursor.path() for at, spec in enumerate(node.specs)}
    held = {handle.value_id: handle for handle in handles if handle.value_id not in nodes}
    later: list[Repeated] = []
    for handle in handles:
        node = nodes.get(handle.value_id)
        if node is None:
            continue
        source = _source(trace, node, held, specs)
        if source is None or source.numel() * TIMES > handle.numel():
            held[handle.value_id] = handle
            continue
        if source.value is None:
            held[source.value_id] = source
        later.append(Repeated(handle, source, node.op, tuple(node.args[1:]), node.kwargs))
    late = {id(one.handle) for one in later}
    now = [handle for handle in handles if id(handle) not in late]
    known = {id(handle) for handle in now}
    now += [one for one in held.values() if id(one) not in known and id(one) not in late]
    return sorted(now, key=lambda handle: handle.value_id), later


def _source(
    trace: Trace, node: Node, held: Mapping[int, LazyTensor], specs: Mapping[int, TensorSpec | None]
) -> LazyTensor | None:
    """The handle of what a node expands: a leaf, one that is held anyway, or a new one to be computed."""
    template = node.args[0]
    if isinstance(template, Leaf):
        return trace.leaves[template.position]
    if not isinstance(template, Value):
        return None
    if (known := held.get(template.value_id)) is not None:
        return known
    spec = specs.get(template.value_id)
    if spec is None or math.prod(spec.shape) * TIMES > math.prod(_shape_of(node)):
        return None
    made = make_handle(spec, trace.index)
    made.value_id = template.value_id
    trace.keep(made)  # so that its id ends with the trace
    return made


def _shape_of(node: Node) -> tuple[int, ...]:
    spec = node.specs[0]
    return () if spec is None else spec.shape


def expand_again(trace: Trace, later: Sequence[Repeated]) -> None:
    """Begin the next trace with the expansions. A handle whose source has failed has failed as well."""
    for one in later:
        handle = one.handle
        handle.value_id = NONE
        try:
            made: Any = by_op[one.op].indexed(trace, one.source, *one.args, **one.kwargs)
        except TorchportError as error:
            handle.failure = error
            continue
        if made.value is not None:  # operators are interpreted at once here
            handle.value, handle.spec = made.value, made.spec
            continue
        handle.value_id = made.value_id
        trace.keep(handle)
