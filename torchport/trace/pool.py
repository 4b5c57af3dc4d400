"""Pools: the handles that a node's kernel returns, step after step, and what is done to them when a trace ends.

A handle that died before a flush never had a value, so its node hands the very same object out on the next step.
A node's pool (``Node.ready``) has handles whose ids never change. A handle of it that is still held when its
trace ends is replaced then. Both its reference counts tell: C++ code holds handles, too.

Private torch APIs used here: ``torch._C._len_torch_dispatch_stack``, ``torch._C._ExcludeDispatchKeyGuard`` and
the dispatch key ``Python``.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch

from ..core.references import holders
from ..core.specs import TensorSpec
from ..native.twins import twins
from .handle import LazyTensor
from .trie import NONE, Node

__all__ = ["alive", "fill_pool", "forget", "give", "new_handle", "pending", "release", "sweep"]

_PYTHON: Final = torch._C.DispatchKeySet(torch._C.DispatchKey.Python)


@twins.python
def alive(handles: list[LazyTensor]) -> list[LazyTensor]:
    """The handles that somebody holds besides the list and their nodes' pools. No name may stand for one meanwhile."""
    counts = holders(handles)
    return [
        handle
        for handle, count in zip(handles, counts, strict=True)
        if count > (handle.home is not None) or handle._use_count() > _USES_ALONE  # type: ignore[attr-defined]
    ]


def new_handle(node: Node, offset: int) -> LazyTensor:
    """A handle of a node's result that is in no pool."""
    template: Any = node.templates[offset]
    if torch._C._len_torch_dispatch_stack():
        with torch._C._ExcludeDispatchKeyGuard(_PYTHON):  # no mode is to see how it is made
            made = template.data
    else:
        made = template.data
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


@twins.python
def sweep(made: list[LazyTensor], node: Node, swept: Node) -> None:
    """Keep of a list the handles that are held, and add those of the nodes from one up to another, without the latter.

    Results that Python code holds as one leave their pool: the list or tuple itself would tell nothing of each.
    """
    while node is not swept:
        # A name for a node's results would count as one of their holders.
        if node.ready.__class__ is LazyTensor:
            made.append(node.ready)  # type: ignore[arg-type]
        elif node.ready is not None:
            as_one = _count_of_ready(node) > _READY_ALONE
            found: Any = [handle for handle in node.ready if handle is not None]  # type: ignore[union-attr]
            made.extend(found)
            if as_one:
                for handle in found:
                    release(handle)
        assert node.parent is not None
        node = node.parent
    found = handle = None  # each name would count as a holder
    made[:] = alive(made)


@twins.python
def pending(handles: Iterable[LazyTensor]) -> list[LazyTensor]:
    """Those without value and failure, oldest first; their nodes let go of them."""
    found = [handle for handle in handles if handle.value is None and handle.failure is None]
    _release_all(found)
    found.sort(key=_value_id_of)
    return found


@twins.python
def forget(handles: Iterable[LazyTensor]) -> None:
    """Have handles belong to no trace; those that are in their nodes' pools leave them."""
    for handle in handles:
        if handle.home is not None:
            fill_pool(*handle.home)
        handle.value_id = NONE


@twins.python
def give(owners: Iterable[Iterable[LazyTensor]], values: Sequence[Any], specs: Sequence[TensorSpec]) -> None:
    """Give the handles of each group in ``owners`` a value and its spec. Raises ``ValueError`` for other lengths."""
    for handles, value, spec in zip(owners, values, specs, strict=True):
        for handle in handles:
            handle.value, handle.spec = value, spec


def _count_of_ready(node: Node) -> int:
    return sys.getrefcount(node.ready)


def _measured() -> int:
    probe = Node.root()
    probe.ready = []
    return _count_of_ready(probe)


_READY_ALONE: Final = _measured()
"""What :func:`_count_of_ready` says of results that only their node holds."""

_USES_ALONE: Final[int] = torch.empty(0, device="cpu")._use_count()  # type: ignore[attr-defined]
"""PyTorch's references to a tensor that only one Python object stands for."""

_value_id_of: Final = operator.attrgetter("value_id")
