"""The dispatcher: operators by name, their kernels, the fallbacks they share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, final

from torchport.core.errors import DispatchError

from ..core.forks import guarded_rlock
from . import messages
from .extract import KeyGetters
from .keys import (
    PER_BACKEND,
    BackendComponent,
    DispatchKey,
    Functionality,
    KeyClass,
    backends,
    runtime_key,
)
from .keyset import DEFAULT_EXCLUDED, DispatchKeySet
from .operator import Decision, Operator
from .rules import IMPLICIT, UNDEFINED, Registration, Row, expands_to, fallthrough
from .schema import Schema, check_arity, operator_name, parse_schema
from .tls import thread_keys

__all__ = ["BackendKernels", "Dispatcher"]

Key = DispatchKey | str


@final
class Dispatcher:
    """Operators, kernels and fallbacks. Independent of every other dispatcher; made afresh by tests.

    ``standard_fallbacks`` registers the fallthroughs PyTorch starts with, for keys that by default have nothing to do:
    BackendSelect, ADInplaceOrView, the vmap modes, every autograd and autocast key.
    Reading is safe from any thread; changes take a lock.
    """

    def __init__(self, *, standard_fallbacks: bool = True) -> None:
        self._lock = guarded_rlock()
        self._operators: dict[str, Operator] = {}
        self._fallbacks: dict[DispatchKey, Registration] = {}
        self._by_runtime_key: tuple[int, dict[DispatchKey, Registration]] = (-1, {})
        self._getters = KeyGetters()
        self.version = 0
        """Grows with every change that can change a decision; whoever remembers decisions elsewhere compares it."""
        if standard_fallbacks:
            keys = ["BackendSelect", "ADInplaceOrView", "FuncTorchVmapMode", "VmapMode", "Autograd"]
            for key in (*keys, *DEFAULT_EXCLUDED):
                self._add_fallback(DispatchKey(key), fallthrough, with_keyset=False, source="torchport default")

    # -- operators -------------------------------------------------------------------------------------------------

    def define(self, schema: str) -> Operator:
        """Define an operator from its schema, or from its bare name (``namespace::name``), and give its handle.

        Kernels may have been registered before. Errors (nothing changes): malformed schema, defined twice, a registered
        kernel that does not take the schema's arguments.
        """
        parsed = parse_schema(schema) if "(" in schema else None
        name = operator_name(parsed.name if parsed else schema.strip())
        with self._lock:
            existing = self._operators.get(name)
            if existing is not None and (existing.schema is not None or (existing.defined and parsed is None)):
                raise DispatchError(
                    f"{name} is defined already ({existing.schema or 'without a schema'}); undefine() it first"
                )
            if existing is not None and parsed is not None:
                for registration in existing.table.registrations():
                    self._check(parsed, registration.kernel, registration.with_keyset, str(registration))
            op = existing or self._new_operator(name)
            if parsed is not None:
                op.set_schema(parsed)
                self.version += 1
            op.defined = True
            return op

    def undefine(self, op: str | Operator) -> None:
        """Forget an operator's schema; its kernels stay until they are removed, the operator goes with the last."""
        with self._lock:
            found = self.operator(op)
            found.set_schema(None)
            found.defined = False
            self.version += 1
            if not found.table.direct:
                del self._operators[found.name]

    def _new_operator(self, name: str) -> Operator:
        op = self._operators[name] = Operator(name, self._getters, self._fallback_at)
        return op

    def operator(self, op: str | Operator) -> Operator:
        """The operator's handle; ``DispatchError`` when there is none."""
        if isinstance(op, Operator):
            return op
        found = self._operators.get(op) or self._operators.get(op.removesuffix(".default"))
        if found is None:
            raise DispatchError(messages.unknown_operator(op, self._operators))
        return found

    def operator_optional(self, op: str) -> Operator | None:
        """The operator's handle, or None."""
        return self._operators.get(op) or self._operators.get(op.removesuffix(".default"))

    def __iter__(self) -> Iterator[Operator]:
        return iter(tuple(self._operators.values()))

    def __contains__(self, op: object) -> bool:
        return isinstance(op, str) and self.operator_optional(op) is not None

    # -- kernels ---------------------------------------------------------------------------------------------------

    def impl(
        self,
        op: str | Operator,
        key: Key | None,
        kernel: Callable[..., Any],
        *,
        with_keyset: bool = False,
        label: str = "",
    ) -> Registration:
        """Register a kernel for one operator at a runtime or alias key; ``remove()`` on the result takes it away.

        The newest kernel at a key is in force and hides older ones. ``key`` None, "Undefined" or "CatchAll" is the
        catch-all, which is CompositeImplicitAutograd. ``kernel`` may be ``fallthrough``. ``with_keyset`` passes the
        call's key set, without fallthroughs, first; redispatch with ``keyset & DispatchKeySet.full_after(key)``.
        An unknown operator is made, without a schema. Errors (nothing changes): unknown key; a per-backend
        functionality without its backend ("Sparse"); a kernel that does not take the schema's arguments.
        """
        at = self._kernel_key(key)
        with self._lock:
            name = op.name if isinstance(op, Operator) else operator_name(op)
            known = self.operator_optional(name)
            self._check(known.schema if known else None, kernel, with_keyset, f"{name} at {at}")
            registration = Registration(
                at, kernel, op=name, with_keyset=with_keyset, label=label, remove=self._remove_kernel
            )
            target = known or self._new_operator(name)
            target.table.direct.setdefault(at, []).insert(0, registration)
            target.forget()
            self.version += 1
            return registration

    def _remove_kernel(self, registration: Registration) -> None:
        with self._lock:
            op = self._operators[registration.op or ""]
            found = op.table.direct[registration.key]
            found.remove(registration)
            if not found:
                del op.table.direct[registration.key]
            op.forget()
            self.version += 1
            if not op.defined and not op.table.direct:
                del self._operators[op.name]

    @staticmethod
    def _kernel_key(key: Key | None) -> DispatchKey:
        at = DispatchKey(key) if key is not None else UNDEFINED
        if at is UNDEFINED:
            return IMPLICIT
        if at.key_class is KeyClass.PER_BACKEND_FUNCTIONALITY:
            example = runtime_key(at.functionality, backends.get("CPU"))
            raise DispatchError(
                f"{at} has one key per backend and no slot of its own; register at one of them, for example {example}, "
                f"or through for_backend(component).impl(op, {at.name!r}, kernel)"
            )
        return at

    @staticmethod
    def _check(schema: Schema | None, kernel: Callable[..., Any], with_keyset: bool, what: str) -> None:
        if not callable(kernel):
            raise DispatchError(f"{what}: the kernel is {kernel!r}, which is not callable")
        if schema is not None and kernel is not fallthrough:
            check_arity(schema, kernel, int(with_keyset), what)

    def fallback(
        self, key: Key, kernel: Callable[..., Any], *, with_keyset: bool = False, label: str = ""
    ) -> Registration:
        """Register what runs at a key for every operator that has nothing there: ``kernel(op, *args, **kwargs)``.

        ``with_keyset``: ``kernel(keyset, op, *args, **kwargs)``. An alias key means all its runtime keys, backends that
        register later included. Errors (nothing changes): a key that has a fallback already, the catch-all, a
        per-backend functionality without its backend.
        """
        at = DispatchKey(key)
        if at is UNDEFINED:
            raise DispatchError("a fallback needs a key; to serve calls without tensors use 'BackendSelect'")
        self._kernel_key(at)
        if not callable(kernel):
            raise DispatchError(f"fallback at {at}: the kernel is {kernel!r}, which is not callable")
        return self._add_fallback(at, kernel, with_keyset, label)

    def _add_fallback(
        self, at: DispatchKey, kernel: Callable[..., Any], with_keyset: bool, label: str = "", source: str | None = None
    ) -> Registration:
        with self._lock:
            for other in expands_to(at):
                present = self._fallback_at(other)
                if present is not None:
                    raise DispatchError(f"{other} has a fallback already ({present.source}); remove() that one first")
            registration = Registration(
                at, kernel, with_keyset=with_keyset, label=label, source=source, remove=self._remove_fallback
            )
            self._fallbacks[at] = registration
            self._fallbacks_changed()
            return registration

    def _remove_fallback(self, registration: Registration) -> None:
        with self._lock:
            del self._fallbacks[registration.key]
            self._fallbacks_changed()

    def _fallbacks_changed(self) -> None:
        self._by_runtime_key = (-1, {})
        self.version += 1
        for op in self._operators.values():
            op.forget()

    def _fallback_at(self, key: DispatchKey) -> Registration | None:
        version, expanded = self._by_runtime_key
        if version != backends.version:
            with self._lock:
                version = backends.version
                expanded = {at: made for alias, made in self._fallbacks.items() for at in expands_to(alias)}
                self._by_runtime_key = (version, expanded)
        return expanded.get(key)

    def fallbacks(self) -> dict[DispatchKey, Registration]:
        """The fallbacks, as registered (alias keys not expanded)."""
        return dict(self._fallbacks)

    def for_backend(self, component: BackendComponent | str) -> BackendKernels:
        """What a backend gets to register its own kernels: it reaches that backend's keys and no others."""
        return BackendKernels(self, backends.get(component) if isinstance(component, str) else component)

    def add_extractor(self, cls: type, extractor: Callable[[Any], DispatchKeySet | int]) -> None:
        """Say which keys objects of a type carry. Without it: ``dispatch_keys``, or for tensors PyTorch's own."""
        with self._lock:
            self._getters.add(cls, extractor)
            self.version += 1

    # -- calling and looking ---------------------------------------------------------------------------------------

    def call(self, op: str | Operator, /, *args: Any, **kwargs: Any) -> Any:
        """Dispatch and run. Errors: ``MissingKernel``, ``AmbiguousKernel``, arguments that do not fit the schema."""
        found = op if isinstance(op, Operator) else self._operators.get(op) or self.operator(op)
        return found(*args, **kwargs)

    def redispatch(self, op: str | Operator, keyset: DispatchKeySet, /, *args: Any, **kwargs: Any) -> Any:
        """Run the kernel of exactly this set: neither this thread's keys nor fallthrough masks apply."""
        return self.operator(op).redispatch(keyset, *args, **kwargs)

    def lookup(self, op: str | Operator, keyset: DispatchKeySet | int, *, verbatim: bool = False) -> Decision:
        """What a call with arguments of this key set (or its bits) would do, and by which rule; nothing runs.

        A missing kernel is no error here: see ``Decision.found``. ``verbatim`` as in redispatch. Remembered per set.
        """
        found = op if isinstance(op, Operator) else self._operators.get(op) or self.operator(op)
        bits = keyset if isinstance(keyset, int) else keyset.bits
        return found.decide(bits, None if verbatim else thread_keys.current)

    def computed_table(self, op: str | Operator) -> dict[DispatchKey, Row]:
        """For each runtime key, in c10's order: the kernel and the rule that chose it."""
        return self.operator(op).rows()

    def dump_table(self, op: str | Operator) -> str:
        """The computed table as text, in c10's format."""
        return self.operator(op).dump_table()


