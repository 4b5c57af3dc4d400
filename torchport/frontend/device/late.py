"""Change a module when it is imported, whenever that is, without importing it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["when_imported"]

_UNDER_WAY = "_initializing"
"""What importlib notes on a module's spec while the module runs."""
_Change = Callable[[Any], None]


def when_imported(name: str, change: _Change) -> None:
    """Call ``change(module)`` once the module of that name has been imported: now, if that is so already.

    A module whose import is still under way is changed when ``change`` is next asked for after it is done: nothing can
    be put behind the end of an import that has begun.
    """
    module = sys.modules.get(name)
    if module is None:
        _finder.changes.setdefault(name, []).append(change)
        if _finder not in sys.meta_path:
            sys.meta_path.insert(0, _finder)
    elif not getattr(module.__spec__, _UNDER_WAY, False):
        change(module)


class _Finder:
    """Finds nothing itself: lets the others find a module, and puts the change behind its execution."""

    def __init__(self) -> None:
        self.changes: dict[str, list[_Change]] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self.changes:
            return None
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(name, path, target)) is not None:
                self._put_behind(spec, name)
                return spec
        return None

    def _put_behind(self, spec: ModuleSpec, name: str) -> None:
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module  # the loader is as it was; a reload changes nothing
            execute(module)
            for change in self.changes.pop(name, []):
                change(module)

        loader.exec_module = exec_module


_finder = _Finder()
