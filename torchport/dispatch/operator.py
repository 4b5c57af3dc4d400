"""One operator: its schema, its kernels, the calls it decides and remembers.

How a call is decided (c10's ``DispatchKeyExtractor``), in :meth:`Operator.decide`:

1. union of the key sets of all tensor arguments;
2. add this thread's included keys, take away the excluded ones (exclusion wins);
3. take away every functionality whose row, for the highest backend present, is fallthrough;
4. the top functionality that is left, with that backend, names the row; no functionality left: Undefined.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, final

from torchport.core.errors import AmbiguousKernel, DispatchError, MissingKernel

from . import messages
from .keys import (
    BACKEND_SHIFT,
    FUNCTIONALITY_MASK,
    PER_BACKEND,
    DispatchKey,
    Functionality,
    backends,
    runtime_key,
)
from .keyset import DispatchKeySet
from .rules import AMBIGUOUS, KernelTable, Registration, Row, Rule
from .schema import Schema
from .tls import LocalKeys, thread_keys

if TYPE_CHECKING:
    from .extract import KeyGetters

__all__ = ["Decision", "Operator"]

_FUNCTIONALITIES: Final = tuple(Functionality)
_CPU: Final = backends.get("CPU")


@final
class Decision:
    """What an operator does for one key set, worked out once and remembered.

    Attributes: ``op`` (its name), ``key`` (the row), ``keyset`` (after thread keys and fallthroughs; what a
    ``with_keyset`` kernel gets), ``rule`` (why), ``registration`` (None when missing), ``run`` (call it with the
    arguments: the kernel, or what raises the error).
    """

    __slots__ = ("key", "keyset", "op", "registration", "rule", "run")

    def __init__(self, op: str, row: Row, keyset: DispatchKeySet, run: Callable[..., Any]) -> None:
        self.op: Final = op
        self.key: Final = row.key
        self.keyset: Final = keyset
        self.rule: Final[Rule] = row.rule
        self.registration: Final = row.registration
        self.run: Final = run

    @property
    def found(self) -> bool:
        """Whether there is a kernel to run: neither missing, nor ambiguous, nor fallthrough."""
        chosen = self.registration
        return chosen is not None and chosen is not AMBIGUOUS and not chosen.is_fallthrough

    @property
    def kernel(self) -> Callable[..., Any] | None:
        """The registered function, or None when :attr:`found` is false."""
        return self.registration.kernel if self.found and self.registration is not None else None

    @property
    def is_fallback(self) -> bool:
        """Whether the kernel is a fallback for all operators rather than this operator's own."""
        return self.registration is not None and self.registration.op is None and self.found

    def __repr__(self) -> str:
        chosen = self.registration.label if self.registration else "none"
        return f"Decision({self.op} at {self.key}: {chosen} [{self.rule.provenance}])"


def row_key(bits: int) -> DispatchKey:
    """The row a final set lands on. A per-backend functionality without any backend lands on CPU's row, as in c10."""
    functionality = _FUNCTIONALITIES[(bits & FUNCTIONALITY_MASK).bit_length()]
    if functionality not in PER_BACKEND:
        return runtime_key(functionality, None)
    return runtime_key(functionality, backends.at((bits >> BACKEND_SHIFT).bit_length() - 1) or _CPU)


