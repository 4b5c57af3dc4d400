"""Which keys an argument carries: a getter per Python type, found once and remembered."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any, final

from torchport.core.errors import DispatchError

from .keyset import DispatchKeySet

__all__ = ["KeyGetters"]

Getter = Callable[[Any], int]


def _no_keys(value: object) -> int:
    return 0


def _attribute(value: Any) -> int:
    return value.dispatch_keys.bits


@final
class KeyGetters(dict[type, Getter]):
    """Type → function giving an argument's bits. Looks new types up on first sight.

    In order: an extractor added for the type or a base class; an attribute ``dispatch_keys`` (a key set);
    lists and tuples (union of the items); ``torch.Tensor``, if torch is loaded; anything else carries no keys.
    """

    def __init__(self) -> None:
        super().__init__()
        self._added: dict[type, Getter] = {}
        self[list] = self[tuple] = self._items
        self[type(None)] = _no_keys

    def add(self, cls: type, extractor: Callable[[Any], DispatchKeySet | int]) -> None:
        """Use ``extractor`` for a type and its subclasses; it gives a key set or its bits."""

        def getter(value: Any) -> int:
            keys = extractor(value)
            if isinstance(keys, DispatchKeySet):
                return keys.bits
            return keys

        if cls in (list, tuple, type(None)):
            raise DispatchError(f"{cls.__name__} cannot get an extractor: lists are looked into, None carries no keys")
        self._added[cls] = getter
        self.clear()
        self[list] = self[tuple] = self._items
        self[type(None)] = _no_keys

    def _items(self, values: Iterable[Any]) -> int:
        bits = 0
        for value in values:
            bits |= self[type(value)](value)
        return bits

    def __missing__(self, cls: type) -> Getter:
        getter = self._find(cls)
        self[cls] = getter
        return getter

    def _find(self, cls: type) -> Getter:
        for base in cls.__mro__:
            if base in self._added:
                return self._added[base]
        if hasattr(cls, "dispatch_keys") or "dispatch_keys" in getattr(cls, "__annotations__", ()):
            return _attribute
        if issubclass(cls, (list, tuple)):
            return self._items
        torch = sys.modules.get("torch")
        if torch is not None and issubclass(cls, torch.Tensor):
            from .torch_bits import tensor_bits  # on demand: the dispatcher needs no torch

            return tensor_bits
        return _no_keys
