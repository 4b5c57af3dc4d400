"""Who runs an operator: one list of rules, tried in order. The node of the trie remembers the answer.

1. a kernel the backend registered for the operator, as the dispatcher's table for its component says;
2. capture into the graph, where the backend supports what the operator lowers to;
3. (part of 2) a decomposition, the backend's own first, then PyTorch's core ATen ones, into supported operators;
4. the backend's boxed fallback kernel, for what no graph of static shapes can hold;
5. the host, counted, as far as ``config.fallback`` allows: captured like any other operator where its results'
   shapes are known, and then the plan has the interpreter run it between the backend's segments; else at once;
6. an error that says what was tried.

Nothing is run here. What runs at once is an :class:`AtOnce`; the trace's runner makes a barrier of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils._pytree import tree_leaves

from ..backend.builder import Refused
from ..backend.decompositions import DECOMPOSE
from ..backend.infer import DataDependent, Inferred, NoShapeRule, infer_as_on_cpu, learn, observed
from ..backend.interpret import refuse_repetition
from ..backend.lowering import view_form
from ..backend.random import is_random
from ..core.errors import UnsupportedOp
from ..core.fallback import check_fallback
from ..core.frames import user_line
from ..core.specs import TensorSpec
from .graph import check_taken
from .trace import Runner
from .trie import HostScalar, Leaf, Node, Value, is_template, single_op

if TYPE_CHECKING:
    from ..backend.interface import Backend

__all__ = ["AtOnce", "decide", "draws_on_the_host", "not_taken", "refusal"]


@dataclass(frozen=True, slots=True)
class AtOnce:
    """The op is not captured: ``kernel``, one of the backend's, runs it at once, or the host where that is ``None``.

    ``reason``: why no graph can have it. ``seeded``: it draws numbers, from CPU's generator, which
    gets the device's next key as its seed.
    """

    kernel: Callable[..., Any] | None = None
    reason: str = ""
    seeded: bool = False


def decide(runner: Runner, node: Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Inferred | AtOnce:
    """The results of capturing the op, or that it is run at once instead.

    ``args`` and ``kwargs`` hold a :class:`TensorSpec` where the op has a tensor. Raises what shape inference raises.
    """
    kernel = runner.kernels.kernel(node.op)
    if kernel is not None:
        return AtOnce(kernel)
    if node.op in _OF_STRIDES:
        refuse_repetition(node.op, *args[_OF_STRIDES.index(node.op) :][:2])
    if draws_on_the_host(node.op):
        return _boxed_or_host(
            runner, node, "it draws random numbers of a kind the device has no formula for", seeded=True
        )
    if observed:
        learn()
    try:
        inferred = infer_as_on_cpu(DECOMPOSE.get(node.op) or view_form(node.op), args, kwargs)
    except (DataDependent, NoShapeRule) as error:
        if node.op in runner.capture.kernels:
            raise UnsupportedOp(
                f"it has a kernel for the backend, but no graph of static shapes can hold it: {error}; give it a fake "
                "implementation (torch.library.register_fake) whose sizes do not depend on values",
                op=str(node.op),
                source=user_line(),
            ) from error
        return _boxed_or_host(runner, node, str(error))
    # Where the path is interpreted at first, whoever compiles it asks: that takes longer than the rest of recording.
    if not runner.capture.takes_all and not runner.interprets:
        reason = refusal(runner, *_alone(node, inferred, args, kwargs))
        if reason is not None:
            check_fallback(node.op, node.source, not_taken(runner.backend, reason))
            node.refused = True
    return inferred


def refusal(runner: Runner, node: Node, specs: Sequence[TensorSpec]) -> str | None:
    """Why the backend cannot have the op in a graph, or ``None`` if it can.

    ``node`` is a path of its own whose leaves have these specs. An unsupported operator is replaced by its
    decomposition, the backend's own or PyTorch's core ATen one, if what that gives is supported.
    """
    try:
        key = _question(runner, node, specs)
        known = runner.capture.answers.get(key, _UNKNOWN)
    except TypeError:  # something unhashable among the arguments
        return _refusal(runner, node, specs)
    if known is not _UNKNOWN:
        return known
    reason = _refusal(runner, node, specs)
    if len(runner.capture.answers) >= _ANSWERS_AT_MOST:
        runner.capture.answers.clear()
    runner.capture.answers[key] = reason
    return reason


def _refusal(runner: Runner, node: Node, specs: Sequence[TensorSpec]) -> str | None:
    outputs = [value_id for value_id, spec in enumerate(node.specs) if spec is not None]
    try:
        check_taken([node], outputs, specs, runner.capture)
    except Refused as refused:
        return refused.reason
    return None


_UNKNOWN: Final[Any] = object()
_ANSWERS_AT_MOST: Final = 16_384


def _question(runner: Runner, node: Node, specs: Sequence[TensorSpec]) -> Any:
    """What the backend's answer depends on: layers that repeat ask the same. Raises ``TypeError`` if not hashable."""
    key = (
        node.op, _described(node.args), _described(tuple(node.kwargs.items())), tuple(specs), node.specs,
        torch.get_default_dtype(), len(runner.capture.kernels),
    )  # fmt: skip
    hash(key)
    return key


