"""Operators that no delegate took: run one at a time with PyTorch's CPU kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..backend.arguments import check_arguments, gives_several
from ..backend.control_flow import CONTROL_FLOW
from ..backend.serialize import decode_arg, resolve_op
from ..core.errors import DelegateError, ErrorCode, GraphError
from .document import KernelRecord

__all__ = ["bind"]


class _Value:
    """Stands for a value's number among an operator's arguments."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


class _StandIns:
    """Indexing gives the stand-in: how :func:`decode_arg` meets references to values."""

    def __getitem__(self, number: int) -> _Value:
        return _Value(number)


def _filler(value: Any) -> Callable[[Sequence[Any]], Any] | None:
    """A function that puts values into a nested argument; ``None`` if there are none in it."""
    if isinstance(value, _Value):
        number = value.number
        return lambda values: values[number]
    if isinstance(value, list):
        parts = [(_filler(one), one) for one in value]
        if all(filler is None for filler, _ in parts):
            return None
        return lambda values: [one if filler is None else filler(values) for filler, one in parts]
    return None


def _is_value(value: object) -> bool:
    return isinstance(value, _Value)


def _misuse(kernel: KernelRecord, op: Any, args: list[Any], kwargs: dict[str, Any]) -> str:
    """Why an instruction cannot be one of a program; empty if it can."""
    if op in CONTROL_FLOW or op._schema.is_mutable:
        return f"operator {kernel.op} writes to its arguments or calls graphs; a program holds functional operators"
    try:
        check_arguments(op, args, kwargs, _is_value)
    except GraphError as error:
        return f"this program file is damaged: {error}; save it again"
    if gives_several(op) is not kernel.several:
        return f"this program file is damaged: {kernel.op} gives another number of results; save it again"
    return ""


def bind(kernel: KernelRecord) -> Callable[[Sequence[Any]], Any]:
    """A function from a method's values to the operator's result.

    Raises :class:`DelegateError` with ``OPERATOR_MISSING`` if this PyTorch does not have the operator.
    """
    try:
        op = resolve_op(kernel.op)
        args = decode_arg(list(kernel.args), _StandIns())
        kwargs = {key: decode_arg(value, _StandIns()) for key, value in kernel.kwargs.items()}
    except (GraphError, ValueError, TypeError, AttributeError, LookupError, RuntimeError) as error:
        raise DelegateError(
            f"operator {kernel.op} cannot run here: {error}; import the library that defines it, or lower the model "
            "again with this PyTorch",
            code=ErrorCode.OPERATOR_MISSING,
            debug_handles=(kernel.handle,),
        ) from error
    if why := _misuse(kernel, op, args, kwargs):
        raise DelegateError(why, code=ErrorCode.INVALID_PROGRAM, debug_handles=(kernel.handle,))
    positional = [(_filler(one), one) for one in args]
    named = {key: (_filler(one), one) for key, one in kwargs.items()}

    def run(values: Sequence[Any]) -> Any:
        filled = [one if filler is None else filler(values) for filler, one in positional]
        if not named:
            return op(*filled)
        return op(*filled, **{key: one if fill is None else fill(values) for key, (fill, one) in named.items()})

    return run
