"""One Python kernel per functional operator, generated from its schema: the hottest code of torchport.

A kernel makes the trace key from its arguments, looks it up under the cursor and returns a fresh handle. What the
schema tells is settled here, when the kernel is made: which arguments are tensors, which scalars may vary, what is
returned. In the steady state it returns what its node returned on the step before (``Node.ready``): a new handle would
take 0.4 µs, and its bookkeeping 0.1 µs.
"""

from __future__ import annotations

import functools
import itertools
import keyword
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from ..backend.lowering import scalar_role
from ..backend.random import is_random
from . import keys
from .handle import IndexedLazyTensor, LazyTensor
from .record import emit, record
from .trie import FLOAT, LIMITS

__all__ = ["Kernel", "by_op", "has_tensor_argument", "key_parts", "letters", "make_kernel", "supported_schema"]

_serials = itertools.count(1)

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
_SCALAR: Final = {"number", "Optional[number]"}
_GENERATOR: Final = {"Generator", "Optional[Generator]"}
_KNOWN: Final = (
    _TENSOR | _TENSORS | _IGNORED | _PLAIN_LISTS | _OPTIONAL_LISTS | _PLAIN | _FLOATS | _SCALAR | _GENERATOR
    | {"List[number]"}
)  # fmt: skip
_KEY_PARTS: Final = ("leaf", "foreign", "tensors", "sized", "filler", "scalars", "constant", "constants")


def _kind(argument: Any) -> str:
    return sys.intern(str(argument.real_type))


_DTYPE_CODES: Final = {4: torch.int64, 6: torch.float32, 7: torch.float64, 11: torch.bool}
"""c10's ``ScalarType`` numbers, which schemas give as the default of a dtype argument."""


class KernelArgument:
    """A schema argument: its name (never a Python keyword), kind, default, and place in the trace key, if any."""

    __slots__ = (
        "default", "has_default", "holds_tensors", "is_device", "is_list", "kind", "kwarg_only", "name", "part",
    )  # fmt: skip

    def __init__(self, argument: Any) -> None:
        self.name: str = argument.name + "_" * keyword.iskeyword(argument.name)
        self.kind = _kind(argument)
        self.kwarg_only: bool = argument.kwarg_only
        self.has_default: bool = argument.has_default_value()
        default = argument.default_value
        coded = self.kind in {"ScalarType", "Optional[ScalarType]"} and isinstance(default, int)
        self.default: Any = _DTYPE_CODES[default] if coded else default
        self.is_list = self.kind in _TENSORS
        self.holds_tensors = self.kind in _TENSOR or self.is_list
        self.is_device = self.kind in {"Device", "Optional[Device]"}
        self.part: int | None = None


def _arguments(op: torch._ops.OpOverload) -> tuple[KernelArgument, ...]:
    """The schema's arguments; the key holds the kernel's serial first, then its parts in schema order."""
    arguments = tuple(KernelArgument(argument) for argument in op._schema.arguments)
    place = itertools.count(1)
    for argument in arguments:
        if argument.kind not in _IGNORED | _GENERATOR:
            argument.part = next(place)
    return arguments


def key_parts(op: torch._ops.OpOverload, key: Sequence[Any], other: Sequence[Any]) -> list[tuple[str, bool, Any, Any]]:
    """For each argument its name, whether it holds tensors, and its parts in two trace keys of the operator."""
    arguments = [argument for argument in _arguments(op) if argument.part is not None]
    return [(a.name, a.holds_tensors, key[a.part], other[a.part]) for a in arguments if a.part is not None]


