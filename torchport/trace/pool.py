"""Pools: the handles that a node's kernel returns, step after step, and what is done to them when a trace ends.

A handle that died before a flush never had a value, so its node hands the very same object out on the next step.
A node's pool (``Node.ready``) has handles whose ids never change. A handle of it that is still held when its
trace ends is replaced then. Both its reference counts tell: C++ code holds handles, too.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

from .handle import LazyTensor
from .trie import NONE, Node

__all__ = ["PYTHON", "HandleOperations", "alive", "fill_pool", "forms", "new_handle", "release", "use"]


def make_alive_filter() -> Callable[[Iterable[LazyTensor]], list[LazyTensor]]:
    """A function that keeps the handles somebody holds besides the list it is given and their nodes' pools."""
    count = sys.getrefcount

    def counts(handles: Iterable[Any]) -> list[int]:
        return [count(h) for h in handles]

    (alone,) = counts([object()])

    def alive(handles: Iterable[LazyTensor]) -> list[LazyTensor]:
        return [h for h in handles if h._use_count() > 1 or count(h) > alone + (h.home is not None)]  # type: ignore[attr-defined]

    return alive


def alive(handles: list[LazyTensor]) -> list[LazyTensor]:
    """The handles that somebody holds besides the list and their nodes' pools. Nothing else may hold them meanwhile."""
    return forms().alive(handles)


def new_handle(node: Node, offset: int) -> LazyTensor:
    """A handle of a node's result that is in no pool."""
    template = node.templates[offset]
    made: Any = template.data  # type: ignore[union-attr]
    made.__class__ = LazyTensor
    made.value_id = node.first_id + offset
    return made


def fill_pool(node: Node, offset: int) -> None:
    """Give a node's pool a new handle for one of its results, and let go of the one it had."""
    made = new_handle(node, offset)
    made.home = (node, offset)
    former = node.ready
    if node.container is None:
        node.ready = made
    else:
        assert node.ready is not None
        results: list[Any] = list(node.ready)  # type: ignore[arg-type]
        former, results[offset] = results[offset], made
        node.ready = node.container(results)
    if former is not None:
        former.home = None  # type: ignore[union-attr]


def release(handle: LazyTensor) -> None:
    """Take a handle out of its node's pool: it is about to get a value, or is otherwise no longer like new."""
    if handle.home is not None:
        fill_pool(*handle.home)


def _release_all(handles: Iterable[LazyTensor]) -> None:
    """:func:`release` for many: where a node has several results, its pool is made anew once and not for each."""
    pools: dict[Node, list[Any]] = {}
    for handle in handles:
        if handle.home is None:
            continue
        node, offset = handle.home
        if node.container is None:
            fill_pool(node, offset)
            continue
        if node not in pools:
            pools[node] = list(node.ready)  # type: ignore[arg-type]
        made = pools[node][offset] = new_handle(node, offset)
        made.home, handle.home = handle.home, None
    for node, results in pools.items():
        assert node.container is not None
        node.ready = node.container(results)


def sweep(made: list[LazyTensor], node: Node, swept: Node) -> None:
    """Keep of a list the handles that are held, and add those of the nodes from one up to another, without the latter.

    Results that Python code holds as one leave their pool: the list or tuple itself would tell nothing of each.
    """
    while node is not swept:
        ready = node.ready
        if ready.__class__ is LazyTensor:
            made.append(ready)  # type: ignore[arg-type]
        elif ready is not None:
            results: Any = ready
            made.extend([handle for handle in results if handle is not None])
            if sys.getrefcount(results) > _CONTAINER_ALONE:
                for handle in results:
                    if handle is not None:
                        release(handle)
        assert node.parent is not None
        node = node.parent
    ready = results = handle = None  # each name would count as a holder
    made[:] = PYTHON.alive(made)


def pending(handles: Iterable[LazyTensor]) -> list[LazyTensor]:
    """Those without value and failure, oldest first; their nodes let go of them."""
    found = [handle for handle in handles if handle.value is None and handle.failure is None]
    _release_all(found)
    found.sort(key=_value_id_of)
    return found


def forget(handles: Iterable[LazyTensor]) -> None:
    """Have handles belong to no trace; those that are in their nodes' pools leave them."""
    for handle in handles:
        if handle.home is not None:
            fill_pool(*handle.home)
        handle.value_id = NONE


class HandleOperations(NamedTuple):
    """What is done to every handle when a trace ends: here, or in C++ (:data:`torchport.native.flush`)."""

    alive: Callable[[list[LazyTensor]], list[LazyTensor]]
    sweep: Callable[[list[LazyTensor], Node, Node], None]
    pending: Callable[[list[LazyTensor]], list[LazyTensor]]
    forget: Callable[[list[LazyTensor]], None]


PYTHON: Final = HandleOperations(make_alive_filter(), sweep, pending, forget)
_forms = PYTHON


def forms() -> HandleOperations:
    """Who does it now."""
    return _forms


def use(forms: HandleOperations) -> None:
    """Handle handles by these from now on."""
    global _forms
    _forms = forms


_CONTAINER_ALONE: Final = 4
"""What ``sys.getrefcount`` says in :func:`sweep` of results that only their node holds: node, two names, call."""

_value_id_of: Final = operator.attrgetter("value_id")
