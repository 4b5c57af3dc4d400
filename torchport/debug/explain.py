"""Where does an operator go, and why: each argument's keys, the rule that won and those passed over, what to do.

``explain("aten::add.Tensor", x, y)`` reads PyTorch's own C++ dispatcher, so it needs neither our device nor our
dispatcher; operators that only a :class:`~torchport.dispatch.Dispatcher` has are explained from there. Rows of
PyTorch's operators are recomputed by our rules from its registrations; the test suite compares them with PyTorch's.

Private PyTorch APIs used here (checked on torch 2.13.0), besides those of ``dispatch.torch_bridge``:
``torch._C._jit_resolve_packet`` (which overload some arguments mean), ``torch._C._jit_get_schemas_for_operator``
(an operator's overloads), ``torch._C._dispatch_check_invariants`` (whether C++'s live table lags behind),
``torch._C._dispatch_has_kernel`` (whether an overload is dispatched at all), ``OpOverload.name``,
``OpOverloadPacket._qualified_op_name``.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from torchport import dispatch
from torchport.core.errors import DispatchError
from torchport.core.traffic import Collective, journal
from torchport.dispatch import BackendComponent, DispatchKey, DispatchKeySet, Functionality, Operator
from torchport.dispatch.extract import KeyGetters
from torchport.dispatch.messages import fixes
from torchport.dispatch.operator import row_key
from torchport.dispatch.rules import EXPLICIT, IMPLICIT, Row, Verdict, examine
from torchport.dispatch.schema import Schema
from torchport.dispatch.tls import LocalKeys
from torchport.dispatch.torch_bridge import device_keys, stock_operator, stock_operator_names, thread_keysets

from .device import component_of, device_lines, make_ready, port_device

if TYPE_CHECKING:
    from torchport.dispatch.torch_bridge import StockOperator

__all__ = [
    "ArgumentKeys",
    "CallExplanation",
    "ChainStep",
    "Explanation",
    "add_section",
    "explain",
    "explain_cli",
    "set_device_resolver",
]

_OURS, _STOCK = "torchport's dispatcher", "PyTorch's C++ dispatcher"


@dataclass(frozen=True, slots=True)
class ArgumentKeys:
    """One argument that takes part in dispatch."""

    name: str
    value: str
    keys: DispatchKeySet


@dataclass(frozen=True, slots=True)
class ChainStep:
    """A kernel that runs, if every kernel before it redispatches below itself. ``source`` says which and where from."""

    key: DispatchKey
    provenance: str
    kernel: str
    source: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Explanation:
    """How one call of one operator is dispatched. ``str()`` is the report; ``table()`` the operator's whole table."""

    op: str
    schema: str
    origin: str
    """Whose registrations these are: PyTorch's or ours."""
    arguments: tuple[ArgumentKeys, ...]
    union: DispatchKeySet
    include: DispatchKeySet
    exclude: DispatchKeySet
    fallthrough: DispatchKeySet
    """What the mask took away: functionalities of the call whose row is fallthrough."""
    keyset: DispatchKeySet
    """After include, exclude and mask."""
    key: DispatchKey
    row: Row
    verdicts: tuple[Verdict, ...]
    """What each rule said, in order."""
    chain: tuple[ChainStep, ...]
    warnings: tuple[str, ...]
    fixes: tuple[str, ...]
    """What to write when there is no kernel; empty otherwise."""
    sections: tuple[str, ...] = ()
    also: Explanation | None = None
    """The same call in our dispatcher, when PyTorch and we both have kernels for the operator."""
    rows: Mapping[DispatchKey, Row] = field(default_factory=dict[DispatchKey, Row], repr=False)

    @property
    def rule(self) -> str:
        """c10's name for the rule that decided."""
        return self.row.rule.provenance

    @property
    def kernel(self) -> str | None:
        """The chosen kernel, or None."""
        return None if self.row.registration is None else self.row.registration.label

    @property
    def source(self) -> str | None:
        """``file:line`` of the chosen kernel's registration, or None."""
        return None if self.row.registration is None else self.row.registration.source

    def table(self) -> str:
        """Every row that has a kernel, one line each."""
        return "".join(f"{row}\n" for row in self.rows.values() if row.registration is not None)

    def diff(self, other: Explanation) -> str:
        """Rows in which two operators' tables (or one operator's, before and after) differ."""
        lines: list[str] = []
        for key in dict.fromkeys([*self.rows, *other.rows]):
            mine, yours = (str(e.rows[key]) if key in e.rows else f"{key}: (no such key)" for e in (self, other))
            if mine != yours:
                lines += [f"- {mine}", f"+ {yours}"]
        return "\n".join(lines)

    def __str__(self) -> str:
        return "\n".join(_render(self))