@dataclass(eq=False, slots=True)
class Kernel:
    """An operator as the trace sees it: ``fast`` serves device index 0, ``indexed`` takes the trace first."""

    op: torch._ops.OpOverload
    serial: int
    arguments: tuple[KernelArgument, ...]
    is_factory: bool
    takes_device: bool
    """Whether a call may ask for another device or bring a generator."""
    threads: Any
    """``of(index)``: the calling thread's trace of a device index; ``trace``: that of index 0."""
    with_generator: Callable[..., Any]
    """Runs a random operator that was given a generator."""
    elsewhere: Callable[..., Any]
    """Runs an operator whose result is wanted on another device."""
    mark: Callable[[Callable[..., Any]], Any]
    """Called with each function that is made for the operator, and again once it has its code."""
    fast: Callable[..., Any] = field(init=False)
    _indexed: Callable[..., Any] | None = field(init=False, default=None)
    tensor_parts: tuple[tuple[bool, int], ...] = field(init=False)
    """Of each argument that holds tensors: whether it is a list, and its place in the trace key."""

    def __post_init__(self) -> None:
        self.tensor_parts = tuple((a.is_list, a.part) for a in self.arguments if a.holds_tensors and a.part is not None)
        self.fast = _unwritten(self, True)

    @property
    def indexed(self) -> Callable[..., Any]:
        """The function that takes the trace first, made when it is first asked for: most programs have one device."""
        if self._indexed is None:
            self._indexed = _unwritten(self, False)
        return self._indexed

    def __hash__(self) -> int:
        return self.serial


def letters(kernel: Kernel) -> str | None:
    """The kinds of a kernel's arguments as ``native/follow.cpp`` knows them, one letter each.

    ``None`` if it draws a key.
    """
    if is_random(kernel.op):
        return None
    role = scalar_role(kernel.op)
    return "".join(_letter(argument, role) for argument in kernel.arguments)


def _letter(argument: KernelArgument, role: str) -> str:
    if argument.kind in _SCALAR:
        return {"scalar": "s", "filler": "f"}.get(role, "p")
    if argument.kind == "List[number]":
        return "p" if role == "constant" else "S"
    kinds = ((_TENSOR, "t"), (_TENSORS, "T"), (_GENERATOR, "g"), (_IGNORED, "d"))
    return next((letter for names, letter in kinds if argument.kind in names), "p")


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


def _takes_device(op: torch._ops.OpOverload) -> bool:
    return any(_kind(a) in _IGNORED | _GENERATOR or a.name == "pin_memory" for a in op._schema.arguments)


def _tensor_lines(name: str, kind: str, part: str, fast: bool, wraps: bool) -> list[str]:
    """Statements for a tensor's value id.

    Asking for the attribute and catching its absence costs a third of asking for the class, but 0.6 µs where it is
    absent: not for the arguments that take Python numbers, nor where a handle of another index has the attribute, too.
    """
    value_id = [f"{part} = {name}.value_id", f"if {part} < 0: {part} = _leaf(_trace, {name})"]
    other = f"{part} = _foreign(_trace, {name})"
    if wraps or not fast:
        lines = [f"if type({name}) is _HANDLE:", *_indented(value_id)]
        lines += [f"elif type({name}) is float and {name} - {name} == 0.0:", *_indented(_varying(name, part))] * wraps
        lines += [f"else: {other}"]
    else:
        lines = [f"try: {value_id[0]}", f"except AttributeError: {other}", "else:", f"    {value_id[1]}"]
    if kind == "Tensor":
        return lines
    return [f"if {name} is None: {part} = None", "else:", *_indented(lines)]


def _varying(name: str, part: str) -> list[str]:
    """Statements for a finite float that becomes a scalar input, as ``keys.scalar`` does it."""
    return [f"{part} = _FLOAT", f"_trace.scalar_inputs.append({name})"]


def _indented(lines: Sequence[str]) -> list[str]:
    return ["    " + line for line in lines]


