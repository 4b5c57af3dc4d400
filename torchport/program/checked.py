"""Values of JSON documents, each checked before it is used: what is not as it should be raises :class:`Bad`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

__all__ = ["Bad", "bad", "read_each", "read_flag", "read_list", "read_number", "read_object", "read_text"]

T = TypeVar("T")


class Bad(ValueError):
    """Something in the document is not as it should be; the text says what."""


def bad(what: str) -> Bad:
    """The error to raise."""
    return Bad(what)


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
