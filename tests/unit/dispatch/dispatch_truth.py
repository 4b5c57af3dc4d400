"""The same random work done by the C++ dispatcher of the torch wheel and by ours, and every difference between them.

Each ``compare_*`` takes a seeded ``random.Random`` and a size, and gives the differences as text; the tests want none,
and the mutation tests want some.
"""

from __future__ import annotations

import itertools
import random
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from torchport import dispatch
from torchport.core.errors import AmbiguousKernel, DispatchError, MissingKernel
from torchport.dispatch import DispatchKey, DispatchKeySet, torch_bits, torch_bridge

if not torch_bits.SAME_KEYS:
    pytest.skip("this PyTorch has other dispatch keys than torch 2.13, of which the model is", allow_module_level=True)

C: Any = torch._C
K: Any = C.DispatchKey

_FIRST_PER_BACKEND, _LAST_PER_BACKEND = 48, 149  # StartOfDenseBackends … EndOfAutogradFunctionalityBackends
TORCH_KEYS: dict[DispatchKey, Any] = {
    DispatchKey(C._dispatch_key_name(K(number))): K(number)
    for number in (*range(47), *range(_FIRST_PER_BACKEND, _LAST_PER_BACKEND + 1), *range(150, 156))
    if not C._dispatch_key_name(K(number)).endswith("Undefined") or number == 0
}
"""Every key of ours that c10 has → c10's."""

RUNTIME = [key for key in TORCH_KEYS if key.is_runtime and key.bits]
ALIASES = [key for key in TORCH_KEYS if key.is_alias]
_serial = itertools.count(1)
_FILE = "kernel"


def our_name(torch_key: Any) -> str:
    """Our name for what ``highestPriorityTypeId`` gives: a set without a backend yields the start-of-block markers."""
    marks = {48: "Dense", 65: "Quantized", 82: "Sparse", 99: "SparseCsr", 116: "NestedTensor"}
    marks[133] = "AutogradFunctionality"
    return marks.get(int(torch_key)) or str(C._dispatch_key_name(torch_key))


# -- key sets --------------------------------------------------------------------------------------------------------


def random_raw(rng: random.Random) -> int:
    raw = rng.getrandbits(62)
    for _ in range(rng.choice((0, 1, 2, 4, 6))):  # from dense to nearly empty sets
        raw &= rng.getrandbits(62)
    return raw


def compare_keysets(rng: random.Random, count: int) -> list[str]:
    """``count`` random pairs of sets and keys: conversions, operators, membership, priority, iteration."""
    differences: list[str] = []
    keys = [key for key in TORCH_KEYS if key.bits]
    for _ in range(count):
        theirs, other = (C.DispatchKeySet.from_raw_repr(random_raw(rng)) for _ in range(2))
        ours, our_other = DispatchKeySet.from_torch(theirs), DispatchKeySet.from_torch(other)
        key = rng.choice(keys)
        cases = {
            "round trip": (theirs.raw_repr(), ours),
            "|": ((theirs | other).raw_repr(), ours | our_other),
            "&": ((theirs & other).raw_repr(), ours & our_other),
            "-": ((theirs - other).raw_repr(), ours - our_other),
            "add": (theirs.add(TORCH_KEYS[key]).raw_repr(), ours.add(key)),
            "remove": (theirs.remove(TORCH_KEYS[key]).raw_repr(), ours.remove(key)),
        }
        wrong = [f"{what}: {made}" for what, (raw, made) in cases.items() if made.to_torch().raw_repr() != raw]
        if theirs.has(TORCH_KEYS[key]) != ours.has(key):
            wrong.append(f"has({key})")
        if our_name(theirs.highestPriorityTypeId()) != ours.highest_priority.name:
            wrong.append(f"highest_priority: {ours.highest_priority}")
        if C._dispatch_keyset_to_string(theirs) != repr(ours):
            wrong.append(f"repr: {ours!r}")
        if (theirs == other) != (ours == our_other) or len(ours) != len(list(ours)):
            wrong.append("== or len")
        differences += [f"{theirs.raw_repr():#x}: {what}" for what in wrong]
    return differences