def _tensors_lines(name: str, part: str) -> list[str]:
    """Statements for the value ids of a list of tensors; two is the most common length."""
    return [
        "try:",
        f"    if len({name}) == 2:",
        f"        _a, _b = {name}",
        f"        {part} = (_a.value_id, _b.value_id)",
        f"    else: {part} = tuple([_a.value_id for _a in {name}])",
        f"    if -1 in {part}: {part} = _tensors(_trace, {name})",
        f"except AttributeError: {part} = _tensors(_trace, {name})",
    ]


def _key_lines(argument: KernelArgument, part: str, role: str, fast: bool, wraps: bool) -> list[str]:
    """Statements that leave the key part of one argument in the local ``part``."""
    name, kind = argument.name, argument.kind
    if kind in _TENSOR:
        return _tensor_lines(name, kind, part, fast, wraps)
    if kind in _SCALAR:
        lines = [f"if type({name}) is int: {part} = {name}"]
        if role == "scalar":
            small = f"-{LIMITS[0]} <= {name} <= {LIMITS[0]}"
            lines += [f"elif type({name}) is float and {small}:", *_indented(_varying(name, part))]
        convert = {"constant": "_constant(", "scalar": "_sized(_trace, ", "filler": "_filler(_trace, "}[role]
        return [*lines, f"else: {part} = {convert}{name})"]
    if kind == "List[number]":
        return [f"{part} = {'_constants(' if role == 'constant' else '_scalars(_trace, '}{name})"]
    if kind in _FLOATS:
        return [f"{part} = {name} if {name} == {name} and {name} != 0 else _constant({name})"]
    if kind in _TENSORS:
        return _tensors_lines(name, part) if fast else [f"{part} = _tensors(_trace, {name})"]
    if kind in _PLAIN_LISTS:
        return [f"{part} = tuple({name})"]
    if kind in _OPTIONAL_LISTS:
        return [f"{part} = None if {name} is None else tuple({name})"]
    return []


def _signature(arguments: Sequence[KernelArgument]) -> tuple[str, str, str, dict[str, Any]]:
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


def _key_statements(kernel: Kernel, call: str, fast: bool) -> list[str]:
    """Statements that make ``_key`` from the arguments."""
    role = scalar_role(kernel.op)
    packet = getattr(torch.ops.aten, kernel.op._schema.name.removeprefix("aten::"), None)
    has_scalar_form = packet is not None and any("Scalar" in overload for overload in packet.overloads())
    lines: list[str] = []
    parts = [str(kernel.serial)]
    for position, argument in enumerate(kernel.arguments):
        part = f"_{position}"
        made = _key_lines(argument, part, role, fast, wraps=has_scalar_form and position > 0)
        lines += made
        if made:
            parts.append(part)
        elif argument.kind in _GENERATOR:
            lines.append(f"if {argument.name} is not None: return _with_generator(_trace, _K, {call})")
        elif argument.kind not in _IGNORED:
            parts.append(argument.name)
    if is_random(kernel.op):
        lines.append("_trace.random_keys.append(_trace.runtime.next_key())")
    return [*lines, f"_key = ({', '.join(parts)},)"]


def _device_statements(kernel: Kernel, positional: str, keywords: str) -> list[str]:
    """Statements for an explicit ``device``: a factory runs on that device's trace, other results move there."""
    if kernel.is_factory:
        call = f"return _K.indexed(_there, *{positional}, **{keywords})"
        other = "(_there := _threads.of(device.index)).index != _trace.index"
        return [f"if device is not None and device.index and device.index != _trace.index and {other}: {call}"]
    here = "device.type == 'port' and device.index in (None, _trace.index)"
    return [f"if device is not None and not ({here}): return _elsewhere(_trace, _K, {positional}, {keywords})"]


_FROM_POOL: Final = (
    "_ready = _node.ready",
    "if _ready is not None:",
    "    _trace.cursor = _node",
    "    return _ready",
)


