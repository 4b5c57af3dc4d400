"""Writes to inputs without dimensions that PyTorch's part of torch.compile would drop.

Dynamo takes a float64 input of the CPU without dimensions for a number in disguise. After AOTAutograd has told it which
of those are constants, it traces again and removes them from the graph: an input whose every use reads its number, and
that it finds by the number that the node's fake tensor remembers. The result of a write in place is the same fake
tensor as the input, and where nothing uses that result, all of its no uses read the number: the write goes.

Private torch API used here: ``torch._dynamo.output_graph.OutputGraph.remove_tensorify_specialized_graphargs``.
"""

from __future__ import annotations

import functools
from typing import Any

from ..device.patches import is_applied, replace

__all__ = ["keep_writes_to_scalars"]

_TARGET = "torch._dynamo.output_graph.OutputGraph.remove_tensorify_specialized_graphargs"


def keep_writes_to_scalars() -> None:
    """Have Dynamo remove inputs only, from now on, not the nodes that write to them."""
    if is_applied(_TARGET):
        return
    from torch._dynamo.output_graph import OutputGraph

    remove = OutputGraph.remove_tensorify_specialized_graphargs

    @functools.wraps(remove)
    def wrapped(self: OutputGraph) -> Any:
        hidden = [
            (node, node.meta.pop("example_value"))
            for node in self.graph.nodes
            if node.op != "placeholder" and not node.users and "example_value" in node.meta
        ]
        try:
            return remove(self)
        finally:
            for node, value in hidden:
                node.meta["example_value"] = value

    replace(_TARGET, wrapped)
