"""Key sets as PyTorch has them: our bits from c10's, and back. Imported on demand: it needs torch.

Private PyTorch APIs used here (checked on torch 2.13.0):

=========================================  ========================================================
name                                       what for
=========================================  ========================================================
``torch._C.DispatchKeySet.raw_repr``       a set's 64-bit word: 16 backend bits, then functionality bits
``torch._C.DispatchKeySet.from_raw_repr``  the way back
``torch._C._dispatch_keys``                a tensor's key set
``torch._C._dispatch_key_name``            which bit is which key's: releases differ
=========================================  ========================================================
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Final, cast

import torch

from torchport.core.errors import DispatchError

from .keys import BACKEND_SHIFT, FUNCTIONALITY_MASK, BackendComponent, Functionality, backends

__all__ = ["SAME_KEYS", "bits_from_raw", "bits_from_torch", "bits_to_torch", "tensor_bits"]

_TORCH_BACKENDS: Final = sum(1 for component in backends if component.builtin)
_TORCH_BACKEND_MASK: Final = (1 << _TORCH_BACKENDS) - 1
_PRIVATEUSE1: Final = backends.get("PrivateUse1")
_C: Final = cast(Any, torch)._C
_dispatch_keys: Final = _C._dispatch_keys


def _places() -> dict[int, int]:
    """c10's bit of a functionality → ours. A key that only c10 has is left out (``Named``, until torch 2.12)."""
    names = [_C._dispatch_key_name(_C.DispatchKey(number)) for number in range(len(Functionality) + 2)]
    ours = Functionality.__members__
    return {at - 1: ours[name] - 1 for at, name in enumerate(names) if at and name in ours and name != "Undefined"}


_PLACES: Final = _places()
SAME_KEYS: Final = all(theirs == ours for theirs, ours in _PLACES.items())
"""Whether this release has the functionality keys of torch 2.13, in that order."""


def _moved(word: int, places: Iterable[tuple[int, int]]) -> int:
    return sum(1 << to for at, to in places if word >> at & 1)


@lru_cache(maxsize=4096)
def bits_from_raw(raw: int) -> int:
    """Our layout from c10's 64-bit word."""
    word = raw >> _TORCH_BACKENDS
    return (word if SAME_KEYS else _moved(word, _PLACES.items())) | (raw & _TORCH_BACKEND_MASK) << BACKEND_SHIFT


def bits_from_torch(keyset: Any, privateuse1: BackendComponent | None = None) -> int:
    """``torch._C.DispatchKeySet`` in our layout; ``privateuse1`` stands in for the PrivateUse1 backend bit."""
    bits = bits_from_raw(keyset.raw_repr())
    if privateuse1 is not None and bits & _PRIVATEUSE1.bit:
        bits = bits & ~_PRIVATEUSE1.bit | privateuse1.bit
    return bits


def bits_to_torch(bits: int) -> Any:
    """``torch._C.DispatchKeySet`` from our layout. ``DispatchError`` for backends c10 does not have."""
    foreign = bits >> (BACKEND_SHIFT + _TORCH_BACKENDS)
    if foreign:
        named = [c.name for c in backends if not c.builtin and bits & c.bit]
        raise DispatchError(
            "the set has backends that PyTorch's 16 bits cannot name: "
            f"{', '.join(named) or 'one that is no longer registered'}; remove_backend() them first"
        )
    word = bits & FUNCTIONALITY_MASK
    if not SAME_KEYS:
        word = _moved(word, [(ours, theirs) for theirs, ours in _PLACES.items()])
    raw = word << _TORCH_BACKENDS | bits >> BACKEND_SHIFT
    return _C.DispatchKeySet.from_raw_repr(raw)


def tensor_bits(tensor: torch.Tensor) -> int:
    """A tensor's keys, in our layout."""
    return bits_from_raw(_dispatch_keys(tensor).raw_repr())
