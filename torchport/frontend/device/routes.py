"""Backends' kernels at keys other than Dense: one PyTorch kernel per operator and key, routed by device index.

PyTorch has one PrivateUse1 key per functionality for all of this device's indices. When a backend registers a kernel
of Autograd, Sparse, SparseCsr, Quantized or NestedTensor, the operator gets a router at that key: it asks the
dispatcher for the kernel of the backend the tensors live on, and passes other calls on to PyTorch's own kernel.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch.utils._pytree import tree_leaves

from ...backend.registrar import BackendRegistrar, on_registered
from ...core.errors import MissingKernel
from ...dispatch import Functionality
from ...run.device_runtime import runtimes
from ...trace.handle import DEVICE_TYPE
from ...trace.layouts import is_sparse_here
from .inplace import overriding
from .opaque import opaque

__all__ = ["call_autograd_kernel", "install", "is_routed", "on_routed", "registrar_for", "to_stock_autograd"]

_OTHER_AUTOGRAD: Final = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradPrivateUse3)
"""Added to a key set, this key leads to PyTorch's own autograd kernel. That kernel is at every backend's autograd key,
and the bit of a backend above PrivateUse1 wins. It computes its callees' keys afresh, so the bit goes no further."""

_PYTHON_DISPATCHER: Final = torch._C.DispatchKey.PythonDispatcher


def to_stock_autograd(keys: Any) -> Any:
    """The key set that leads from a kernel at AutogradPrivateUse1 on to PyTorch's own autograd kernel.

    The Python dispatcher's key, which ``torch.compile`` has on while it traces, is removed: it would lead back here.
    """
    return (keys | _OTHER_AUTOGRAD).remove(_PYTHON_DISPATCHER)


_TORCH_KEYS: Final = {
    Functionality.AutogradFunctionality: "AutogradPrivateUse1",
    Functionality.Sparse: "SparsePrivateUse1",
    Functionality.SparseCsr: "SparseCsrPrivateUse1",
    Functionality.Quantized: "QuantizedPrivateUse1",
    Functionality.NestedTensor: "NestedTensorPrivateUse1",
}
_routed: Final[set[tuple[Any, str]]] = set()
on_routed: Final[list[Callable[[torch._ops.OpOverload, str], object]]] = []
"""Called with an operator and PyTorch's name of a key once there is a router."""
_libraries: Final[dict[str, torch.library.Library]] = {}
_inside = threading.local()


def install() -> None:
    """Start routing the kernels that backends register from now on."""
    if _route not in on_registered:
        on_registered.append(_route)


def _route(registrar: BackendRegistrar, op: torch._ops.OpOverload, functionality: Functionality) -> None:
    key = _TORCH_KEYS.get(functionality)
    if key is None or (op, key) in _routed:
        return
    _routed.add((op, key))
    library = _libraries.get(op.namespace)
    if library is None:
        library = _libraries[op.namespace] = torch.library.Library(op.namespace, "IMPL")
    autograd = functionality is Functionality.AutogradFunctionality
    router = _autograd_router(op) if autograd else _router(op, functionality, _own_kernel(op, functionality))
    with overriding():  # the device has kernels at some of these keys that refuse the operator
        library.impl(op.name().split("::")[1], opaque(router), key, with_keyset=True, allow_override=True)
    for tell in on_routed:
        tell(op, key)


def is_routed(op: torch._ops.OpOverload, key: str) -> bool:
    """Whether an operator has a router at a key, which has PyTorch's name."""
    return (op, key) in _routed


def registrar_for(args: Sequence[Any], kwargs: Mapping[str, Any]) -> BackendRegistrar | None:
    """The registrar of the backend that the first tensor of this device lives on."""
    first = args[0] if args else None
    if not _is_ours(first):  # the first argument mostly is; to search all takes longer than the rest
        first = next(filter(_is_ours, tree_leaves((args, kwargs))), None)
    if first is not None:
        return runtimes.get(first.device.index or 0).kernels
    device = kwargs.get("device")
    if isinstance(device, torch.device) and device.type == DEVICE_TYPE:
        return runtimes.get(device.index or 0).kernels
    return None


def _is_ours(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == DEVICE_TYPE


def _autograd_router(op: torch._ops.OpOverload) -> Callable[..., Any]:
    def router(keys: Any, *args: Any, **kwargs: Any) -> Any:
        return call_autograd_kernel(op, args, kwargs, lambda: op.redispatch(to_stock_autograd(keys), *args, **kwargs))

    return router


def call_autograd_kernel(
    op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], stock: Callable[[], Any]
) -> Any:
    """Call the Autograd kernel of the backend that an operator's tensors live on, or ``stock`` where it has none.

    The kernel may call the operator itself, for its forward: that call gets ``stock``.
    """
    running: set[Any] = _inside.__dict__.setdefault("running", set())
    registrar = None if op in running else registrar_for(args, kwargs)
    kernel = registrar.kernel(op, Functionality.AutogradFunctionality) if registrar is not None else None
    if kernel is None:
        return stock()
    running.add(op)
    try:
        return kernel(*args, **kwargs)
    finally:
        running.discard(op)


def _own_kernel(op: torch._ops.OpOverload, functionality: Functionality) -> Any:
    """The device's own kernel of an operator on COO tensors, which serves backends that have none."""
    if functionality is not Functionality.Sparse:
        return None
    return torch.library.get_kernel(op, _TORCH_KEYS[functionality])


def _router(op: torch._ops.OpOverload, functionality: Functionality, own: Any) -> Callable[..., Any]:
    def router(keys: Any, *args: Any, **kwargs: Any) -> Any:
        registrar = registrar_for(args, kwargs)
        kernel = registrar.kernel(op, functionality) if registrar is not None else None
        if kernel is None and own is not None and any(map(is_sparse_here, tree_leaves((args, kwargs)))):
            return own.call_boxed(keys, *args, **kwargs)
        if kernel is None:
            where = registrar.component.name if registrar is not None else DEVICE_TYPE
            raise MissingKernel(
                f"{op.name()}: backend {where!r} has no {functionality.name} kernel for it; register one with "
                f"registrar.impl({op.name()!r}, {functionality.name!r}, fn), or call .to_dense() first"
            )
        return kernel(*args, **kwargs)

    return router
