"""Control flow inside graphs: PyTorch's higher-order operators whose branches and bodies are graphs of their own.

A graph in normal form may hold them for a backend that says so (:attr:`Capabilities.control_flow`). The graphs that
such an operator calls are in normal form themselves, but may return their inputs; the call names them by ``get_attr``
nodes.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import fx

__all__ = ["CONTROL_FLOW", "inner_graph"]

CONTROL_FLOW: Final[frozenset[Any]] = frozenset(
    {torch.ops.higher_order.cond, torch.ops.higher_order.while_loop},  # pyright: ignore[reportAttributeAccessIssue]
)


def inner_graph(module: torch.nn.Module, node: fx.Node) -> fx.GraphModule | None:
    """The graph that a ``get_attr`` node names; ``None`` for any other node."""
    held = getattr(module, str(node.target), None) if node.op == "get_attr" else None
    return held if isinstance(held, fx.GraphModule) else None
