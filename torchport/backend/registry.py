"""The registry: which backends exist, made on first use, and which ``port`` device index stands for which.

The registry is an object; tests make fresh ones. The process-wide one is :data:`registry`, and ``register``,
``get_backend`` and ``list_backends`` are its methods. Backends arrive by entry point (group ``torchport.backends``,
ours included) or by an explicit :meth:`Registry.register`; nothing registers by being imported.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.metadata
import os
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from ..core.errors import BackendNotFound, BackendUnavailable, TorchportError
from ..core.forks import guarded_rlock
from .answers import checked_devices
from .declared import follow_declaration
from .forked import end_openmp_team, refuse_lost
from .interface import Backend, BackendDevice
from .optional import optional_of

__all__ = ["BackendInfo", "Registry", "make_by_recipe", "note_used", "recipe_of", "registry", "resolve_device"]

ENTRY_POINT_GROUP: Final = "torchport.backends"

BackendFactory: TypeAlias = Callable[[], Backend]
"""A ``Backend`` subclass, or anything else that returns a backend when called without arguments."""


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """One row of ``list_backends()``: ``reason`` says why it is unavailable, or is empty."""

    name: str
    available: bool
    reason: str
    source: str


class _Entry:
    """A registered name: how to make the backend, and the backend once it is made."""

    def __init__(self, name: str, factory: Callable[[], object], source: str) -> None:
        self.name = name
        self.factory = factory
        self.source = source
        self.backend: Backend | None = None
        self.lock = guarded_rlock()

    def load(self) -> Backend:
        with self.lock:
            if self.backend is None:
                self.backend = self._make()
            return self.backend

    def _make(self) -> Backend:
        try:
            made = self.factory()
            if isinstance(made, type):
                made = made()
        except BackendUnavailable:
            raise
        except Exception as error:
            raise BackendUnavailable(
                f"backend {self.name!r} ({self.source}) failed to load: {type(error).__name__}: {error}"
            ) from error
        if not isinstance(made, Backend):
            raise BackendUnavailable(
                f"backend {self.name!r} ({self.source}) gave a {type(made).__name__}; "
                "register a torchport.Backend subclass or a function that returns an instance of one"
            )
        try:
            note_used(made)
        except TorchportError as error:
            raise BackendUnavailable(f"backend {self.name!r} ({self.source}) cannot be used: {error}") from error
        return made


def _raising(message: str) -> Callable[[], object]:
    def factory() -> object:
        raise BackendUnavailable(message)

    return factory


class Registry:
    """Names → backends. Duplicates raise; a backend's module is imported when the backend is first asked for."""

    def __init__(self, entry_point_group: str | None = None) -> None:
        self._entries: dict[str, _Entry] = {}
        self._group = entry_point_group
        self._lock = guarded_rlock()

    def _all(self) -> dict[str, _Entry]:
        with self._lock:
            if self._group is not None:
                group, self._group = self._group, None
                for point in importlib.metadata.entry_points(group=group):
                    self._add(point)
            return self._entries

    def _add(self, point: importlib.metadata.EntryPoint) -> None:
        source = f"entry point {point.value}"
        known = self._entries.get(point.name)
        if known is None:
            self._entries[point.name] = _Entry(point.name, point.load, source)
        elif known.source != source:
            # One distribution may be listed twice, but two that bring the same name must not win by chance.
            message = f"two packages bring a backend {point.name!r}: {known.source} and {source}; uninstall one"
            self._entries[point.name] = _Entry(point.name, _raising(message), f"{known.source}, {source}")

    def register(self, backend: type[Backend] | BackendFactory | Backend, name: str | None = None) -> str:
        """Register a backend class, instance or factory; returns its name.

        ``name`` defaults to the backend's ``name`` attribute. Raises :class:`TorchportError` if the name is taken or
        missing. Usable as a class decorator through :func:`torchport.register`.
        """
        name = name or getattr(backend, "name", None)
        if not isinstance(name, str) or not name.isidentifier() or len(name) > 64:
            raise TorchportError(
                f"a backend needs a name that is an identifier of at most 64 characters, got {name!r}: set `name` on "
                "the class"
            )
        instance = backend if isinstance(backend, Backend) else None
        module = getattr(backend, "__module__", type(backend).__module__)
        with self._lock:
            if name in self._all():
                raise TorchportError(
                    f"backend {name!r} is registered already ({self._entries[name].source}); "
                    f"unregister({name!r}) it first or choose another name"
                )
            factory = (lambda: instance) if instance is not None else backend
            self._entries[name] = _Entry(name, factory, f"registered by {module}")  # type: ignore[arg-type]
        return name

    def unregister(self, name: str) -> None:
        """Forget a backend. Tensors that live on it keep working. Raises :class:`BackendNotFound`."""
        with self._lock:
            if self._all().pop(name, None) is None:
                raise BackendNotFound(self._unknown(name))

    def names(self) -> list[str]:
        """Every registered name, sorted; imports nothing."""
        return sorted(self._all())

    def get_optional(self, name: str) -> Backend | None:
        """The backend if it is registered and available, else ``None``."""
        try:
            return self.get(name)
        except (BackendNotFound, BackendUnavailable):
            return None

    def _entry(self, name: str) -> _Entry:
        entry = self._all().get(name)
        if entry is None:
            raise BackendNotFound(self._unknown(name))
        return entry

    def find(self, name: str) -> Backend:
        """The backend of that name, whether or not it can run here: compiling ahead of time may not need that.

        Raises :class:`BackendNotFound`, or :class:`BackendUnavailable` if its module cannot be loaded.
        """
        return self._entry(name).load()

    def get(self, name: str) -> Backend:
        """The backend of that name. Raises :class:`BackendNotFound` or :class:`BackendUnavailable`."""
        entry = self._entry(name)
        backend = entry.load()
        try:
            available = backend.is_available()
        except Exception as error:
            raise BackendUnavailable(
                f"backend {name!r} ({entry.source}) failed to say whether it is available: "
                f"{type(error).__name__}: {error}"
            ) from error
        if not available:
            reason = backend.unavailable_reason() or "its is_available() returned False"
            raise BackendUnavailable(f"backend {name!r} is installed but cannot run here: {reason}")
        return backend

    def recipe(self, backend: Backend) -> str | None:
        """How another process makes this backend, for :func:`make_by_recipe`; ``None`` where it cannot.

        It can where the backend came by entry point, or was registered as a class or function that can be imported.
        """
        with self._lock:
            entry = next((entry for entry in self._all().values() if entry.backend is backend), None)
        if entry is None:
            return None
        if entry.source.startswith("entry point "):
            return entry.name
        module, name = getattr(entry.factory, "__module__", ""), getattr(entry.factory, "__qualname__", "")
        found: object = sys.modules.get(module) if module != "__main__" else None
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is not entry.factory or getattr(sys.modules[module], "__spec__", None) is None:
            return None  # another process could not import it by that name
        return f"{module}:{name}"

    def list(self) -> list[BackendInfo]:
        """One row per registered backend, sorted by name; loads each to ask whether it is available."""
        rows: list[BackendInfo] = []
        for name, source in [(name, entry.source) for name, entry in sorted(self._all().items())]:
            try:
                self.get(name)
            except (BackendNotFound, BackendUnavailable) as error:
                rows.append(BackendInfo(name, False, str(error), source))
            else:
                rows.append(BackendInfo(name, True, "", source))
        return rows

    def _unknown(self, name: str) -> str:
        known = ", ".join(self.names()) or "none"
        return (
            f"no backend is called {name!r}; registered are: {known}. Install the package that brings it, "
            "or call torchport.register(YourBackend)"
        )


