"""A graph that a backend takes only part of, as segments: the backend's, and the interpreter's for what it refuses.

Three things are done so that there are few segments and that little crosses between them. Views, and constants that
operators make, belong to whoever uses them, in a copy for each: what crosses is the memory that they show. A few cheap
operators of the backend's between two segments of the interpreter's become the interpreter's, where calling the backend
for them would cost more than they do. And what one segment needs of another crosses once.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Mapping, Sequence, Set
from typing import Any, Final

import torch
from torch import fx
from torch.fx.node import map_arg

from .builder import REFUSAL, is_factory
from .graph_modules import graph_module
from .grouping import HOST, group
from .normal_form import is_view

__all__ = ["CALL", "Group", "host_seconds", "segments"]

_getitem: Any = operator.getitem
Group = tuple[Hashable, list[fx.Node]]

CALL: Final = 50e-6
"""Seconds that running one more segment costs, whatever is in it: arguments, locks, the engine's own call."""
PER_OPERATOR: Final = 5e-6
"""Seconds that the interpreter takes for an operator besides computing."""
BYTES: Final = 10e9
"""Bytes that the host's operators read and write in a second."""
FLOPS: Final = 20e9
"""Products and sums that they compute in a second."""


def _tensors(value: Any) -> list[torch.Tensor]:
    values = value if isinstance(value, (list, tuple)) else [value]
    return [one for one in values if isinstance(one, torch.Tensor)]


def _flops(node: fx.Node) -> int:
    from torch.utils.flop_counter import flop_registry  # on demand: it takes a while, and most graphs are not split

    namespace, _, name = str(node.target).partition(".")
    packet = getattr(getattr(torch.ops, namespace), name.partition(".")[0], None)
    count = None if packet is None else flop_registry.get(packet)
    if count is None:
        return 0
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    return int(count(*args, **kwargs, out_val=node.meta["val"]))


def host_seconds(nodes: Sequence[fx.Node]) -> float:
    """What operators may take on the host; views take nothing. Rough: good for telling few from many."""
    seconds = 0.0
    for node in nodes:
        if node.target is _getitem or is_view(node.target):
            continue
        touched = [*_tensors(node.meta["val"]), *(t for n in node.all_input_nodes for t in _tensors(n.meta["val"]))]
        size = sum(t.numel() * t.element_size() for t in touched)
        seconds += PER_OPERATOR + size / BYTES + _flops(node) / FLOPS
    return seconds


def segments(
    graph: fx.GraphModule, colours: Mapping[fx.Node, Hashable | None]
) -> tuple[fx.GraphModule, list[Group], dict[fx.Node, fx.Node]]:
    """A copy of the graph, its groups in an order they can run in, and for each original node the copy's.

    ``colours``: whose each call but ``getitem`` is; :data:`.grouping.HOST`: the interpreter's; ``None``: runs alone.
    """
    made = Segments(graph, colours)
    made.give_to_users(made.colour, made.free_nodes())
    groups = made.groups()
    while made.dissolve_islands(groups):
        made.give_to_users(made.colour, made.free_nodes())
        groups = made.groups()
    return made.module, made.with_own_views(groups), made.copies


