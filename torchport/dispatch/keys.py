"""Backend components, functionalities and dispatch keys.

The model is c10's (``c10/core/DispatchKey.h``, Note [DispatchKey Classification], checked against torch 2.13), with one
difference: backends register at run time and there is no limit of 64 bits, because sets are Python integers.

Bit layout of every set: functionality ``f`` owns bit ``f - 1``; backend number ``i`` owns bit ``BACKEND_SHIFT + i``.
Functionalities come first because their number is fixed and the number of backends is not.
"""

from __future__ import annotations

import difflib
import enum
import re
from collections.abc import Iterator
from typing import Final, final

from torchport.core.errors import DispatchError

from ..core.forks import guarded_lock

__all__ = [
    "BACKEND_SHIFT",
    "FUNCTIONALITY_MASK",
    "PER_BACKEND",
    "BackendComponent",
    "BackendRegistry",
    "DispatchKey",
    "Functionality",
    "KeyClass",
    "backends",
    "runtime_key",
    "runtime_keys",
]

_C10_NAMES = "CPU CUDA HIP XLA MPS IPU XPU HPU VE Lazy MTIA MAIA PrivateUse1 PrivateUse2 PrivateUse3 Meta"
_BUILTIN_BACKENDS = tuple(_C10_NAMES.split())


class Functionality(enum.IntEnum):
    """c10's functionality keys, lowest priority first; the values are those of torch 2.13."""

    Undefined = 0
    Dense = 1
    FPGA = 2
    Vulkan = 3
    Metal = 4
    Quantized = 5
    CustomRNGKeyId = 6
    MkldnnCPU = 7
    Sparse = 8
    SparseCsr = 9
    NestedTensor = 10
    BackendSelect = 11
    Fake = 12
    Python = 13
    FuncTorchDynamicLayerBackMode = 14
    Functionalize = 15
    Conjugate = 16
    Negative = 17
    ZeroTensor = 18
    ADInplaceOrView = 19
    AutogradOther = 20
    AutogradFunctionality = 21
    AutogradNestedTensor = 22
    Tracer = 23
    AutocastCPU = 24
    AutocastMTIA = 25
    AutocastMAIA = 26
    AutocastXPU = 27
    AutocastIPU = 28
    AutocastHPU = 29
    AutocastXLA = 30
    AutocastMPS = 31
    AutocastCUDA = 32
    AutocastPrivateUse1 = 33
    FuncTorchBatched = 34
    BatchedNestedTensor = 35
    FuncTorchVmapMode = 36
    Batched = 37
    VmapMode = 38
    FuncTorchGradWrapper = 39
    DeferredInit = 40
    PythonTLSSnapshot = 41
    FuncTorchDynamicLayerFrontMode = 42
    TESTING_ONLY_GenericWrapper = 43
    TESTING_ONLY_GenericMode = 44
    PreDispatch = 45
    PythonDispatcher = 46


BACKEND_SHIFT: Final = int(max(Functionality))
"""First backend bit."""
FUNCTIONALITY_MASK: Final = (1 << BACKEND_SHIFT) - 1
"""All functionality bits."""

_PREFIX: Final[dict[Functionality, str]] = {
    Functionality.Dense: "",
    Functionality.Quantized: "Quantized",
    Functionality.Sparse: "Sparse",
    Functionality.SparseCsr: "SparseCsr",
    Functionality.NestedTensor: "NestedTensor",
    Functionality.AutogradFunctionality: "Autograd",
}
PER_BACKEND: Final = frozenset(_PREFIX)
"""Functionalities that have one runtime key per backend."""

_LONE_BACKENDS = frozenset(
    {
        Functionality.FPGA,
        Functionality.Vulkan,
        Functionality.Metal,
        Functionality.CustomRNGKeyId,
        Functionality.MkldnnCPU,
    }
)
_ALIASES = (
    "Autograd",
    "CompositeImplicitAutograd",
    "FuncTorchBatchedDecomposition",
    "CompositeImplicitAutogradNestedTensor",
    "CompositeExplicitAutograd",
    "CompositeExplicitAutogradNonFunctional",
)
_SYNONYMS = {
    "CatchAll": "Undefined",
    "DefaultBackend": "CompositeExplicitAutograd",
    "Autocast": "AutocastCUDA",
}


class KeyClass(enum.IntEnum):
    """The five classes of Note [DispatchKey Classification], and Undefined, which has a table slot but no bit."""

    UNDEFINED = 0
    BACKEND = 1
    """Backend without per-backend functionalities (FPGA): a bit and a slot."""
    FUNCTIONALITY = 2
    """Functionality that no backend customises (Functionalize): a bit and a slot."""
    PER_BACKEND_FUNCTIONALITY = 3
    """Functionality with one slot per backend (Sparse): a bit, no slot of its own."""
    RUNTIME_INSTANCE = 4
    """One backend's instance of a class 3 key (SparseCPU): a slot, no bit of its own."""
    ALIAS = 5
    """Stands for several runtime keys when registering (CompositeImplicitAutograd): neither bit nor slot."""


