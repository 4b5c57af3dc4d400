"""Where PyTorch's Python code assumes memory behind a tensor, or knows devices by name: one contained shim each.

Private torch APIs touched here, each wrapped for ``port`` tensors only and left alone for all others:
``torch._C._has_storage``, ``torch._tensor_str._str_intern``, ``torch.Tensor._reduce_ex_internal``,
``torch.nn.Module._apply``,
``torch.serialization.register_package`` (public), ``torch.optim.optimizer.register_optimizer_step_post_hook`` (public),
storage methods of ``torch.Tensor`` and ``torch.UntypedStorage``.
"""

from __future__ import annotations

import functools
import sys
import threading
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch._utils import _rebuild_tensor_v2
from torch.utils._pytree import tree_leaves

from ...core.errors import StorageAccess
from ...lazy.closures import step_ended
from ...lazy.runtime import flush_mine
from ...lazy.tensor import DEVICE_TYPE, LazyTensor
from ...lazy.trace import unwrap, wrap
from .opaque import opaque

__all__ = ["TorchWithoutWrapping", "install", "is_ours", "storages_are_names"]


def _is_port(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == DEVICE_TYPE


def install() -> None:
    """Apply every shim."""
    _storage_free_copies()
    _print_from_host()
    _pickle_as_storages()
    _keep_parameters()
    _flush_after_optimizer()
    _load_onto_device()
    _guard_memory()
    _checkpoint_on_any_index()


def _storage_free_copies() -> None:
    """``deepcopy`` and pickling take PyTorch's path for devices without storages instead of cloning one."""
    has_storage = torch._C._has_storage
    torch._C._has_storage = lambda tensor: False if tensor.device.type == DEVICE_TYPE else has_storage(tensor)


class TorchWithoutWrapping:
    """``torch`` for a copied function: without functionalization's wrapper, which every tensor of this device has."""

    @staticmethod
    def _is_functional_tensor(tensor: torch.Tensor) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _print_from_host() -> None:
    """Formatting reads many small values; on a host copy that is one transfer, and no computation of its own.

    Tensors of this device are formatted by a copy of PyTorch's function that sees other globals; all others as before.
    """
    import torch._tensor_str as module
    from torch._C._functorch import is_functorch_wrapped_tensor

    original = module._str_intern

    def tensor_str(self: torch.Tensor, indent: int) -> str:
        return module._tensor_str(self.cpu(), indent)

    names = {**vars(module), "torch": TorchWithoutWrapping(), "_tensor_str": tensor_str}
    ours: Any = types.FunctionType(original.__code__, names, original.__name__)
    ours.__kwdefaults__ = original.__kwdefaults__

    @functools.wraps(original)
    def str_intern(inp: torch.Tensor, *, tensor_contents: str | None = None) -> str:
        if _is_port(inp) and not is_functorch_wrapped_tensor(inp):
            return ours(inp, tensor_contents=tensor_contents)
        return original(inp, tensor_contents=tensor_contents)

    module._str_intern = opaque(str_intern)


def _pickle_as_storages() -> None:
    """A tensor is saved as CUDA's are: contents in a storage tagged with the device.

    Such a file loads with any ``map_location``, also where torchport is not installed.
    """
    original = torch.Tensor._reduce_ex_internal

    @functools.wraps(original)
    def reduce(self: torch.Tensor, proto: int) -> Any:
        if not _is_port(self) or torch.serialization._serialization_tls.skip_data:
            return original(self, proto)
        torch.utils.hooks.warn_if_has_hooks(self)
        held = self.detach().cpu()
        storage = torch.storage.TypedStorage(
            wrap_storage=_HostStorage.of(held.untyped_storage(), self.get_device()), dtype=held.dtype, _internal=True
        )
        state = (storage, held.storage_offset(), tuple(held.size()), held.stride(), self.requires_grad, OrderedDict())
        return _rebuild_tensor_v2, state

    torch.Tensor._reduce_ex_internal = reduce  # type: ignore[method-assign]


def _keep_parameters() -> None:
    """``Module.to`` swaps a parameter that comes to or leaves the device, instead of replacing it.

    A new ``Parameter`` object would untie tied weights and orphan an optimizer made before. PyTorch's switch for this
    (``torch.__future__.set_swap_module_params_on_conversion``) is global and changes CPU modules too, so it is set only
    while parameters cross.
    """
    original = torch.nn.Module._apply

    @functools.wraps(original)
    def apply(self: torch.nn.Module, fn: Callable[..., Any], recurse: bool = True) -> Any:
        future = torch.__future__
        if future.get_swap_module_params_on_conversion() or not _crosses(self, fn):
            return original(self, fn, recurse)
        if recurse:
            for child in self.children():
                child._apply(fn)
        uninitialized = _move_uninitialized(self, fn)
        arriving = [p for p in self._parameters.values() if type(p) is torch.nn.Parameter and not _is_port(p)]
        attributes = [(p, dict(vars(p))) for p in self._parameters.values() if p is not None]
        future.set_swap_module_params_on_conversion(True)
        try:
            return original(self, fn, False)
        finally:
            future.set_swap_module_params_on_conversion(False)
            self._parameters.update(uninitialized)
            for parameter in filter(_is_port, arriving):
                _no_view(parameter)
            for parameter, before in attributes:
                vars(parameter).update(before)  # swapping gave them to the tensor that is dropped

    torch.nn.Module._apply = apply  # type: ignore[method-assign]


def _no_view(parameter: torch.nn.Parameter) -> None:
    """Give a parameter that has just arrived a wrapper of its own.

    ``Parameter(x)`` is a view of ``x``. Nobody holds that any more, but each write to the parameter would update it.
    """
    grad, parameter.grad = parameter.grad, None
    own = wrap(unwrap(parameter)).requires_grad_(parameter.requires_grad)
    own.__class__ = torch.nn.Parameter
    vars(own).update(vars(parameter))
    torch.utils.swap_tensors(parameter, own)
    parameter.grad = grad


def _move_uninitialized(module: torch.nn.Module, fn: Callable[..., Any]) -> dict[str, Any]:
    """Move the parameters of lazy modules, which stay uninitialized; they are taken out of the module and returned.

    PyTorch's conversion would make ordinary parameters without elements of them.
    """
    found: dict[str, Any] = {}
    for name, parameter in module._parameters.items():
        if isinstance(parameter, torch.nn.UninitializedParameter):
            with torch.no_grad():
                probe = fn(torch.empty(0, dtype=parameter.dtype, device=parameter.device))
            make: Any = torch.nn.UninitializedParameter  # its annotations do not know these options
            moved = make(parameter.requires_grad, device=probe.device, dtype=probe.dtype)
            torch.utils.swap_tensors(parameter, moved)
            found[name] = parameter
            module._parameters[name] = None
    return found


def _crosses(module: torch.nn.Module, fn: Callable[..., Any]) -> bool:
    """Whether ``fn`` would move any of the module's own parameters to or from the device."""
    probed: dict[torch.device, bool] = {}
    for parameter in module._parameters.values():
        if parameter is None or parameter.device.type == "meta":
            continue
        device = parameter.device
        if device not in probed:
            with torch.no_grad():
                probe = fn(torch.empty(0, dtype=parameter.dtype, device=device))
            probed[device] = (probe.device.type == DEVICE_TYPE) != (device.type == DEVICE_TYPE)
        if probed[device]:
            return True
    return False


def _flush_after_optimizer() -> None:
    """A training step ends with the optimizer: whatever is pending then is one computation."""
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    def flush(optimizer: Any, args: Any, kwargs: Any) -> None:
        error = flush_mine("step")
        if error is not None:
            raise error
        step_ended()

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            _own_gradients(group["params"])

    register_optimizer_step_pre_hook(opaque(before))
    register_optimizer_step_post_hook(opaque(flush))


_ALONE = (3, 2, 2)
"""Python's references to a gradient in :func:`own_gradients`, its C++ ones, and those to its storage, if only its
parameter holds it."""


def own_gradients(parameters: Iterable[torch.Tensor]) -> None:
    """Give gradients that are views wrappers of their own, where nobody can tell.

    A linear layer's gradient is a view of a product. As long as the wrapper knows that, the product is alive beside the
    gradient, and each training step would compute and keep both.
    """
    storage_of: Any = torch._C.TensorBase.untyped_storage  # type: ignore[attr-defined]
    for parameter in parameters:
        grad: Any = parameter.grad
        if grad is None or grad.requires_grad or not torch._is_functional_tensor(grad):
            continue
        counts = sys.getrefcount(grad), grad._use_count(), torch._C._storage_Use_Count(storage_of(grad)._cdata)
        if counts == _ALONE and isinstance(unwrap(grad), LazyTensor):
            parameter.grad = wrap(unwrap(grad))


_own_gradients = own_gradients


def use_native(form: Callable[[Iterable[torch.Tensor]], None]) -> None:
    """Give gradients wrappers by this function from now on (:data:`torchport.core.native.flush`)."""
    global _own_gradients
    _own_gradients = form


class _HostStorage(torch.UntypedStorage):
    """A CPU storage that stands for one on the device while a file is written or read.

    ``torch.load`` makes an empty tensor on ``storage.device`` and sets the storage into it; the device's ``set_``
    copies the contents.
    """

    index = 0

    @classmethod
    def of(cls, storage: torch.UntypedStorage, index: int) -> _HostStorage:
        """A copy of a CPU storage that says it is on ``port:index``."""
        made = cls(storage.nbytes())
        torch.UntypedStorage.copy_(made, storage)
        made.index = index
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device(DEVICE_TYPE, self.index)

    def cpu(self) -> torch.UntypedStorage:
        made = torch.UntypedStorage(self.nbytes())
        return made.copy_(self)


def _load_onto_device() -> None:
    """``torch.save`` tags storages of the device, and ``torch.load`` puts storages on it where told to."""

    def tag(storage: Any) -> str | None:
        return f"{DEVICE_TYPE}:{storage.index}" if isinstance(storage, _HostStorage) else None

    def deserialize(storage: Any, location: str) -> Any:
        if not location.startswith(DEVICE_TYPE):
            return None
        return _HostStorage.of(storage, torch.device(location).index or 0)

    torch.serialization.register_package(5, tag, deserialize)


# -- memory that is not there --------------------------------------------------------------------------------------
_TENSOR_METHODS = (
    "share_memory_",
    "storage",
    "untyped_storage",
    "_typed_storage",
    "data_ptr",
    "is_shared",
    "pin_memory",
    "__dlpack__",
)


def is_ours(tensor: torch.Tensor) -> bool:
    """False for what only stands for a tensor of this device, such as a fake tensor: that has a storage of its own."""
    kind, plain = cast("Any", type(tensor)), cast("Any", torch.Tensor)
    return kind.__torch_dispatch__ is plain.__torch_dispatch__ or isinstance(tensor, LazyTensor)


class _Names(threading.local):
    allowed = False


_names = _Names()


@contextmanager
def storages_are_names() -> Iterator[None]:
    """The calling thread may ask for storages, which tell what is a view of what, and promises not to look inside."""
    before, _names.allowed = _names.allowed, True
    try:
        yield
    finally:
        _names.allowed = before


def _guard_memory() -> None:
    """Everything that would hand out the memory of a ``port`` tensor raises :class:`StorageAccess` instead."""

    def guard(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self.device.type == DEVICE_TYPE and not _names.allowed and is_ours(self):
                raise StorageAccess(
                    f"{name} needs the memory of a tensor on {self.device}, which has none in this process: "
                    "its values may be pending, or held by the backend. Use .cpu() to get a copy in host memory"
                )
            return original(self, *args, **kwargs)

        setattr(owner, name, guarded)

    for name in _TENSOR_METHODS:
        guard(torch.Tensor, name)

    def new_storage(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == DEVICE_TYPE:
            raise StorageAccess(
                f"there are no storages on {kwargs['device']}: its tensors have no memory in this process"
            )
        return torch._C.StorageBase.__new__(cls, *args, **kwargs)

    torch.UntypedStorage.__new__ = new_storage  # type: ignore[assignment]


def _checkpoint_on_any_index() -> None:
    """Checkpointing asks for generators' states with their device as the current one, which index 0 alone can be."""
    import torch.utils.checkpoint as module

    get, put = module.get_device_states, module.set_device_states

    @functools.wraps(get)
    def get_device_states(*args: Any) -> tuple[list[int], list[torch.Tensor]]:
        tensors = [leaf for leaf in tree_leaves(args) if _is_port(leaf)]
        if not tensors:
            return get(*args)
        indices = [tensor.get_device() for tensor in tensors]
        return indices, [torch.port.get_rng_state(index) for index in indices]  # type: ignore[attr-defined]

    @functools.wraps(put)
    def set_device_states(devices: Any, states: Any, *, device_type: str | None = None) -> None:
        if device_type != DEVICE_TYPE:
            return put(devices, states, device_type=device_type)
        for index, state in zip(devices, states, strict=False):
            torch.port.set_rng_state(state, index)  # type: ignore[attr-defined]
        return None

    module.get_device_states, module.set_device_states = get_device_states, set_device_states
