"""Texts of dispatch errors: at most five lines; the whole table is on the error's ``explain()``."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .keys import DispatchKey, Functionality, KeyClass
from .keyset import DispatchKeySet, in_alias
from .rules import AUTOGRAD, IMPLICIT, Row, keys_of

if TYPE_CHECKING:
    from .operator import Operator

__all__ = ["ambiguous", "fixes", "landed_on_fallthrough", "missing", "unknown_operator"]

_WIDTH = 110


def _short(names: Iterable[str]) -> str:
    text = ", ".join(names)
    return text if len(text) <= _WIDTH else text[: _WIDTH - 4].rsplit(",", 1)[0] + ", …"


def missing(
    op: Operator, key: DispatchKey, keyset: DispatchKeySet, bits: int, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> str:
    """No kernel: the op, the keys it had, what is registered, the two nearest fixes."""
    if bits:
        had = f"keys: {_short(k.name for k in keyset)} (its arguments' and this thread's, without fallthroughs)"
    else:
        types = _short(type(value).__name__ for value in (*args, *kwargs.values())) or "no arguments"
        had = f"keys: none; no argument carries any ({types})"
    first, second = fixes(op, key)
    return "\n".join(
        (
            f"no kernel for {op.name} at {key}",
            f"  {had}",
            f"  registered at: {_short([keys_of(op.table.registrations())])}",
            f"  fix: {first}",
            f"  or:  {second}; .explain() on this error has the table",
        )
    )


def _impl(op: str, key: str) -> str:
    return f"dispatcher.impl({op!r}, {key!r}, kernel)"


def fixes(op: Operator, key: DispatchKey, how: Callable[[str, str], str] | None = None) -> tuple[str, str]:
    """The two nearest ways to give an operator a kernel at a key. ``how(op, key)`` is the code that registers one."""
    how = how or _impl
    register = how(op.name, key.name)
    if key.key_class is KeyClass.UNDEFINED:
        return (
            f"choose a backend from the other arguments: {how(op.name, 'BackendSelect')}",
            "register at 'CompositeExplicitAutograd', which also serves calls without tensors",
        )
    if in_alias(key, AUTOGRAD):
        return (register, f"call it without gradients: with dispatch.exclude({key.name!r})")
    direct = [r.key for r in op.table.registrations() if not r.key.is_alias]
    dense = [k for k in direct if k.backend is key.backend and k.functionality is Functionality.Dense]
    if key.functionality is not Functionality.Dense and key.backend is not None and dense:
        return (register, f"make the arguments dense: there is a kernel at {dense[0]}")
    same = [k.name for k in direct if k.functionality is key.functionality and k.backend is not None]
    if same:
        return (register, f"move the arguments to a backend that has a kernel: {_short(same)}")
    return (
        register,
        f"write it in other operators, for all backends: {how(op.name, IMPLICIT.name)}",
    )


def ambiguous(op: Operator, keyset: DispatchKeySet) -> str:
    """AutogradOther with a composite and a backend kernel: neither may win."""
    composite = op.table.newest(IMPLICIT)
    others = [r for r in op.table.registrations() if r.key.bits and in_alias(r.key, IMPLICIT)]
    return "\n".join(
        (
            f"{op.name} at AutogradOther: the composite and a backend kernel both claim it",
            f"  keys: {_short(k.name for k in keyset)}",
            f"  composite: {composite.source if composite else '?'}; backend kernels: {_short([keys_of(others)])}",
            f"  fix: register a gradient formula: dispatcher.impl({op.name!r}, 'AutogradOther', kernel)",
            "  or:  give the backend kernel's backend its own autograd key; .explain() on this error has the table",
        )
    )


def landed_on_fallthrough(op: Operator, row: Row, keyset: DispatchKeySet, redispatched: bool) -> str:
    """A fallthrough row was reached and nothing lies below it."""
    if redispatched:
        why = "redispatch takes the set as it is, fallthrough rows included"
        fix = f"take the key away first: op.redispatch(keyset.remove({row.key.name!r}), ...)"
    else:
        why = "every other key of the call is fallthrough too, and Undefined cannot be skipped"
        fix = "register a kernel at a key the arguments have"
    source = row.registration.source if row.registration else "?"
    return "\n".join(
        (
            f"{op.name}: the call landed on the fallthrough at {row.key} ({source})",
            f"  keys: {_short(k.name for k in keyset) or 'none'}",
            f"  why: {why}",
            f"  fix: {fix}",
        )
    )


def unknown_operator(name: str, known: Iterable[str]) -> str:
    """No operator of that name."""
    near = difflib.get_close_matches(name, list(known), n=2)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    return f"no operator is named {name!r}{hint} (define() or impl() makes one)"
