"""Tensors without memory: which questions about memory have an answer, and which raise an error.

A tensor of the device has no memory in this process. But programs ask for memory to learn other things: which tensors
are the same (to save tied weights once), how large a tensor is, where a view lies in its base. These questions have
true answers, since functionalization keeps one storage for a tensor and its views. The program sees the storage as a
:class:`DeviceStorage`, whose address is a number that no other storage has and nobody can read from.

Private torch APIs used here: ``torch.UntypedStorage._cdata`` by its subclasses, ``torch._is_functional_tensor``,
``torch._C._to_dlpack`` (as ``torch.utils.dlpack`` has it).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Final, cast

import torch
import torch.utils.dlpack

from ...core.errors import StorageAccess
from ...trace.handle import DEVICE_TYPE, LazyTensor
from ...trace.wrapping import inner_of
from . import places, storages
from .names import device_of
from .opaque import opaque
from .patches import replace

__all__ = ["ADDRESS", "DeviceStorage", "install", "is_ours", "refuse_memory"]

ADDRESS: Final = "_address"
"""An attribute of a storage whose address was asked for: the address, and the size in bytes then. C++ looks for it."""
_FIRST_ADDRESS: Final = 1 << 60
"""No processor has memory there, so reading from such an address is an error that the operating system reports."""
_ALIGNMENT: Final = 512
_last = _FIRST_ADDRESS
_lock: Final = threading.Lock()


class DeviceStorage(torch.UntypedStorage):
    """A storage of the device: its identity, size and address, and no contents.

    Views share their base's storage. No address is given out twice, so a storage also differs from earlier ones.
    Whatever needs the contents raises :class:`StorageAccess`.
    """

    def data_ptr(self) -> int:
        """The address of the first byte, fixed as long as the storage lives and does not grow; 0 if it is empty."""
        size = self.nbytes()
        if size == 0:
            return 0
        address, known = vars(self).get(ADDRESS, (0, -1))
        if known < size:  # new, or larger than it was
            address = _new_address(size)
            setattr(self, ADDRESS, (address, size))
        return address

    def is_shared(self) -> bool:
        """False: no other process sees writes to the storage."""
        return False

    def is_pinned(self, device: Any = None) -> bool:
        """False: only host memory is pinned."""
        return False

    def __repr__(self) -> str:
        return f"[{torch.typename(self)}(device={device_of(self)}) of size {self.nbytes()}]"

    __str__ = __repr__


def _new_address(size: int) -> int:
    global _last
    with _lock:
        address = _last
        _last += -(-size // _ALIGNMENT) * _ALIGNMENT
    return address


_ANSWERED: Final = frozenset(
    {
        *("__class__", "__delattr__", "__dir__", "__eq__", "__format__", "__getattribute__", "__getstate__", "__ge__"),
        *("__gt__", "__hash__", "__init__", "__init_subclass__", "__le__", "__len__", "__lt__", "__ne__", "__new__"),
        *("__reduce_ex__", "__setattr__", "__sizeof__", "__subclasshook__"),
        *("_expired", "_fix_weakref", "_free_weak_ref", "_new_with_weak_ptr", "_weak_ref"),
        *("element_size", "get_device", "nbytes", "new", "resizable", "size", "type", "untyped", "from_buffer"),
        *("from_file", "_new_shared", "_new_shared_cuda", "_new_shared_filename_cpu", "_new_using_fd_cpu"),
        *("_new_using_filename_cpu", "_release_ipc_counter", "_release_ipc_counter_cuda"),
    }
)
"""Methods of PyTorch's class that work as they are, since they need no contents of the storage."""


def _refuse_contents() -> None:
    """Have all other methods raise: none may reach PyTorch's C++, which takes a storage to have memory."""

    def refusing(name: str) -> Callable[..., Any]:
        def refused(self: Any, *args: Any, **kwargs: Any) -> Any:
            raise _no_memory(f"{name} of a storage", device_of(self))

        return opaque(refused)

    for kind in torch.UntypedStorage.__mro__:
        for name, value in vars(kind).items():
            known = name in _ANSWERED or name in vars(DeviceStorage)
            if not known and (callable(value) or isinstance(value, (classmethod, staticmethod))):
                setattr(DeviceStorage, name, refusing(name))


