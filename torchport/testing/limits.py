"""Failures with a reason on record: PyTorch's limits and the device's, and what a backend's own table says.

A table is a text file of rows ``operator | variant | dtype | frontend | message | reason``: four shell patterns, a
regular expression that the failure's message must match, and the reason in words. ``#`` starts a comment line.
"""

from __future__ import annotations

import fnmatch
import inspect
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ..core.errors import TorchportError
from .plan import Result

__all__ = ["DEVICE_TABLE", "Limit", "find_limit", "limits_of", "read_limits"]

DEVICE_TABLE: Final = Path(__file__).with_name("limits.txt")
"""Limits of PyTorch and of the ``port`` device, whatever the backend."""
BACKEND_TABLE: Final = "conformance.txt"
"""A file of this name beside a backend's module holds the limits of its engine."""


@dataclass(frozen=True, slots=True)
class Limit:
    """One row of a table."""

    op: str
    variant: str
    dtype: str
    frontend: str
    message: re.Pattern[str]
    reason: str

    def covers(self, result: Result) -> bool:
        """Whether the row is about this failure."""
        case = result.case
        pairs = (
            (case.op, self.op),
            (case.variant, self.variant),
            (case.dtype, self.dtype),
            (case.frontend, self.frontend),
        )
        if not all(any(fnmatch.fnmatchcase(text, p) for p in pattern.split(",")) for text, pattern in pairs):
            return False
        return self.message.search(f"{result.status}: {result.message}") is not None


def read_limits(path: Path) -> list[Limit]:
    """The rows of a table. Raises :class:`TorchportError` with the line that is malformed."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise TorchportError(f"the table of limits {path} cannot be read: {error}") from error
    rows: list[Limit] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        cells = [cell.strip() for cell in line.split(" | ")]
        if len(cells) != 6 or not all(cells):
            raise TorchportError(
                f"{path.name}:{number}: write 'operator | variant | dtype | frontend | message | reason', not {line!r}"
            )
        try:
            op, variant, dtype, frontend, message, reason = cells
            rows.append(Limit(op, variant, dtype, frontend, re.compile(message), reason))
        except re.error as error:
            raise TorchportError(f"{path.name}:{number}: the message is no regular expression: {error}") from None
    return rows


def limits_of(backend: Any, files: Iterable[str] = ()) -> list[Limit]:
    """The device's rows, those beside the backend's module, and those of further files."""
    paths = [DEVICE_TABLE]
    try:
        own = Path(inspect.getfile(type(backend))).with_name(BACKEND_TABLE)
    except (TypeError, OSError):
        own = None  # a class made in an interpreter session has no file
    if own is not None and own.exists():
        paths.append(own)
    return [row for path in (*paths, *map(Path, files)) for row in read_limits(path)]


def find_limit(limits: Sequence[Limit], result: Result) -> Limit | None:
    """The first row that covers a failure."""
    return next((row for row in limits if row.covers(result)), None)
