"""Views and writes on handles themselves, where PyTorch runs a composite below functionalization.

Functionalization turns views and writes into functional operators before they reach this device. Some composites
(an ``out=`` form of a composite, a Python custom operator) run after it and do views and writes of their own on
handles. A view is then a value of its own, and a write gives a handle another value. That is correct as long as no
handle is written that is a view or has one. Such a write is refused; nothing is ever silently wrong.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...backend.normal_form import is_view
from ...core.errors import UnsupportedOp
from ...core.frames import user_line
from ...run.donation import take_place
from ...trace.handle import LazyTensor
from ...trace.pool import release
from ...trace.trace import Trace
from ...trace.wrapping import unwrap
from .custom import on_handles

__all__ = ["fallback"]

aten = torch.ops.aten


@functools.cache
def _copy_form(op: Any) -> Any:
    """The ``*_copy`` operator of a view operator, or ``None``."""
    if op in (aten.view.default, aten._unsafe_view.default):
        return aten.view_copy.default
    packet = getattr(aten, op._schema.name.removeprefix("aten::") + "_copy", None)
    return getattr(packet, op._overloadname, None) if packet is not None else None


@functools.cache
def _functional_form(op: Any) -> Any:
    """The functional operator of an in-place or ``out=`` operator, found by its arguments, or ``None``."""
    packet = getattr(aten, op._schema.name.removeprefix("aten::").removesuffix("_"), None)
    if packet is None:
        return None
    names = [a.name for a in op._schema.arguments if not a.is_out]
    for overload in packet.overloads():
        candidate = getattr(packet, overload)
        schema = candidate._schema
        if not schema.is_mutable and [a.name for a in schema.arguments if a.name in names] == names:
            return candidate
    return None


def fallback(trace: Trace, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], call: Callable[..., Any]) -> Any:
    """An operator on handles of one device that has no kernel there. ``call(op, args, kwargs)`` runs one that has."""
    if op.namespace == "aten":
        if is_view(op):
            return _view(trace, op, args, kwargs, call)
        if op._schema.is_mutable:
            return _write(trace, op, args, kwargs, call)
    return on_handles(trace, op, args, kwargs)


def _view(trace: Trace, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], call: Callable[..., Any]) -> Any:
    form = _copy_form(op)
    if form is None:
        return on_handles(trace, op, args, kwargs)
    results = call(form, args, kwargs)
    for tensor in (args[0], *(results if isinstance(results, (list, tuple)) else [results])):
        handle = unwrap(tensor)
        if isinstance(handle, LazyTensor):
            if handle.home is not None:  # once out of its node's pool, a flush finds the handle only in ``made``
                release(handle)
                if not any(held is handle for held in trace.made):
                    trace.keep(handle)
            handle.viewed = True
    return results


def _write(trace: Trace, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], call: Callable[..., Any]) -> Any:
    """Run the functional form and give its results' values to the handles the operator writes to."""
    form = _functional_form(op)
    if form is None:
        return on_handles(trace, op, args, kwargs)
    arguments = op._schema.arguments
    given = {**{a.name: v for a, v in zip(arguments, args, strict=False)}, **kwargs}
    targets = [given[a.name] for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    outs = {a.name for a in arguments if a.is_out}
    positional = [a.name for a in form._schema.arguments if not a.kwarg_only]
    inputs = {name: value for name, value in given.items() if name not in outs}
    call_args = [inputs.pop(name) for name in positional if name in inputs]
    results = call(form, call_args, inputs)
    for target, result in zip(targets, results if isinstance(results, (list, tuple)) else [results], strict=False):
        _assign(trace, op, unwrap(target), unwrap(result))
    return targets[0] if len(targets) == 1 else tuple(targets)


def _assign(trace: Trace, op: Any, target: Any, result: Any) -> None:
    if not isinstance(target, LazyTensor) or target.viewed:
        raise UnsupportedOp(
            "it writes to a tensor that shares memory with another, inside an operator that PyTorch runs below "
            "functionalization; write to a clone instead",
            op=str(op),
            source=user_line(),
        )
    if target.shape != result.shape or target.dtype != result.dtype:
        raise UnsupportedOp(
            f"its out= tensor is {target.dtype}{list(target.shape)} but the result is "
            f"{result.dtype}{list(result.shape)}; pass one of the result's shape and dtype",
            op=str(op),
            source=user_line(),
        )
    release(target)
    # Recorded operators use the value that the target has had so far.
    take_place(trace, target)
    target.value_id, target.value, target.spec, target.failure = (
        result.value_id,
        result.value,
        result.spec,
        result.failure,
    )
    if target.value is None:
        trace.keep(target)
