"""Ops that run at once instead of joining the graph: a backend's own kernels, and the counted host fallback."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map

from ..backend.decompositions import DECOMPOSE
from ..backend.execution import call_kernel
from ..backend.interface import BackendData
from ..backend.interpret import how, interpret
from ..core.default_state import default_state
from ..core.errors import UnsupportedOp
from ..core.fallback import check_fallback, note_fallback
from ..core.frames import user_line
from ..trace.decide import AtOnce, not_taken
from ..trace.handle import LazyTensor
from ..trace.layouts import kind_of, refusal
from ..trace.trace import Trace
from ..trace.wrapping import unwrap
from .flush import flush
from .values import host_tensor, leaf_from_data, leaf_from_host, value_of

if TYPE_CHECKING:
    from ..trace.trie import Node
    from .device_runtime import DeviceRuntime

__all__ = ["make_barrier", "on_host"]


def backend_kernel(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A barrier that calls a backend's own kernel: tensors arrive and leave as :class:`BackendData`."""

    def run(trace: Trace, node: Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        def argument(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            inner = unwrap(value)
            if isinstance(inner, LazyTensor):
                return value_of(inner, trace)
            return trace.runtime.backend.to_device(inner, trace.runtime.device)

        def result(value: Any) -> Any:
            return leaf_from_data(trace.runtime, value) if isinstance(value, BackendData) else value

        flush(trace, f"kernel {node.op}")
        with default_state():
            values, named = tree_map(argument, tuple(args)), tree_map(argument, dict(kwargs))
            outputs = call_kernel(trace.runtime.backend, fn, node.op, values, named, node.source)
        return tree_map(result, outputs, is_leaf=lambda v: isinstance(v, BackendData))

    return run


def make_barrier(runtime: DeviceRuntime, node: Node, decision: AtOnce) -> Callable[..., Any]:
    """What runs a node's operator at once. Raises :class:`UnsupportedOp` where the policy forbids the host."""
    kernel = decision.kernel
    barrier = host(runtime, node, decision.reason) if kernel is None else backend_kernel(kernel)
    return seeded(barrier) if decision.seeded else barrier


def seeded(barrier: Callable[..., Any]) -> Callable[..., Any]:
    """A barrier whose random numbers come from the device's generator: CPU's is seeded with its key, and put back."""

    def run(trace: Trace, node: Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        generator = torch.default_generator
        before = generator.get_state()
        generator.manual_seed(trace.runtime.next_key())
        try:
            return barrier(trace, node, args, kwargs)
        finally:
            generator.set_state(before)

    return run


def host(runtime: DeviceRuntime, node: Node, reason: str) -> Callable[..., Any]:
    """The barrier that runs an op on the host. Raises :class:`UnsupportedOp` where the policy forbids it."""
    message = not_taken(runtime.backend, reason)
    check_fallback(node.op, node.source, message)

    def run(trace: Trace, node: Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        note_fallback(node.op, node.source, message)
        drawn = trace.random_keys[-1] if "random_key" in node.kwargs else None  # the kernel has just drawn it
        return on_host(trace, node.op, args, kwargs, drawn)

    return run


def on_host(
    trace: Trace, op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], key: int | None = None
) -> Any:
    """Run an op on CPU copies of its arguments and bring the results back.

    ``key``: what a random operator draws with, so that its numbers are those of the graphs of other backends.
    """

    def argument(value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if not isinstance(value, torch.Tensor):
            return value
        inner = unwrap(value)
        return host_tensor(inner) if isinstance(inner, LazyTensor) else inner

    def result(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if value.layout is not torch.strided:
            raise UnsupportedOp(refusal(kind_of(value.layout)), op=str(op), source=user_line())
        return leaf_from_host(trace.runtime, value)

    flush(trace, f"host {op}")
    formula: Callable[..., Any] = op
    if op in DECOMPOSE and not torch._C._dispatch_has_computed_kernel_for_dispatch_key(op.name(), "CPU"):
        formula = DECOMPOSE[op]  # such as fused LSTM cells, which PyTorch has for other devices only
    if key is not None:
        formula = functools.partial(_drawn, op, key)
    with default_state():
        outputs = formula(*tree_map(argument, tuple(args)), **tree_map(argument, dict(kwargs)))
    return tree_map(result, outputs)


def _drawn(op: torch._ops.OpOverload, key: int, *args: Any, **kwargs: Any) -> Any:
    """A random operator's results on CPU tensors, by the formula that graphs have."""
    given = {name: value for name, value in kwargs.items() if value is not None}
    with torch.no_grad():
        return interpret(how(op), args, given, key)
