"""Operators on a ``DTensor`` and a plain tensor of the device, such as a loss in parts times a factor.

PyTorch takes a tensor of one element, or any under ``implicit_replication()``, for one that is replicated. Here such an
operator would reach functionalization first, for the plain tensor's sake, which would wrap the ``DTensor`` that comes
out as a plain tensor. So the plain ones become ``DTensor``s before: at a dispatch key that comes above all others, and
that only tensors with a ``__torch_dispatch__`` carry, so operators on plain tensors pay nothing.

Private torch APIs used here: ``torch._C._dispatch_get_all_op_names``, ``torch._C._dispatch_key_parse``,
``torch._C._ExcludeDispatchKeyGuard``,
``torch._C._dispatch_has_kernel_for_dispatch_key``, ``torch.distributed.tensor.DTensor._op_dispatcher``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch.utils._pytree import tree_map_only

from ...core import releases
from ...trace.handle import DEVICE_TYPE, LazyTensor
from ...trace.wrapping import inner_of
from ..device.inplace import overriding
from ..device.opaque import opaque
from ..device.registered import KEPT_WHOLE, aten_operator

__all__ = ["install"]

_KEY: Final = "PythonTLSSnapshot"
_KEYS: Final = torch._C.DispatchKeySet(torch._C._dispatch_key_parse(_KEY))
_PAST_FUNCTIONALIZATION: Final = _KEYS | torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize)
_STAYS: Final = releases.version() < (2, 13)
"""Whether a call that leaves the key out fails an assertion of PyTorch's: its kernel there has to be passed."""
_library: Final[list[torch.library.Library]] = []


def install(module: Any) -> None:
    """Register the kernels, once in a process, for operators of several tensors that PyTorch does not decompose.

    ``module``: ``torch.distributed.tensor``.
    """
    if _library:
        return
    library = torch.library.Library("aten", "IMPL")
    _library.append(library)
    with overriding():
        for name in torch._C._dispatch_get_all_op_names():
            short = name.removeprefix("aten::")
            apart = torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
            if short == name or (apart and name not in KEPT_WHOLE):
                continue
            op = aten_operator(name)
            if op is not None and _takes_several(op):
                stock = torch.library.get_kernel(op, _KEY)
                library.impl(short, opaque(_for_all_in_parts(module, op, stock)), _KEY, with_keyset=True)
    for name in ("_fused_adam_.tensor_lr", "_fused_adamw_.tensor_lr"):
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "Meta"):
            library.impl(name, opaque(_gives_nothing), "Meta")


def _gives_nothing(*_: Any, **__: Any) -> None:
    """The shapes of what an operator gives that only writes.

    PyTorch has this for the same optimizers with a rate that is a number. Without it a ``DTensor`` asks the device's
    own kernel, in a place where it has no values.
    """


def _takes_several(op: Any) -> bool:
    types = [kind for argument in op._schema.arguments if "Tensor" in (kind := str(argument.type))]
    return len(types) > 1 or any(kind.startswith("List") for kind in types)


def _for_all_in_parts(module: Any, op: Any, stock: Any) -> Callable[..., Any]:
    """The kernel: plain tensors that are read, or are in a list, become replicated ones of the ``DTensor``s' mesh."""
    cls = module.DTensor
    arguments = op._schema.arguments
    written = [bool(argument.alias_info and argument.alias_info.is_write) for argument in arguments]
    given_out = any(argument.kwarg_only and flag for argument, flag in zip(arguments, written, strict=True))
    slots = [at for at, argument in enumerate(arguments) if str(argument.type) in ("Tensor", "Optional[Tensor]")]

    of_a_number = getattr(op.overloadpacket, op._overloadname.replace("Tensor", "Scalar"), None) if _STAYS else None

    def as_it_was(keys: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if any(at < len(args) and isinstance(args[at], (int, float, complex)) for at in slots):
            if of_a_number is not None and isinstance(args[0], torch.Tensor):
                return of_a_number(*args, **kwargs)
            with torch._C._ExcludeDispatchKeyGuard(_KEYS):  # a number for a tensor is nothing that a kernel takes
                return op(*args, **kwargs)
        return stock.call_boxed(keys, *args, **kwargs)

    def past_functionalization(keys: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if _STAYS:
            return stock.call_boxed(keys.remove(torch._C.DispatchKey.Functionalize), *args, **kwargs)
        with torch._C._ExcludeDispatchKeyGuard(_PAST_FUNCTIONALIZATION):
            return op(*args, **kwargs)

    def call(keys: Any, *args: Any, **kwargs: Any) -> Any:
        mesh = _mesh_among(cls, (*args, *kwargs.values()) if kwargs else args)
        if mesh is None or given_out:
            return as_it_was(keys, args, kwargs)
        if op in cls._op_dispatcher._custom_op_handlers:  # as that of ``loss_parallel``, which takes plain tensors
            return past_functionalization(keys, args, kwargs)
        whole = [module.Replicate()] * mesh.ndim
        changed, refused = list[bool](), list[bool]()

        def replicated(one: torch.Tensor) -> torch.Tensor:
            if not _is_plain(cls, one):
                return one
            if one.numel() != 1 and not cls._op_dispatcher._allow_implicit_replication:
                refused.append(True)
                return one
            changed.append(True)
            return cls.from_local(one, mesh, whole, run_check=False)

        # Of a list that is written to, as an optimizer's parameters, the new ones share memory with the plain ones.
        wanted = [
            value if writes and isinstance(value, torch.Tensor) else tree_map_only(torch.Tensor, replicated, value)
            for value, writes in zip(args, written, strict=False)
        ]
        named = {name: tree_map_only(torch.Tensor, replicated, value) for name, value in kwargs.items()}
        if refused:
            return past_functionalization(keys, args, kwargs)  # where PyTorch says so
        return op(*wanted, **named) if changed else as_it_was(keys, args, kwargs)

    return call


def _mesh_among(cls: Any, values: Any) -> Any:
    """The mesh of the first ``DTensor`` among values and lists of them, if there is a plain tensor, too."""
    mesh, plain = None, False
    for value in values:
        for one in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(one, cls):
                mesh = mesh or one.device_mesh
            elif isinstance(one, torch.Tensor):
                plain = True
    return mesh if plain else None


def _is_plain(cls: Any, tensor: torch.Tensor) -> bool:
    """Whether a tensor is a plain one of this device, which PyTorch may take for a replicated one."""
    if isinstance(tensor, cls) or tensor.device.type != DEVICE_TYPE or not torch._is_functional_tensor(tensor):
        return False
    return isinstance(inner_of(tensor), LazyTensor)
