"""The backend under test, by name, by module or by file: what a command line and a worker process can both say."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from ..backend.interface import Backend
from ..backend.registry import registry
from ..core.errors import BackendNotFound

__all__ = ["load_backend"]


def load_backend(text: str) -> Backend:
    """The backend that ``text`` means: a registered name, ``package.module:Class``, or ``path/file.py:Class``.

    A class or factory that is not registered becomes so. Raises :class:`BackendNotFound` or
    :class:`BackendUnavailable`.
    """
    place, separator, attribute = text.rpartition(":")
    if not separator:
        return registry.get(text)
    try:
        module = _from_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except (ImportError, OSError) as error:
        raise BackendNotFound(f"{place!r} of {text!r} cannot be imported: {error}") from error
    found: Any = getattr(module, attribute, None)
    if found is None:
        raise BackendNotFound(f"{place!r} has no {attribute!r}; write module:Class or file.py:Class")
    name = getattr(found, "name", None)
    if isinstance(name, str) and name not in registry.names():
        registry.register(found)
    return registry.get(str(name))


def _from_file(path: Path) -> Any:
    if not path.is_file():
        raise OSError(f"there is no file {path}")
    name = f"torchport_target_{path.stem}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    neighbours = str(path.resolve().parent)
    if neighbours not in sys.path:  # as ``python file.py`` has it
        sys.path.insert(0, neighbours)
    spec.loader.exec_module(module)
    return module
