"""A graph that repeats itself, cut into pieces, each different one of which is compiled once.

The repetitions are found by :mod:`.repeats`. What they leave (embeddings, the loss) becomes pieces of its own. Four
things keep equal layers equal, and what crosses small:

* Updates that an optimizer makes side by side, operator by operator over all parameters, are taken parameter by
  parameter: nothing but results depends on them, so their order is free.
* Views, constants that operators make, and numbers taken from the packs of scalar inputs and random keys belong to
  whoever uses them, in a copy for each piece.
* A piece gets its own part of such a pack.
* A cut is made where least is alive.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx

from ..core.config import config
from ..core.sharding import is_partitioned
from ..core.specs import TensorSpec
from .builder import is_factory
from .control_flow import inner_graph
from .infer import fake_tensor
from .interface import Backend
from .partition import extracted, inputs_of, needed_for
from .repeats import Run, find_runs, live_bytes, specs_of, tokens_of
from .segments import Segments

__all__ = ["Pack", "PieceCall", "Pieces", "cut", "in_pieces", "pays", "whole"]

_getitem: Any = operator.getitem
aten = torch.ops.aten

MOST: Final = 0.75
"""Part of what compiling the whole takes that compiling the pieces takes at most."""
LEAST: Final = 32
"""Operators that a run saves at least."""
_FILLED: Final = frozenset({
    aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.fill.Scalar, aten.zero.default,
})  # fmt: skip
"""Operators whose results are one number everywhere, as an optimizer's state is at first."""
_CHEAP: Final = frozenset({
    aten.add.Tensor, aten.sub.Tensor, aten.rsub.Scalar, aten.mul.Tensor, aten.neg.default, aten.relu.default,
    aten.clamp.default, aten.clamp_min.default, aten.where.self, aten.gt.Scalar, aten.ge.Scalar, aten.le.Scalar,
    aten.lt.Scalar, aten.eq.Scalar, aten.ne.Scalar, aten.bitwise_not.default, aten.logical_not.default,
    aten.add.Scalar, aten.mul.Scalar, aten.sub.Scalar, aten._to_copy.default, aten.addcmul.default,
})  # fmt: skip
"""Elementwise operators that take less than reading their result from memory."""
FEW_USERS: Final = 16
"""What has as many is shared."""
UNCUTTABLE: Final = 1 << 50
"""Bytes that are said to cross where values cross that are no tensors."""


@dataclass(frozen=True, slots=True)
class Pack:
    """Part of a 1-D input: the elements at ``places`` of the input at ``source``."""

    source: int
    places: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PieceCall:
    """One call: the graph's number, and the values that go in and come out, by number."""

    graph: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Pieces:
    """A graph in pieces. Values are numbered: the inputs, then the ``packs``, then what calls give, in order.

    ``graphs`` are the different ones, ``results`` the values that are the whole's.
    """

    graphs: tuple[fx.GraphModule, ...]
    inputs: int
    packs: tuple[Pack, ...]
    calls: tuple[PieceCall, ...]
    results: tuple[int, ...]


# -- whether ----------------------------------------------------------------------------------------------------------
_whole: Final = ContextVar("whole", default=False)


@contextmanager
def whole() -> Iterator[None]:
    """Inside of the block, no graph is cut."""
    token = _whole.set(True)
    try:
        yield
    finally:
        _whole.reset(token)


def in_pieces(backend: Backend) -> bool:
    """Whether a backend's graphs are cut where they repeat, as far as the settings and the backend say."""
    return (
        backend.capabilities.fixed_compile_cost > 0
        and config.pieces == "auto"
        and not _whole.get()
        and not is_partitioned(backend)  # how values lie on several devices is decided for the whole
    )