def compare_key_maps() -> list[str]:
    """Every key: alias membership, autograd → backend, full_after; and c10's constant sets."""
    differences: list[str] = []
    for key, theirs in TORCH_KEYS.items():
        for alias in ALIASES:
            if C._dispatch_is_included_in_alias(theirs, TORCH_KEYS[alias]) != dispatch.in_alias(key, alias) and (
                not key.is_alias
            ):
                differences.append(f"{key} in {alias}")
        raw = C._dispatch_get_backend_keyset_from_autograd(theirs).raw_repr()
        if dispatch.backend_from_autograd(key).to_torch().raw_repr() != raw:
            differences.append(f"backend_from_autograd({key})")
        if key.bits:
            raw = C._dispatch_keyset_full_after(theirs).raw_repr()
            if DispatchKeySet.full_after(key).to_torch().raw_repr() != raw:
                differences.append(f"full_after({key})")
    if DispatchKeySet.full().to_torch().raw_repr() != C._dispatch_keyset_full().raw_repr():
        differences.append("full()")
    if repr(C._dispatch_autogradother_backends) != repr(dispatch.backend_from_autograd("AutogradOther")):
        differences.append("AutogradOther's backends")
    return differences


# -- tables ----------------------------------------------------------------------------------------------------------


def mirror_fallbacks(dispatcher: dispatch.Dispatcher) -> None:
    """Give ours the fallbacks PyTorch has in this process."""
    for key, theirs in torch_bridge.stock_fallbacks().items():
        kernel = dispatch.fallthrough if theirs.is_fallthrough else theirs.kernel
        dispatcher.fallback(key, kernel, label=theirs.label)


@contextmanager
def quiet() -> Iterator[None]:
    """PyTorch warns once when a kernel is overridden; that is what these tests do."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@dataclass
class Pair:
    """One operator in both dispatchers."""

    ours: dispatch.Dispatcher
    name: str
    held: dict[int, tuple[Any, dispatch.Registration]] = field(default_factory=dict[int, Any])
    """serial → (the C++ library object, our handle)"""
    definition: Any = None
    log: list[Any] = field(default_factory=list[Any])

    def __post_init__(self) -> None:
        self.namespace, self.short = self.name.split("::")

    def define(self, arguments: str = "Tensor x") -> Pair:
        schema = f"{self.short}({arguments}) -> Tensor"
        self.definition = C._dispatch_library("FRAGMENT", self.namespace, "", _FILE, 0)
        self.definition.def_(schema)
        self.ours.define(f"{self.namespace}::{schema}")
        return self

    def register(self, key: DispatchKey, *, fall: bool = False, kernels: tuple[Any, Any] | None = None) -> int:
        """The same kernel, under the same label, at the same key of both. ``key`` Undefined is the catch-all."""
        serial = next(_serial)
        label = f"registered at {_FILE}:{serial}"
        fall = fall and (key.bits != 0 or key.is_alias)  # C++ has no fallthrough catch-all from Python
        theirs, ours = kernels or (lambda x: x, lambda x: x)
        library = C._dispatch_library("FRAGMENT", self.namespace, "", _FILE, serial)
        with quiet():
            if not key.bits and not key.is_alias:
                library.impl_t_t(self.short, "", debug=label)
            elif fall:
                library.impl(self.short, TORCH_KEYS[key], torch.library.fallthrough_kernel)
            else:
                library.impl(self.short, TORCH_KEYS[key], theirs, kernels is not None)
        ours_fn = dispatch.fallthrough if fall else ours
        with_keyset = kernels is not None and not fall
        handle = self.ours.impl(self.name, key, ours_fn, label=label, with_keyset=with_keyset)
        self.held[serial] = (library, handle)
        return serial

    def remove(self, serial: int) -> None:
        library, handle = self.held.pop(serial)
        del library
        handle.remove()

    def difference(self) -> list[str]:
        """Rows that the two computed tables do not share."""
        theirs, ours = C._dispatch_dump_table(self.name), self.ours.dump_table(self.name)
        if theirs == ours:
            return []
        registered = ", ".join(str(r.key) for r in self.ours.operator(self.name).table.registrations())
        rows = set(theirs.splitlines()) ^ set(ours.splitlines())
        return [f"{self.name} with {registered}: {row}" for row in sorted(rows)[:6]]

    def close(self) -> None:
        for serial in list(self.held):
            self.remove(serial)
        self.definition = None


_NAMES = """
    CPU XLA Lazy Meta PrivateUse1 HIP VE MTIA FPGA MkldnnCPU QuantizedCPU SparseCPU SparseXLA SparseCsrCPU
    NestedTensorCPU AutogradOther AutogradCPU AutogradXLA AutogradHIP AutogradNestedTensor FuncTorchBatched
    Functionalize BackendSelect
