"""PyTorch's higher-order operators that XLA has, too: a branch and a loop stay in the graph, whatever the values are.

Their branches are graphs of their own, given as ``get_attr`` nodes; each is lowered where it is called.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .support import Any, Array, Call, Sequence, cast, fx, lax, lowers, np

_cond: Any = torch.ops.higher_order.cond
_while_loop: Any = torch.ops.higher_order.while_loop
_BOOL = np.dtype(np.bool_)


def _function(call: Call, graph: fx.GraphModule) -> Callable[..., tuple[Array, ...]]:
    """A graph as a function of arrays; a result that is left out (``None``) stays so."""
    context: Any = call.context
    return lambda *arrays: context.inner_results(graph, arrays)


@lowers(_cond)
def cond(
    call: Call, predicate: Any, true: fx.GraphModule, false: fx.GraphModule, operands: Sequence[Array] = ()
) -> tuple[Array, ...]:
    if isinstance(predicate, (bool, int)):
        return _function(call, true if predicate else false)(*operands)
    return lax.cond(lax.reshape(cast(predicate, _BOOL), ()), _function(call, true), _function(call, false), *operands)


@lowers(_while_loop)
def while_loop(
    call: Call,
    condition: fx.GraphModule,
    body: fx.GraphModule,
    carried: Sequence[Array],
    additional: Sequence[Array] = (),
) -> tuple[Array, ...]:
    goes_on, step = _function(call, condition), _function(call, body)

    def holds(state: tuple[Array, ...]) -> Array:
        (answer,) = goes_on(*state, *additional)
        return lax.reshape(cast(answer, _BOOL), ())

    def advance(state: tuple[Array, ...]) -> tuple[Array, ...]:
        return tuple(cast(new, np.dtype(old.dtype)) for new, old in zip(step(*state, *additional), state, strict=True))

    return lax.while_loop(holds, advance, tuple(carried))
