"""Kernels that a program gives a backend for the operators of its own libraries: :func:`kernel`.

An operator of ``torch.library`` has a schema and a fake implementation. With a kernel it is part of the backend's
graphs like any other operator, on every way into torchport. A backend that
:attr:`~torchport.Capabilities.holds_kernels` finds the kernel on the node (``meta["kernel"]``), and
:class:`.LoweringContext` calls it for one that lowers node by node. Other backends run it at once, on CPU tensors.
"""

from __future__ import annotations

import hashlib
import inspect
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import torch

from ..core.errors import DispatchError
from ..core.forks import guarded_lock

__all__ = ["OwnKernel", "given_kernels", "kernel", "kernels_of", "on_added", "resolve_operator"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, eq=False)
class OwnKernel:
    """A kernel for an operator on one backend. ``digest`` tells it from others, as part of the compile cache's key."""

    op: torch._ops.OpOverload
    fn: Callable[..., Any]
    digest: str


_kernels: Final[dict[str, dict[Any, OwnKernel]]] = {}
_lock: Final = guarded_lock()
on_added: Final[list[Callable[[str, OwnKernel], None]]] = []
"""Called with a backend's name and the kernel that was added for it."""


def kernels_of(backend: str) -> Mapping[Any, OwnKernel]:
    """The kernels given for a backend, by operator overload; those added later appear in it."""
    return _kernels.setdefault(backend, {})


def given_kernels() -> list[OwnKernel]:
    """Every kernel that was given, for whichever backend."""
    with _lock:
        return [own for table in _kernels.values() for own in table.values()]


def kernel(op: Any, *, backend: str) -> Callable[[_Function], _Function]:
    """A decorator: the function computes an operator of ``torch.library`` on one backend, inside its graphs.

    ``op``: the operator, as ``torch.ops.lib.name``, ``"lib::name"`` or what ``torch.library.custom_op`` gave. It must
    be functional and have a fake implementation (``torch.library.register_fake``). The function gets the operator's
    arguments: JAX arrays while the graph is traced on ``xla`` (so it may call Pallas), CPU tensors on ``reference``,
    the engine's values on a backend that lowers with a :class:`.LoweringTable`. On a backend without
    :attr:`~torchport.Capabilities.holds_kernels` it gets CPU tensors and runs between two computations. A second
    kernel takes the first one's place. Raises :class:`DispatchError` for operators that cannot have one.
    """
    overload = resolve_operator(op)
    _require_functional(overload)

    def enter(fn: _Function) -> _Function:
        made = OwnKernel(overload, fn, _digest(fn))
        with _lock:
            table = _kernels.setdefault(backend, {})
            before = table.get(overload)
            table[overload] = made
        try:
            for notify in on_added:
                notify(backend, made)
        except BaseException:
            with _lock:
                table.pop(overload)
                if before is not None:
                    table[overload] = before
            raise
        return fn

    return enter


def resolve_operator(op: Any) -> torch._ops.OpOverload:
    """The overload that a name or an object of PyTorch's means. Raises :class:`DispatchError` for anything else."""
    if isinstance(op, torch._ops.OpOverload):
        return op
    found: Any = None
    if hasattr(op, "overloads"):  # a packet of overloads
        found = getattr(op, "default", None)
    elif isinstance(op, str):
        namespace, _, rest = op.rpartition("::") if "::" in op else ("aten", "", op.removeprefix("aten."))
        base, _, overload = rest.partition(".")
        found = getattr(getattr(getattr(torch.ops, namespace), base, None), overload or "default", None)
    else:
        found = getattr(op, "_opoverload", None)  # of torch.library.custom_op
    if not isinstance(found, torch._ops.OpOverload):
        raise DispatchError(
            f"PyTorch has no operator {op!r}; write it as 'aten::add.Tensor' or torch.ops.aten.add.Tensor"
        )
    return found


def _require_functional(op: torch._ops.OpOverload) -> None:
    if op.namespace in ("aten", "prims"):
        raise DispatchError(
            f"{op.name()} is PyTorch's own operator: a backend takes it with supports(), or registers a kernel for it "
            f"with registrar.impl({op.name()!r}, 'Dense', fn)",
            op=op.name(),
        )
    if any(argument.alias_info is not None for argument in op._schema.arguments):
        raise DispatchError(
            f"{op.name()} writes to an argument or returns a view of one, and graphs hold functional operators only; "
            "give the kernel to an operator that returns a new tensor",
            op=op.name(),
        )
    if not op._schema.returns or any("Tensor" not in str(one.type) for one in op._schema.returns):
        raise DispatchError(f"{op.name()} returns something else than tensors", op=op.name())


def _digest(fn: Callable[..., Any]) -> str:
    """Equal for functions that compute the same, as far as text, defaults and closures tell; other processes' too."""
    parts = [getattr(fn, "__module__", ""), getattr(fn, "__qualname__", type(fn).__qualname__)]
    try:
        parts.append(inspect.getsource(fn))
    except (OSError, TypeError):
        code = getattr(fn, "__code__", None)
        parts.append(repr((code.co_code, code.co_consts)) if code is not None else f"{_PROCESS} {id(fn)}")
    parts.append(_shown(getattr(fn, "__defaults__", None)))
    parts.append(_shown(getattr(fn, "__kwdefaults__", None)))
    parts += [_shown(_contents(cell)) for cell in getattr(fn, "__closure__", None) or ()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


_PROCESS: Final = secrets.token_hex(8)
"""Stands beside what only this process can tell apart."""


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not bound yet
        return None


def _shown(value: Any) -> str:
    """A value as text: plain data by what it is, a function by its digest, anything else by its identity."""
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_shown, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key!r}: {_shown(one)}' for key, one in value.items())}}}"
    if inspect.ismodule(value):
        return value.__name__
    code = getattr(value, "__code__", None)
    if code is not None:
        return f"{value.__qualname__} {hashlib.sha256(code.co_code).hexdigest()} {code.co_consts!r}"
    return f"{type(value).__qualname__} {_PROCESS} {id(value)}"
