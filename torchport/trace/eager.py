"""Eager mode: each op is computed at once, by the machinery of the lazy trace.

An eager trace has a trie of depth one. The root hides its children from the kernels, so each operator comes to
:func:`.record.record`, which calls :meth:`EagerTrace.at_once`. The kernels of lazy tracing need not know of modes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .trace import Runner, Trace
from .trie import Node

__all__ = ["EagerTrace"]


class _Hidden(dict[Any, Node]):
    """Children that are there, but not for who looks them up the usual way."""

    def __getitem__(self, key: Any) -> Node:
        raise KeyError(key)

    def get(self, key: Any, default: Any = None) -> Any:
        return default


class EagerTrace(Trace):
    """A trace that never holds more than one op."""

    __slots__ = ()
    eager = True

    def __init__(self, runtime: Runner) -> None:
        super().__init__(runtime)
        self.direct = 1 if runtime.interprets else 0
        self._hide()

    def restart(self) -> None:
        super().restart()
        self._hide()

    def _hide(self) -> None:
        if self.root.children.__class__ is not _Hidden:
            self.root.children = _Hidden(self.root.children)

    def at_once(self, key: Any, emit: Callable[[Node], Any], record: Callable[[], Any]) -> Any:
        """Compute one op: ``emit`` gives a known node's results, ``record`` those of an op that is new here.

        Raises the error the op ends in.
        """
        node = dict.get(self.root.children, key)
        result = record() if node is None else emit(node)
        error = self.runtime.flush(self, "eager")
        if error is not None:
            raise error
        return result
