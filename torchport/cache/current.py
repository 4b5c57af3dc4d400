"""The folder that the settings name (``config.cache``, ``cache_dir``, ``cache_size``)."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path

from ..core.config import config
from ..core.errors import ConfigError
from .folder import CacheFolder, say, trouble_with

__all__ = ["default_folder", "disk_cache", "folder_in_settings"]


def default_folder() -> Path:
    """Where the cache is if nobody says: in the user's own cache folder. Raises ``RuntimeError`` without a home."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(given):
        return Path(given) / "torchport"
    return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "torchport"


def folder_in_settings() -> Path:
    """The folder that the settings name, which need not be there. Raises :class:`ConfigError`."""
    if config.cache_dir:
        return Path(config.cache_dir).expanduser().absolute()
    try:
        return default_folder()
    except RuntimeError as error:
        raise ConfigError(f"there is no place for the disk cache: {error}; set TORCHPORT_CACHE_DIR") from error


@functools.lru_cache(maxsize=8)
def _opened(mode: str, path: Path, size: int, user: int) -> CacheFolder | str:
    trouble = trouble_with(path, create=mode == "on")
    return trouble or CacheFolder(path, size, writable=mode == "on")


def disk_cache() -> CacheFolder | None:
    """The cache in use; ``None`` where there is none. Raises :class:`ConfigError` where nothing else is allowed."""
    mode = config.cache
    if mode == "off":
        return None
    try:
        path = folder_in_settings()
        found = _opened(mode, path, config.cache_size, os.geteuid())
        if isinstance(found, CacheFolder):
            return found
        raise ConfigError(f"{path} is not used as a cache: {found}; set TORCHPORT_CACHE_DIR to a folder of your own")
    except ConfigError as error:
        if mode == "cache-only":
            raise
        say(str(error))
        return None