"""
_INTERESTING = [DispatchKey(name) for name in _NAMES.split()]


def random_key(rng: random.Random) -> DispatchKey:
    draw = rng.random()
    if draw < 0.45:
        return rng.choice(ALIASES)
    if draw < 0.75:
        return rng.choice(_INTERESTING)
    return rng.choice(RUNTIME) if draw < 0.97 else DispatchKey("Undefined")


def compare_tables(rng: random.Random, operators: int, *, stop_at: int = 10**9) -> tuple[list[str], int]:
    """Random register and remove sequences; after every step every row of both tables. Also: how many steps."""
    ours = dispatch.Dispatcher(standard_fallbacks=False)
    mirror_fallbacks(ours)
    differences: list[str] = []
    steps = 0
    for _ in range(operators):
        pair = Pair(ours, f"torchport_tables::op{next(_serial)}").define()
        for _ in range(rng.randint(4, 14)):
            steps += 1
            if pair.held and rng.random() < 0.35:
                pair.remove(rng.choice(list(pair.held)))
            else:
                pair.register(random_key(rng), fall=rng.random() < 0.15)
            differences += pair.difference()
        pair.close()
        if len(differences) >= stop_at:
            break
    return differences, steps


def compare_fallbacks(rng: random.Random, configurations: int, *, stop_at: int = 10**9) -> tuple[list[str], int]:
    """Random fallbacks at keys where PyTorch has none, conflicts included, under operators with a few kernels."""
    stock = set(torch_bridge.stock_fallbacks())
    free = [key for key in RUNTIME if key not in stock]
    differences: list[str] = []
    dumps = 0
    for _ in range(configurations):
        ours = dispatch.Dispatcher(standard_fallbacks=False)
        mirror_fallbacks(ours)
        libraries: list[Any] = []
        wanted = rng.sample(free, rng.randint(1, 12))
        if rng.random() < 0.3:
            # The alias and a key it stands for: a conflict in every such configuration, whatever else is drawn. Which
            # keys are drawn depends on the fallbacks that earlier tests of this process left.
            alias = DispatchKey("CompositeImplicitAutogradNestedTensor")
            members = [key for key in free if dispatch.in_alias(key, alias)]
            wanted = [alias, rng.choice(members), *wanted]
        for key in wanted:
            differences += _register_fallback(ours, libraries, key, fall=rng.random() < 0.5)
        for _ in range(rng.randint(1, 4)):
            pair = Pair(ours, f"torchport_fallbacks::op{next(_serial)}").define()
            for _ in range(rng.randint(0, 3)):
                pair.register(random_key(rng), fall=rng.random() < 0.2)
            differences += pair.difference()
            if libraries:
                libraries.pop(rng.randrange(len(libraries)))()
                differences += pair.difference()
            dumps += 2
            pair.close()
        while libraries:
            libraries.pop()()
        if len(differences) >= stop_at:
            break
    return differences, dumps


def _register_fallback(
    ours: dispatch.Dispatcher, libraries: list[Callable[[], None]], key: DispatchKey, *, fall: bool
) -> list[str]:
    """A fallback in both; a key that is taken must be refused by both. ``libraries`` gets what removes it again."""
    serial = next(_serial)
    held = [C._dispatch_library("IMPL", "_", "", _FILE, serial)]
    handles: list[dispatch.Registration] = []
    refused = {"theirs": False, "ours": False}
    try:
        handles.append(
            ours.fallback(
                key,
                dispatch.fallthrough if fall else lambda op, x: x,
                label=f"registered at {_FILE}:{serial}",
            )
        )
    except DispatchError:
        refused["ours"] = True
    try:
        held[0].fallback(TORCH_KEYS[key], torch.library.fallthrough_kernel if fall else lambda op, x: x)
    except RuntimeError:
        refused["theirs"] = True

    def undo() -> None:
        held.clear()
        for handle in handles:
            handle.remove()

    if refused["theirs"] or refused["ours"]:
        held.clear()  # C++ keeps the part of an alias it had registered when it refused; ours keeps nothing
        for handle in handles:
            handle.remove()
        return [] if refused["theirs"] == refused["ours"] else [f"fallback at {key}: refused by {refused}"]
    libraries.append(undo)
    return []


# -- calls -----------------------------------------------------------------------------------------------------------

_NOT_INCLUDED = {  # c10 treats these specially before or after the table, or asserts on their state
    "Python",
    "PythonDispatcher",
    "PythonTLSSnapshot",
    "PreDispatch",
    "FuncTorchDynamicLayerFrontMode",
    "FuncTorchDynamicLayerBackMode",
}
SAFE = [key for key in RUNTIME if key.name not in _NOT_INCLUDED]
_BARE = [DispatchKey(name) for name in ("Dense", "Quantized", "Sparse", "SparseCsr", "NestedTensor")]
"""Functionalities that want a backend; a set may have them without one."""


def _some_keys(rng: random.Random, most: int) -> DispatchKeySet:
    bare = rng.sample(_BARE, rng.randint(1, 2)) if rng.random() < 0.3 else []
    return DispatchKeySet(*bare, *rng.sample(SAFE if not bare else _LOW, rng.randint(0 if bare else 1, most)))


_LOW = [key for key in SAFE if key.backend is None]


def tensors() -> list[torch.Tensor]:
    """Tensors of every kind whose key sets differ."""
    with quiet():
        dense = torch.ones(2)
        return [
            dense,
            torch.ones(2, requires_grad=True),
            torch.ones(2, device="meta"),
            torch.eye(2).to_sparse(),
            torch.eye(2).to_sparse_csr(),
            dense.to_mkldnn(),
            torch.ones(2, dtype=torch.cfloat).conj(),
            torch.ones(2, dtype=torch.cfloat).conj().imag,
            torch.nested.nested_tensor([torch.ones(2)]),
            torch.quantize_per_tensor(dense, 1.0, 0, torch.quint8),
            torch._to_functional_tensor(dense),
            torch._efficientzerotensor(2),
        ]


_SCHEMAS = (
    "Tensor x",
    "Tensor x, Tensor? y",
    "Tensor[] xs, Tensor? y",
    "Tensor?[] xs, int n=0",
    "int n, Tensor? x, *, Tensor? out=None",
    "int n=0, *, float f=1.0",
)


def _arguments(rng: random.Random, schema: str, pool: list[torch.Tensor]) -> tuple[list[Any], dict[str, Any]]:
    def one(optional: bool = True) -> Any:
        return None if optional and rng.random() < 0.3 else rng.choice(pool)

    many = [rng.choice(pool) for _ in range(rng.randint(0, 3))]
    holes = [one() for _ in range(rng.randint(0, 3))]
    named = {} if rng.random() < 0.5 else {"out": one()}
    return {
        _SCHEMAS[0]: ([one(False)], {}),
        _SCHEMAS[1]: ([one(False), one()], {}),
        _SCHEMAS[2]: ([many, one()], {}),
        _SCHEMAS[3]: ([holes] if rng.random() < 0.5 else [holes, 3], {}),
        _SCHEMAS[4]: ([1, one()], named),
        _SCHEMAS[5]: ([] if rng.random() < 0.5 else [2], {} if rng.random() < 0.5 else {"f": 2.0}),
    }[schema]


_result = torch.ones(1)


def _kernels(pair: Pair, serial: int, key: DispatchKey, handle: Any, chained: bool) -> tuple[Any, Any]:
    """The same kernel for both: log who ran with which set; when chained, redispatch below the key."""

    def theirs(keyset: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        pair.log.append((serial, DispatchKeySet.from_torch(keyset).bits))
        if chained:
            handle().redispatch_boxed(keyset & C._dispatch_keyset_full_after(TORCH_KEYS[key]), *args, **kwargs)
        return _result

    def ours(keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> torch.Tensor:
        pair.log.append((serial, keyset.bits))
        if chained:
            pair.ours.redispatch(pair.name, keyset & DispatchKeySet.full_after(key), *args, **kwargs)
        return _result

    return theirs, ours


def _call_operator(rng: random.Random, ours: dispatch.Dispatcher) -> tuple[Pair, str]:
    """An operator with random kernels. Aliases last, so that C++'s live table has no stale rows (see rules.py)."""
    schema = rng.choice(_SCHEMAS)
    pair = Pair(ours, f"torchport_calls::op{next(_serial)}").define(schema)
    keys = {rng.choice(_INTERESTING) for _ in range(rng.randint(1, 6))} | {rng.choice(SAFE) for _ in range(4)}
    keys |= {DispatchKey(name) for name in ("Conjugate", "Negative", "ZeroTensor") if rng.random() < 0.5}
    order = ["CompositeExplicitAutogradNonFunctional", "CompositeExplicitAutograd", "Autograd"]
    order += ["CompositeImplicitAutogradNestedTensor", "CompositeImplicitAutograd"]
    aliases = [DispatchKey(name) for name in order if rng.random() < 0.35]
    for serial, key in enumerate([*sorted(keys, key=lambda key: key.name), *aliases]):
        fall = rng.random() < 0.25
        chained = not fall and key.bits != 0 and rng.random() < 0.75
        pair.register(
            key,
            fall=fall,
            kernels=_kernels(pair, serial, key, lambda: C._dispatch_find_schema_or_throw(pair.name, ""), chained),
        )
    C._dispatch_check_invariants(pair.name)
    return pair, schema