@dataclass(frozen=True, slots=True)
class CallExplanation:
    """What a Python function does: every operator it reached below autograd, in order, each with its first keys.

    ``collectives``: what it exchanged with other ranks, with bytes and lines.
    """

    name: str
    operators: tuple[Explanation, ...]
    collectives: tuple[Collective, ...] = ()

    def __str__(self) -> str:
        head = f"{self.name} reached {len(self.operators)} different operator call(s)"
        if self.collectives:
            total = sum(one.nbytes for one in self.collectives)
            head += f" and {len(self.collectives)} collective(s) of {total:,} bytes"
            head = "\n".join([head, *(str(one) for one in self.collectives)])
        return "\n\n".join([head, *(str(one) for one in self.operators)])


# -- hooks of the layers above -----------------------------------------------------------------------------------------

Section = Callable[[str, "str | None"], Sequence[str]]
_sections: list[Section] = []
_resolver: Callable[[str], BackendComponent | None] = component_of


def add_section(section: Section) -> Callable[[], None]:
    """Add lines to every explanation: ``section(op name, device or None)``. The result takes the section away again."""
    _sections.append(section)
    return lambda: _sections.remove(section)


def set_device_resolver(resolver: Callable[[str], BackendComponent | None]) -> None:
    """Say which registered backend a device string (``port:0``) means in our dispatcher; None for other devices."""
    global _resolver
    _resolver = resolver


# -- entry points ------------------------------------------------------------------------------------------------------


def explain(op: Any, /, *args: Any, dispatcher: dispatch.Dispatcher | None = None, **kwargs: Any) -> Any:
    """Explain a call: :class:`Explanation`, or for a Python function :class:`CallExplanation`.

    ``op``: an operator (name, ``torch.ops`` overload or packet, handle of our dispatcher) with its arguments, or with
    one device in their place (``explain("aten::add.Tensor", "cuda")``), or with nothing (its table). Any other callable
    is run once with the arguments. ``dispatcher``: look there instead of in PyTorch.
    Errors: ``DispatchError`` for an unknown operator, device or argument.
    """
    make_ready((*args, *kwargs.values()))
    if isinstance(op, Operator):
        return _explain_ours(op, args, kwargs)
    name = _name_of(op)
    if name is None:
        return _explain_callable(op, args, kwargs)
    if dispatcher is not None:
        return _explain_ours(dispatcher.operator(_canonical(name)), args, kwargs)
    stock = _find_stock(name, args, kwargs)
    ours = dispatch.default.operator_optional(stock.name if stock else _canonical(name))
    if stock is None:
        if ours is None:
            raise DispatchError(_unknown(name))
        return _explain_ours(ours, args, kwargs)
    explained = _explain_stock(stock, args, kwargs)
    if ours is not None:
        explained = dataclasses.replace(explained, also=_explain_ours(ours, args, kwargs))
    return explained


def explain_cli(op_name: str, device: str | None) -> str:
    """The text of ``torchport explain OP [--device DEVICE]``; a backend's name is a device, too. Errors as in
    :func:`explain`."""
    return str(explain(op_name) if device is None else explain(op_name, port_device(device)))


def _name_of(op: Any) -> str | None:
    if isinstance(op, str):
        return op
    name = getattr(op, "_qualified_op_name", None)  # torch.ops.aten.add
    if isinstance(name, str):
        return name
    if hasattr(op, "_schema") and callable(getattr(op, "name", None)):  # torch.ops.aten.add.Tensor
        return str(op.name())
    return None


def _canonical(name: str) -> str:
    """``aten::add.Tensor`` from that, ``aten.add.Tensor``, ``torch.ops.aten.add.Tensor``, ``add.Tensor`` or ``add``."""
    name = name.removeprefix("torch.ops.").removesuffix(".default")
    if "::" in name:
        return name
    parts = name.split(".")
    if len(parts) == 3:
        return f"{parts[0]}::{parts[1]}.{parts[2]}"
    if len(parts) == 2 and parts[0] in ("aten", "prims", "quantized", "mkldnn", "_c10d_functional"):
        return f"{parts[0]}::{parts[1]}"
    return f"aten::{name}"


