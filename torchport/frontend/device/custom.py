"""Operators of other libraries: Python bodies run as part of the program, CPU kernels run on the host.

PyTorch runs the body of a ``torch.library.custom_op`` below functionalization, on handles. A view is a value of its own
there, so a write to a view does not reach its base. PyTorch also refuses to functionalize an operator that writes to
its arguments. A body that is called where functionalization would be called sees the user's own tensors instead: its
operators join the trace, its views alias and its writes reach the arguments.

Private torch APIs used here: ``torch._library.custom_ops`` (the definitions, their kernels by device type),
``torch._library.utils`` (PyTorch's own check of what a body returns).
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from torch._library import custom_ops, utils
from torch.utils._pytree import tree_leaves, tree_map

from ...core.errors import UnsupportedOp
from ...core.fallback import note_fallback
from ...core.frames import user_line
from ...run import barriers
from ...trace.handle import DEVICE_TYPE, LazyTensor
from ...trace.wrapping import inner_of
from .opaque import opaque
from .patches import replace

if TYPE_CHECKING:
    from ...trace.trace import Trace

__all__ = ["first_port_tensor", "has_kernel", "hide", "install", "on_handles"]

has_kernel: Final = torch._C._dispatch_has_kernel_for_dispatch_key
"""PyTorch's own answer, which counts torchport's kernels, too; its compilers are given another one (:func:`hide`)."""

_FUNCTIONALIZE: Final = "Functionalize"
_taken: Final[set[str]] = set()
"""The names of the operators for which torchport has registered a kernel at Functionalize."""
_seen: Final[weakref.WeakSet[Any]] = weakref.WeakSet()
_NO_KERNEL: Final = f"it has a kernel for the CPU, and none for {DEVICE_TYPE}"


def install() -> None:
    """Register kernels for the custom operators that are defined, and for those that are defined later."""
    _take_those_to_come()
    _hide_from_compilers()
    for known in list(custom_ops.OPDEFS.values()):
        _take(known)


@functools.cache
def _take_those_to_come() -> None:
    definition: Any = custom_ops.CustomOpDef
    original = definition.register_kernel

    @functools.wraps(original)
    def register_kernel(self: Any, device_types: Any, fn: Any = None, /) -> Any:
        result = original(self, device_types, fn)
        if fn is not None:
            _take(self)
            return result

        def decorator(fn: Any) -> Any:
            made = result(fn)
            _take(self)
            return made

        return decorator

    replace("torch._library.custom_ops.CustomOpDef.register_kernel", register_kernel)


def on_handles(trace: Trace, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """An operator that reached the device and has no kernel there: on the host, if it is another library's.

    Raises :class:`UnsupportedOp` for PyTorch's own operators, and where the CPU has no kernel either.
    """
    if op.namespace == "aten" or op._schema.is_mutable:  # a write would go to memory that other values may share
        raise _unsupported(op)
    _require_host_kernel(op)
    note_fallback(op, user_line(), _NO_KERNEL)
    return barriers.on_host(trace, op, args, kwargs)


def _require_host_kernel(op: Any) -> None:
    if not torch._C._dispatch_has_computed_kernel_for_dispatch_key(op.name(), "CPU"):
        raise _unsupported(op)


def _unsupported(op: Any) -> UnsupportedOp:
    return UnsupportedOp(
        f"the {DEVICE_TYPE} device has no kernel for it and PyTorch has no decomposition. Write it with other "
        "operators, or run it on the CPU: x.cpu()",
        op=str(op),
        source=user_line(),
    )


@functools.cache
def _hide_from_compilers() -> None:
    """Hide torchport's kernels from PyTorch's compilers, which functionalize only operators without such a kernel."""

    @functools.wraps(has_kernel)
    def as_compilers_see_it(name: str, key: Any) -> bool:
        is_ours = name in _taken and key in (_FUNCTIONALIZE, torch._C.DispatchKey.Functionalize)
        return not is_ours and has_kernel(name, key)

    replace("torch._C._dispatch_has_kernel_for_dispatch_key", as_compilers_see_it)


def hide(op: Any) -> None:
    """Have PyTorch's compilers functionalize an operator as if torchport had registered no kernel at Functionalize."""
    _taken.add(op.name())


def _take(definition: Any) -> None:
    op = definition._opoverload
    if definition in _seen or has_kernel(op.name(), _FUNCTIONALIZE):
        return  # torchport's kernel, or the author's own
    others = torch.library.get_kernel(op, _FUNCTIONALIZE)

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        mine = first_port_tensor((args, kwargs))
        if mine is None:
            return others.call_boxed(keys, *args, **kwargs)
        body = _body(definition)
        if body is None:
            return _on_host(op, mine.device, args, kwargs)
        result = body(*args, **kwargs)
        if not op._schema.is_mutable:
            check: Any = utils._c_check_aliasing_constraint
            check(definition._name, args, kwargs, result, lambda: inspect.getmodule(definition._init_fn))
        return result

    definition._lib.impl(definition._name, opaque(kernel), _FUNCTIONALIZE, with_keyset=True)
    _seen.add(definition)
    hide(op)


def _body(definition: Any) -> Callable[..., Any] | None:
    """The Python code for this device's tensors, or ``None`` if there is only that for other devices."""
    bodies: Mapping[str | None, Callable[..., Any]] = definition._backend_fns
    return bodies.get(DEVICE_TYPE) or bodies.get(None)


def first_port_tensor(given: Any) -> torch.Tensor | None:
    """The first wrapper of a handle among the values; compilers trace with wrappers of other tensors."""
    for value in tree_leaves(given):
        wrapped = isinstance(value, torch.Tensor) and torch._is_functional_tensor(value)
        if wrapped and isinstance(inner_of(value), LazyTensor):
            return value
    return None


def _on_host(op: Any, device: torch.device, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operator on CPU copies. Results move to the device; what was written is copied back into the arguments."""
    _require_host_kernel(op)
    _refuse_overlap(op, args, kwargs)
    note_fallback(op, user_line(), _NO_KERNEL)
    copies: dict[int, torch.Tensor] = {}

    def host(value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in copies:  # a tensor that is given twice has one copy
            copies[id(value)] = value.cpu()
        return copies[id(value)]

    given = tree_map(host, [list(args), dict(kwargs)])
    results = op(*given[0], **given[1])
    for target in _written(op, args, kwargs):
        target.copy_(copies[id(target)])
    return tree_map(lambda value: value.to(device) if isinstance(value, torch.Tensor) else value, results)


def _written(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors among the arguments that the schema says are written."""
    found: list[torch.Tensor] = []
    for at, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[at] if at < len(args) else kwargs.get(argument.name)
            found += [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return found


def _refuse_overlap(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise :class:`UnsupportedOp` if a written tensor shares memory with another one: their copies would not share."""
    tensors = {id(leaf): leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
    bases = [id(tensor._base) if tensor._is_view() else id(tensor) for tensor in tensors.values()]
    written = {id(tensor._base) if tensor._is_view() else id(tensor) for tensor in _written(op, args, kwargs)}
    if any(bases.count(base) > 1 for base in written):
        raise UnsupportedOp(
            "it writes to a tensor that shares memory with another argument, and has a kernel for the CPU alone; pass "
            "clones, or move the tensors to the CPU first",
            op=str(op),
            source=user_line(),
        )
