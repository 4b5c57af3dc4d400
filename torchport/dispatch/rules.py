"""How a table row is chosen: one ordered list of rules, :data:`RULES`.

A row is a pure function of what is registered: the order of registrations never matters, except that the newest kernel
at a key hides older ones there. Source: ``OperatorEntry::computeDispatchTableEntryWithDebug`` in torch 2.13, whose
provenance strings are kept. (C++ refreshes only some rows of its live table per change, so that table can lag behind
its own computation after some orders; here there is no second table that could.)
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

from torchport.core.errors import DispatchError

from .keys import DispatchKey, runtime_keys
from .keyset import alias_keys, backend_from_autograd, in_alias

__all__ = [
    "AMBIGUOUS",
    "RULES",
    "KernelTable",
    "Registration",
    "Row",
    "Rule",
    "Verdict",
    "choose",
    "examine",
    "fallthrough",
]

UNDEFINED: Final = DispatchKey("Undefined")
AUTOGRAD: Final = DispatchKey("Autograd")
AUTOGRAD_OTHER: Final = DispatchKey("AutogradOther")
EXPLICIT: Final = DispatchKey("CompositeExplicitAutograd")
NON_FUNCTIONAL: Final = DispatchKey("CompositeExplicitAutogradNonFunctional")
IMPLICIT: Final = DispatchKey("CompositeImplicitAutograd")
NESTED: Final = DispatchKey("CompositeImplicitAutogradNestedTensor")
BATCHED: Final = DispatchKey("FuncTorchBatchedDecomposition")


@final
class FallthroughKernel:
    """The kernel that is no kernel: registered at a key, it makes calls pass on to the next lower key."""

    def __repr__(self) -> str:
        return "fallthrough"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise DispatchError("a fallthrough kernel cannot be called; register it with impl() or fallback()")


fallthrough: Final = FallthroughKernel()
"""Pass to ``impl`` or ``fallback`` in place of a function."""


def _caller() -> str:
    """``file:line`` of the first frame outside this package: where the user wrote the registration."""
    package = str(Path(__file__).parent)
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame.f_back is not None and frame.f_code.co_filename.startswith(package):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


@final
class Registration:
    """One kernel at one key, and the handle that takes it away again.

    Attributes: ``op`` (None for a fallback), ``key``, ``kernel``, ``with_keyset``, ``label`` (what to call the kernel),
    ``source`` (``file:line`` of the registration). A context manager: the kernel goes at the end of the block.
    """

    __slots__ = ("_remove", "active", "kernel", "key", "label", "op", "source", "with_keyset")

    def __init__(
        self,
        key: DispatchKey,
        kernel: Callable[..., Any],
        *,
        op: str | None = None,
        with_keyset: bool = False,
        label: str = "",
        source: str | None = None,
        remove: Callable[[Registration], None] | None = None,
    ) -> None:
        self.key: Final = key
        self.kernel: Final = kernel
        self.op: Final = op
        self.with_keyset: Final = with_keyset
        self.label: Final = label or getattr(kernel, "__qualname__", None) or repr(kernel)
        self.source: Final = _caller() if source is None else source
        self.active = remove is not None
        self._remove = remove

    @property
    def is_fallthrough(self) -> bool:
        """Whether this is the fallthrough kernel."""
        return self.kernel is fallthrough

    @property
    def where(self) -> str:
        """The kernel's name and the place of its registration; PyTorch's own kernels have only the place."""
        return self.source if self.label.startswith("registered at ") else f"{self.label} ({self.source})"

    def remove(self) -> None:
        """Take the kernel away; what it hid is visible again. A second time: ``DispatchError``."""
        if not self.active or self._remove is None:
            raise DispatchError(f"{self} was removed already; every registration is removed once")
        self._remove(self)
        self.active = False

    def __enter__(self) -> Registration:
        return self

    def __exit__(self, *error: object) -> None:
        if self.active:
            self.remove()

    def __str__(self) -> str:
        where = self.op or "fallback"
        return f"{where} at {self.key}: {self.label} ({self.source})"

    __repr__ = __str__


AMBIGUOUS: Final = Registration(
    AUTOGRAD_OTHER, fallthrough.__call__, label="ambiguous_autogradother", source="torchport"
)
"""What the ambiguity rule selects; calling it raises ``AmbiguousKernel``."""


class KernelTable:
    """The registrations of one operator, with the fallbacks it shares with all others. Newest first at each key."""

    __slots__ = ("direct", "fallbacks")

    def __init__(self, fallbacks: Callable[[DispatchKey], Registration | None]) -> None:
        self.direct: dict[DispatchKey, list[Registration]] = {}
        self.fallbacks = fallbacks

    def newest(self, key: DispatchKey) -> Registration | None:
        """The kernel in force at exactly this key, alias keys included."""
        found = self.direct.get(key)
        return found[0] if found else None

    def any_in(self, bits: int) -> Registration | None:
        """A kernel registered directly at a runtime key of the set, or None. Alias keys are in no set."""
        if bits:
            for key, found in self.direct.items():
                if key.bits and key.bits & bits == key.bits:
                    return found[0]
        return None

    def registrations(self) -> Iterator[Registration]:
        """All of them, newest first at each key."""
        for found in self.direct.values():
            yield from found

    def row(self, key: DispatchKey) -> Row:
        """The computed row of a runtime key."""
        return choose(self, key)

    def rows(self) -> dict[DispatchKey, Row]:
        """The computed row of every runtime key."""
        return {key: choose(self, key) for key in runtime_keys()}


Select = Callable[[KernelTable, DispatchKey], Registration | None]
WhyNot = Callable[[KernelTable, DispatchKey], str]


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule: ``select`` gives the kernel, or None to pass on; ``why_not`` then says why, for people."""

    id: str
    provenance: str
    """c10's name for the outcome, as its table dumps print it."""
    select: Select
    why_not: WhyNot


