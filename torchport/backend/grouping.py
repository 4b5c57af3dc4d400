"""Groups of operators that one backend compiles as one graph, as large as they can be without a cycle among them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final

from torch import fx

__all__ = ["HOST", "group"]

_getitem: Any = operator.getitem


class _Host:
    """The type of :data:`HOST`."""

    def __repr__(self) -> str:
        return "HOST"


HOST: Final = _Host()
"""The colour of operators that the interpreter runs. Their groups are joined after all others have been."""


class _Units:
    """What cannot be taken apart: an operator with the ``getitem`` nodes of its results. Edges are dependencies."""

    def __init__(self, graph: fx.Graph) -> None:
        self.nodes: list[list[fx.Node]] = []
        self.of: dict[fx.Node, int] = {}
        self.before: list[set[int]] = []
        for node in graph.nodes:
            if node.op in ("placeholder", "get_attr", "output"):
                continue
            unit = self.of.get(node.args[0]) if node.target is _getitem else None  # type: ignore[arg-type]
            if unit is None:
                unit = len(self.nodes)
                self.nodes.append([])
                self.before.append(set())
            self.nodes[unit].append(node)
            self.of[node] = unit
            self.before[unit].update(self.of[n] for n in node.all_input_nodes if n in self.of and self.of[n] != unit)


def _layers(units: _Units, colours: Sequence[Hashable | None]) -> list[int]:
    """A group number per unit. Along an edge the layer rises unless the colour stays, so groups have no cycle."""
    layer: list[int] = []
    groups: dict[Any, int] = {}
    found: list[int] = []
    for unit, colour in enumerate(colours):
        height = max(
            (layer[p] + (colour is None or colours[p] != colour) for p in units.before[unit]),
            default=0,
        )
        layer.append(height)
        key = ("alone", unit) if colour is None else (height, colour)
        found.append(groups.setdefault(key, len(groups)))
    return found


class _Joining:
    """Joins groups of a colour pairwise while no path leads out of the pair and back. Sets of groups are bit masks."""

    def __init__(self, units: _Units, colours: Sequence[Hashable | None], groups: list[int]) -> None:
        self.members: dict[int, list[int]] = {}
        self.colour: dict[int, Hashable | None] = {}
        for unit, group_of in enumerate(groups):
            self.members.setdefault(group_of, []).append(unit)
            self.colour[group_of] = colours[unit]
        self.after: dict[int, set[int]] = {g: set() for g in self.members}
        for unit, group_of in enumerate(groups):
            for before in units.before[unit]:
                if groups[before] != group_of:
                    self.after[groups[before]].add(group_of)

    def order(self) -> list[int]:
        """The groups, each after those it depends on; otherwise by their first operator."""
        waiting = dict.fromkeys(self.members, 0)
        for following in self.after.values():
            for g in following:
                waiting[g] += 1
        ready = sorted((g for g, count in waiting.items() if not count), key=lambda g: -self.members[g][0])
        done: list[int] = []
        while ready:
            g = ready.pop()
            done.append(g)
            released = [h for h in self.after[g] if not (waiting.__setitem__(h, waiting[h] - 1) or waiting[h])]
            ready = sorted([*ready, *released], key=lambda h: -self.members[h][0]) if released else ready
        return done

    def _beyond(self) -> dict[int, int]:
        """For each group, the groups that a path through at least one other group leads to."""
        reach: dict[int, int] = {}
        beyond: dict[int, int] = {}
        for g in reversed(self.order()):
            beyond[g] = direct = 0
            for h in self.after[g]:
                direct |= 1 << h
                beyond[g] |= reach[h]
            reach[g] = direct | beyond[g]
        return beyond

    def _join(self, kept: int, gone: int) -> None:
        self.members[kept] = sorted([*self.members[kept], *self.members.pop(gone)])
        self.after[kept] = (self.after[kept] | self.after.pop(gone)) - {kept, gone}
        del self.colour[gone]
        for following in self.after.values():
            if gone in following:
                following.discard(gone)
                following.add(kept)
        self.after[kept].discard(kept)

    def run(self) -> None:
        """Join until no pair can be joined: backends' groups first, since what is on the host splits them."""
        self._run({colour for colour in self.colour.values() if colour is not HOST})
        self._run({HOST})

    def _run(self, colours: set[Hashable | None]) -> None:
        beyond = self._beyond()
        joined = True
        while joined:
            joined = False
            mine = [g for g in self.order() if self.colour[g] is not None and self.colour[g] in colours]
            for position, g in enumerate(mine):
                for h in mine[position + 1 :]:
                    if h not in self.members or self.colour[h] != self.colour[g]:
                        continue
                    if not (beyond[g] >> h & 1 or beyond[h] >> g & 1):
                        self._join(g, h)
                        beyond = self._beyond()
                        joined = True
                if joined:
                    break


def group(graph: fx.Graph, colour_of: Callable[[fx.Node], Hashable | None]) -> list[tuple[Hashable, list[fx.Node]]]:
    """The groups of a graph, in an order they can run in: ``(colour, nodes)``; colour ``None`` is one operator alone.

    ``colour_of`` is asked for every call but ``getitem``, which goes with the operator whose result it takes.
    """
    units = _Units(graph)
    colours = [colour_of(nodes[0]) for nodes in units.nodes]
    joining = _Joining(units, colours, _layers(units, colours))
    joining.run()
    return [(joining.colour[g], [n for unit in joining.members[g] for n in units.nodes[unit]]) for g in joining.order()]