@contextmanager
def _random_guards(rng: random.Random) -> Iterator[str]:
    """The same include and exclude guards in both, nested up to three deep."""
    with ExitStack() as stack:
        described: list[str] = []
        for _ in range(rng.randint(0, 3)):
            chosen = _some_keys(rng, 5)
            autograd = DispatchKeySet(*(key for key in RUNTIME if key.name.startswith("Autograd")))
            kind = rng.choice(("include", "exclude", "exclude autograd", "force"))
            described.append(f"{kind} {chosen}")
            if kind == "include":
                key = rng.choice([*SAFE, *_BARE])
                stack.enter_context(C._IncludeDispatchKeyGuard(TORCH_KEYS[key]))
                stack.enter_context(dispatch.include(key))
            elif kind == "force":
                other = DispatchKeySet(*rng.sample(SAFE, rng.randint(0, 5)))
                stack.enter_context(C._ForceDispatchKeyGuard(chosen.to_torch(), other.to_torch()))
                stack.enter_context(dispatch.force(chosen, other))
            else:
                taken = chosen if kind == "exclude" else autograd
                stack.enter_context(C._ExcludeDispatchKeyGuard(taken.to_torch()))
                stack.enter_context(dispatch.exclude(taken))
        yield "; ".join(described)


def _private_name(name: str) -> str:
    """PyTorch prints the private backend's registered name in errors; ours is c10's."""
    if name.endswith("Undefined"):  # C++ names the marker at the start of the block; the row is CPU's
        return name.removesuffix("Undefined") + "CPU"
    chosen = C._get_privateuse1_backend_name()
    if chosen != "privateuseone" and name.endswith(chosen):
        return name.removesuffix(chosen) + "PrivateUse1"
    return name


