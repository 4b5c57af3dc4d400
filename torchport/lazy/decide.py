"""Who runs an op: one numbered list, at one place. The answer is remembered in the trie.

1. a kernel the backend registered for the operator, as the dispatcher's table for its component says;
2. capture into the graph, where the backend supports what the operator lowers to;
3. (part of 2) a decomposition, the backend's own first, then PyTorch's core ATen ones, into supported operators;
4. the backend's boxed fallback kernel, for what no graph of static shapes can hold;
5. the host, counted, as far as ``config.fallback`` allows;
6. an error that says what was tried.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from ..backend.decompositions import DECOMPOSE
from ..backend.infer import DataDependent, Inferred, NoShapeRule, check_complex, infer
from ..backend.lowering import view_form
from ..core.specs import TensorSpec
from .random import is_random
from .trace import Leaf, Node, Value, is_template, single_op

if TYPE_CHECKING:
    from .runtime import DeviceRuntime

__all__ = ["Inferred", "decide"]


def decide(
    runtime: DeviceRuntime, node: Node, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Inferred | Callable[..., Any]:
    """The results of capturing the op, or the barrier that runs it at once instead.

    ``args`` and ``kwargs`` hold a :class:`TensorSpec` where the op has a tensor.
    Raises what shape inference raises, and :class:`UnsupportedOp` where nothing takes the op.
    """
    from . import barriers

    kernel = runtime.kernels.kernel(node.op)
    if kernel is not None:
        return barriers.backend_kernel(kernel)
    if _draws_on_the_host(node.op):
        return barriers.seeded(
            _at_once(runtime, node, "it draws random numbers of a kind the device has no formula for")
        )
    try:
        inferred = infer(DECOMPOSE.get(node.op) or view_form(node.op), args, kwargs)
    except (DataDependent, NoShapeRule) as error:
        return _at_once(runtime, node, str(error))
    check_complex(node.op, args, kwargs, inferred)
    if not runtime.capture.takes_all:
        reason = runtime.refusal(*_alone(node, inferred, args, kwargs))
        if reason is not None:
            return barriers.host(runtime, node, reason)
    return inferred


def _draws_on_the_host(op: Any) -> bool:
    """Whether the op draws random numbers of a kind the device has no formula for."""
    # Fused attention draws only under dropout, which the device never asks of it.
    return (
        torch.Tag.nondeterministic_seeded in op.tags
        and not is_random(op)
        and not op.name().startswith("aten::_scaled_dot_product")
    )


def _at_once(runtime: DeviceRuntime, node: Node, reason: str) -> Callable[..., Any]:
    """The backend's boxed kernel, else the host."""
    from . import barriers

    boxed = runtime.kernels.boxed
    if boxed is None:
        return barriers.host(runtime, node, reason)
    return barriers.backend_kernel(functools.partial(_boxed, boxed, node.op))


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
        key = ("leaf" if template.__class__ is Leaf else "value", getattr(template, "number", None))
        if template.__class__ in (Leaf, Value) and key not in position_of:
            position_of[key] = len(specs)
            specs.append(spec)
    alone = single_op(node, position_of)
    alone.specs, alone.container, alone.end = inferred.specs, inferred.container, len(inferred.specs)
    return alone, specs
