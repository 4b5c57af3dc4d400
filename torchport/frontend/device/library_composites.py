"""Composite operators of other libraries: their bodies run on the program's own tensors.

PyTorch runs a kernel at ``CompositeExplicitAutograd`` below functionalization, on handles. A tensor that the body makes
(``torch.ones(…, device=x.device)``) comes back as a shallow copy of a handle, and the copy belongs to no trace. So the
body is called where functionalization would be called, like the body of a ``torch.library.custom_op``: its operators
join the trace, its views alias and its writes reach the arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import torch
from torch._library import custom_ops

from ...core.errors import UnsupportedOp
from ...core.frames import user_line
from .custom import first_port_tensor, hide
from .opaque import opaque
from .patches import replace

__all__ = ["install"]

_EXPLICIT: Final = torch._C.DispatchKey.CompositeExplicitAutograd
_PYTORCHS: Final = frozenset(
    {"aten", "prims", "rngprims", "prim", "profiler", "c10d", "_c10d_functional", "_c10d_functional_autograd", "fsdp"}
)
"""Namespaces of PyTorch's own operators: the device has kernels for these, or their bodies are for compilers."""
_CANNOT_FOLLOW: Final = "We only support functionalizing operators whose outputs do not have alias annotations"
_libraries: Final[dict[str, torch.library.Library]] = {}


def install() -> None:
    """Register kernels for the composites that are defined, and for those that are defined later."""
    _take_those_to_come()
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, short = name.partition("::")
        if _is_composite(name):
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
        if (dispatch_key or self.dispatch_key) == "CompositeExplicitAutograd":
            named: str = op_name.name() if isinstance(op_name, torch._ops.OpOverload) else op_name
            short = named.rpartition("::")[2]
            name = f"{self.ns}::{short}"
            if _is_composite(name):
                _take(self, name, short)

    replace("torch.library.Library.impl", impl)


def _is_composite(name: str) -> bool:
    """Whether an operator has a body for all devices, and no kernel at Functionalize or PrivateUse1."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return (
        name.partition("::")[0] not in _PYTORCHS
        and name not in custom_ops.OPDEFS  # custom.py's
        and has_kernel(name, "CompositeExplicitAutograd")
        and not has_kernel(name, "Functionalize")
        and not has_kernel(name, "PrivateUse1")
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
        if first_port_tensor((args, kwargs)) is None or torch._C._dispatch_has_kernel_for_dispatch_key(
            op.name(), "PrivateUse1"
        ):
            return below.call_boxed(keys, *args, **kwargs)
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
