"""Sets of dispatch keys, what alias keys stand for, and the maps between backends and their autograd keys.

Follows ``c10/core/DispatchKeySet.h`` of torch 2.13. A set is one Python integer (layout in :mod:`.keys`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, final

from torchport.core.errors import DispatchError

from .keys import (
    BACKEND_SHIFT,
    FUNCTIONALITY_MASK,
    PER_BACKEND,
    BackendComponent,
    DispatchKey,
    Functionality,
    backends,
    runtime_key,
)

__all__ = [
    "DEFAULT_EXCLUDED",
    "DEFAULT_INCLUDED",
    "PER_BACKEND_MASK",
    "DispatchKeySet",
    "Keys",
    "alias_keys",
    "autograd_from_backend",
    "backend_from_autograd",
    "in_alias",
    "tensor_keys",
    "to_bits",
]

PER_BACKEND_MASK: Final = sum(1 << (functionality - 1) for functionality in PER_BACKEND)
"""Functionality bits that need a backend bit to mean a runtime key."""

_FUNCTIONALITIES: Final = tuple(Functionality)
_UNDEFINED: Final = DispatchKey("Undefined")


def _key_bits(item: DispatchKey | BackendComponent | str) -> int:
    if isinstance(item, BackendComponent):
        return item.bit
    key = DispatchKey(item)
    if key.is_alias:
        raise DispatchError(
            f"{key} is an alias key, where a runtime key is needed; alias_keys({key.name!r}) gives what it stands for"
        )
    return key.bits


@final
class DispatchKeySet:
    """An immutable set of functionality bits and backend bits.

    ``DispatchKeySet("CPU", "AutogradCPU")``; a :class:`BackendComponent` adds its backend bit alone. As in c10, ``-``
    and :meth:`remove` take functionality bits away and leave backend bits, since a backend bit may serve other
    functionalities of the set. Alias keys: ``DispatchError``.
    """

    __slots__ = ("bits",)
    bits: int

    def __init__(self, *items: DispatchKey | BackendComponent | str) -> None:
        bits = 0
        for item in items:
            bits |= _key_bits(item)
        object.__setattr__(self, "bits", bits)

    @classmethod
    def from_bits(cls, bits: int) -> DispatchKeySet:
        """The set with exactly these bits (layout in :mod:`.keys`)."""
        made = object.__new__(cls)
        object.__setattr__(made, "bits", bits)
        return made

    @classmethod
    def full(cls) -> DispatchKeySet:
        """Every functionality and every backend."""
        return cls.from_bits(FUNCTIONALITY_MASK | backends.mask)

    @classmethod
    def full_after(cls, key: DispatchKey | str) -> DispatchKeySet:
        """All below ``key``'s functionality, all backends, and PythonDispatcher: a kernel's usual redispatch mask."""
        functionality = DispatchKey(key).functionality
        if not functionality:
            raise DispatchError(f"full_after({key}): not a functionality or runtime key")
        below = (1 << (functionality - 1)) - 1
        return cls.from_bits(below | backends.mask | 1 << (Functionality.PythonDispatcher - 1))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("DispatchKeySet is immutable; use |, -, add() or remove()")

    def __delattr__(self, name: str) -> None:
        raise AttributeError("DispatchKeySet is immutable")

    def __reduce__(self) -> tuple[Callable[[int], DispatchKeySet], tuple[int]]:
        return (DispatchKeySet.from_bits, (self.bits,))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DispatchKeySet) and self.bits == other.bits

    def __hash__(self) -> int:
        return hash(self.bits)

    def __bool__(self) -> bool:
        return self.bits != 0

    def __or__(self, other: DispatchKeySet) -> DispatchKeySet:
        return DispatchKeySet.from_bits(self.bits | other.bits)

    def __and__(self, other: DispatchKeySet) -> DispatchKeySet:
        return DispatchKeySet.from_bits(self.bits & other.bits)

    def __xor__(self, other: DispatchKeySet) -> DispatchKeySet:
        return DispatchKeySet.from_bits(self.bits ^ other.bits)

    def __sub__(self, other: DispatchKeySet) -> DispatchKeySet:
        return DispatchKeySet.from_bits(self.bits & ~(other.bits & FUNCTIONALITY_MASK))

    def add(self, item: DispatchKey | BackendComponent | str) -> DispatchKeySet:
        """This set with the key's bits, or the backend's bit, as well."""
        return DispatchKeySet.from_bits(self.bits | _key_bits(item))

    def remove(self, key: DispatchKey | str) -> DispatchKeySet:
        """This set without the key's functionality bit; backend bits stay."""
        return DispatchKeySet.from_bits(self.bits & ~(_key_bits(DispatchKey(key)) & FUNCTIONALITY_MASK))

    def remove_backend(self, component: BackendComponent) -> DispatchKeySet:
        """This set without the backend's bit."""
        return DispatchKeySet.from_bits(self.bits & ~component.bit)

    def has(self, item: DispatchKey | BackendComponent | str) -> bool:
        """Whether all of the key's bits are in the set. Undefined and alias keys: ``DispatchError``."""
        bits = _key_bits(item)
        if not bits:
            raise DispatchError("has(Undefined): Undefined is in no set; test `not keyset` instead")
        return self.bits & bits == bits

    __contains__ = has

    def has_all(self, other: DispatchKeySet) -> bool:
        """Whether the other set is part of this one."""
        return self.bits & other.bits == other.bits

    def has_any(self, other: DispatchKeySet) -> bool:
        """Whether any bit is common. ``other`` may not mix backend bits with per-backend functionalities.

        Such a mix would compare bits that mean nothing alone: AutogradCPU and CPU share the CPU bit.
        """
        if other.bits >> BACKEND_SHIFT and other.bits & PER_BACKEND_MASK:
            raise DispatchError(f"has_any({other}): per-backend keys share bits; test each with has()")
        return self.bits & other.bits != 0

    @property
    def backend(self) -> BackendComponent | None:
        """The backend that decides: the highest present."""
        return backends.at((self.bits >> BACKEND_SHIFT).bit_length() - 1)

    @property
    def highest_priority(self) -> DispatchKey:
        """The key to dispatch on: top functionality, with the top backend where it has one slot per backend."""
        functionality = _FUNCTIONALITIES[(self.bits & FUNCTIONALITY_MASK).bit_length()]
        return runtime_key(functionality, self.backend) if functionality else _UNDEFINED

    def backends(self) -> tuple[BackendComponent, ...]:
        """Backends whose bit is set, ascending."""
        return tuple(component for component in backends if self.bits & component.bit)

    def __iter__(self) -> Iterator[DispatchKey]:
        """Runtime keys, ascending; a per-backend functionality without a backend bit is skipped, as in c10."""
        rest = self.bits & FUNCTIONALITY_MASK
        present = self.backends()
        while rest:
            low = rest & -rest
            functionality = _FUNCTIONALITIES[low.bit_length()]
            if functionality in PER_BACKEND:
                for component in present:
                    yield runtime_key(functionality, component)
            else:
                yield runtime_key(functionality, None)
            rest ^= low

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"DispatchKeySet({', '.join(key.name for key in self)})"

    def to_torch(self) -> Any:
        """The same set as ``torch._C.DispatchKeySet``. ``DispatchError`` when it has a backend that c10 has not."""
        from .torch_bits import bits_to_torch  # on demand: the dispatcher needs no torch

        return bits_to_torch(self.bits)

    @classmethod
    def from_torch(cls, keyset: Any, *, privateuse1: BackendComponent | None = None) -> DispatchKeySet:
        """The same set from ``torch._C.DispatchKeySet``; ``privateuse1`` stands in for the PrivateUse1 backend bit."""
        from .torch_bits import bits_from_torch  # on demand: the dispatcher needs no torch

        return cls.from_bits(bits_from_torch(keyset, privateuse1))


