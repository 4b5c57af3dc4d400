"""Operators of other libraries with code that is called below functionalization: composites, kernels for this device.

PyTorch runs a kernel at ``CompositeExplicitAutograd`` below functionalization, on handles. A tensor that the body makes
(``torch.ones(…, device=x.device)``) comes back as a shallow copy of a handle, and the copy belongs to no trace. So the
body is called where functionalization would be called, like the body of a ``torch.library.custom_op``: its operators
join the trace, its views alias and its writes reach the arguments.

A kernel at ``PrivateUse1`` does run on handles, as its author has chosen. Functionalization wraps every tensor that
such a kernel gives, also one of the CPU: its wrapper has no memory, and PyTorch's kernels for the CPU would read and
write there. So those are taken out of their wrappers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import torch
from torch._library import custom_ops
from torch.utils._pytree import tree_map_only

from ...core.errors import UnsupportedOp
from ...core.frames import user_line
from ...trace.handle import LazyTensor
from ...trace.wrapping import inner_of
from .custom import first_port_tensor, has_kernel, hide
from .opaque import opaque
from .patches import replace

__all__ = ["install"]

_EXPLICIT: Final = torch._C.DispatchKey.CompositeExplicitAutograd
_KEYS: Final = ("CompositeExplicitAutograd", "PrivateUse1")
_PYTORCHS: Final = frozenset(
    {"aten", "prims", "rngprims", "prim", "profiler", "c10d", "_c10d_functional", "_c10d_functional_autograd", "fsdp"}
)
"""Namespaces of PyTorch's own operators: the device has kernels for these, or their bodies are for compilers."""
_CANNOT_FOLLOW: Final = "We only support functionalizing operators whose outputs do not have alias annotations"
_libraries: Final[dict[str, torch.library.Library]] = {}


def install() -> None:
    """Register kernels for the operators that have such code, and for those that get some later."""
    _take_those_to_come()
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, short = name.partition("::")
        if _is_to_be_taken(name):
            library = _libraries.get(namespace)
            if library is None:
                library = _libraries[namespace] = torch.library.Library(namespace, "IMPL")
            _take(library, name, short)


@functools.cache
def _take_those_to_come() -> None:
    original = torch.library.Library.impl

    @functools.wraps(original)
    def impl(self: Any, op_name: Any, fn: Any, dispatch_key: str = "", **options: Any) -> None:
        original(self, op_name, fn, dispatch_key, **options)
        if (dispatch_key or self.dispatch_key) in _KEYS:
            named: str = op_name.name() if isinstance(op_name, torch._ops.OpOverload) else op_name
            short = named.rpartition("::")[2]
            name = f"{self.ns}::{short}"
            if _is_to_be_taken(name):
                _take(self, name, short)

    replace("torch.library.Library.impl", impl)


def _is_to_be_taken(name: str) -> bool:
    """Whether an operator has a body for all devices or a kernel for this one, and no kernel at Functionalize.

    torchport's own kernel there counts: PyTorch before 2.13 refuses a second one, and later ones would call the first.
    """
    return (
        name.partition("::")[0] not in _PYTORCHS
        and name not in custom_ops.OPDEFS  # custom.py's
        and any(has_kernel(name, key) for key in _KEYS)
        and not has_kernel(name, "Functionalize")
    )


def _take(library: torch.library.Library, name: str, short: str) -> None:
    """Register a kernel at Functionalize, which lives as long as the library."""
    packet, _, overload = name.partition(".")
    namespace, _, base = packet.partition("::")
    op: Any = getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")
    below = torch.library.get_kernel(op, "Functionalize")
    library.impl(short, opaque(_above(op, below)), "Functionalize", with_keyset=True)
    hide(op)


def _above(op: Any, below: Any) -> Callable[..., Any]:
    def call(keys: Any, *args: Any, **kwargs: Any) -> Any:
        if first_port_tensor((args, kwargs)) is None:
            return below.call_boxed(keys, *args, **kwargs)
        if has_kernel(op.name(), "PrivateUse1"):
            return tree_map_only(torch.Tensor, _without_empty_wrapper, below.call_boxed(keys, *args, **kwargs))
        try:
            return op._op_dk(_EXPLICIT, *args, **kwargs)
        except RuntimeError as error:
            if _CANNOT_FOLLOW not in str(error):
                raise
            raise UnsupportedOp(
                f"an operator inside it writes to its arguments, and has neither Python code nor a kernel for this "
                f"device: {str(error).partition('. ')[0]}. Define it with torch.library.custom_op",
                op=str(op),
                source=user_line(),
            ) from error

    return call


def _without_empty_wrapper(value: torch.Tensor) -> torch.Tensor:
    """A tensor as the program may have it: functionalization's wrapper of another device's tensor has no memory."""
    if not torch._is_functional_tensor(value):
        return value
    inner = inner_of(value)
    return value if isinstance(inner, LazyTensor) else inner