@final
class Operator:
    """An operator of a dispatcher, which makes it, and the handle to call it."""

    __slots__ = (
        "_by_count",
        "_decisions",
        "_keyword_names",
        "_plain_keywords",
        "defined",
        "getters",
        "name",
        "schema",
        "table",
    )

    def __init__(self, name: str, getters: KeyGetters, fallbacks: Callable[[DispatchKey], Registration | None]) -> None:
        self.name: Final = name
        self.schema: Schema | None = None
        self.defined = False
        """Whether define() was called, rather than impl() alone."""
        self.table: Final = KernelTable(fallbacks)
        self.getters = getters
        self._decisions: dict[tuple[int, LocalKeys], Decision] = {}
        self._by_count: dict[int, tuple[int, ...]] = {}
        self._keyword_names: tuple[str, ...] = ()
        self._plain_keywords: frozenset[str] = frozenset()

    def __repr__(self) -> str:
        return f"Operator({self.schema or self.name})"

    # -- calling -------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Dispatch on the arguments' keys and run the kernel."""
        positions = self._by_count.get(len(args))
        if positions is None or (kwargs and not self._plain_keywords.issuperset(kwargs)):
            return self._call_by_name(args, kwargs)
        bits = 0
        getters = self.getters
        for at in positions:
            value = args[at]
            bits |= getters[type(value)](value)
        local = thread_keys.current
        decision = self._decisions.get((bits, local))
        if decision is None:
            decision = self.decide(bits, local)
        return decision.run(*args, **kwargs)

    def _call_by_name(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if self.schema is not None:
            args, kwargs = self.schema.bind(args, kwargs)
        return self.decide(self.argument_bits(args, kwargs), thread_keys.current).run(*args, **kwargs)

    def argument_bits(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
        """Union of the keys of the tensor arguments, as bits. Without a schema every argument is looked at."""
        bits = 0
        getters = self.getters
        if self.schema is None or self.schema.varargs:
            values = (*args, *kwargs.values())
        else:
            last = len(args)
            values = [args[at] for at in self._positions() if at < last]
            values += [kwargs[name] for name in self._keyword_names if name in kwargs]
        for value in values:
            bits |= getters[type(value)](value)
        return bits

    def redispatch(self, keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        """Run the kernel of exactly this set: no thread keys, no mask. A fallthrough row is a ``DispatchError``."""
        if self.schema is not None and not self._plain_keywords.issuperset(kwargs):
            args, kwargs = self.schema.bind(args, kwargs)
        return self.decide(keyset.bits, None).run(*args, **kwargs)

    def _positions(self) -> tuple[int, ...]:
        if self.schema is None:
            return ()
        return tuple(at for at, argument in enumerate(self.schema.positional) if argument.carries_tensors)

    # -- deciding ------------------------------------------------------------------------------------------------

    def decide(self, bits: int, local: LocalKeys | None) -> Decision:
        """The remembered decision for a set of argument keys; ``local`` None means verbatim, as in redispatch."""
        remembered = self._decisions  # stored into even if a change replaces it meanwhile: then it is dropped
        slot = (bits, local or _VERBATIM)
        decision = remembered.get(slot)
        if decision is None:
            final_bits = bits if local is None else self.masked(local.apply(bits))
            row = self.table.row(row_key(final_bits))
            keyset = DispatchKeySet.from_bits(final_bits)
            decision = Decision(self.name, row, keyset, self._runner(row, keyset, bits, redispatched=local is None))
            remembered[slot] = decision
        return decision

    def fallthrough_bits(self, bits: int) -> int:
        """Functionality bits of the set whose row, for the set's highest backend, is fallthrough."""
        component = backends.at((bits >> BACKEND_SHIFT).bit_length() - 1) or _CPU
        skipped = 0
        rest = bits & FUNCTIONALITY_MASK
        while rest:
            low = rest & -rest
            if self.table.row(runtime_key(_FUNCTIONALITIES[low.bit_length()], component)).is_fallthrough:
                skipped |= low
            rest ^= low
        return skipped

    def masked(self, bits: int) -> int:
        """The set without its fallthrough functionalities; backend bits stay."""
        return bits & ~self.fallthrough_bits(bits)

    def _runner(self, row: Row, keyset: DispatchKeySet, bits: int, *, redispatched: bool) -> Callable[..., Any]:
        chosen = row.registration
        if chosen is None:
            return functools.partial(self._raise_missing, row, keyset, bits)
        if chosen is AMBIGUOUS:
            return functools.partial(self._raise_ambiguous, row, keyset)
        if chosen.is_fallthrough:
            return functools.partial(self._raise_fallthrough, row, keyset, redispatched)
        leading: list[Any] = [keyset] if chosen.with_keyset else []
        if chosen.op is None:
            leading.append(self)
        return functools.partial(chosen.kernel, *leading) if leading else chosen.kernel

    def _raise_missing(self, row: Row, keyset: DispatchKeySet, bits: int, *args: Any, **kwargs: Any) -> Any:
        text = messages.missing(self, row.key, keyset, bits, args, kwargs)
        raise MissingKernel(text, op=self.name, key=row.key.name, table=self.dump_table)

    def _raise_ambiguous(self, row: Row, keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        text = messages.ambiguous(self, keyset)
        raise AmbiguousKernel(text, op=self.name, key=row.key.name, table=self.dump_table)

    def _raise_fallthrough(self, row: Row, keyset: DispatchKeySet, redispatched: bool, *args: Any, **kw: Any) -> Any:
        text = messages.landed_on_fallthrough(self, row, keyset, redispatched)
        raise DispatchError(text, op=self.name, key=row.key.name, table=self.dump_table)

    # -- looking -------------------------------------------------------------------------------------------------

    def rows(self) -> dict[DispatchKey, Row]:
        """The computed table: one row per runtime key, missing ones included."""
        return self.table.rows()

    def dump_table(self) -> str:
        """The computed table as text, one line per key that has a kernel, in c10's format."""
        return "".join(f"{row}\n" for row in self.rows().values() if row.registration is not None)

    def dump_registrations(self) -> str:
        """What is registered, one line each; a hidden older kernel is marked inactive."""
        lines = [f"name: {self.name}", f"schema: {self.schema or '(none)'}"]
        for key, found in self.table.direct.items():
            alias = "[alias]" if key.is_alias else ""
            for at, registration in enumerate(found):
                inactive = " (inactive)" if at else ""
                lines.append(f"{key}{alias}{inactive}: {registration.label} ({registration.source})")
        return "\n".join(lines) + "\n"

    # -- changing (the dispatcher's business) ----------------------------------------------------------------------

    def forget(self) -> None:
        """Drop remembered decisions: something they depend on changed."""
        self._decisions = {}

    def set_schema(self, schema: Schema | None) -> None:
        """Attach or take away the schema; prepares which argument positions dispatch for each argument count."""
        self.schema = schema
        self._by_count = {}
        self._keyword_names = ()
        self._plain_keywords = frozenset()
        if schema is not None and not schema.varargs:
            positions = self._positions()
            needed = sum(1 for argument in schema.positional if not argument.has_default)
            self._keyword_names = tuple(a.name for a in schema.keyword_only if a.carries_tensors)
            self._plain_keywords = frozenset(a.name for a in schema.keyword_only if not a.carries_tensors)
            if all(argument.has_default for argument in schema.keyword_only):
                for count in range(needed, len(schema.positional) + 1):
                    self._by_count[count] = tuple(at for at in positions if at < count)
        self.forget()


_VERBATIM: Final = LocalKeys(0, 0)
"""Slot for verbatim decisions; its own object, so it never equals a thread's pair."""