@final
class BackendKernels:
    """A backend's view of the dispatcher: kernels of its own component only, named by functionality."""

    def __init__(self, dispatcher: Dispatcher, component: BackendComponent) -> None:
        self._dispatcher: Final = dispatcher
        self.component: Final = component
        self.registered: Final[list[Registration]] = []
        """Everything registered through this view and still in force, oldest first."""

    def impl(
        self,
        op: str | Operator,
        functionality: Functionality | str,
        kernel: Callable[..., Any],
        *,
        with_keyset: bool = False,
        label: str = "",
    ) -> Registration:
        """Register at (functionality × this backend). ``functionality``: Dense, Quantized, Sparse, SparseCsr,
        NestedTensor, or Autograd (also AutogradFunctionality). Any other key: ``DispatchError``, since it would serve
        other backends too.
        """
        name = functionality.name if isinstance(functionality, Functionality) else functionality
        name = "AutogradFunctionality" if name == "Autograd" else name
        wanted = Functionality.__members__.get(name)
        if wanted is None or wanted not in PER_BACKEND:
            choices = ", ".join(sorted(f.name for f in PER_BACKEND))
            raise DispatchError(
                f"{self.component.name} registers for itself alone, which needs a runtime key of its own: "
                f"{functionality!r} is none; use one of {choices}"
            )
        key = runtime_key(wanted, self.component)
        registration = self._dispatcher.impl(op, key, kernel, with_keyset=with_keyset, label=label)
        self.registered.append(registration)
        return registration

    def remove_all(self) -> None:
        """Take away everything registered through this view."""
        while self.registered:
            registration = self.registered.pop()
            if registration.active:
                registration.remove()