@final
class BackendComponent:
    """One backend of the registry. Made by :meth:`BackendRegistry.register`, compared by identity.

    Attributes: ``name``; ``index``, its priority (the highest present in a set wins); ``bit``; ``functional``, true for
    engines that want functional operators only (as XLA and Lazy), which ``CompositeExplicitAutogradNonFunctional``
    kernels leave out; ``own_autograd``, false for the three built-in backends whose autograd key c10 maps to nothing.
    """

    __slots__ = ("bit", "functional", "index", "name", "own_autograd")

    def __init__(self, name: str, index: int, functional: bool, own_autograd: bool) -> None:
        self.name: Final = name
        self.index: Final = index
        self.bit: Final = 1 << (BACKEND_SHIFT + index)
        self.functional: Final = functional
        self.own_autograd: Final = own_autograd

    @property
    def builtin(self) -> bool:
        """Whether c10 has this backend too."""
        return self.index < len(_BUILTIN_BACKENDS)

    def __repr__(self) -> str:
        return f"BackendComponent({self.name!r})"


class _KeyMeta(type):
    """Makes ``DispatchKey.CPU`` mean ``DispatchKey("CPU")``; names of run-time backends work too."""

    def __getattr__(cls, name: str) -> DispatchKey:
        key = _keys.get(name)
        if key is None:
            raise AttributeError(f"no dispatch key named {name!r}")
        return key


@final
class DispatchKey(metaclass=_KeyMeta):
    """A dispatch key, one object per key: ``DispatchKey("SparseCPU")`` and ``DispatchKey.SparseCPU`` are the same.

    Keys of run-time backends are spelled with a colon: ``DispatchKey("Sparse:port.inductor")``; the dense one is the
    backend's name. Attributes: ``name``, ``key_class``, ``functionality`` (Undefined for aliases), ``backend`` (class 4
    only), ``bits`` (what the key adds to a set; 0 for Undefined and aliases). Unknown name: ``DispatchError``.
    """

    __slots__ = ("backend", "bits", "functionality", "key_class", "name")
    name: str
    key_class: KeyClass
    functionality: Functionality
    backend: BackendComponent | None
    bits: int

    def __new__(cls, name: str | DispatchKey) -> DispatchKey:
        if isinstance(name, DispatchKey):
            return name
        key = _keys.get(_SYNONYMS.get(name, name))
        if key is None and ":" in name:
            key = _keys.get("".join(name.split(":", 1)))
        if key is None:
            near = difflib.get_close_matches(name, _keys, n=2)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise DispatchError(f"no dispatch key is named {name!r}{hint}")
        return key

    @property
    def is_alias(self) -> bool:
        """Class 5: stands for several runtime keys."""
        return self.key_class is KeyClass.ALIAS

    @property
    def is_runtime(self) -> bool:
        """Whether the key owns a slot in the operator table (Undefined does)."""
        return self.key_class not in (KeyClass.ALIAS, KeyClass.PER_BACKEND_FUNCTIONALITY)

    def __repr__(self) -> str:
        return f"DispatchKey.{self.name}" if self.name.isidentifier() else f"DispatchKey({self.name!r})"

    def __str__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[type[DispatchKey], tuple[str]]:
        return (DispatchKey, (self.name,))


_keys: dict[str, DispatchKey] = {}
_instances: dict[tuple[Functionality, int], DispatchKey] = {}


def _add_key(name: str, key_class: KeyClass, functionality: Functionality, backend: BackendComponent | None) -> None:
    key = object.__new__(DispatchKey)
    key.name, key.key_class, key.functionality, key.backend = name, key_class, functionality, backend
    key.bits = 0
    if functionality:
        key.bits = 1 << (functionality - 1)
    if backend is not None:
        key.bits |= backend.bit
        _instances[functionality, backend.index] = key
    _keys[name] = key


def _add_fixed_keys() -> None:
    for functionality in Functionality:
        if functionality is Functionality.Undefined:
            key_class = KeyClass.UNDEFINED
        elif functionality in PER_BACKEND:
            key_class = KeyClass.PER_BACKEND_FUNCTIONALITY
        elif functionality in _LONE_BACKENDS:
            key_class = KeyClass.BACKEND
        else:
            key_class = KeyClass.FUNCTIONALITY
        _add_key(functionality.name, key_class, functionality, None)
    for alias in _ALIASES:
        _add_key(alias, KeyClass.ALIAS, Functionality.Undefined, None)


