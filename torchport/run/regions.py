"""Regions: what comes back between operators that never do, found by comparing paths that are interpreted.

A loop whose sizes grow leads to another path in each round: in ``generate`` the ids and the mask grow by one per token.
None of these paths is worth recording, though most of each is the same: the model's forward pass on one token. So the
operators of some rounds that begin at one place of the trie are noted and compared. A run of operators that two rounds
have in common is a *region*. When its first operator comes while operators are interpreted, the trace records again,
from the root of the trie, up to the operator that the region ends with. From then on a region is a path as any other:
interpreted as a whole, compiled when it has cost enough, and run as one computation between operators that are
interpreted.
"""

from __future__ import annotations

import difflib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from ..core import metrics
from .interpreted import InterpretedPlan

if TYPE_CHECKING:
    from ..trace.kernels import Kernel
    from ..trace.trie import Node

__all__ = [
    "Anchor",
    "Calls",
    "Log",
    "Regions",
    "Rounds",
    "begun_with",
    "common_runs",
    "may_have_common_runs",
    "on_anchor",
    "shapes_of",
]

SHORTEST: Final = 100
"""Operators that a region has at least. Recording one, and a computation more per round, cost so much that the pieces
of a layer between values that grow (the keys of a cache) do not pay: with 24, ``generate`` with such a cache took twice
as long. A forward pass with a static cache is one piece of hundreds."""
LONGEST_LOG: Final = 4_096
"""Operators of a round that are noted at most."""
LOGS: Final = 8
"""Rounds that are noted: a loop may read values, each of which ends a round, several times per turn."""
RECORDINGS: Final = 8
"""How often each operator of a region may be recorded: other sizes than those that were seen may come as often."""

begun_with: Final[dict[tuple[int, tuple[int, ...]], None]] = {}
"""Of every operator that a region of some device begins with: its serial, and the :func:`shapes_of` its arguments."""
on_anchor: Final[list[Callable[[int, tuple[int, ...]], object]]] = []
"""Called with each of these when it is new."""


# -- what is noted of a call -------------------------------------------------------------------------------------
def _described(value: Any) -> Any:
    cls = value.__class__
    if cls is float:
        return float  # a scalar input
    if isinstance(value, torch.Tensor):
        return (torch.Tensor, tuple(value.shape), value.dtype, value.stride())
    if cls is list or cls is tuple:
        return tuple(map(_described, value))
    return (cls, value)


