"""Where an engine's shared libraries are, found without importing it (:class:`.SupportsCacheKey`)."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from glob import glob

__all__ = ["environment", "libraries_of"]


def libraries_of(package: str, *patterns: str) -> list[str]:
    """Paths of the files of an installed package that match ``patterns`` in its folder; none if it is not installed."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return []
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    return sorted(
        path
        for folder in folders
        for pattern in patterns
        for path in glob(os.path.join(folder, pattern), recursive=True)
    )


def environment(wanted: Callable[[str], bool]) -> Mapping[str, str]:
    """The environment variables whose names are ``wanted``."""
    return {name: value for name, value in sorted(os.environ.items()) if wanted(name)}