Keys = DispatchKey | BackendComponent | DispatchKeySet | str
"""What the functions below accept wherever keys are wanted."""


def to_bits(items: Iterable[Keys]) -> int:
    """Bits of the union of keys and sets."""
    bits = 0
    for item in items:
        bits |= item.bits if isinstance(item, DispatchKeySet) else _key_bits(item)
    return bits


def _functionality_bits(*functionalities: Functionality) -> int:
    return sum(1 << (functionality - 1) for functionality in functionalities)


_F = Functionality
_AUTOGRAD_BITS = _functionality_bits(_F.AutogradFunctionality, _F.AutogradOther, _F.AutogradNestedTensor)
_OTHER_BITS = _functionality_bits(
    _F.FPGA, _F.Vulkan, _F.Metal, _F.CustomRNGKeyId, _F.MkldnnCPU, _F.Sparse, _F.SparseCsr, _F.Quantized
)
_EXPLICIT_BITS = _OTHER_BITS | _functionality_bits(_F.Dense)
_SPARSE_BITS = _functionality_bits(_F.Sparse)
_NESTED_BITS = _functionality_bits(_F.NestedTensor)
_NESTED_BOTH_BITS = _functionality_bits(_F.NestedTensor, _F.AutogradNestedTensor)
_BATCHED_BITS = _functionality_bits(_F.FuncTorchBatched)