@final
class BackendRegistry:
    """All backends of this process: c10's in c10's order, then those registered at run time, each above the last.

    A bit is never given out twice, so a set made before :meth:`unregister` cannot come to mean another backend.
    """

    def __init__(self) -> None:
        self._lock = guarded_lock()
        self._by_name: dict[str, BackendComponent] = {}
        self._slots: list[BackendComponent | None] = []
        self.version = 0
        """Grows with every change; whoever remembers something about all backends compares it."""
        self.mask = 0
        """Bits of all backends."""
        self.functional_mask = 0
        """Bits of the backends that take functional operators only."""

    def register(self, name: str, *, functional: bool = False) -> BackendComponent:
        """Add a backend and its six keys. Errors: malformed name, or a name that a backend or key already has."""
        if not re.fullmatch(r"[A-Za-z_][\w.\-]*", name):
            raise DispatchError(f"backend name {name!r}: use letters, digits, '_', '.' and '-', a letter first")
        return self._add(name, functional, own_autograd=True, separator=":")

    def _add(self, name: str, functional: bool, own_autograd: bool, separator: str) -> BackendComponent:
        with self._lock:
            if name in _keys or name in _SYNONYMS:
                raise DispatchError(f"{name!r} is already a backend or dispatch key; choose another name")
            component = BackendComponent(name, len(self._slots), functional, own_autograd)
            for functionality, prefix in _PREFIX.items():
                full = f"{prefix}{separator}{name}" if prefix else name
                _add_key(full, KeyClass.RUNTIME_INSTANCE, functionality, component)
            self._slots.append(component)
            self._by_name[name] = component
            self._refresh()
            return component

    def unregister(self, component: BackendComponent) -> None:
        """Forget a run-time backend and its keys. Errors: a built-in one, or one that is not registered."""
        with self._lock:
            if component.builtin:
                raise DispatchError(f"{component.name} is one of c10's backends and cannot be unregistered")
            if self._by_name.get(component.name) is not component:
                raise DispatchError(f"backend {component.name!r} is not registered")
            del self._by_name[component.name]
            self._slots[component.index] = None
            for functionality in _PREFIX:
                del _keys[_instances.pop((functionality, component.index)).name]
            self._refresh()

    def _refresh(self) -> None:
        live = tuple(self._by_name.values())
        self.mask = sum(component.bit for component in live)
        self.functional_mask = sum(component.bit for component in live if component.functional)
        self.version += 1

    def get(self, name: str) -> BackendComponent:
        """The backend of that name; ``DispatchError`` when there is none."""
        component = self._by_name.get(name)
        if component is None:
            near = difflib.get_close_matches(name, self._by_name, n=2)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise DispatchError(f"no backend is named {name!r}{hint}")
        return component

    def get_optional(self, name: str) -> BackendComponent | None:
        """The backend of that name, or None."""
        return self._by_name.get(name)

    def at(self, index: int) -> BackendComponent | None:
        """The backend with that bit, or None when it was never given out or is no longer registered."""
        return self._slots[index] if 0 <= index < len(self._slots) else None

    def __iter__(self) -> Iterator[BackendComponent]:
        return iter(tuple(self._by_name.values()))

    def __len__(self) -> int:
        return len(self._by_name)

    def __contains__(self, item: object) -> bool:
        name = item.name if isinstance(item, BackendComponent) else item
        return name in self._by_name


def runtime_key(functionality: Functionality, backend: BackendComponent | None) -> DispatchKey:
    """The key that owns the table slot: class 4 for a per-backend functionality, else the functionality's own.

    Without a backend a per-backend functionality gives its class 3 key.
    """
    if backend is not None and functionality in PER_BACKEND:
        return _instances[functionality, backend.index]
    return _keys[functionality.name]


_runtime_cache: tuple[int, tuple[DispatchKey, ...]] = (-1, ())


def runtime_keys() -> tuple[DispatchKey, ...]:
    """Every key with a table slot, in c10's order: Undefined, then functionalities, backends ascending in each."""
    global _runtime_cache
    version, keys = _runtime_cache
    if version != backends.version:
        version = backends.version
        live = tuple(backends)
        found: list[DispatchKey] = []
        for functionality in Functionality:
            if functionality in PER_BACKEND:
                found.extend(_instances[functionality, component.index] for component in live)
            else:
                found.append(_keys[functionality.name])
        keys = tuple(found)
        _runtime_cache = (version, keys)
    return keys


def _builtin_registry() -> BackendRegistry:
    registry = BackendRegistry()
    for name in _BUILTIN_BACKENDS:
        registry._add(  # pyright: ignore[reportPrivateUsage]
            name,
            functional=name in ("XLA", "Lazy"),
            # c10's getBackendKeySetFromAutograd has no entry for these three (checked on 2.13).
            own_autograd=name not in ("HIP", "VE", "MTIA"),
            separator="",
        )
    return registry


_add_fixed_keys()
backends: Final[BackendRegistry] = _builtin_registry()
"""The process's registry."""
