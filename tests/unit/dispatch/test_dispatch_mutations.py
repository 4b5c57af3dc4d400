"""The differential tests can fail: each rule broken on purpose makes them find differences."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dispatch_truth as truth
import pytest

from torchport import dispatch
from torchport.dispatch import DispatchKey, DispatchKeySet, extract, keys, keyset, operator, rules, schema, tls
from torchport.dispatch.rules import KernelTable, Registration, Rule

Patch = pytest.MonkeyPatch
RULES = {rule.id: rule for rule in rules.RULES}


def tables() -> list[str]:
    return truth.compare_tables(random.Random(17), 400, stop_at=1)[0]


def calls() -> list[str]:
    return truth.compare_calls(random.Random(19), 4_000, stop_at=1)[0]


def fallbacks() -> list[str]:
    return truth.compare_fallbacks(random.Random(23), 30, stop_at=1)[0]


def sets() -> list[str]:
    return truth.compare_keysets(random.Random(29), 2_000) + truth.compare_key_maps()


def without(id: str) -> Callable[[Patch], None]:
    def apply(patch: Patch) -> None:
        patch.setattr(rules, "RULES", tuple(rule for rule in rules.RULES if rule.id != id))

    return apply


def before(first: str, second: str) -> Callable[[Patch], None]:
    """Ask ``first`` before ``second`` although it comes after."""

    def apply(patch: Patch) -> None:
        order = [rule for rule in rules.RULES if rule.id != first]
        order.insert(order.index(RULES[second]), RULES[first])
        patch.setattr(rules, "RULES", tuple(order))

    return apply


def selecting(id: str, select: Callable[[KernelTable, DispatchKey], Registration | None]) -> Callable[[Patch], None]:
    def apply(patch: Patch) -> None:
        changed = Rule(id, RULES[id].provenance, select, RULES[id].why_not)
        patch.setattr(rules, "RULES", tuple(changed if rule.id == id else rule for rule in rules.RULES))

    return apply


def setting(owner: Any, name: str, value: Any) -> Callable[[Patch], None]:
    return lambda patch: patch.setattr(owner, name, value)


def alias(name: str, change: Callable[[int], int]) -> Callable[[Patch], None]:
    """Let an alias key stand for other keys."""
    key = DispatchKey(name)
    original = keyset._alias_bits[key]
    return lambda patch: patch.setitem(keyset._alias_bits, key, lambda: change(original()))  # type: ignore[arg-type]


def bit(name: str) -> int:
    return DispatchKeySet(name).bits & keys.FUNCTIONALITY_MASK


def _implicit_ignoring(table: KernelTable, key: DispatchKey, blocker: Registration | None) -> Registration | None:
    if not rules._serves(key, rules.IMPLICIT) or blocker is not None:
        return None
    return table.newest(rules.IMPLICIT)


_plain_backends = keyset.backend_from_autograd
_original_masked = operator.Operator.masked

TABLE_MUTATIONS: dict[str, Callable[[Patch], None]] = {
    **{f"no rule {id}": without(id) for id in RULES},
    "explicit before direct": before("composite_explicit", "direct"),
    "explicit before non-functional": before("composite_explicit", "composite_non_functional"),
    "implicit before explicit": before("composite_implicit", "composite_explicit"),
    "implicit before nested": before("composite_implicit", "composite_nested"),
    "implicit ignores every kernel below": selecting("composite_implicit", lambda t, k: _implicit_ignoring(t, k, None)),
    "ambiguous needs no backend kernel": selecting(
        "ambiguous",
        lambda t, k: rules.AMBIGUOUS if k is rules.AUTOGRAD_OTHER and t.newest(rules.IMPLICIT) else None,
    ),
    "autograd before implicit": before("autograd", "composite_implicit"),
    "autograd before ambiguous": before("autograd", "ambiguous"),
    "fallback before autograd": before("fallback", "autograd"),
    "fallback before batched": before("fallback", "batched"),
    "implicit ignores explicit": selecting(
        "composite_implicit",
        lambda t, k: _implicit_ignoring(t, k, t.any_in(keyset.backend_from_autograd(k).bits)),
    ),
    "implicit ignores backend kernels": selecting(
        "composite_implicit", lambda t, k: _implicit_ignoring(t, k, t.newest(rules.EXPLICIT))
    ),
    "nested gives way to backend kernels": selecting(
        "composite_nested", lambda t, k: None if rules._backend_kernel(t, k) else rules._nested(t, k)
    ),
    "nested serves Undefined": selecting(
        "composite_nested", lambda t, k: t.newest(rules.NESTED) if rules._serves(k, rules.NESTED) else None
    ),
    "Undefined is served by no alias": setting(rules, "_serves", keyset.in_alias),
    "oldest kernel wins": setting(
        KernelTable, "newest", lambda self, key: self.direct[key][-1] if self.direct.get(key) else None
    ),
    "catch-all is explicit": setting(rules, "IMPLICIT", rules.EXPLICIT),
    "non-functional covers Sparse": alias("CompositeExplicitAutogradNonFunctional", lambda b: b | bit("Sparse")),
    "non-functional covers XLA": alias(
        "CompositeExplicitAutogradNonFunctional", lambda b: b | keys.backends.get("XLA").bit
    ),
    "non-functional covers Lazy": alias(
        "CompositeExplicitAutogradNonFunctional", lambda b: b | keys.backends.get("Lazy").bit
    ),
    "explicit leaves out Quantized": alias("CompositeExplicitAutograd", lambda b: b & ~bit("Quantized")),
    "explicit covers NestedTensor": alias("CompositeExplicitAutograd", lambda b: b | bit("NestedTensor")),
    "implicit leaves out NestedTensor": alias("CompositeImplicitAutograd", lambda b: b & ~bit("NestedTensor")),
    "implicit covers Functionalize": alias("CompositeImplicitAutograd", lambda b: b | bit("Functionalize")),
    "implicit leaves out autograd": alias("CompositeImplicitAutograd", lambda b: b & ~bit("AutogradFunctionality")),
    "Autograd leaves out AutogradOther": alias("Autograd", lambda b: b & ~bit("AutogradOther")),
    "Autograd leaves out nested": alias("Autograd", lambda b: b & ~bit("AutogradNestedTensor")),
    "nested alias leaves out autograd": alias(
        "CompositeImplicitAutogradNestedTensor", lambda b: b & ~bit("AutogradNestedTensor")
    ),
    "HIP has an autograd key of its own": setting(
        rules,
        "backend_from_autograd",
        lambda key: DispatchKeySet("HIP") if key.name == "AutogradHIP" else _plain_backends(key),
    ),
    "AutogradOther covers dense backends": setting(
        rules,
        "backend_from_autograd",
        lambda key: _plain_backends(key).add("Dense") if key.name == "AutogradOther" else _plain_backends(key),
    ),
    "AutogradNestedTensor covers nothing": setting(
        rules,
        "backend_from_autograd",
        lambda key: DispatchKeySet() if key.name == "AutogradNestedTensor" else _plain_backends(key),
    ),
}


def _verbatim_with_mask(self: operator.Operator, bits: int, local: Any) -> Any:
    return _decide(self, bits if local is not None else self.masked(bits), local)


def _verbatim_with_thread_keys(self: operator.Operator, bits: int, local: Any) -> Any:
    return _decide(self, bits, local or tls.thread_keys.current)


_decide = operator.Operator.decide
_lowest = operator.row_key

CALL_MUTATIONS: dict[str, Callable[[Patch], None]] = {
    "inclusion wins over exclusion": setting(
        tls.LocalKeys,
        "apply",
        lambda self, bits: (bits & ~(self.exclude & keys.FUNCTIONALITY_MASK)) | self.include,
    ),
    "exclusion takes backend bits": setting(
        tls.LocalKeys, "apply", lambda self, bits: (bits | self.include) & ~self.exclude
    ),
    "included backends do not count": setting(
        tls.LocalKeys,
        "apply",
        lambda self, bits: (
            (bits | (self.include & keys.FUNCTIONALITY_MASK)) & ~(self.exclude & keys.FUNCTIONALITY_MASK)
        ),
    ),
    "nothing is included": setting(
        tls.LocalKeys, "apply", lambda self, bits: bits & ~(self.exclude & keys.FUNCTIONALITY_MASK)
    ),
    "no mask": setting(operator.Operator, "masked", lambda self, bits: bits),
    "fallthrough takes backend bits": setting(
        operator.Operator,
        "masked",
        lambda self, bits: (
            _original_masked(self, bits)
            if _original_masked(self, bits) == bits
            else _original_masked(self, bits) & keys.FUNCTIONALITY_MASK
        ),
    ),
    "mask of the call's lowest backend": setting(
        operator.Operator,
        "masked",
        lambda self, bits: (
            bits
            & ~self.fallthrough_bits(
                bits & keys.FUNCTIONALITY_MASK | (bits & ~keys.FUNCTIONALITY_MASK & -(bits & ~keys.FUNCTIONALITY_MASK))
            )
        ),
    ),
    "the lowest backend decides": setting(
        operator,
        "row_key",
        lambda bits: _lowest(
            bits & keys.FUNCTIONALITY_MASK | (bits & ~keys.FUNCTIONALITY_MASK & -(bits & ~keys.FUNCTIONALITY_MASK))
        ),
    ),
    "no backend means Undefined": setting(
        operator,
        "row_key",
        lambda bits: (
            _lowest(bits)
            if bits & ~keys.FUNCTIONALITY_MASK or not bits & keyset.PER_BACKEND_MASK
            else DispatchKey("Undefined")
        ),
    ),
    "redispatch masks": setting(operator.Operator, "decide", _verbatim_with_mask),
    "redispatch uses thread keys": setting(operator.Operator, "decide", _verbatim_with_thread_keys),
    "force adds instead of replacing": setting(
        tls.KeyGuard,
        "__enter__",
        lambda self: (
            self._previous.append(tls.thread_keys.current),
            setattr(
                tls.thread_keys,
                "current",
                tls._local_keys(
                    tls.thread_keys.current.include | self._include, tls.thread_keys.current.exclude | self._exclude
                ),
            ),
        )[0],
    ),
    "lists are not looked into": setting(extract.KeyGetters, "_items", lambda self, values: 0),
    "optional tensors do not count": setting(schema, "_DISPATCH_TYPES", frozenset({"Tensor", "Tensor[]", "Tensor?[]"})),
    "lists of optional tensors do not count": setting(
        schema, "_DISPATCH_TYPES", frozenset({"Tensor", "Tensor?", "Tensor[]"})
    ),
}

SET_MUTATIONS: dict[str, Callable[[Patch], None]] = {
    "- clears backend bits": setting(
        DispatchKeySet, "__sub__", lambda self, other: DispatchKeySet.from_bits(self.bits & ~other.bits)
    ),
    "remove clears backend bits": setting(
        DispatchKeySet, "remove", lambda self, key: DispatchKeySet.from_bits(self.bits & ~DispatchKeySet(key).bits)
    ),
    "has wants the functionality only": setting(
        DispatchKeySet, "has", lambda self, key: bool(self.bits & bit(key.name)) if key.bits else False
    ),
    "lowest backend wins": setting(
        DispatchKeySet, "backend", property(lambda self: self.backends()[0] if self.backends() else None)
    ),
    "full_after without PythonDispatcher": setting(
        DispatchKeySet,
        "full_after",
        classmethod(
            lambda cls, key: DispatchKeySet.from_bits(
                ((bit(DispatchKey(key).functionality.name)) - 1) | keys.backends.mask
            )
        ),
    ),
    "iteration without backends": setting(
        DispatchKeySet, "__iter__", lambda self: iter([k for k in dispatch.runtime_keys() if not k.backend])
    ),
}

FALLBACK_MUTATIONS: dict[str, Callable[[Patch], None]] = {
    "no rule fallback": without("fallback"),
    "taken keys are not refused": setting(
        dispatch.Dispatcher, "_fallback_at", lambda self, key: self.fallbacks().get(key)
    ),
    "fallbacks stay when removed": setting(dispatch.Dispatcher, "_remove_fallback", lambda self, registration: None),
}


def _cases(mutations: dict[str, Callable[[Patch], None]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("mutate", mutations.values(), ids=mutations.keys())


@_cases(TABLE_MUTATIONS)
def test_broken_table_rule_is_seen(mutate: Callable[[Patch], None], monkeypatch: Patch) -> None:
    mutate(monkeypatch)
    assert tables()


@_cases(CALL_MUTATIONS)
def test_broken_call_rule_is_seen(mutate: Callable[[Patch], None], monkeypatch: Patch) -> None:
    mutate(monkeypatch)
    assert calls()


@_cases(SET_MUTATIONS)
def test_broken_set_rule_is_seen(mutate: Callable[[Patch], None], monkeypatch: Patch) -> None:
    mutate(monkeypatch)
    assert sets()


@pytest.mark.parametrize("name", FALLBACK_MUTATIONS)
def test_broken_fallback_rule_is_seen(name: str) -> None:
    # In a process of its own: a device in use has fallbacks at keys that an alias stands for, so that the alias is
    # refused, and nothing is taken by way of it.
    code = (
        "import pytest, test_dispatch_mutations as here\n"
        f"here.FALLBACK_MUTATIONS[{name!r}](pytest.MonkeyPatch())\n"
        "assert here.fallbacks(), 'not seen'"
    )
    folder = Path(__file__).parent
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_unbroken_rules_pass() -> None:
    assert [*tables(), *calls(), *fallbacks(), *sets()] == []