_alias_bits: Mapping[DispatchKey, Callable[[], int]] = {
    DispatchKey("Autograd"): lambda: _AUTOGRAD_BITS | backends.mask,
    DispatchKey("CompositeExplicitAutograd"): lambda: _EXPLICIT_BITS | backends.mask,
    DispatchKey("CompositeExplicitAutogradNonFunctional"): lambda: (
        (_EXPLICIT_BITS & ~_SPARSE_BITS) | (backends.mask & ~backends.functional_mask)
    ),
    DispatchKey("CompositeImplicitAutograd"): lambda: _EXPLICIT_BITS | _AUTOGRAD_BITS | _NESTED_BITS | backends.mask,
    DispatchKey("CompositeImplicitAutogradNestedTensor"): lambda: _NESTED_BOTH_BITS | backends.mask,
    DispatchKey("FuncTorchBatchedDecomposition"): lambda: _BATCHED_BITS,
}

DEFAULT_INCLUDED: Final = DispatchKeySet("BackendSelect", "ADInplaceOrView")
"""What a new thread includes, as in c10."""
DEFAULT_EXCLUDED: Final = DispatchKeySet(*(f.name for f in Functionality if f.name.startswith("Autocast")))
"""What a new thread excludes, as in c10: every Autocast key."""


def alias_keys(alias: DispatchKey | str) -> DispatchKeySet:
    """The runtime keys an alias key stands for now; a runtime key stands for itself."""
    key = DispatchKey(alias)
    return DispatchKeySet.from_bits(_alias_bits[key]() if key.is_alias else key.bits)


def in_alias(key: DispatchKey, alias: DispatchKey) -> bool:
    """Whether a kernel registered at ``alias`` may serve ``key`` (c10's isIncludedInAlias; Undefined never is)."""
    bits = key.bits
    return bits != 0 and _alias_bits[alias]() & bits == bits


def backend_from_autograd(key: DispatchKey | str) -> DispatchKeySet:
    """Backend keys whose kernels an autograd key stands above; empty for other keys.

    Irregular as in c10: AutogradOther covers every backend without its own autograd key, AutogradHIP, AutogradVE and
    AutogradMTIA cover nothing.
    """
    key = DispatchKey(key)
    if key.functionality is _F.AutogradFunctionality and key.backend is not None:
        return DispatchKeySet(runtime_key(_F.Dense, key.backend)) if key.backend.own_autograd else DispatchKeySet()
    if key.functionality is _F.AutogradOther:
        return DispatchKeySet.from_bits(_OTHER_BITS | backends.mask)
    if key.functionality is _F.AutogradNestedTensor:
        return DispatchKeySet.from_bits(_NESTED_BITS | backends.mask)
    return DispatchKeySet()


def autograd_from_backend(component: BackendComponent | None) -> DispatchKey:
    """The autograd key of a backend's tensors; AutogradOther for no backend, HIP and VE."""
    # getAutogradRelatedKeySetFromBackend lists MTIA although getBackendKeySetFromAutograd does not.
    if component is None or (not component.own_autograd and component.name != "MTIA"):
        return DispatchKey("AutogradOther")
    return runtime_key(_F.AutogradFunctionality, component)


def tensor_keys(component: BackendComponent, functionality: Functionality = Functionality.Dense) -> DispatchKeySet:
    """The keys a plain tensor of a backend carries: its kernel key, ADInplaceOrView, autograd and autocast keys."""
    keys = DispatchKeySet(runtime_key(functionality, component), "ADInplaceOrView", autograd_from_backend(component))
    autocast = f"Autocast{component.name}"
    if autocast in Functionality.__members__:
        keys = keys.add(autocast)
    if functionality is Functionality.NestedTensor:
        keys = keys.add("AutogradNestedTensor")
    return keys
