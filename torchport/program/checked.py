"""Values of JSON documents, each checked before it is used: what is not as it should be raises :class:`Bad`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar, cast

__all__ = [
    "MAX_RANK",
    "Bad",
    "bad",
    "check_amount",
    "read_each",
    "read_flag",
    "read_list",
    "read_number",
    "read_object",
    "read_text",
]

T = TypeVar("T")
MAX_RANK: Final = 64
"""Dimensions of a tensor; PyTorch's and NumPy's own limits."""
_BYTES_PER_VALUE: Final = 16
_FREE_VALUES: Final = 500_000


class Bad(ValueError):
    """Something in the document is not as it should be; the text says what."""


def bad(what: str) -> Bad:
    """The error to raise."""
    return Bad(what)


def check_amount(text: bytes, size: int) -> None:
    """Raise :class:`Bad` for JSON with so many values that reading it would take much more memory than the file has.

    ``size``: the whole file's, in bytes. A value takes up to about 200 bytes in memory. Documents of real programs have
    one in about 10 bytes of theirs, and lie in files that are several times as large: PyTorch's part says the same in
    more words.
    """
    values = sum(text.count(sign) for sign in (b",", b"[", b"{"))
    if values > _FREE_VALUES + size // _BYTES_PER_VALUE:
        raise bad(f"it has {values:,} values, which is more than a file of {size:,} bytes needs")


def read_object(value: object) -> Mapping[str, Any]:
    """An object."""
    if not isinstance(value, dict):
        raise bad("expected an object")
    return cast("dict[str, Any]", value)


def read_list(value: object, length: int | None = None) -> list[Any]:
    """A list, of this length if one is given."""
    if not isinstance(value, list):
        raise bad("expected a list")
    found = cast("list[Any]", value)
    if length is not None and len(found) != length:
        raise bad(f"expected {length} items")
    return found


def read_text(value: object) -> str:
    """Text."""
    if not isinstance(value, str):
        raise bad("expected text")
    return value


def read_number(value: object, below: int = 1 << 62) -> int:
    """A whole number from 0 on."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < below:
        raise bad(f"expected a whole number from 0 to {below - 1}")
    return value


def read_each(read: Callable[..., T], value: object, *more: object) -> tuple[T, ...]:
    """A list whose items are read one by one."""
    return tuple(read(one, *more) for one in read_list(value))


def read_flag(value: object) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise bad("expected true or false")
    return value