@dataclass(frozen=True, slots=True)
class Row:
    """A table row: the key, the rule that decided, and the kernel it chose (None: there is none)."""

    key: DispatchKey
    rule: Rule
    registration: Registration | None

    @property
    def is_fallthrough(self) -> bool:
        """Whether a call passes this row by."""
        return self.registration is not None and self.registration.is_fallthrough

    def __str__(self) -> str:
        if self.registration is None:
            return f"{self.key}: [{self.rule.provenance}]"
        mark = "fallthrough " if self.is_fallthrough else ""
        return f"{self.key}: {mark}{self.registration.label} [{self.rule.provenance}]"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one rule said of one key: ``outcome`` is "chosen", "passed over" or "not reached"."""

    rule: Rule
    outcome: str
    reason: str
    registration: Registration | None


def _backend_kernel(table: KernelTable, key: DispatchKey) -> Registration | None:
    """The backend kernel that keeps a composite away from an autograd key: it may need its own formula."""
    return table.any_in(backend_from_autograd(key).bits) or table.newest(EXPLICIT)


def _serves(key: DispatchKey, alias: DispatchKey) -> bool:
    # Undefined has no bit, so no alias contains it, yet tensor-less calls of composites must work.
    return key is UNDEFINED or in_alias(key, alias)


def _direct(table: KernelTable, key: DispatchKey) -> Registration | None:
    return table.newest(key)


def _non_functional(table: KernelTable, key: DispatchKey) -> Registration | None:
    return table.newest(NON_FUNCTIONAL) if _serves(key, NON_FUNCTIONAL) else None


def _explicit(table: KernelTable, key: DispatchKey) -> Registration | None:
    return table.newest(EXPLICIT) if _serves(key, EXPLICIT) else None


def _nested(table: KernelTable, key: DispatchKey) -> Registration | None:
    return table.newest(NESTED) if in_alias(key, NESTED) else None


def _ambiguous(table: KernelTable, key: DispatchKey) -> Registration | None:
    if key is not AUTOGRAD_OTHER or table.newest(IMPLICIT) is None:
        return None
    return AMBIGUOUS if table.any_in(backend_from_autograd(AUTOGRAD_OTHER).bits) else None


def _implicit(table: KernelTable, key: DispatchKey) -> Registration | None:
    if not _serves(key, IMPLICIT) or _backend_kernel(table, key) is not None:
        return None
    return table.newest(IMPLICIT)


def _autograd(table: KernelTable, key: DispatchKey) -> Registration | None:
    return table.newest(AUTOGRAD) if in_alias(key, AUTOGRAD) else None


def _batched(table: KernelTable, key: DispatchKey) -> Registration | None:
    return table.newest(BATCHED) if in_alias(key, BATCHED) else None


def _fallback(table: KernelTable, key: DispatchKey) -> Registration | None:
    return table.fallbacks(key)


def _why_alias(alias: DispatchKey, serves: Callable[[DispatchKey, DispatchKey], bool] = _serves) -> WhyNot:
    def why_not(table: KernelTable, key: DispatchKey) -> str:
        registered = table.newest(alias)
        if registered is None:
            return f"nothing is registered at {alias}"
        if not serves(key, alias):
            return f"{alias} (registered at {registered.source}) does not stand for {key}"
        blocker = _backend_kernel(table, key)
        if blocker is None:
            return f"{alias} stands for {key}, but an earlier rule decides"
        return (
            f"{alias} (registered at {registered.source}) gives way to the kernel at {blocker.key} ({blocker.source})"
        )

    return why_not


def _why_ambiguous(table: KernelTable, key: DispatchKey) -> str:
    if key is not AUTOGRAD_OTHER:
        return "only AutogradOther can be ambiguous"
    if table.newest(IMPLICIT) is None:
        return f"nothing is registered at {IMPLICIT}"
    return "no backend that shares AutogradOther has a kernel"


def _why_direct(table: KernelTable, key: DispatchKey) -> str:
    return f"no kernel is registered at {key} itself"


def _why_fallback(table: KernelTable, key: DispatchKey) -> str:
    return f"no fallback is registered at {key}"


def _never(table: KernelTable, key: DispatchKey) -> str:
    return "something was found"


def _nothing(table: KernelTable, key: DispatchKey) -> Registration | None:
    return None


RULES: tuple[Rule, ...] = (
    Rule("direct", "kernel", _direct, _why_direct),
    Rule("composite_non_functional", "default backend kernel", _non_functional, _why_alias(NON_FUNCTIONAL)),
    Rule("composite_explicit", "default backend kernel", _explicit, _why_alias(EXPLICIT)),
    Rule("composite_nested", "nested kernel", _nested, _why_alias(NESTED, in_alias)),
    Rule("ambiguous", "ambiguous autogradother", _ambiguous, _why_ambiguous),
    Rule("composite_implicit", "math kernel", _implicit, _why_alias(IMPLICIT)),
    Rule("autograd", "autograd kernel", _autograd, _why_alias(AUTOGRAD, in_alias)),
    Rule("batched", "batched kernel", _batched, _why_alias(BATCHED, in_alias)),
    Rule("fallback", "backend fallback", _fallback, _why_fallback),
)
"""In the order they are asked; the first that selects a kernel decides."""

MISSING_RULE: Final = Rule("missing", "missing", _nothing, _never)
"""What decides when no rule does."""


def choose(table: KernelTable, key: DispatchKey) -> Row:
    """The row of a runtime key: the first rule that selects a kernel, else "missing"."""
    for rule in RULES:
        registration = rule.select(table, key)
        if registration is not None:
            return Row(key, rule, registration)
    return Row(key, MISSING_RULE, None)


def examine(table: KernelTable, key: DispatchKey) -> list[Verdict]:
    """What every rule says of a key, in order, with reasons. The one "chosen" is what :func:`choose` gives."""
    verdicts: list[Verdict] = []
    winner: Rule | None = None
    for rule in RULES:
        registration = rule.select(table, key)
        if registration is None:
            verdicts.append(Verdict(rule, "passed over", rule.why_not(table, key), None))
        elif winner is None:
            winner = rule
            verdicts.append(Verdict(rule, "chosen", registration.where, registration))
        else:
            reason = f"the rule '{winner.id}' decided; it would give {registration.where}"
            verdicts.append(Verdict(rule, "not reached", reason, registration))
    if winner is None:
        verdicts.append(Verdict(MISSING_RULE, "chosen", "no rule found a kernel", None))
    return verdicts


def keys_of(registrations: Iterable[Registration]) -> str:
    """Names of the keys registered at, for messages."""
    return ", ".join(dict.fromkeys(r.key.name for r in registrations)) or "nothing"


def expands_to(key: DispatchKey) -> tuple[DispatchKey, ...]:
    """The runtime keys a registration at ``key`` is for."""
    return tuple(alias_keys(key)) if key.is_alias else (key,)