def _described(value: Any) -> Any:
    """A hashable form of what a node remembers of its arguments; numbers keep their type, for 1 equals True and 1.0."""
    if isinstance(value, (list, tuple)):
        return tuple([_described(item) for item in value])
    if value.__class__ is Leaf:
        return Leaf, value.position
    if value.__class__ is HostScalar:
        return HostScalar, value.dtype, _described(value.value)
    if is_template(value):
        return value.__class__  # which scalar of the trace it is makes no difference
    return (value.__class__, repr(value)) if isinstance(value, (int, float, complex)) else value


_OF_STRIDES = (torch.ops.aten.empty_strided.default, torch.ops.aten.new_empty_strided.default)
"""Operators whose sizes and strides stand at the place that they have here, and at the next."""


def draws_on_the_host(op: Any) -> bool:
    """Whether the op draws random numbers of a kind the device has no formula for."""
    # Fused attention draws only under dropout, which the device never asks of it.
    return (
        torch.Tag.nondeterministic_seeded in op.tags
        and not is_random(op)
        and not op.name().startswith("aten::_scaled_dot_product")
    )


def not_taken(backend: Backend, reason: str) -> str:
    """What is said of an operator that a backend does not take."""
    return f"backend {backend.name!r} does not take the operator: {reason}"


def _boxed_or_host(runner: Runner, node: Node, reason: str, seeded: bool = False) -> AtOnce:
    """The backend's boxed kernel, else the host."""
    boxed = runner.kernels.boxed
    kernel = None if boxed is None else functools.partial(_boxed, boxed, node.op)
    return AtOnce(kernel, reason, seeded)


def _boxed(fn: Callable[..., Any], op: Any, *args: Any, **kwargs: Any) -> Any:
    return fn(op, args, kwargs)


def _alone(
    node: Node, inferred: Inferred, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Node, list[TensorSpec]]:
    """The op as a path of its own, each tensor argument a leaf, and the leaves' specs."""
    templates = tree_leaves((list(node.args), dict(node.kwargs)), is_leaf=is_template)
    given = tree_leaves((list(args), dict(kwargs)), is_leaf=lambda v: isinstance(v, TensorSpec))
    position_of: dict[Any, int] = {}
    specs: list[TensorSpec] = []
    for template, spec in zip(templates, given, strict=False):
        if template.__class__ is Leaf:
            key = ("leaf", template.position)
        elif template.__class__ is Value:
            key = ("value", template.value_id)
        else:
            continue
        if key not in position_of:
            position_of[key] = len(specs)
            specs.append(spec)
    alone = single_op(node, position_of)
    alone.specs, alone.container, alone.end_id = inferred.specs, inferred.container, len(inferred.specs)
    return alone, specs