def described(kernel: Kernel, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """A call as far as it decides what a path goes on with: the operator, the tensors' specs, constant numbers.

    Raises ``TypeError`` if an argument cannot be hashed.
    """
    call = (kernel.serial, tuple(map(_described, args)), tuple((name, _described(kwargs[name])) for name in kwargs))
    hash(call)
    return call


def shapes_of(values: Sequence[Any]) -> tuple[int, ...]:
    """The number of dimensions and the sizes of each tensor among the arguments, one after the other."""
    found: list[int] = []
    for value in _tensors(values):
        found += [value.dim(), *value.shape]
    return tuple(found)


def _tensors(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (item for item in value if isinstance(item, torch.Tensor))


class Calls:
    """The calls of some rounds, each different one numbered: most come in every layer and every round.

    As objects of their own they would be some ten thousand, which bring on a full run of Python's garbage collector.
    """

    __slots__ = ("_known", "_numbers")

    def __init__(self) -> None:
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._known: list[tuple[tuple[Any, ...], tuple[int, ...]]] = []

    def number(self, kernel: Kernel, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
        """The number of a call; one that cannot be hashed equals no other."""
        try:
            call = described(kernel, args, kwargs)
        except TypeError:
            call = (object(),)
        number = self._numbers.get(call)
        if number is None:
            number = self._numbers[call] = len(self._known)
            self._known.append((call, shapes_of(args)))
        return number

    def call(self, number: int) -> tuple[Any, ...]:
        """What :func:`described` says of it."""
        return self._known[number][0]

    def shapes(self, number: int) -> tuple[int, ...]:
        """The shapes that C++ recognises it by."""
        return self._known[number][1]


class Log:
    """The operators of one round, in order, by their numbers."""

    __slots__ = ("_calls", "numbers")

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self.numbers: list[int] = []

    def add(self, kernel: Kernel, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Note a call."""
        if len(self.numbers) < LONGEST_LOG:
            self.numbers.append(self._calls.number(kernel, args, kwargs))


def common_runs(first: Sequence[int], second: Sequence[int]) -> list[Sequence[int]]:
    """Runs of at least :data:`SHORTEST` elements that two sequences have in common, in order."""
    if min(len(first), len(second)) < SHORTEST:
        return []
    counts = Counter(first)
    if sum(counts[one] for one in second) > LONGEST_LOG * SHORTEST:
        return []  # the same few operators over and over: to compare them takes long
    blocks = difflib.SequenceMatcher(None, first, second, autojunk=False).get_matching_blocks()
    return [first[block.a : block.a + block.size] for block in blocks if block.size >= SHORTEST]


def may_have_common_runs(first: str, second: str) -> bool:
    """Whether two strings may have :data:`SHORTEST` characters in a row in common: most have not.

    Such a run covers a whole one of the pieces of half that length that the first is cut into.
    """
    half = (SHORTEST + 1) // 2
    return any(first[at : at + half] in second for at in range(0, len(first) - half + 1, half))


# -- regions -----------------------------------------------------------------------------------------------------
class Anchor:
    """An operator with which regions begin, and by their serials the operators that these go on with.

    A region is recorded, and handed to the compiler's process. Until it is compiled, its operators are interpreted one
    by one, which takes less than to record them and interpret the whole.
    """

    __slots__ = ("_at", "_exhausted", "_plans", "_recordings", "_tree", "seconds")

    def __init__(self) -> None:
        self.seconds = 0.0
        """What the rounds have cost that it was found in."""
        self._tree: dict[int, Any] = {}
        self._recordings = 0
        self._exhausted = False
        """Whether it begins otherwise each time, and that was recorded often enough."""
        self._at: tuple[Node | None, dict[int, Any] | None] = (None, None)
        self._plans: list[InterpretedPlan] = []

    def note(self, node: Node) -> None:
        """A run of it has ended at a node: what is interpreted of it and may be on its way to be compiled."""
        plans = [] if node.plans is None else list(node.plans.values())
        self._plans = [plan for plan in plans if isinstance(plan, InterpretedPlan) and not plan.here]

    def is_ready(self) -> bool:
        """Whether to enter it: nothing of it is being compiled, and what was compiled."""
        if self._exhausted:
            return False
        return not any(plan.stays or (plan.ticket is not None and not plan.ticket.done()) for plan in self._plans)

    def add(self, serials: Sequence[int]) -> None:
        """Know one more region, by the serials of its operators from the first on."""
        tree = self._tree
        for serial in serials:
            tree = tree.setdefault(serial, {})
        self._recordings += RECORDINGS * len(serials)

    def goes_on(self, node: Node, serial: int) -> bool:
        """Whether an operator that is new after the path to ``node`` is one of a region's, and is to be recorded."""
        tree = self._after(node)
        self._at = node, tree
        if tree is None or serial not in tree or self._recordings <= 0:
            self._exhausted |= node.parent is None
            return False
        self._recordings -= 1
        return True

    def _after(self, node: Node) -> dict[int, Any] | None:
        known, tree = self._at
        if node is known:
            return tree
        if node.parent is known and known is not None:
            return None if tree is None else tree.get(node.key[0])
        tree = self._tree
        for one in node.path():
            tree = tree.get(one.key[0])
            if tree is None:
                return None
        return tree


class Rounds:
    """Rounds of operators that are interpreted and never were before, which begin at one place of a trie."""

    __slots__ = ("calls", "count", "logs", "next_look", "ops", "seconds")

    def __init__(self) -> None:
        self.count = 0
        self.ops = 0
        self.seconds = 0.0
        self.next_look = LOGS
        self.logs: deque[Log] = deque(maxlen=LOGS)
        self.calls = Calls()
        """Of the logs."""


class Regions:
    """What is known of the regions of one device's traces."""

    def __init__(self) -> None:
        self.serials: set[int] = set()
        """Of the operators that regions begin with."""
        self._anchors: dict[tuple[Any, ...], Anchor] = {}

    def clear(self) -> None:
        """Forget everything."""
        self.serials.clear()
        self._anchors.clear()

    def begin_round(self, rounds: Rounds, is_worth: Callable[[float, int, int], bool]) -> Log | None:
        """What to note the operators of another round in; ``None``: they are not to be noted.

        ``is_worth``: whether so many seconds, of so many operators in so many runs, would pay to have these compiled.
        """
        rounds.count += 1
        if rounds.logs:
            if len(rounds.logs) == LOGS:
                self._compare(rounds)
                return None
        elif rounds.count < rounds.next_look or not is_worth(rounds.seconds, rounds.ops // rounds.count, rounds.count):
            return None
        log = Log(rounds.calls)
        rounds.logs.append(log)
        return log

    def anchor(self, kernel: Kernel, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Anchor | None:
        """The regions that begin with a call."""
        try:
            return self._anchors.get(described(kernel, args, kwargs))
        except TypeError:
            return None

    def _compare(self, rounds: Rounds) -> None:
        logs, calls, seconds = [log.numbers for log in rounds.logs], rounds.calls, rounds.seconds
        rounds.logs.clear()
        rounds.calls = Calls()
        rounds.seconds, rounds.ops, rounds.next_look = 0.0, 0, 2 * rounds.count
        rounds.count = 0
        found = len(self._anchors)
        texts = ["".join(map(chr, log)) for log in logs]
        for at, log in enumerate(logs):
            others = [one for one, text in zip(logs[:at], texts, strict=False) if may_have_common_runs(text, texts[at])]
            runs = max((common_runs(other, log) for other in others), key=_length, default=[])
            counts = Counter(log)
            for run in runs:
                self._add(run, counts, calls, seconds)
        if len(self._anchors) > found:
            metrics.count("RegionsFound", len(self._anchors) - found)

    def _add(self, run: Sequence[int], counts: Mapping[int, int], calls: Calls, seconds: float) -> None:
        # It begins with an operator that is rare: one that comes often would begin regions where there are none.
        latest = min(len(run) // 4, len(run) - SHORTEST)
        start = min(range(latest + 1), key=lambda at: (counts[run[at]], at))
        first = calls.call(run[start])
        self.serials.add(first[0])
        known = first[0], calls.shapes(run[start])
        if known not in begun_with:
            begun_with[known] = None
            for tell in on_anchor:
                tell(*known)
        anchor = self._anchors.setdefault(first, Anchor())
        anchor.seconds = max(anchor.seconds, seconds)
        anchor.add([calls.call(number)[0] for number in run[start:]])


def _length(runs: Sequence[Sequence[int]]) -> int:
    return sum(map(len, runs))
