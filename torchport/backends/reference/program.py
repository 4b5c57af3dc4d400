"""A graph as a function that lets go of every value, its arguments included, where it was last used."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import fx
from torch.fx.node import map_arg

from .order import is_sure

__all__ = ["Run", "make_run"]

Run: TypeAlias = Callable[[list[Any], list[Any]], Sequence[torch.Tensor]]
"""Takes a list of arguments, which it empties, and a list of what else holds them, which it empties as soon as nothing
can fail any more."""


class _Kernel(torch.nn.Module):
    """A function that a graph calls; FX would write a function's name."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        self._fn = fn

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._fn(*args, **kwargs)


def make_run(module: fx.GraphModule, kernels: Mapping[Any, Callable[..., Any]]) -> Run:
    """The function of a graph in normal form. ``kernels``: what computes the program's own operators."""
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
        if node.op == "call_function" and node.target in kernels:
            name = f"kernel_{at}"
            setattr(module, name, _Kernel(kernels[node.target]))
            args, kwargs = map_arg((node.args, node.kwargs), copies.__getitem__)
            copies[node] = graph.call_module(name, args, kwargs)
        elif node.op != "placeholder":
            copies[node] = graph.node_copy(node, lambda used: copies[used])
    return fx.GraphModule(module, graph).forward
