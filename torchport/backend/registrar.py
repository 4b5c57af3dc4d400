"""A backend's own kernels: registered with the dispatcher at the backend's component, and looked up there.

Every backend that is bound to a device index is a backend component ``port.NAME`` of the process's dispatcher, so two
backends in one process can have different kernels for the same operator. Registering or removing one makes the traces
of that backend's devices start from empty tries: their remembered decisions no longer hold.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Final

import torch

from .. import dispatch
from ..core.errors import DispatchError
from ..dispatch import BackendComponent, DispatchKey, DispatchKeySet, Functionality, Registration, runtime_key
from .interface import Backend

__all__ = ["BackendRegistrar", "Handle", "on_registered", "registrar_of"]

on_registered: Final[list[Callable[[BackendRegistrar, torch._ops.OpOverload, Functionality], None]]] = []
"""Called after a backend registered a kernel; the device routes the operator's other dispatch keys here."""


class Handle:
    """A registered kernel; :meth:`remove` brings back what was before."""

    def __init__(self, registrar: BackendRegistrar, registration: Registration) -> None:
        self._registrar = registrar
        self._registration = registration

    def remove(self) -> None:
        """Take the kernel away. Raises :class:`DispatchError` the second time."""
        self._registration.remove()
        self._registrar.changed()


class BackendRegistrar:
    """What ``Backend.register_kernels`` is given: the dispatcher, seen from one backend's component."""

    def __init__(self, backend: Backend) -> None:
        name = f"port.{backend.name}"
        self.component: BackendComponent = dispatch.backends.get_optional(name) or dispatch.backends.register(name)
        self._kernels = dispatch.default.for_backend(self.component)
        self.functionalities: set[Functionality] = set()
        """Those that the backend has registered a kernel for."""
        self._fallbacks: list[Registration] = []
        self._found: tuple[int, dict[tuple[Any, Functionality], Any]] = (-1, {})
        self._listeners: weakref.WeakSet[Any] = weakref.WeakSet()

    def impl(self, op: str | torch._ops.OpOverload, key: str, fn: Callable[..., Any]) -> Handle:
        """Register a kernel for this backend alone.

        ``op``: ``"aten::add.Tensor"``, ``"add.Tensor"`` or an ``OpOverload``. ``key``: ``"Dense"`` (tensors arrive and
        leave as :class:`BackendData`), ``"Autograd"``, ``"Sparse"``, ``"SparseCsr"``, ``"Quantized"`` or
        ``"NestedTensor"`` (tensors arrive and leave as the user's). Raises :class:`DispatchError`.
        """
        overload = resolve_operator(op)
        name = overload.name()
        if dispatch.default.operator_optional(name) is None:
            dispatch.default.define(str(overload._schema))
        functionality = Functionality.__members__.get("AutogradFunctionality" if key == "Autograd" else key)
        registration = self._kernels.impl(name, key, fn, label=f"backend {self.component.name}")
        self.changed()
        if functionality is not None:
            self.functionalities.add(functionality)
            for notify in on_registered:
                notify(self, overload, functionality)
        return Handle(self, registration)

    def fallback(self, key: str, fn: Callable[..., Any]) -> Handle:
        """Register a boxed kernel, ``fn(op, args, kwargs)``, for what cannot be captured. ``key``: ``"Dense"``."""
        if key != "Dense":
            raise DispatchError(f"a backend's boxed kernel goes to the key 'Dense', not {key!r}")
        registration = dispatch.default.fallback(self._key(Functionality.Dense), fn)
        self._fallbacks.append(registration)
        self.changed()
        return Handle(self, registration)

    def _key(self, functionality: Functionality) -> DispatchKey:
        return runtime_key(functionality, self.component)

    def kernel(self, op: torch._ops.OpOverload, functionality: Functionality = Functionality.Dense) -> Any:
        """The kernel the dispatcher's table gives for the operator at this backend's key, or ``None``. Remembered."""
        version, found = self._found
        if version != dispatch.default.version:
            version, found = self._found = dispatch.default.version, {}
        try:
            return found[op, functionality]
        except KeyError:
            found[op, functionality] = kernel = self._look_up(op, functionality)
            return kernel

    def _look_up(self, op: torch._ops.OpOverload, functionality: Functionality) -> Any:
        found = dispatch.default.operator_optional(op.name())
        if found is None:
            return None
        decision = dispatch.default.lookup(found, DispatchKeySet(self._key(functionality)), verbatim=True)
        return decision.kernel if decision.found and not decision.is_fallback else None

    @property
    def boxed(self) -> Callable[..., Any] | None:
        """The boxed fallback kernel, if there is one."""
        return next((r.kernel for r in self._fallbacks if r.active), None)

    def listen(self, runtime: Any) -> None:
        """Tell a device about changes, by calling its ``forget_decisions``, for as long as it lives."""
        self._listeners.add(runtime)

    def changed(self) -> None:
        """What devices remember of this backend's kernels no longer holds."""
        for runtime in self._listeners:
            runtime.forget_decisions()

    def remove_all(self) -> None:
        """Take away every kernel of the backend."""
        self._kernels.remove_all()
        for registration in self._fallbacks:
            if registration.active:
                registration.remove()
        self.changed()


def resolve_operator(op: str | torch._ops.OpOverload) -> torch._ops.OpOverload:
    """The overload a name means. Raises :class:`DispatchError` for a name PyTorch does not have."""
    if isinstance(op, torch._ops.OpOverload):
        return op
    namespace, _, rest = op.rpartition("::") if "::" in op else ("aten", "", op.removeprefix("aten."))
    base, _, overload = rest.partition(".")
    found = getattr(getattr(getattr(torch.ops, namespace), base, None), overload or "default", None)
    if not isinstance(found, torch._ops.OpOverload):
        raise DispatchError(
            f"PyTorch has no operator {op!r}; write it as 'aten::add.Tensor' or torch.ops.aten.add.Tensor"
        )
    return found


_registrars: Final[weakref.WeakKeyDictionary[Backend, BackendRegistrar]] = weakref.WeakKeyDictionary()
_owner_of: Final[weakref.WeakValueDictionary[str, Backend]] = weakref.WeakValueDictionary()


def registrar_of(backend: Backend) -> BackendRegistrar:
    """The backend's registrar, filled by its ``register_kernels`` the first time.

    A backend that takes the name of an earlier one takes its component too, without the earlier one's kernels.
    """
    registrar = _registrars.get(backend)
    if registrar is None:
        former = _owner_of.get(backend.name)
        if former is not None and former in _registrars:
            _registrars[former].remove_all()
        registrar = _registrars[backend] = BackendRegistrar(backend)
        _owner_of[backend.name] = backend
        backend.register_kernels(registrar)
    return registrar