def _outcome(pair: Pair, call: Callable[[], Any]) -> tuple[Any, ...]:
    """Which kernels ran with which sets, and how it ended."""
    pair.log.clear()
    try:
        end = "returned" if call() is not None else "nothing"
    except MissingKernel as error:
        end = f"missing at {error.key}"
    except AmbiguousKernel:
        end = "ambiguous"
    except DispatchError as error:
        end = "fallthrough" if "landed on the fallthrough" in str(error) else f"unexpected: {error}"
    except RuntimeError as error:
        text = str(error)
        backend = re.search(r"arguments from the '(.*?)' backend", text)
        if backend:
            end = f"missing at {_private_name(backend[1])}"
        elif "no tensor arguments" in text:
            end = "missing at Undefined"
        elif "fallthrough_kernel was executed" in text:
            end = "fallthrough"
        elif "AutogradOther" in text and "unreachable" in text:
            end = "ambiguous"
        else:
            end = f"unexpected: {text[:200]}"
    return (*pair.log, end)


class StockKernelReached(Exception):
    """Ours says that a fallback of PyTorch's own would run: nothing to compare, and some of them assert."""


def _stop(*args: Any, **kwargs: Any) -> Any:
    raise StockKernelReached


def compare_calls(rng: random.Random, calls: int, *, stop_at: int = 10**9) -> tuple[list[str], int]:
    """``calls`` calls and redispatches under random guards; those that would reach PyTorch's fallbacks don't count."""
    ours = dispatch.Dispatcher(standard_fallbacks=False)
    for key, theirs in torch_bridge.stock_fallbacks().items():
        ours.fallback(key, dispatch.fallthrough if theirs.is_fallthrough else _stop, label=theirs.label)
    pool = tensors()
    differences: list[str] = []
    done = 0
    while done < calls and len(differences) < stop_at:
        pair, schema = _call_operator(rng, ours)
        handle = C._dispatch_find_schema_or_throw(pair.name, "")
        for _ in range(12):
            args, kwargs = _arguments(rng, schema, pool)
            with _random_guards(rng) as guards:
                verbatim = _some_keys(rng, 4) if rng.random() < 0.25 else None
                try:
                    mine, yours = _both(pair, handle, verbatim, args, kwargs)
                except StockKernelReached:
                    continue
            done += 1
            if mine != yours:
                kinds = [str(C._dispatch_keys(a)) if isinstance(a, torch.Tensor) else type(a).__name__ for a in args]
                differences.append(f"{pair.name}({schema}) {kinds} [{guards}] {verbatim}: {mine} instead of {yours}")
        pair.close()
    return differences, done


