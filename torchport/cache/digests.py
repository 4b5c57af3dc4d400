"""What files hold, as hashes that are computed once per change of a file and not at each start.

A hash is remembered with the path, size and time of change that the file had. What is remembered lies in one file of
the cache's folder; without it everything is read again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

__all__ = ["Digests"]

_SOURCES: Final = (".py", ".cpp", ".h", ".so", ".txt")


def _digest_of_file(path: str) -> str:
    with open(path, "rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Digests:
    """Hashes of files and folders; ``path``: where they are kept, or ``None``."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._known: dict[str, Any] = self._read()
        self._changed = False
        self._asked: dict[str, str] = {}

    def _read(self) -> dict[str, Any]:
        if self._path is not None:
            with contextlib.suppress(OSError, ValueError):
                found = json.loads(self._path.read_text())
                if isinstance(found, dict):
                    return found  # pyright: ignore[reportUnknownVariableType]
        return {}

    def file(self, path: str | os.PathLike[str]) -> str:
        """The hash of a file's content. Raises ``OSError``."""
        real = os.path.realpath(path)
        found = self._asked.get(real)
        if found is None:
            stat = os.stat(real)
            found = self._asked[real] = self._remembered(
                real, f"{stat.st_mtime_ns} {stat.st_size}", lambda: _digest_of_file(real)
            )
        return found

    def files(self, paths: Iterable[str | os.PathLike[str]]) -> str:
        """One hash of several files: their names and what they hold, wherever they lie. Raises ``OSError``."""
        listed = sorted((os.path.basename(path), self.file(path)) for path in paths)
        return hashlib.sha256(json.dumps(listed).encode()).hexdigest()

    def sources(self, folder: str) -> str:
        """One hash of a folder of Python and C++ sources, wherever it lies. Raises ``OSError``."""
        folder = os.path.realpath(folder)
        found = self._asked.get(folder)
        if found is not None:
            return found
        listed: list[tuple[str, int, int]] = []
        for root, folders, names in os.walk(folder):
            folders[:] = sorted(name for name in folders if name != "__pycache__")
            for name in sorted(names):
                if name.endswith(_SOURCES):
                    path = os.path.join(root, name)
                    stat = os.stat(path)
                    listed.append((os.path.relpath(path, folder), stat.st_mtime_ns, stat.st_size))

        def content() -> str:
            digest = hashlib.sha256()
            for name, _, _ in listed:
                digest.update(f"{name}\0{_digest_of_file(os.path.join(folder, name))}\0".encode())
            return digest.hexdigest()

        state = hashlib.sha256(json.dumps(listed).encode()).hexdigest()
        found = self._asked[folder] = self._remembered(folder, state, content)
        return found

    def _remembered(self, name: str, state: str, compute: Any) -> str:
        known = self._known.get(name)
        if isinstance(known, list) and len(known) == 2 and known[0] == state and isinstance(known[1], str):
            return known[1]
        found = compute()
        self._known[name] = [state, found]
        self._changed = True
        return found

    def save(self) -> None:
        """Keep what was computed for other processes; if that is not possible they compute it, too."""
        if not self._changed or self._path is None:
            return
        self._changed = False
        private = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            private.write_text(json.dumps(self._known))
            private.replace(self._path)
        except OSError:
            with contextlib.suppress(OSError):
                private.unlink()
