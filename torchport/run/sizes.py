"""Computations that differ in sizes alone: which there are, and when compiling one more of them is worth it.

A program whose lengths or batches vary leads to one path per set of sizes. All of them have one *skeleton*: the same
operators and the same data flow, other integers. Where one computation serves them all (:mod:`..backend.sizes`), each
is asked for as soon as its path is recorded. Else the first sizes of a skeleton are compiled as any computation is.
After that each one more has to have cost twice as much as the one before it: sizes that come back again and again are
compiled in the end, and the many that do not are interpreted, at near eager speed, and keep no compiler busy.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, ClassVar, Final

from ..core.specs import TensorSpec
from ..trace.trie import HostScalar, Node, ScalarInput, Value, is_template

__all__ = ["FREE", "Family", "families", "family_of", "skeleton_of", "widened"]

FREE: Final = 3
"""Sets of sizes that are compiled as if there were no others."""
FAMILIES: Final = 1_024
"""Skeletons that are remembered."""
MOST_DOUBLINGS: Final = 30
"""After these one more costs no more than the one before it."""
SHOWN: Final = 4
"""Sizes that are told at most where one changes."""


class Family:
    """The sizes that were compiled of one skeleton, oldest first: the integers in which they differ, in order.

    ``shared``: whether a computation for several sizes may serve further ones.
    """

    __slots__ = ("compiled", "shared")

    any_shared: ClassVar[bool] = False
    """Whether any skeleton ever was."""

    def __init__(self) -> None:
        self.compiled: list[tuple[int, ...]] = []
        self.shared = False

    def factor(self, sizes: tuple[int, ...] = ()) -> int:
        """How many times as much as usual one more has to have cost before it is compiled."""
        others = len(self.compiled) - (sizes in self.compiled)
        return 1 << max(0, min(others - FREE + 1, MOST_DOUBLINGS))

    def note_shared(self) -> None:
        """Note that there is a computation for several sizes."""
        self.shared = Family.any_shared = True

    def add(self, sizes: tuple[int, ...]) -> None:
        """These are compiled."""
        if sizes not in self.compiled:
            self.compiled.append(sizes)

    def varied(self, sizes: tuple[int, ...], names: Sequence[str]) -> str:
        """What is another in these sizes than in those that were compiled, in words: of each place that a name is given
        for; empty if nothing is."""
        before = [one for one in self.compiled if one != sizes and len(one) == len(sizes)]
        told: list[str] = []
        for at, (size, name) in enumerate(zip(sizes, names, strict=False)):
            others = list(dict.fromkeys(one[at] for one in before))
            if any(other != size for other in others):
                shown = ", ".join(map(str, others[-SHOWN:]))
                told.append(f"{name} was {'…, ' if len(others) > SHOWN else ''}{shown} and is {size}")
        return "; ".join(told[:SHOWN])


families: Final[OrderedDict[bytes, Family]] = OrderedDict()
"""By a digest of who compiles and of the skeleton; the one that was used last is at the end."""


def family_of(key: bytes) -> Family:
    """The family of a skeleton."""
    found = families.get(key)
    if found is None:
        found = families[key] = Family()
        if len(families) > FAMILIES:
            families.popitem(last=False)
    else:
        families.move_to_end(key)
    return found


def skeleton_of(
    who: str, path: Sequence[Node], value_ids: Sequence[int], leaf_specs: Sequence[TensorSpec]
) -> tuple[bytes, tuple[int, ...], list[str]]:
    """A digest of what is computed but for its sizes, the sizes, and names of the first: the leaves' dimensions.

    ``who``: for whom. Takes time linear in the path's length.
    """
    sizes: list[int] = []
    names: list[str] = []
    start = path[0].first_id if path else 0  # where a trace's ids begin says nothing of the path
    wanted = tuple(value_id - start for value_id in value_ids)
    digest = hashlib.blake2b(repr((who, wanted)).encode(), digest_size=16)

    def described(value: Any) -> Any:
        cls = value.__class__
        if cls is int:
            sizes.append(value)
            return "size"
        if cls is list or cls is tuple:
            return [described(one) for one in value]
        if cls is Value:
            return "value", value.value_id - start
        if cls is HostScalar:
            return "host", str(value.dtype), described(value.value)
        if is_template(value):
            return cls.__name__, 0 if cls is ScalarInput else value.position
        return repr(value)

    for at, spec in enumerate(leaf_specs):
        digest.update(f"{spec.dtype} {len(spec.shape)};".encode())
        sizes += spec.shape
        names += [f"dimension {dim} of input {at}" for dim in range(len(spec.shape))]
    for node in path:
        kwargs = {name: described(value) for name, value in node.kwargs.items()}
        # How many results ``unbind`` has is a size, but other values have other ids after another number of them.
        digest.update(repr((str(node.op), len(node.specs), described(node.args), kwargs)).encode())
    return digest.digest(), tuple(sizes), names


FEWER: Final = 4
"""A value more is computed per this many operators, at most."""
_wanted: Final[OrderedDict[bytes, dict[frozenset[int], int]]] = OrderedDict()
"""By a skeleton's digest, whichever of its values are wanted: what was computed of it, and for how many sizes."""


def widened(
    who: str, path: Sequence[Node], value_ids: tuple[int, ...], leaf_specs: Sequence[TensorSpec]
) -> tuple[int, ...]:
    """The values to compute where these are wanted and a computation is to be made: more, if it once was more at other
    sizes.

    Values that only a reference cycle holds are wanted or not as the garbage collector has just run or not. One form
    then serves both. It is not made of many more: a program that once looked at everything is not to compute that ever
    after.
    """
    digest, _, _ = skeleton_of(who, path, (), leaf_specs)
    wanted = frozenset(value_ids)
    known = _wanted.setdefault(digest, {})
    _wanted.move_to_end(digest)
    if len(_wanted) > FAMILIES:
        _wanted.popitem(last=False)
    most = len(wanted) + len(path) // FEWER
    fit = [one for one in known if wanted <= one and len(one) <= most]
    # What most sizes compute has the most computations that may serve this one, too.
    found = max(fit, key=lambda one: (known[one], len(one)), default=wanted)
    known[found] = known.get(found, 0) + 1
    return tuple(sorted(found))
