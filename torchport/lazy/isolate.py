"""After a computation failed: run its ops one by one, so that one bad op takes only what depends on it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from torch.utils._pytree import tree_iter

from ..core import metrics
from ..core.errors import ExecutionError, TorchportError
from ..core.specs import TensorSpec
from .executor import execute, make_plan
from .tensor import LazyTensor, make_handle
from .trace import Leaf, Node, Trace, Value, is_template, single_op

__all__ = ["isolate"]


def _inputs(node: Node) -> list[tuple[str, int]]:
    found: list[tuple[str, int]] = []
    for template in tree_iter((node.args, node.kwargs), is_leaf=is_template):
        if template.__class__ is Leaf:
            found.append(("leaf", template.number))
        elif template.__class__ is Value:
            found.append(("value", template.number))
    return list(dict.fromkeys(found))


class _Replay:
    """The values of a failed trace, op by op: each a handle with its data, or the error that stands in for it."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.values: dict[tuple[str, int], Any] = {
            ("leaf", position): leaf for position, leaf in enumerate(trace.leaves)
        }

    def run(self, node: Node) -> None:
        """Run one op; its results, or its error, become values."""
        inputs = _inputs(node)
        failed = next((v for key in inputs if isinstance(v := self.values[key], TorchportError)), None)
        results: Sequence[Any] = [failed] * len(node.specs)
        if failed is None:
            try:
                results = self._execute(node, inputs)
            except TorchportError as error:
                if isinstance(error, ExecutionError):
                    named = ExecutionError(error.message, op=str(node.op), source=node.source)
                    named.__cause__ = error.__cause__
                    error = named
                results = [error] * len(node.specs)
        for offset, result in enumerate(results):
            self.values["value", node.number + offset] = result

    def _execute(self, node: Node, inputs: Sequence[tuple[str, int]]) -> list[LazyTensor]:
        scratch = Trace(self.trace.runtime)
        scratch.numbers, scratch.keys = self.trace.numbers, self.trace.keys
        scratch.leaves = [self.values[key] for key in inputs]  # type: ignore[misc]
        copy = single_op(node, {key: position for position, key in enumerate(inputs)})
        plan = make_plan(scratch, copy, tuple(n for n, spec in enumerate(node.specs) if spec is not None), [copy])
        outputs = dict(zip(plan.numbers, execute(plan, scratch), strict=True))
        handles: list[Any] = []
        for offset, spec in enumerate(node.specs):
            handle = make_handle(spec, self.trace.index) if spec is not None else None
            if handle is not None:
                outputs[offset].info = self.trace.runtime
                handle.value = outputs[offset]
            handles.append(handle)
        return handles


def isolate(trace: Trace, handles: Sequence[LazyTensor], error: TorchportError) -> TorchportError | None:
    """Compute the handles' values op by op; returns the first error among them, if there is one.

    ``error`` is what the whole computation ended in; it is chained to the errors of the single ops.
    """
    metrics.count("Isolate")
    replay = _Replay(trace)
    wanted = {handle.number - trace.base for handle in handles}
    path = trace.cursor.path()
    kept: list[Node] = []
    for node in reversed(path):
        if any(number in wanted for number in range(node.number, node.end)):
            kept.append(node)
            wanted.update(number for kind, number in _inputs(node) if kind == "value")
    for node in reversed(kept):
        replay.run(node)
    first: TorchportError | None = None
    for handle in handles:
        result = replay.values["value", handle.number - trace.base]
        if isinstance(result, TorchportError):
            if result.__context__ is None and result is not error:
                result.__context__ = error
            handle.failure = result
            first = first or result
        else:
            handle.value, handle.spec = result.value, TensorSpec.of(handle)
    if first is None:
        metrics.count("IsolateRecovered")
        warnings.warn(
            f"a computation failed as a whole and was run op by op, which is slow: {error}",
            RuntimeWarning,
            stacklevel=2,
        )
    return first