registry: Final = Registry(ENTRY_POINT_GROUP)

_recipes: Final[weakref.WeakKeyDictionary[Backend, str]] = weakref.WeakKeyDictionary()
"""Of backends that were made by one, which are in no registry."""


def recipe_of(backend: Backend) -> str | None:
    """How another process makes a backend, whether it was registered here or made by a recipe itself."""
    return registry.recipe(backend) or _recipes.get(backend)


def make_by_recipe(recipe: str) -> Backend:
    """The backend that :meth:`Registry.recipe` described. Raises :class:`BackendUnavailable`."""
    module, _, name = recipe.rpartition(":")
    if not module:
        return registry.get(name)
    factory: Any = importlib.import_module(module)
    for part in name.split("."):
        factory = getattr(factory, part)
    made = _Entry(name, factory, f"{module}:{name}").load()
    _recipes[made] = recipe
    if not made.is_available():
        raise BackendUnavailable(f"backend {made.name!r} cannot run here: {made.unavailable_reason()}")
    return made


def resolve_device(backend: Backend, ordinal: int) -> BackendDevice:
    """The backend's device of that ordinal. Raises :class:`BackendUnavailable` listing what there is."""
    devices = checked_devices(backend)
    for device in devices:
        if device.ordinal == ordinal:
            return device
    shown = ", ".join(str(device) for device in devices) or "none"
    raise BackendUnavailable(f"backend {backend.name!r} has no device {ordinal}; it has: {shown}")


_used: Final[weakref.WeakSet[Backend]] = weakref.WeakSet()


def note_used(backend: Backend) -> None:
    """Have :meth:`Backend.shutdown` called when the process ends, whichever frontend the backend was used through.

    A process that is forked later finds out whether its engine can work there (:class:`.SupportsFork`). Raises
    :class:`TorchportError` for a backend that is written for a former contract.
    """
    optional_of(backend)
    follow_declaration(backend, ask=False)
    _used.add(backend)


@atexit.register
def _shut_down() -> None:
    """Tell every backend that the process ends: after the lazy device's last work, whose module imports this one."""
    for backend in list(_used):
        try:
            backend.shutdown()
        except Exception as error:
            print(f"torchport: {backend.name}.shutdown() raised {type(error).__name__}: {error}", file=sys.stderr)


os.register_at_fork(before=end_openmp_team, after_in_child=lambda: refuse_lost(list(_used)))