_refuse_contents()


def _no_memory(what: str, device: torch.device) -> StorageAccess:
    return StorageAccess(
        f"{what} needs the memory of a tensor on {device}, which has none in this process: "
        "its values may be pending, or held by the backend. Use .cpu() to get a copy in host memory"
    )


def is_ours(tensor: torch.Tensor) -> bool:
    """Whether a tensor on ``port`` is the device's own. A fake tensor is not: it has a storage of its own."""
    kind, plain = cast("Any", type(tensor)), cast("Any", torch.Tensor)
    return kind.__torch_dispatch__ is plain.__torch_dispatch__ or isinstance(tensor, LazyTensor)


def refuse_memory(tensor: torch.Tensor, name: str) -> None:
    """Raise :class:`StorageAccess` for a tensor of this device."""
    if is_ours(tensor):
        raise _no_memory(name, tensor.device)


@functools.cache
def install() -> None:
    """Wrap the methods that ask for memory. Runs once: the device may be made ready again after it failed."""
    _of_ours("untyped_storage", _untyped_storage)
    _of_ours("data_ptr", _data_ptr)
    _of_ours("storage_offset", _storage_offset)
    _of_ours("__dlpack__", _dlpack)
    _of_ours("__dlpack_device__", _dlpack_device)
    capsule = torch.utils.dlpack.to_dlpack

    @functools.wraps(capsule)
    def to_dlpack(tensor: torch.Tensor) -> Any:
        ours = device_of(tensor).type == DEVICE_TYPE and is_ours(tensor)
        return capsule(_for_dlpack(tensor) if ours else tensor)

    replace("torch.utils.dlpack.to_dlpack", to_dlpack)
    storages.refusals.append(refuse_memory)  # for the wrapper of ``pin_memory`` (``accelerator.py``)


def _of_ours(name: str, answer: Callable[..., Any]) -> None:
    """Give a method of tensors another answer for those of this device."""
    original = getattr(torch.Tensor, name)

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if device_of(self).type == DEVICE_TYPE and is_ours(self):
            return answer(original, self, *args, **kwargs)
        return original(self, *args, **kwargs)

    replace(f"torch.Tensor.{name}", opaque(method))


def _untyped_storage(original: Any, self: torch.Tensor) -> Any:
    storage = original(self)
    if type(storage) is torch.UntypedStorage:  # PyTorch keeps the Python object as long as there is the storage
        storage.__class__ = DeviceStorage
    return storage


def _data_ptr(original: Any, self: torch.Tensor) -> int:
    if self.numel() == 0:
        return 0
    start = self.untyped_storage().data_ptr()
    offset = places.offset(self)
    if offset is None:
        what = "data_ptr of a view after detach() or .data, of which is not known where it begins,"
        raise _no_memory(what, self.device)
    return start + offset * self.element_size()


def _storage_offset(original: Any, self: torch.Tensor) -> int:
    if torch._is_functional_tensor(self) and not isinstance(inner_of(self), LazyTensor):
        return original(self)  # a compiler's tensor: comparing its symbolic sizes would add to the compiler's graph
    return places.offset(self) or 0


# -- to other libraries: through the host --------------------------------------------------------------------------
def _for_dlpack(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the host that nobody else writes to. Raises ``BufferError`` as PyTorch does for other devices."""
    if tensor.requires_grad:
        raise BufferError("Can't export tensors that require gradient, use tensor.detach()")
    return tensor.cpu().clone()


def _dlpack(
    original: Any,
    self: torch.Tensor,
    *,
    stream: Any = None,
    max_version: tuple[int, int] | None = None,
    dl_device: tuple[Any, int] | None = None,
    copy: bool | None = None,
) -> Any:
    """The capsule of a host copy: other libraries get the values, and their writes do not reach the tensor."""
    if copy is False:
        raise BufferError(f"a tensor on {self.device} has no memory that another library could share; it gets a copy")
    return _for_dlpack(self).__dlpack__(max_version=max_version, dl_device=dl_device)


def _dlpack_device(original: Any, self: torch.Tensor) -> tuple[Any, int]:
    return torch.utils.dlpack.DLDeviceType.kDLCPU, 0