def _unknown(name: str) -> str:
    import difflib

    known = [*stock_operator_names(), *(op.name for op in dispatch.default)]
    near = difflib.get_close_matches(_canonical(name), known, n=3)
    return f"no operator is named {name!r}" + (f"; did you mean {' or '.join(near)}?" if near else "")


# -- PyTorch's operators -----------------------------------------------------------------------------------------------


def _find_stock(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> StockOperator | None:
    """The operator of that name; without an overload, the one the arguments mean, else default, Tensor, the first."""
    import torch

    c = cast(Any, torch)._C
    name = _canonical(name)
    if not re.fullmatch(r"\w+::\w+(\.\w+)?", name):
        raise DispatchError(f"operator name {name!r}: write 'namespace::name' or 'namespace::name.overload'")
    base, _, overload = name.partition(".")
    every: list[str] = [] if overload else [s.overload_name for s in c._jit_get_schemas_for_operator(base)]
    # TorchScript has overloads of its own (add.int, add.str) that no dispatcher knows.
    overloads = [o for o in every if c._dispatch_has_kernel(f"{base}.{o}" if o else base)]
    if not overloads:
        return stock_operator(name)
    chosen = next((o for o in ("", "Tensor") if o in overloads), overloads[0])
    if (args or kwargs) and not _is_device(args, kwargs):
        try:
            chosen = c._jit_resolve_packet(base, *args, **kwargs)
        except RuntimeError as error:
            names = ", ".join(o or "default" for o in overloads)
            raise DispatchError(f"{base}: none of its overloads {names} takes these arguments") from error
    return stock_operator(base if chosen in ("", "default") else f"{base}.{chosen}")


def _explain_stock(stock: StockOperator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Explanation:
    import torch

    op = Operator(stock.name, KeyGetters(), stock.table.fallbacks)
    op.table.direct.update(stock.table.direct)
    device = _is_device(args, kwargs)
    if device is not None:
        arguments = _device_arguments(stock.schema, device_keys(device), device)
    else:
        arguments = _arguments(op, stock.schema, args, kwargs)
    explained = _explanation(
        op,
        stock.schema_text,
        _STOCK,
        arguments,
        *thread_keysets(),
        device,
        device_lines(stock.name, device, args, kwargs),
    )
    warnings = list(explained.warnings)
    try:
        cast(Any, torch)._C._dispatch_check_invariants(stock.name)
    except RuntimeError:
        warnings.append(
            "PyTorch's live table lags behind its registrations (it depends on their order); calls may go elsewhere"
        )
    return dataclasses.replace(explained, warnings=tuple(warnings))


def _is_device(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """The device that stands in for the arguments, if that is what was given."""
    if len(args) != 1 or kwargs:
        return None
    value = args[0]
    if isinstance(value, str) and re.fullmatch(r"[a-zA-Z_]\w*(:\d+)?", value):
        return value
    return str(value) if type(value).__name__ == "device" and type(value).__module__ == "torch" else None


# -- our operators -----------------------------------------------------------------------------------------------------


def _explain_ours(op: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Explanation:
    device = _is_device(args, kwargs)
    if device is not None:
        arguments = _device_arguments(op.schema, _our_device_keys(device), device)
    else:
        arguments = _arguments(op, op.schema, args, kwargs)
    lines = device_lines(op.name, device)
    return _explanation(op, str(op.schema or op.name), _OURS, arguments, *dispatch.local_keys(), device, lines)


def _our_device_keys(device: str) -> DispatchKeySet:
    component = _resolver(device) or dispatch.backends.get_optional(device.split(":", 1)[0])
    if component is not None:
        return dispatch.tensor_keys(component)
    return device_keys(device)


# -- common ------------------------------------------------------------------------------------------------------------


def _device_arguments(schema: Schema | None, keys: DispatchKeySet, device: str) -> list[ArgumentKeys]:
    if schema is None:
        return [ArgumentKeys("(tensors)", f"a tensor on {device}", keys)]
    found: list[ArgumentKeys] = []
    for argument in schema.arguments:
        if argument.carries_tensors and not argument.has_default and "?" not in argument.type:
            found.append(ArgumentKeys(argument.name, f"{argument.type} on {device}", keys))
    return found


def _arguments(
    op: Operator, schema: Schema | None, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[ArgumentKeys]:
    """What the arguments carry; by name where there is a schema. No arguments at all: nothing to bind."""
    getters = op.getters
    named: list[tuple[str, Any]] = []
    if schema is None:
        named = [(f"#{at}", value) for at, value in enumerate(args)] + list(kwargs.items())
    elif args or kwargs:
        positional, keywords = schema.bind(args, kwargs)
        pairs = zip(schema.positional, positional, strict=False)
        named = [(a.name, value) for a, value in pairs if a.carries_tensors]
        named += [(a.name, keywords[a.name]) for a in schema.arguments if a.name in keywords and a.carries_tensors]
    found: list[ArgumentKeys] = []
    for name, value in named:
        keys = DispatchKeySet.from_bits(getters[type(value)](value))
        if keys or schema is not None:
            found.append(ArgumentKeys(name, _describe(value), keys))
    return found


def _describe(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        items = cast("Sequence[Any]", value)
        return f"{type(items).__name__} of {len(items)}"
    if hasattr(value, "device") and hasattr(value, "shape"):
        return f"{type(value).__name__} {list(value.shape)} on {value.device}"
    return type(value).__name__


def _explanation(
    op: Operator,
    schema: str,
    origin: str,
    arguments: Sequence[ArgumentKeys],
    include: DispatchKeySet,
    exclude: DispatchKeySet,
    device: str | None,
    lines: Sequence[str],
) -> Explanation:
    union = DispatchKeySet()
    for argument in arguments:
        union |= argument.keys
    effective = LocalKeys(include.bits, exclude.bits).apply(union.bits)
    skipped = op.fallthrough_bits(effective)
    keyset = DispatchKeySet.from_bits(effective & ~skipped)
    key = row_key(keyset.bits)
    row = op.table.row(key)
    rows = op.rows()
    # A skipped functionality is shown with the call's backends, as a key people know.
    shown = DispatchKeySet.from_bits(skipped | (effective & dispatch.backends.mask))
    how = _stock_register if origin == _STOCK else None
    missing = row.registration is None
    return Explanation(
        op=op.name,
        schema=schema,
        origin=origin,
        arguments=tuple(arguments),
        union=union,
        include=include,
        exclude=exclude,
        fallthrough=shown,
        keyset=keyset,
        key=key,
        row=row,
        verdicts=tuple(examine(op.table, key)),
        chain=tuple(_chain(op, keyset)),
        warnings=tuple(_warnings(op, rows, keyset)),
        fixes=fixes(op, key, how) if missing else (),
        sections=(*lines, *(line for section in _sections for line in section(op.name, device))),
        rows=rows,
    )


def _stock_register(op: str, key: str) -> str:
    namespace, _, name = op.partition("::")
    return f"torch.library.Library({namespace!r}, 'IMPL').impl({name!r}, kernel, {key!r})"


def _chain(op: Operator, keyset: DispatchKeySet) -> list[ChainStep]:
    """The kernels in the order they run, until one computes, decomposes, or is missing."""
    steps: list[ChainStep] = []
    while True:
        key = row_key(keyset.bits)
        row = op.table.row(key)
        note = ""
        if row.registration is None:
            kernel, source, note = "none", "", "a call that gets here fails"
        else:
            kernel, source = row.registration.label, row.registration.where
            if row.is_fallthrough:
                note = "fallthrough: redispatching to it fails"
            elif key.functionality is Functionality.BackendSelect:
                note = "chooses a backend from the other arguments and dispatches anew"
            elif row.rule.id in ("composite_implicit", "composite_nested"):
                note = "written in other operators, which dispatch anew"
        steps.append(ChainStep(key, row.rule.provenance, kernel, source, note))
        if note or key.functionality < Functionality.BackendSelect:
            return steps
        keyset = keyset & DispatchKeySet.full_after(key)


def _warnings(op: Operator, rows: Mapping[DispatchKey, Row], keyset: DispatchKeySet) -> list[str]:
    winners = {id(row.registration) for row in rows.values()}
    found: list[str] = []
    for key, stack in op.table.direct.items():
        newest = stack[0]
        if id(newest) not in winners:
            found.append(
                f"unreachable: the kernel at {key} ({newest.source}) wins no key; others are nearer everywhere"
            )
        for older in stack[1:]:
            found.append(f"shadowed: at {key}, {older.source} is hidden by {newest.source}")
    found += _disabled_composites(op, rows)
    found += _missing_gradient(op, rows, keyset)
    return found


def _disabled_composites(op: Operator, rows: Mapping[DispatchKey, Row]) -> list[str]:
    composite = op.table.newest(IMPLICIT)
    if composite is None:
        return []
    found: list[str] = []
    for key, row in rows.items():
        below = dispatch.backend_from_autograd(key)
        blocker = op.table.any_in(below.bits)
        if blocker is None or row.registration is composite or row.rule.id == "direct":
            continue
        now = "ambiguous" if row.rule.id == "ambiguous" else row.rule.provenance
        found.append(
            f"the kernel at {blocker.key} ({blocker.source}) turns the composite ({composite.source}) off for {key}: "
            f"gradients there now come from: {now}"
        )
    return found


def _missing_gradient(op: Operator, rows: Mapping[DispatchKey, Row], keyset: DispatchKeySet) -> list[str]:
    component = keyset.backend
    if component is None:
        return []
    key = dispatch.autograd_from_backend(component)
    row = rows[key]
    kernel = op.table.any_in(dispatch.backend_from_autograd(key).bits) or op.table.newest(EXPLICIT)
    if kernel is None or row.rule.id not in ("fallback", "missing"):
        return []
    return [f"no gradient formula at {key}: there is a kernel at {kernel.key} ({kernel.source}), but none for autograd"]


# -- Python functions --------------------------------------------------------------------------------------------------


def _explain_callable(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CallExplanation:
    if not callable(function):
        raise DispatchError(f"explain({function!r}): neither an operator nor a callable")
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: dict[tuple[str, int], tuple[Any, Sequence[Any], Mapping[str, Any]]] = {}
    getters = KeyGetters()

    class DispatchRecorder(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            bits = 0
            for value in (*args, *kwargs.values()):
                bits |= getters[type(value)](value)
            seen.setdefault((func.name(), bits), (func, args, kwargs))
            return func(*args, **kwargs)

    kept = list(journal.records)  # so that no new record has the identity of one that has been dropped
    before = set(map(id, kept))
    with DispatchRecorder():
        function(*args, **kwargs)
    name = getattr(function, "__qualname__", None) or repr(function)
    exchanged = tuple(one for one in journal.records if id(one) not in before)
    return CallExplanation(name, tuple(explain(func, *a, **k) for func, a, k in seen.values()), exchanged)


# -- text --------------------------------------------------------------------------------------------------------------


def _names(keys: DispatchKeySet) -> str:
    names = [key.name for key in keys]
    autocast = [key.name for key in dispatch.DEFAULT_EXCLUDED]
    if set(autocast) <= set(names):
        names = [name for name in names if name not in autocast] + ["every Autocast key"]
    return ", ".join(names) or "-"


def _render(e: Explanation) -> list[str]:
    lines = [e.schema, f"  in {e.origin}", ""]
    width = max([len(argument.name) for argument in e.arguments] or [0])
    for argument in e.arguments:
        lines.append(f"  {argument.name:<{width}}  {argument.value}: {_names(argument.keys)}")
    lines += [
        *([""] if e.arguments else []),
        f"  union        {_names(e.union)}",
        f"  include      {_names(e.include)}",
        f"  exclude      {_names(e.exclude)}",
        f"  fallthrough  {_names(e.fallthrough)}",
        f"  key set      {_names(e.keyset)}",
        f"  key          {e.key}",
        "",
        f"  {e.key} → {e.row.registration.where if e.row.registration else 'no kernel'} [{e.rule}]",
    ]
    for verdict in e.verdicts:
        mark = {"chosen": "→", "passed over": "·", "not reached": " "}[verdict.outcome]
        said = "" if verdict.outcome == "chosen" else verdict.reason
        lines.append(f"    {mark} {verdict.rule.id}: {said or 'decides'}")
    lines += ["", "  if every kernel redispatches below itself:"]
    for step in e.chain:
        note = f"  ({step.note})" if step.note else ""
        what = step.source or step.kernel
        lines.append(f"    {step.key}: {what} [{step.provenance}]{note}")
    for title, items in (("warnings", e.warnings), ("fixes", e.fixes), ("", e.sections)):
        if items:
            lines += ["", *([f"  {title}:"] if title else []), *(f"    {item}" for item in items)]
    if e.also is not None:
        lines += ["", *_render(e.also)]
    return lines
