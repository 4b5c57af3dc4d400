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
from torch.utils._pytree import tree_map

from .. import dispatch
from ..core.errors import DispatchError
from ..dispatch import BackendComponent, DispatchKey, DispatchKeySet, Functionality, Registration, runtime_key
from .interface import Backend, BackendData, BackendDevice
from .own_kernels import OwnKernel, kernels_of, on_added, resolve_operator

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
        ``"NestedTensor"`` (tensors arrive and leave as the user's). Raises :class:`DispatchError`, also for an operator
        that never arrives at the key ``"Dense"``: one that PyTorch takes apart before, that writes, or is a view.
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
            try:
                for notify in on_registered:
                    notify(self, overload, functionality)
            except BaseException:
                registration.remove()
                raise
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


_registrars: Final[weakref.WeakKeyDictionary[Backend, BackendRegistrar]] = weakref.WeakKeyDictionary()
_of_name: Final[dict[str, BackendRegistrar]] = {}
"""The registrar of each name's newest backend, which may be gone: its kernels stay registered until another comes."""


def registrar_of(backend: Backend) -> BackendRegistrar:
    """The backend's registrar, filled by its ``register_kernels`` the first time.

    A backend that takes the name of an earlier one takes its component too, without the earlier one's kernels.
    """
    registrar = _registrars.get(backend)
    if registrar is None:
        former = _of_name.get(backend.name)
        if former is not None:
            former.remove_all()
        registrar = _registrars[backend] = _of_name[backend.name] = BackendRegistrar(backend)
        backend.register_kernels(registrar)
        for own in list(kernels_of(backend.name).values()):
            _take(backend, registrar, own)
    return registrar


def _take(backend: Backend, registrar: BackendRegistrar, own: OwnKernel) -> None:
    """Have a kernel of the program's run at once where the backend's graphs do not hold it."""
    if not backend.capabilities.holds_kernels:
        registrar.impl(own.op, "Dense", _on_host(backend, own))


def _on_host(backend: Backend, own: OwnKernel) -> Callable[..., Any]:
    """A Dense kernel that calls a function of CPU tensors."""

    def run(*args: Any, **kwargs: Any) -> Any:
        values = [value for value in (*args, *kwargs.values()) if isinstance(value, BackendData)]
        device = values[0].device if values else BackendDevice("cpu")

        def host(value: Any) -> Any:
            return backend.from_device(value) if isinstance(value, BackendData) else value

        def data(value: Any) -> Any:
            return backend.to_device(value, device) if isinstance(value, torch.Tensor) else value

        given = tree_map(host, (list(args), dict(kwargs)), is_leaf=lambda value: isinstance(value, BackendData))
        with torch.no_grad():
            return tree_map(data, own.fn(*given[0], **given[1]))

    return run


def _added(name: str, own: OwnKernel) -> None:
    """A kernel was given for a backend: its devices' traces begin anew."""
    for backend, registrar in list(_registrars.items()):
        if backend.name == name:
            _take(backend, registrar, own)
            registrar.changed()


on_added.append(_added)