def _source(kernel: Kernel, fast: bool) -> tuple[str, dict[str, Any]]:
    """The kernel's Python source and the default values it names."""
    parameters, positional, keywords, defaults = _signature(kernel.arguments)
    call = f"{positional}, {keywords}"
    pooled = fast and not kernel.is_factory
    lines = [
        *_key_statements(kernel, call, fast),
        "try: _node = _trace.cursor.children[_key]",
        "except KeyError: _node = None",
        "if _node is None:",
        f"    return _record(_trace, _K, _key, {call})",
        *(_FROM_POOL if pooled else ()),
        f"return _emit(_trace, _node, {call})",
    ]
    if any(argument.is_device for argument in kernel.arguments):
        lines[:0] = _device_statements(kernel, positional, keywords)
    interpreted = f"if _trace.direct: return _trace.runtime.run_direct(_trace, _K, {call})"
    if fast:
        lines[:0] = [
            "try: _trace = _threads.trace",
            "except AttributeError: _trace = None",
            "if _trace is None:",  # not made yet, or its operators are interpreted at once
            "    _trace = _threads.of(0)",
            f"    {interpreted}",
        ]
        header = f"def kernel({parameters}):"
    else:
        lines[:0] = [interpreted]
        header = f"def kernel(_trace, {parameters}):"
    return "\n".join([header, *_indented(lines)]), defaults


def make_kernel(
    op: torch._ops.OpOverload,
    threads: Any,
    with_generator: Callable[..., Any],
    elsewhere: Callable[..., Any],
    mark: Callable[[Callable[..., Any]], Any],
) -> Kernel:
    """The kernel of an operator. Its code is written when it is first called: a program calls a tenth of them.

    ``threads.of(index)`` must give the calling thread's trace of an index, and set ``threads.trace`` to that of 0;
    ``with_generator`` takes random ops that were given a generator, ``elsewhere`` ops with a result on another device.
    ``mark`` is called with each function, and again once it has its code.
    """
    by_op[op] = made = Kernel(
        op, next(_serials), _arguments(op), not has_tensor_argument(op), _takes_device(op), threads,
        with_generator, elsewhere, mark,
    )  # fmt: skip
    return made


by_op: Final[dict[torch._ops.OpOverload, Kernel]] = {}
"""The kernels that were made last, by their operators."""


_HELPERS: Final = {
    **{f"_{name}": getattr(keys, name) for name in _KEY_PARTS},
    "_FLOAT": FLOAT,
    "_record": record,
    "_emit": emit,
}
"""What the code of every kernel names."""


def _unwritten(kernel: Kernel, fast: bool) -> Callable[..., Any]:
    """A function whose first call gives it its code: whoever holds it, as PyTorch's dispatcher does, has the kernel."""
    namespace: dict[str, Any] = {}
    function = types.FunctionType(_first_call.__code__, namespace, "kernel")
    namespace["_write"] = functools.partial(_write, kernel, fast, function)
    kernel.mark(function)
    return function


def _first_call(*args: Any, **kwargs: Any) -> Any:
    """The code of a kernel that has none yet; the global names are the kernel's."""
    return globals()["_write"]()(*args, **kwargs)


def _write(kernel: Kernel, fast: bool, function: types.FunctionType) -> Callable[..., Any]:
    """Give a kernel's function its code, and the names that the code uses; two threads may do so at once."""
    source, names = _source(kernel, fast)
    function.__globals__.update(
        _HELPERS, _K=kernel, _threads=kernel.threads, _with_generator=kernel.with_generator,
        _elsewhere=kernel.elsewhere, _HANDLE=LazyTensor if fast else IndexedLazyTensor,
    )  # fmt: skip
    exec(compile(source, f"<torchport kernel {kernel.op}>", "exec"), function.__globals__, names)
    written: types.FunctionType = names["kernel"]
    kernel.mark(written)
    # The defaults first: until there is code that has such arguments, nothing looks at them.
    function.__defaults__, function.__kwdefaults__ = written.__defaults__, written.__kwdefaults__
    function.__code__ = written.__code__
    return function
