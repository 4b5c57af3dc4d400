"""Guards of a compiled function that Dynamo could not check, or would check wrongly, are taken back.

AOTAutograd adds guards while it compiles a graph: on sizes, and on which inputs overlap in memory. Three kinds are no
use to Dynamo.

A graph that AOTAutograd refuses runs as it was captured, which needs none of the guards that came until then.

Inputs that share memory become views of one tensor, which Dynamo has not met. Its sizes have no name in the program,
so that Dynamo ends in an exception of its own at a guard on them. The graph runs as it was captured then, too.

Which inputs overlap is asked of their storage offsets in C++. To C++ every view on this device begins at zero, so the
guard may fail at the very call that it was made for. The call is compared with the first one here instead
(:func:`.as_captured.as_captured_where_shared_otherwise`).

Private torch APIs used here: ``torch._guards.TracingContext`` (``fake_mode``, ``guards_context.aotautograd_guards``),
``torch._guards.StorageOverlap``, ``torch.fx.experimental.symbolic_shapes.ShapeEnv`` (``guards``, ``simplify``,
``_maybe_evaluate_static``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._guards import StorageOverlap, TracingContext

from ...trace.handle import DEVICE_TYPE

__all__ = ["Guards", "mended_guards"]


@dataclass
class Guards:
    """What became of the guards of one graph."""

    on_unknown_sizes: bool = False
    """Whether some were on sizes that Dynamo has no name for, and were taken back: the graph must not run compiled."""


@contextmanager
def mended_guards(graph: fx.GraphModule) -> Iterator[Guards]:
    """While AOTAutograd compiles a captured graph; says at the end what became of its guards."""
    tracing = TracingContext.try_get()
    made = Guards()
    if tracing is None or tracing.fake_mode is None or tracing.fake_mode.shape_env is None:
        yield made
        return
    shapes = tracing.fake_mode.shape_env
    before = len(shapes.guards)
    try:
        yield made
    except Exception:
        del shapes.guards[before:]
        raise
    inputs = [node.meta.get("example_value") for node in graph.graph.find_nodes(op="placeholder")]
    known = {symbol for value in inputs for symbol in _symbols(value)}
    if any(_asks_of_others(shapes, guard, known) for guard in shapes.guards[before:]):
        made.on_unknown_sizes = True
        del shapes.guards[before:]
    if any(isinstance(value, torch.Tensor) and value.device.type == DEVICE_TYPE for value in inputs):
        overlaps = tracing.guards_context.aotautograd_guards
        overlaps[:] = [guard for guard in overlaps if not isinstance(guard, StorageOverlap)]


def _symbols(value: Any) -> Iterator[Any]:
    """The symbols that Dynamo finds in an input by itself: sizes, strides and offsets that are one symbol each."""
    numbers = (*value.shape, *value.stride(), value.storage_offset()) if _is_dense(value) else (value,)
    for number in numbers:
        if isinstance(number, (torch.SymInt, torch.SymFloat)) and number.node.expr.is_Symbol:
            yield number.node.expr


def _is_dense(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def _asks_of_others(shapes: Any, guard: Any, known: set[Any]) -> bool:
    """Whether a guard is on other symbols than these, and is not true of all sizes."""
    if shapes.simplify(guard.expr).free_symbols <= known:
        return False
    return shapes._maybe_evaluate_static(guard.expr, axioms=(), size_oblivious=guard.size_oblivious) is None