def _both(
    pair: Pair, handle: Any, verbatim: DispatchKeySet | None, args: list[Any], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    if verbatim is None:
        mine = _outcome(pair, lambda: pair.ours.call(pair.name, *args, **kwargs))
        return mine, _outcome(pair, lambda: C._dispatch_call_boxed(handle, *args, **kwargs))
    mine = _outcome(pair, lambda: pair.ours.redispatch(pair.name, verbatim, *args, **kwargs))
    return mine, _outcome(pair, lambda: handle.redispatch_boxed(verbatim.to_torch(), *args, **kwargs))


# -- PyTorch's operators ---------------------------------------------------------------------------------------------


def compare_stock_operators(names: list[str]) -> tuple[list[str], int]:
    """Rows recomputed from an operator's registrations against the rows PyTorch computes. Also: how many rows."""
    fallbacks = torch_bridge.stock_fallbacks()
    differences: list[str] = []
    rows = 0
    for name in names:
        stock = torch_bridge.stock_operator(name, fallbacks)
        if stock is None:
            differences.append(f"{name}: not found")
            continue
        made = [str(row) for row in stock.table.rows().values() if row.registration is not None]
        rows += len(made)
        if C._dispatch_dump_table(name).splitlines() != made:
            differences += [f"{name}: {row}" for row in set(C._dispatch_dump_table(name).splitlines()) ^ set(made)]
    return differences, rows
