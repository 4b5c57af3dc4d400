"""Which paths lead to computations that are on disk, so that the compiler's process is started to look for those alone.

Only that process knows the key of an entry: it is made from the graph in normal form, which takes seconds. A path's own
digest takes milliseconds. So whoever has something compiled leaves an empty file of that name beside the entries
(``cache/folder.py``). Without the file nothing is lost but time: when the path has cost enough, the process is asked to
compile it, and finds the entry.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..backend.sizes.sized import is_sized
from ..cache.current import disk_cache
from ..core.specs import TensorSpec
from ..trace.keys import beginning
from .sizes import skeleton_of

if TYPE_CHECKING:
    from ..backend.interface import Backend
    from ..cache.folder import CacheFolder
    from ..trace.trie import Node
    from .plans import ExecutionPlan

__all__ = ["forget", "is_kept", "may_begin", "note_kept", "note_made", "noting"]


def _folder(backend: Backend) -> CacheFolder | None:
    return None if backend.capabilities.skips_cache else disk_cache()


def _names(
    backend: Backend, path: Sequence[Node], value_ids: Sequence[int], leaf_specs: Sequence[TensorSpec]
) -> tuple[str, str]:
    """What a path is called: of these sizes, and of any sizes."""
    key, sizes, _ = skeleton_of(_who(backend), path, value_ids, leaf_specs)
    return hashlib.sha256(key + repr(sizes).encode()).hexdigest(), hashlib.sha256(key).hexdigest()


def note_kept(
    backend: Backend,
    path: Sequence[Node],
    value_ids: Sequence[int],
    leaf_specs: Sequence[TensorSpec],
    any_size: bool = False,
) -> None:
    """Note that these values at the end of a path were compiled; ``any_size``: by what serves other sizes, too."""
    folder = _folder(backend)
    if folder is not None and folder.writable and path:
        folder.note_path(_names(backend, path, value_ids, leaf_specs)[any_size])
        folder.note_path(_name_of_beginning(_who(backend), beginning(path[0].op, path[0].key)))


def note_made(made: ExecutionPlan, backend: Backend, path: Sequence[Node], leaf_specs: Sequence[TensorSpec]) -> None:
    """:func:`note_kept` for what this process has compiled, or loaded; not for graphs with segments on the host."""
    if made.computation is not None and not made.refusals:
        note_kept(backend, path, made.value_ids, leaf_specs, made.computation.resized is not None)


def forget(backend: Backend, path: Sequence[Node], value_ids: Sequence[int], leaf_specs: Sequence[TensorSpec]) -> None:
    """What was noted of these values was looked for, and is gone."""
    folder = _folder(backend)
    if folder is not None:
        for name in _names(backend, path, value_ids, leaf_specs):
            folder.forget_path(name)


def _who(backend: Backend) -> str:
    return f"{backend.name}, torch {torch.__version__}"


@functools.lru_cache(maxsize=1024)
def _begins(folder: CacheFolder, who: str, begins: str) -> bool:
    """As it was when it was first asked for: what this program has compiled since is in its memory."""
    return folder.knows_path(_name_of_beginning(who, begins))


def _name_of_beginning(who: str, begins: str) -> str:
    return hashlib.sha256(f"{who} begins with {begins}".encode()).hexdigest()


def may_begin(backend: Backend, begins: str) -> bool:
    """Whether an earlier program has compiled what begins like this (:func:`~torchport.trace.keys.beginning`)."""
    folder = _folder(backend)
    return folder is not None and _begins(folder, _who(backend), begins)


def noting(
    load: Callable[[Any], Any] | None,
    backend: Backend,
    path: Sequence[Node],
    value_ids: Sequence[int],
    leaf_specs: Sequence[TensorSpec],
) -> Callable[[Any], Any]:
    """What a ticket's ``load`` does, and :func:`note_kept` with it."""

    def loaded(answer: Any) -> Any:
        made = None if load is None else load(answer)
        note_kept(backend, path, value_ids, leaf_specs, is_sized(answer.data))
        return made

    return loaded


def is_kept(backend: Backend, path: Sequence[Node], value_ids: Sequence[int], leaf_specs: Sequence[TensorSpec]) -> bool:
    """Whether an earlier program has compiled these values, of these sizes or for any."""
    folder = _folder(backend)
    return folder is not None and any(map(folder.knows_path, _names(backend, path, value_ids, leaf_specs)))
