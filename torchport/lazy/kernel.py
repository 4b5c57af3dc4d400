"""One Python kernel per functional operator, generated from its schema: the hottest code of torchport.

A kernel makes the trace key from its arguments, looks it up under the cursor and returns a fresh handle. What the
schema tells is settled here, when the kernel is made: which arguments are tensors, which numbers may vary, what is
returned. A handle that died since the last step is handed out again (see ``trace.fill_pool``): measured on torch 2.13,
0.1 µs instead of 0.4 µs for a new one.
"""

from __future__ import annotations

import itertools
import keyword
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from ..backend.lowering import number_role
from . import trace
from .random import is_random
from .record import emit, record
from .tensor import IndexedLazyTensor, LazyTensor

__all__ = ["Kernel", "has_tensor_argument", "key_parts", "make_kernel", "supported_schema"]

_numbers_of_ops = itertools.count(1)

_TENSOR: Final = {"Tensor", "Optional[Tensor]"}
_TENSORS: Final = {"List[Tensor]", "List[Optional[Tensor]]"}
_IGNORED: Final = {"Device", "Optional[Device]"}
_PLAIN_LISTS: Final = {"List[int]", "List[bool]", "List[SymInt]"}
_OPTIONAL_LISTS: Final = {"Optional[List[int]]", "Optional[List[float]]", "List[float]"}
_PLAIN: Final = {
    "int", "Optional[int]", "bool", "Optional[bool]", "str", "Optional[str]", "ScalarType", "Optional[ScalarType]",
    "MemoryFormat", "Optional[MemoryFormat]", "Layout", "Optional[Layout]", "SymInt", "Optional[SymInt]",
}  # fmt: skip
_FLOATS: Final = {"float", "Optional[float]"}
_NUMBER: Final = {"number", "Optional[number]"}
_GENERATOR: Final = {"Generator", "Optional[Generator]"}
_KNOWN: Final = (
    _TENSOR | _TENSORS | _IGNORED | _PLAIN_LISTS | _OPTIONAL_LISTS | _PLAIN | _FLOATS | _NUMBER | _GENERATOR
    | {"List[number]"}
)  # fmt: skip
_TRACE_HELPERS: Final = ("leaf", "foreign", "tensors", "number", "filler", "numbers", "constant", "constants")


def _kind(argument: Any) -> str:
    return str(argument.real_type)


_DTYPE_CODES: Final = {4: torch.int64, 6: torch.float32, 7: torch.float64, 11: torch.bool}
"""c10's ``ScalarType`` numbers, which schemas give as the default of a dtype argument."""


class Argument:
    """A schema argument: its name (never a Python keyword), kind, default, and place in the trace key, if any."""

    def __init__(self, argument: Any) -> None:
        self.name: str = argument.name + "_" * keyword.iskeyword(argument.name)
        self.kind = _kind(argument)
        self.kwarg_only: bool = argument.kwarg_only
        self.has_default: bool = argument.has_default_value()
        default = argument.default_value
        self.default: Any = _DTYPE_CODES[default] if self.kind == "ScalarType" and self.has_default else default
        self.holds_tensors = self.kind in _TENSOR | _TENSORS
        self.is_device = self.kind in {"Device", "Optional[Device]"}
        self.part: int | None = None


def _arguments(op: torch._ops.OpOverload) -> tuple[Argument, ...]:
    """The schema's arguments; key parts are numbered in schema order, after the kernel's own number."""
    arguments = tuple(Argument(argument) for argument in op._schema.arguments)
    place = itertools.count(1)
    for argument in arguments:
        if argument.kind not in _IGNORED | _GENERATOR:
            argument.part = next(place)
    return arguments


def key_parts(op: torch._ops.OpOverload, key: Sequence[Any], other: Sequence[Any]) -> list[tuple[str, bool, Any, Any]]:
    """For each argument its name, whether it holds tensors, and its parts in two trace keys of the operator."""
    arguments = [argument for argument in _arguments(op) if argument.part is not None]
    return [(a.name, a.holds_tensors, key[a.part], other[a.part]) for a in arguments if a.part is not None]


@dataclass(eq=False)
class Kernel:
    """An operator as the trace sees it: ``fast`` serves device index 0, ``indexed`` takes the trace first."""

    op: torch._ops.OpOverload
    number: int
    arguments: tuple[Argument, ...]
    is_factory: bool
    fast: Callable[..., Any] = field(init=False)
    indexed: Callable[..., Any] = field(init=False)
    source: str = ""

    def __hash__(self) -> int:
        return self.number


