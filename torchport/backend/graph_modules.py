"""Graphs as modules that write their Python code when somebody calls them or looks at it, and not before.

``fx.GraphModule`` writes and compiles the code of its graph whenever it gets one, which takes 20 µs per operator. A
graph in normal form is read by backends, not called.
"""

from __future__ import annotations

import torch
from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule

__all__ = ["graph_module"]


def graph_module(graph: fx.Graph, root: torch.nn.Module | None = None) -> fx.GraphModule:
    """A graph as a module; ``root``: where the modules and tensors are that it names."""
    return _LazyGraphModule(torch.nn.Module() if root is None else root, graph)