# -- the order ---------------------------------------------------------------------------------------------------------
def is_pack(node: fx.Node) -> bool:
    """Whether an input is 1-D, and nothing is done with it but to take single elements."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dim() != 1 or not node.users:
        return False
    return all(user.target is aten.select.int and user.args[1] == 0 and len(user.args) == 3 for user in node.users)


def _is_constant(op: Any) -> bool:
    """Whether an operator makes the same tensor each time, of nothing."""
    if not isinstance(op, torch._ops.OpOverload) or op.namespace not in ("aten", "prims"):
        return False
    return is_factory(op) and torch.Tag.nondeterministic_seeded not in op.tags


def _real_users(node: fx.Node, free: Set[fx.Node]) -> Iterator[fx.Node]:
    """Who uses a value, by way of views or not."""
    for user in node.users:
        if user in free:
            yield from _real_users(user, free)
        else:
            yield user


def _updates(calls: Sequence[fx.Node], free: Set[fx.Node]) -> list[list[fx.Node]]:
    """Calls that nothing but results depends on, by what hangs together: an optimizer's updates, a group each."""
    last: set[fx.Node] = set()

    def leads_nowhere(node: fx.Node) -> bool:
        return all(user.op == "output" or user in last for user in _real_users(node, free))

    for node in reversed(calls):
        op = node.target
        alone = isinstance(op, torch._ops.OpOverload) and (torch.Tag.pointwise in op.tags or op in _FILLED)
        if alone and leads_nowhere(node):
            last.add(node)
    # What many share, such as a number that all updates are scaled by, does not join them: it comes before them.
    for node in reversed(calls):
        shared = node in last and bool(node.users) and (len(node.users) >= FEW_USERS or node.meta["val"].numel() <= 1)
        if shared or not leads_nowhere(node):
            last.discard(node)
    group = {node: node for node in calls if node in last}

    def root(node: fx.Node) -> fx.Node:
        while group[node] is not node:
            group[node] = group[group[node]]
            node = group[node]
        return node

    for node in group:
        for user in _real_users(node, free):
            if user in group:
                group[root(node)] = root(user)
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in group:
        found.setdefault(root(node), []).append(node)
    return list(found.values())


@dataclass(frozen=True, slots=True)
class _Order:
    """A graph's calls but the free ones in an order in which they can run: updates are last, one after the other.

    ``updates``: where they begin. ``inside``: places in the middle of one.
    """

    calls: list[fx.Node]
    updates: int
    inside: list[int]


def _ordered(graph: fx.Graph, free: Set[fx.Node]) -> _Order:
    calls = [node for node in graph.nodes if node.op == "call_function" and node not in free]
    groups = _updates(calls, free)
    among = {node for nodes in groups for node in nodes}
    made = [node for node in calls if node not in among]
    updates = len(made)
    inside: list[int] = []
    for nodes in groups:
        inside += range(len(made) + 1, len(made) + len(nodes))
        made += nodes
    return _Order(made, updates, inside)


# -- where to cut ------------------------------------------------------------------------------------------------------
def _roots(free: Set[fx.Node]) -> dict[fx.Node, fx.Node]:
    """For each free view the value whose memory it shows."""
    roots: dict[fx.Node, fx.Node] = {}
    for node in free:
        source = node
        while source in free and source.all_input_nodes:
            source = source.all_input_nodes[0]
        roots[node] = source
    return roots


