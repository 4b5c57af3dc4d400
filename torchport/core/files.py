"""Writing files: what the system refuses is an error in words."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from .errors import TorchportError

__all__ = ["writing"]


@contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """A block that writes to a file or folder. Raises :class:`TorchportError` where the system does not let it."""
    try:
        yield
    except OSError as error:
        why = error.strerror or error
        raise TorchportError(
            f"cannot write {os.fspath(path)}: {why}; make room there, or give another place"
        ) from error
