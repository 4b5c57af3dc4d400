"""Arguments of operators that come from a file, compared with the operator's schema before PyTorch sees them.

PyTorch's own parser does not look at everything: a number where a dtype, a layout or a memory format belongs is taken
for the enumeration's value, and one out of range ends the process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from ..core.errors import GraphError

__all__ = ["check_arguments", "gives_several"]

Check = Callable[[Any], bool]

_LARGEST: Final = 1 << 63
_REFUSED: Final = {
    "aten::from_file": "reads or makes a file",
    "aten::_reshape_alias": "shows memory without looking whether it is there; use as_strided",
    "aten::_reshape_alias_copy": "shows memory without looking whether it is there; use as_strided",
    "aten::_pin_memory": "is for an accelerator's memory",
}
"""Operators that no program holds, and why: what they do does not depend on their arguments' values alone."""
_NO_DTYPE: Final = ("q", "bits")
"""What the names of dtypes begin with that CPU kernels do not look for before they use them."""


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and -_LARGEST <= value < _LARGEST


def _is_number(value: Any) -> bool:
    return isinstance(value, (float, complex)) or _is_int(value)


def _is_float(value: Any) -> bool:
    return isinstance(value, float) or _is_int(value)


def _is_dtype(value: Any) -> bool:
    return isinstance(value, torch.dtype) and not str(value).removeprefix("torch.").startswith(_NO_DTYPE)


_KINDS: Final[Mapping[str, Check]] = {
    "int": _is_int,
    "SymInt": _is_int,
    "float": _is_float,
    "SymFloat": _is_float,
    "number": _is_number,
    "bool": lambda value: isinstance(value, bool) or (_is_int(value) and value in (0, 1)),
    "str": lambda value: isinstance(value, str),
    "complex": _is_number,
    "ScalarType": _is_dtype,
    "Layout": lambda value: value is torch.strided,
    "MemoryFormat": lambda value: isinstance(value, torch.memory_format),
    "Device": lambda value: isinstance(value, torch.device) and value.type == "cpu",
    "Generator": lambda value: False,
}
"""What an argument of a kind may be, besides a value of the program. Other kinds are none of a program's."""
_TAKE_VALUES: Final = {"Tensor", "number"}
_OF_VALUES: Final = {"Tensor", "List[Tensor]", "number"}
"""What an operator may give: ``aten.item`` gives a number, which others take."""


def _check_of(kind: str, is_value: Check) -> Check:
    """Whether something may be an argument of a kind, such as ``Optional[List[int]]``."""
    outer, _, rest = kind.partition("[")
    if outer in ("Optional", "List"):
        inner = _check_of(rest[:-1], is_value)
        if outer == "Optional":
            return lambda value: value is None or inner(value)
        return lambda value: (
            all(map(inner, value)) if isinstance(value, (list, tuple)) else rest != "Tensor]" and inner(value)
        )  # one number stands for each of a fixed number of them
    plain = _is_number if kind == "Tensor" else _KINDS.get(kind)  # PyTorch makes a tensor of a number
    if kind in _TAKE_VALUES:
        return lambda value: is_value(value) or (plain is not None and plain(value))
    return (lambda value: False) if plain is None else plain


@functools.lru_cache(4096)
def _expected(op: Any, is_value: Check) -> tuple[list[tuple[str, str, Check]], int, set[str]]:
    """Per argument its name, its kind and what it may be; how many may be given by position; which must be given."""
    schema = op._schema
    if schema.name in _REFUSED:
        raise GraphError(f"{op} {_REFUSED[schema.name]}")
    if not schema.returns or any(str(one.type) not in _OF_VALUES for one in schema.returns):
        raise GraphError(f"{op} does not give tensors")
    found = [(one.name, str(one.real_type), _check_of(str(one.real_type), is_value)) for one in schema.arguments]
    positional = sum(not one.kwarg_only for one in schema.arguments)
    return found, positional, {one.name for one in schema.arguments if not one.has_default_value()}


def check_arguments(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], is_value: Check) -> None:
    """Raise :class:`GraphError` unless the schema of an ``OpOverload`` takes these arguments and gives tensors.

    ``is_value`` tells what stands for a value of the program, which may be any tensor. It must be the same function in
    every call: what was found about an operator is remembered.
    """
    expected, positional, needed = _expected(op, is_value)
    if len(args) > positional:
        raise GraphError(f"{op} takes {positional} arguments by position, but is given {len(args)}")
    given = {expected[at][0]: value for at, value in enumerate(args)}
    known = {name: (kind, check) for name, kind, check in expected}
    for name, value in kwargs.items():
        if name not in known or name in given:
            raise GraphError(f"{op} has no argument {name[:80]!r}, or is given it twice")
        given[name] = value
    if missing := needed.difference(given):
        raise GraphError(f"{op} misses its argument {min(missing)!r}")
    for name, value in given.items():
        kind, check = known[name]
        if not check(value):
            raise GraphError(f"{op}: its argument {name!r} is of kind {kind}, which {str(value)[:80]!r} is not")


def gives_several(op: Any) -> bool:
    """Whether an ``OpOverload``'s result is several tensors, or a list of them."""
    returns = op._schema.returns
    return len(returns) != 1 or str(returns[0].type).startswith("List")
