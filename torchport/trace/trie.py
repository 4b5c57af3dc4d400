"""The trie: its nodes are operator calls, a path from the root is what a program called, one call after another.

A node's children are the calls that were seen after it, by their keys (:mod:`.keys`). Its results, and what it
remembers of its arguments, are value ids: results count up along the path from the id of the root.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch.utils._pytree import tree_map

from ..core.specs import TensorSpec
from .handle import LazyTensor

__all__ = [
    "FLOAT",
    "FLOATS",
    "FOREIGN_DEVICE",
    "LEAF",
    "LIMITS",
    "NONE",
    "SPAN",
    "WRAPPED",
    "HostScalar",
    "Leaf",
    "Node",
    "RandomKey",
    "ScalarInput",
    "Sights",
    "Value",
    "Varying",
    "is_template",
    "single_op",
]

LEAF: Final = 1 << 30
"""How far the ids of a trace's leaves are above those of its first results."""
SPAN: Final = 1 << 32
"""How many ids each trace has for itself."""
NONE: Final = -1
"""The value id of a handle that belongs to no trace."""


class _Token:
    """A constant in a trace key that equals nothing but itself."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


class Varying(_Token):
    """Stands in a key for a scalar input."""

    __slots__ = ()


LIMITS: Final = (
    127.0, 128.0, 255.0, 256.0, 32767.0, 32768.0, 65504.0, 65535.0, 65536.0, 2.0**31 - 1, 2.0**31, 2.0**32 - 1, 2.0**63,
    torch.finfo(torch.bfloat16).max, torch.finfo(torch.float32).max,
)  # fmt: skip
"""The largest numbers that the dtypes hold. The CPU refuses to fill a tensor with a number that its dtype cannot hold.
So numbers between other limits have other keys, and what holds for one number of a path holds for all of them."""

FLOATS: Final = (Varying("FLOAT"), *(Varying(f"FLOAT {sign} {limit:g}") for limit in LIMITS for sign in (">", "< -")))
"""By size: up to the first limit in absolute value, then above each limit, the positive ones and the negative ones."""
FLOAT: Final = FLOATS[0]

FOREIGN_DEVICE: Final = _Token("FOREIGN_DEVICE")
"""The key part of a tensor of another device. Recording refuses the call."""

WRAPPED: Final = _Token("WRAPPED")
"""The key part of a functionalization wrapper, where functionalization is switched off and could not unwrap it. No node
has such a key; recording has functionalization see the call first."""


# -- argument templates: what a node remembers of the arguments it was called with ------------------------------
class Value:
    """Argument template: the value with this id, made by an op of the trace."""

    __slots__ = ("value_id",)

    def __init__(self, value_id: int) -> None:
        self.value_id = value_id


class _Positioned:
    """Argument template: what the trace holds at a position of one of its lists."""

    __slots__ = ("position",)

    def __init__(self, position: int) -> None:
        self.position = position


class Leaf(_Positioned):
    """Argument template: the trace's leaf at this position."""

    __slots__ = ()


class ScalarInput(_Positioned):
    """Argument template: the trace's scalar input at this position."""

    __slots__ = ()


class HostScalar:
    """Argument template: a 0-dim CPU tensor that is no Python number: its dtype counts in type promotion."""

    __slots__ = ("dtype", "value")

    def __init__(self, dtype: torch.dtype, value: Any) -> None:
        self.dtype = dtype
        self.value = value


class RandomKey(_Positioned):
    """Argument template: the trace's random key at this position."""

    __slots__ = ()


class Sights:
    """What is known of a path that is not recorded: how often it came, what that has cost, and how long it was last.

    ``observed``: what its operators gave the last time is known to shape inference. ``share``: how many of them are
    recorded at one time, once that is known. ``first``: the operator that it begins with, from where the trace does,
    and its key; ``begins``: the same in words, once they were asked for (:func:`.keys.beginning_of`).
    """

    __slots__ = ("begins", "first", "observed", "ops", "seconds", "share", "times")

    def __init__(self) -> None:
        self.times = 0
        self.seconds = 0.0
        self.ops = 0
        self.observed = False
        self.share = 0
        self.first: tuple[Any, Any] | None = None
        self.begins = ""


class Node:
    """An operator call at one place of the trie: its parent is the call before it, its children the calls after it."""

    __slots__ = (
        "apart",
        "args",
        "barrier",
        "children",
        "container",
        "depth",
        "end_id",
        "first_id",
        "fits",
        "is_factory",
        "key",
        "kwargs",
        "missed",
        "op",
        "parent",
        "plans",
        "ready",
        "records",
        "refused",
        "rounds",
        "source",
        "specs",
        "templates",
    )

    def __init__(self, parent: Node | None, key: Any, op: Any) -> None:
        self.parent = parent
        self.key = key
        self.op = op
        self.children: dict[Any, Node] = {}
        self.missed: dict[Any, Sights] | None = None  # keys that were seen here and not recorded
        self.plans: dict[tuple[int, ...], Any] | None = None  # the runner's, by the ids of the values wanted
        self.apart: dict[tuple[tuple[int, ...], int], tuple[tuple[int, ...], ...]] | None = None
        self.args: Sequence[Any] = ()
        self.kwargs: dict[str, Any] = {}
        self.specs: tuple[TensorSpec | None, ...] = ()
        self.templates: tuple[LazyTensor | None, ...] = ()
        self.ready: LazyTensor | Sequence[LazyTensor | None] | None = None
        self.container: type | None = None
        self.records: object = None  # what ``native/follow.cpp`` knows of the calls that led to children
        self.rounds: Any = None  # the runner's: what is known of paths that go on from here and never came back
        self.is_factory = False
        self.fits = False  # whether results are known to be like what an in-place form writes to
        self.refused = False  # whether the backend does not take it, so that the host runs it
        self.source: str | None = None
        self.barrier: Callable[..., Any] | None = None
        self.first_id = 0 if parent is None else parent.end_id
        self.end_id = self.first_id
        self.depth = 0 if parent is None else parent.depth + 1

    @classmethod
    def root(cls, base: int = 0) -> Node:
        """The node before the first op, whose results count up from ``base``."""
        root = cls(None, None, None)
        root.first_id = root.end_id = base
        return root

    def path(self) -> list[Node]:
        """The nodes from the first op to this one."""
        nodes: list[Node] = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes


def is_template(value: Any) -> bool:
    """Whether a leaf of a node's arguments stands for something the trace holds."""
    return isinstance(value, (Value, _Positioned, HostScalar))


def single_op(node: Node, position_of: dict[Any, int]) -> Node:
    """A copy of the node as a path of its own; tensor arguments become leaves at the positions given per template key.

    Keys are ``("leaf", n)`` for a trace's leaf and ``("value", n)`` for a value made by an op.
    """

    def relocate(template: Any) -> Any:
        if template.__class__ is Leaf:
            return Leaf(position_of["leaf", template.position])
        if template.__class__ is Value:
            return Leaf(position_of["value", template.value_id])
        return template

    copy = Node(Node.root(), node.key, node.op)
    copy.args, copy.kwargs = tree_map(relocate, (list(node.args), dict(node.kwargs)), is_leaf=is_template)
    copy.specs, copy.container, copy.is_factory = node.specs, node.container, node.is_factory
    copy.source, copy.end_id, copy.refused = node.source, len(node.specs), node.refused
    return copy