class Segments:
    """The copy of a graph, and the colours of its nodes."""

    def __init__(self, graph: fx.GraphModule, colours: Mapping[fx.Node, Hashable | None]) -> None:
        self.graph = fx.Graph()
        self.copies: dict[fx.Node, fx.Node] = {}
        result: Any = self.graph.graph_copy(graph.graph, self.copies)
        original = graph.graph.output_node()
        self.copies[original] = self.graph.output(result)
        self.copies[original].meta.update(original.meta)
        self.module = graph_module(self.graph, graph)
        self.colour: dict[fx.Node, Hashable | None] = {}
        for node, copy in self.copies.items():
            if node.op == "call_function":
                of: Any = node.args[0] if node.target is _getitem else node
                self.colour[copy] = colours.get(of)
        self.own = dict(self.colour)
        """Who takes a node besides the host."""
        for node in self.graph.nodes:  # a view is, to begin with, where what it shows is made
            if node in self.colour and self.is_free_view(node):
                source = node.args[0]
                if self.colour.get(source) is not None and self._may_have(node, self.colour[source]):
                    self.colour[node] = self.colour[source]

    # -- nodes that belong to whoever uses them ------------------------------------------------------------------------
    def is_free_view(self, node: fx.Node) -> bool:
        view: Any = node.args[0] if node.target is _getitem else node
        if not (isinstance(view, fx.Node) and view.op == "call_function" and is_view(view.target)):
            return False
        return REFUSAL not in view.meta and bool(view.args) and isinstance(view.args[0], fx.Node)

    def free_nodes(self) -> set[fx.Node]:
        """Views, and operators that make a tensor of nothing."""
        return {
            node
            for node, own in self.own.items()
            if own is not None
            and own is not HOST
            and (
                self.is_free_view(node) or (isinstance(node.target, torch._ops.OpOverload) and is_factory(node.target))
            )
        }

    def _may_have(self, node: fx.Node, who: Hashable | None) -> bool:
        return who is HOST or (who is not None and who == self.own[node])

    def give_to_users(self, place: dict[fx.Node, Any], free: Set[fx.Node]) -> None:
        """Give each free node a copy where it is used elsewhere. ``place``, which gets the copies, says where all are.

        A node that nobody uses any more goes.
        """
        made: dict[tuple[fx.Node, Any], fx.Node] = {}

        def here(node: fx.Node, user: fx.Node) -> fx.Node:
            if node not in free or place[node] == place[user] or not self._may_have(node, self.colour[user]):
                return node
            copy = made.get((node, place[user]))
            if copy is None:
                with self.graph.inserting_after(node):
                    copy = made[node, place[user]] = self.graph.node_copy(node, lambda n: here(n, user))
                place[copy], self.colour[copy], self.own[copy] = place[user], self.colour[user], self.own[node]
            return copy

        for node in reversed(list(self.graph.nodes)):
            if node.op == "call_function":
                for used in node.all_input_nodes:
                    copy = here(used, node)
                    if copy is not used:
                        node.replace_input_with(used, copy)
        gone: set[fx.Node] = set()
        for node in reversed(list(self.graph.nodes)):
            if node.op == "call_function" and not node.users and (node in free or node.target is _getitem):
                self.graph.erase_node(node)
                gone.add(node)
        for known in (self.colour, self.own, place):
            for node in gone:
                known.pop(node, None)

    # -- groups --------------------------------------------------------------------------------------------------------
    def groups(self) -> list[Group]:
        """The groups by the present colours."""
        return group(self.graph, self.colour.get)

    def dissolve_islands(self, groups: Sequence[Group]) -> bool:
        """Give the host what is cheap and lies between two of its groups; whether there was something."""
        found = [self._island(nodes) for colour, nodes in groups if colour not in (None, HOST)]
        for nodes in found:
            self.colour.update(dict.fromkeys(nodes, HOST))
        return any(found)

    def _island(self, nodes: Sequence[fx.Node]) -> list[fx.Node]:
        """The operators of a group that lie on a way from the host to the host, if they are cheap there."""
        after: set[fx.Node] = set()
        for node in nodes:
            if any(n in after or self.colour.get(n) is HOST for n in node.all_input_nodes):
                after.add(node)
        between: set[fx.Node] = set()
        for node in reversed(nodes):
            if node in after and any(n in between or self.colour.get(n) is HOST for n in node.users):
                between.add(node)
        # Two segments of the host's become one; where nothing is left of the group, its call is saved, too.
        saved = CALL if any(node not in between and not self.is_free_view(node) for node in nodes) else 2 * CALL
        return [node for node in nodes if node in between] if host_seconds(list(between)) < saved else []

    def with_own_views(self, groups: Sequence[Group]) -> list[Group]:
        """The groups, where each takes the views that it uses by itself, of what it gets from others."""
        number = {node: at for at, (_, nodes) in enumerate(groups) for node in nodes}
        self.give_to_users(number, {node for node in self.free_nodes() if self.is_free_view(node)})
        members: list[list[fx.Node]] = [[] for _ in groups]
        for node in self.graph.nodes:
            if node in number:
                members[number[node]].append(node)
        return [(colour, mine) for (colour, _), mine in zip(groups, members, strict=True) if mine]
