"""A graph as a function that lets go of every value, its arguments included, where it was last used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import fx

from .order import is_sure

__all__ = ["Run", "make_run"]

Run: TypeAlias = Callable[[list[Any], list[Any]], Sequence[torch.Tensor]]
"""Takes a list of arguments, which it empties, and a list of what else holds them, which it empties as soon as nothing
can fail any more."""


def make_run(module: fx.GraphModule) -> Run:
    """The function of a graph in normal form."""
    nodes = list(module.graph.nodes)
    unsure = [at for at, node in enumerate(nodes) if node.op == "call_function" and not is_sure(node)]
    sure_from = unsure[-1] + 1 if unsure else sum(node.op == "placeholder" for node in nodes)
    graph = fx.Graph()
    values, held = graph.placeholder("values"), graph.placeholder("held")
    copies: dict[fx.Node, fx.Node] = {}
    for node in reversed([node for node in nodes if node.op == "placeholder"]):
        copies[node] = graph.call_method("pop", (values,))  # FX's code lets go of it after its last use
    for at, node in enumerate(nodes):
        if at == sure_from:
            graph.call_method("clear", (held,))
        if node.op != "placeholder":
            copies[node] = graph.node_copy(node, lambda used: copies[used])
    return fx.GraphModule(module, graph).forward