def supported_schema(op: torch._ops.OpOverload) -> bool:
    """Whether every argument is of a type a trace key can hold, and every result a tensor."""
    returns = {str(r.type) for r in op._schema.returns}
    return (
        bool(returns)
        and returns <= {"Tensor", "List[Tensor]"}
        and all(_kind(a) in _KNOWN for a in op._schema.arguments)
    )


def has_tensor_argument(op: torch._ops.OpOverload) -> bool:
    """Whether the schema has a tensor anywhere; an op without one is a factory."""
    return any(_kind(a) in _TENSOR | _TENSORS for a in op._schema.arguments)


def _key_lines(argument: Argument, part: str, role: str) -> list[str]:
    """Statements that leave the key part of one argument in the local ``part``."""
    name, kind = argument.name, argument.kind
    if kind in _TENSOR:
        optional = "" if kind == "Tensor" else f"None if {name} is None else "
        return [
            f"if {name}.__class__ is _HANDLE:",
            f"    {part} = {name}.number - _base",
            f"    if {part} < 0: {part} = _leaf(_trace, {name})",
            f"else: {part} = {optional}_foreign(_trace, {name})",
        ]
    if kind in _NUMBER:
        convert = "_constant(" if role == "constant" else f"_{role}(_trace, "
        return [f"{part} = {name} if {name}.__class__ is int else {convert}{name})"]
    if kind == "List[number]":
        return [f"{part} = {'_constants(' if role == 'constant' else '_numbers(_trace, '}{name})"]
    if kind in _FLOATS:
        return [f"{part} = {name} if {name} == {name} and {name} != 0 else _constant({name})"]
    if kind in _TENSORS:
        return [f"{part} = _tensors(_trace, {name})"]
    if kind in _PLAIN_LISTS:
        return [f"{part} = tuple({name})"]
    if kind in _OPTIONAL_LISTS:
        return [f"{part} = None if {name} is None else tuple({name})"]
    return []


def _signature(arguments: Sequence[Argument]) -> tuple[str, str, str, dict[str, Any]]:
    """``(parameters, positional call, keyword call, defaults)``; PyTorch leaves out what has its default."""
    parameters: list[str] = []
    positional: list[str] = []
    keywords: list[str] = []
    defaults: dict[str, Any] = {}
    for argument in arguments:
        if argument.kwarg_only and "*" not in parameters:
            parameters.append("*")
        text = argument.name
        if argument.has_default:
            defaults[f"_default_{argument.name}"] = argument.default
            text += f"=_default_{argument.name}"
        parameters.append(text)
        if argument.kwarg_only:
            keywords.append(f"{argument.name!r}: {argument.name}")
        else:
            positional.append(argument.name)
    call = ", ".join(positional) + ("," if positional else "")
    return ", ".join(parameters), f"({call})", "{" + ", ".join(keywords) + "}", defaults


def _key_statements(kernel: Kernel, call: str) -> list[str]:
    """Statements that make ``_key`` from the arguments."""
    role = number_role(kernel.op)
    lines: list[str] = []
    parts = [str(kernel.number)]
    for position, argument in enumerate(kernel.arguments):
        part = f"_{position}"
        made = _key_lines(argument, part, role)
        lines += made
        if made:
            parts.append(part)
        elif argument.kind in _GENERATOR:
            lines.append(f"if {argument.name} is not None: return _with_generator(_trace, _K, {call})")
        elif argument.kind not in _IGNORED:
            parts.append(argument.name)
    if is_random(kernel.op):
        lines.append("_trace.keys.append(_trace.runtime.next_key())")
    return [*lines, f"_key = ({', '.join(parts)},)"]


def _result_statements(op: torch._ops.OpOverload, call: str) -> list[str]:
    """Statements that return handles from a node's pool (``node.ready``), where nothing else is to do."""
    lines = [
        "_ready = _node.ready",
        "if _ready is None:",
        f"    return _emit(_trace, _node, {call})",
        "_trace.cursor = _node",
    ]
    returns = [str(r.type) for r in op._schema.returns]
    if returns == ["List[Tensor]"]:
        return [
            *lines,
            "_m = 0",
            "_results = []",
            "for _r in _ready:",
            *("    " + line for line in _handle_statements("_r", "_m")),
            "    _results.append(_r)",
            "    _m += 1",
            "_trace.keep_all(_results)",
            "return _results",
        ]
    if len(returns) == 1:
        # One name for the pool's handle and the result: each name would count as a holder.
        lines = [line.replace("_ready", "_r") for line in lines]
        return [*lines, *_handle_statements("_r", "0"), "_trace.keep(_r)", "return _r"]
    names = [f"_r{position}" for position in range(len(returns))]
    lines.append(f"{', '.join(names)} = _ready")
    for position, name in enumerate(names):
        lines += _handle_statements(name, str(position))
    return [*lines, f"_results = ({', '.join(names)})", "_trace.keep_all(_results)", "return _results"]