def _placed(run: Run, slack: int, alive: Any, tokens: Any) -> list[int]:
    """Where a run's repetitions begin, and where its last ends: where least is alive.

    The place depends on what repeats alone, so that two runs of the same layers, parted by another, have equal pieces.
    """
    period, middle = run.period, run.start + run.period * ((run.count - 1) // 2)
    # Each repetition leaves as much behind, such as what the backward pass needs: that says nothing about a place.
    grown = int(alive[middle + period]) - int(alive[middle])
    best: tuple[int, int, int] | None = None
    for phase in range(period if run.count > 2 else slack + 1):
        at = middle + phase
        if alive[at] < UNCUTTABLE:
            cost = int(alive[at]) * period - grown * phase, int(tokens[at % len(tokens)])
            best = min(best, (*cost, phase)) if best is not None else (*cost, phase)
    if best is None:
        return []
    count = run.count if best[2] <= slack else run.count - 1
    return [run.start + best[2] + at * period for at in range(count + 1)]


def _pieces(order: _Order, free: dict[fx.Node, None], fixed: int) -> dict[fx.Node, int] | None:
    """Each call's piece; ``None`` if cutting is not worth it."""
    calls, updates = order.calls, order.updates
    tokens = tokens_of(calls)
    runs = find_runs(tokens, LEAST)
    if sum(run.saved for run, _ in runs) <= fixed:
        return None
    roots = _roots(free.keys())
    alive = live_bytes(calls, roots)
    alive[order.inside] += UNCUTTABLE
    place = {node: at for at, node in enumerate(calls)}
    for node in calls:  # an operator's several results are taken from it in the piece that it is in
        if node.target is _getitem:
            alive[place[node.args[0]] + 1 : place[node] + 1] += UNCUTTABLE  # type: ignore[index]
    bounds, repeated = {0, updates, len(calls)}, set[int]()
    for run, slack in runs:
        placed = _placed(run, slack, alive, tokens)
        bounds.update(placed)
        repeated.update(placed[:-1])
    number: dict[fx.Node, int] = {}
    count = -1
    rest: int | None = None
    for start, end in itertools.pairwise(sorted(bounds)):
        if start == end:
            continue
        if start >= updates and start not in repeated and rest is not None:
            mine = rest  # updates do not depend on each other: those that do not repeat are one piece
        else:
            mine = count = count + 1
            rest = mine if start >= updates and start not in repeated else rest
        number.update(dict.fromkeys(calls[start:end], mine))
    for node in reversed(free):
        users = [number[user] for user in node.users if user in number]
        source = roots[node]
        number[node] = min(users) if users else number.get(source, 0)
    return number


def _made_again(graph: fx.Graph, number: dict[fx.Node, int], free: dict[fx.Node, None]) -> list[fx.Node]:
    """Values that other pieces make again, as an engine would that sees the whole: cheap elementwise operators whose
    inputs these pieces are given anyway. In a backward pass that is much of what a forward pass would have to keep."""
    uses: dict[fx.Node, set[int]] = {}
    for node in graph.nodes:
        if node in number and node not in free:
            for used in node.all_input_nodes:
                while used in free and used.all_input_nodes:
                    used = used.all_input_nodes[0]
                uses.setdefault(used, set()).add(number[node])
    found: list[fx.Node] = []
    for node in reversed(graph.nodes):
        if node not in number or node in free or not _is_cheap(node):
            continue
        others = uses.get(node, set()) - {number[node]}
        if not others:
            continue
        for used in node.all_input_nodes:
            while used in free and used.all_input_nodes:
                used = used.all_input_nodes[0]
            if used.op == "call_function" and used not in free and not others <= uses[used] - {number[used]}:
                break
        else:
            found.append(node)
    return found


def _is_cheap(node: fx.Node) -> bool:
    """Whether an engine makes such a value again rather than read it from memory."""
    return node.target in _CHEAP and isinstance(node.meta.get("val"), torch.Tensor)


# -- whether it pays ---------------------------------------------------------------------------------------------------
def pays(ops: int, missing: Sequence[fx.GraphModule], fixed: int) -> bool:
    """Whether compiling these pieces takes clearly less than compiling a graph of so many operators."""
    cost = sum(fixed + sum(node.op == "call_function" for node in one.graph.nodes) for one in missing)
    return cost <= MOST * (ops + fixed)


# -- cutting -----------------------------------------------------------------------------------------------------------
def cut(graph: fx.GraphModule, fixed: int) -> Pieces | None:
    """A graph in normal form in pieces; ``None`` if too little of it repeats. It is not changed.

    ``fixed``: the operators that take as long to compile as there is in compiling anything.
    """
    calls = [node for node in graph.graph.nodes if node.op == "call_function"]
    if len(calls) < 2 * fixed or any(inner_graph(graph, node) is not None for node in graph.graph.nodes):
        return None
    segments = Segments(graph, dict.fromkeys(calls, 0))
    made = segments.graph
    taken = {user for node in made.find_nodes(op="placeholder") if is_pack(node) for user in node.users}
    free = dict.fromkeys(
        node
        for node in made.nodes
        if node.op == "call_function" and (segments.is_free_view(node) or _is_constant(node.target) or node in taken)
    )
    number = _pieces(_ordered(made, free.keys()), free, fixed)
    if number is None:
        return None
    free.update(dict.fromkeys(_made_again(made, number, free)))
    segments.give_to_users(number, free.keys())
    members: dict[int, list[fx.Node]] = {}
    for node in made.nodes:
        if node in number:
            members.setdefault(number[node], []).append(node)
    return _Written(segments.module, [nodes for _, nodes in sorted(members.items())]).pieces


class _Written:
    """Pieces, from the nodes of each."""

    def __init__(self, module: fx.GraphModule, pieces: Sequence[Sequence[fx.Node]]) -> None:
        self.module = module
        given = module.graph.find_nodes(op="placeholder")
        self.numbers: dict[Any, int] = {node: at for at, node in enumerate(given)}
        self.packs: list[Pack] = []
        self.is_pack = {node for node in given if is_pack(node)}
        of_piece = {node: at for at, nodes in enumerate(pieces) for node in nodes}
        self.last: dict[fx.Node, int] = {}
        """The last piece that uses an input."""
        for at, nodes in enumerate(pieces):
            self.last.update((used, at) for node in nodes for used in node.all_input_nodes if used.op == "placeholder")
        known: dict[Any, int] = {}
        graphs: list[fx.GraphModule] = []
        calls: list[tuple[int, list[Any], list[fx.Node]]] = []
        for at, nodes in enumerate(pieces):
            wanted = [
                node
                for node in nodes
                if isinstance(node.meta.get("val"), torch.Tensor)
                and any(of_piece.get(user, -1) != at for user in node.users)
            ]
            if not wanted:
                continue
            needed = needed_for(nodes, wanted)
            inputs = inputs_of(needed)
            places = [self._places(needed, node) for node in inputs]
            key = self._key(at, needed, wanted, inputs, places)
            if key not in known:
                known[key] = len(graphs)
                graphs.append(self._graph(at, nodes, wanted, places))
            parts = [
                node if part is None else self._part(node, part) for node, part in zip(inputs, places, strict=True)
            ]
            calls.append((known[key], parts, wanted))
        count = len(given) + len(self.packs)
        made: list[PieceCall] = []
        for graph, parts, wanted in calls:
            outputs = tuple(range(count, count + len(wanted)))
            count += len(outputs)
            self.numbers.update(zip(wanted, outputs, strict=True))
            made.append(PieceCall(graph, tuple(self.numbers[one] for one in parts), outputs))
        results: Any = module.graph.output_node().args[0]
        self.pieces = Pieces(
            tuple(graphs), len(given), tuple(self.packs), tuple(made), tuple(self.numbers[one] for one in results)
        )

    def _places(self, needed: Sequence[fx.Node], node: fx.Node) -> tuple[int, ...] | None:
        """Which elements of a pack a piece takes; ``None`` for what is no pack."""
        if node not in self.is_pack:
            return None
        length = node.meta["val"].shape[0]
        return tuple(sorted({int(one.args[2]) % length for one in needed if one.args and one.args[0] is node}))  # type: ignore[arg-type]

    def _part(self, node: fx.Node, places: tuple[int, ...]) -> Any:
        """Part of a pack as a value, or the pack, where that is all of it."""
        if len(places) == node.meta["val"].shape[0]:
            return node
        key = node, places
        if key not in self.numbers:
            self.numbers[key] = len(self.numbers)
            self.packs.append(Pack(self.numbers[node], places))
        return key

    def _is_donated(self, at: int, node: fx.Node) -> bool:
        """Whether an input is likely to be donated, and this piece is the last that uses it."""
        return bool(node.meta.get("donated")) and node not in self.is_pack and self.last[node] == at

    def _key(
        self,
        at: int,
        needed: Sequence[fx.Node],
        wanted: Sequence[fx.Node],
        inputs: Sequence[fx.Node],
        places: Sequence[tuple[int, ...] | None],
    ) -> Any:
        """Equal for pieces that compute the same."""
        local: dict[fx.Node, int] = {}
        parts: list[Any] = []
        for node, part in zip(inputs, places, strict=True):
            local[node] = len(local)
            whole_input = _spec(node), self._is_donated(at, node)
            parts.append(whole_input if part is None else ("part", len(part), node.meta["val"].dtype))
        of_pack = {node: part for node, part in zip(inputs, places, strict=True) if part is not None}

        def described(value: Any) -> Any:
            if isinstance(value, fx.Node):
                return local[value]
            if isinstance(value, (list, tuple)):
                return tuple(map(described, value))
            return value.__class__, repr(value) if value.__class__ is float else value

        for node in needed:
            source = node.args[0] if node.args else None
            if isinstance(source, fx.Node) and source in of_pack:
                place = of_pack[source].index(int(node.args[2]) % source.meta["val"].shape[0])  # type: ignore[arg-type]
                parts.append((local[source], place))
            else:
                kwargs = tuple((name, described(value)) for name, value in node.kwargs.items())
                parts.append((str(node.target), described(node.args), kwargs, _spec(node)))
            local[node] = len(local)
        parts.append(tuple(local[node] for node in wanted))
        return tuple(parts)

    def _graph(
        self,
        at: int,
        nodes: Sequence[fx.Node],
        wanted: Sequence[fx.Node],
        places: Sequence[tuple[int, ...] | None],
    ) -> fx.GraphModule:
        """A piece as a graph in normal form."""
        module, inputs = extracted(self.module, nodes, wanted)
        for node, placeholder, part in zip(inputs, module.graph.find_nodes(op="placeholder"), places, strict=True):
            if not self._is_donated(at, node):
                placeholder.meta.pop("donated", None)
            if part is None or len(part) == node.meta["val"].shape[0]:
                continue
            length = node.meta["val"].shape[0]
            for user in list(placeholder.users):
                user.args = (placeholder, 0, part.index(int(user.args[2]) % length))  # type: ignore[arg-type]
            placeholder.meta["val"] = fake_tensor(TensorSpec((len(part),), placeholder.meta["val"].dtype, (1,)))
        return module


def _spec(node: fx.Node) -> Any:
    return specs_of(node.meta.get("val"))