def _handle_statements(name: str, offset: str) -> list[str]:
    """Statements that make ``name``, a handle of the pool, the result at ``offset``; one still held is replaced."""
    return [
        f"if _count({name}) > _ALONE or {name}._use_count() > 1: {name} = _fill_pool(_node, {offset})",
        f"{name}.number = _base + _node.number" + ("" if offset == "0" else f" + {offset}"),
    ]


def _references_alone() -> int:
    """What ``sys.getrefcount`` says in a kernel of a handle that only its node's pool holds."""

    class Holder:
        ready: object = None

    source = "def probe(_node):\n    _r = _node.ready\n    return _count(_r)"
    namespace: dict[str, Any] = {"_count": sys.getrefcount}
    exec(source, namespace)
    holder = Holder()
    holder.ready = object()
    return namespace["probe"](holder)


def _device_statements(kernel: Kernel, positional: str, keywords: str) -> list[str]:
    """Statements for an explicit ``device``: a factory runs on that device's trace, other results move there."""
    if kernel.is_factory:
        call = f"return _K.indexed(_threads.of(device.index), *{positional}, **{keywords})"
        return [f"if device is not None and device.index and device.index != _trace.index: {call}"]
    here = "device.type == 'port' and device.index in (None, _trace.index)"
    return [f"if device is not None and not ({here}): return _elsewhere(_trace, _K, {positional}, {keywords})"]


def _source(kernel: Kernel, fast: bool) -> tuple[str, dict[str, Any]]:
    """The kernel's Python source and the default values it names."""
    op = kernel.op
    parameters, positional, keywords, defaults = _signature(kernel.arguments)
    call = f"{positional}, {keywords}"
    lines = [
        "_base = _trace.base",
        *_key_statements(kernel, call),
        "_node = _trace.cursor.children.get(_key)",
        "if _node is None:",
        f"    return _record(_trace, _K, _key, {call})",
    ]
    lines += (
        _result_statements(op, call) if fast and not kernel.is_factory else [f"return _emit(_trace, _node, {call})"]
    )
    if any(argument.is_device for argument in kernel.arguments):
        lines[:0] = _device_statements(kernel, positional, keywords)
    if fast:
        lines.insert(0, "_trace = _threads.trace")
        header = f"def kernel({parameters}):"
    else:
        header = f"def kernel(_trace, {parameters}):"
    return "\n".join([header, *("    " + line for line in lines)]), defaults


_ALONE: Final = _references_alone()


def make_kernel(
    op: torch._ops.OpOverload, threads: Any, with_generator: Callable[..., Any], elsewhere: Callable[..., Any]
) -> Kernel:
    """The kernel of an operator.

    ``threads.trace`` must give the calling thread's trace of index 0, ``threads.of(index)`` that of an index;
    ``with_generator`` takes random ops that were given a generator, ``elsewhere`` ops with a result on another device.
    """
    kernel = Kernel(op, next(_numbers_of_ops), _arguments(op), not has_tensor_argument(op))
    helpers = {f"_{name}": getattr(trace, name) for name in _TRACE_HELPERS}
    for fast in (True, False):
        source, defaults = _source(kernel, fast)
        namespace: dict[str, Any] = {
            **helpers,
            **defaults,
            "_K": kernel,
            "_HANDLE": LazyTensor if fast else IndexedLazyTensor,
            "_threads": threads,
            "_with_generator": with_generator,
            "_elsewhere": elsewhere,
            "_record": record,
            "_emit": emit,
            "_count": sys.getrefcount,
            "_ALONE": _ALONE,
            "_fill_pool": trace.fill_pool,
        }
        exec(compile(source, f"<torchport kernel {op}>", "exec"), namespace)
        if fast:
            kernel.fast, kernel.source = namespace["kernel"], source
        else:
            kernel.indexed = namespace["kernel"]
    return kernel
