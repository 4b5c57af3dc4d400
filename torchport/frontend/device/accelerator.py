"""``torch.accelerator`` and pinned memory: PyTorch asks C++ allocators there, and a device defined in Python has none.

Left alone, the functions of ``torch.accelerator.memory`` end in an internal assertion or in a crash of the process, and
``DataLoader(pin_memory=True)`` fails as soon as this device is registered. Runs inside ``import torch`` and does not
make the device ready: a device that was not used yet has used no memory.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.overrides import handle_torch_function, has_torch_function_unary

from ...core.releases import has
from . import module, storages
from .names import NAME, device_of, unheard
from .opaque import opaque
from .patches import PATCHES, replace, when_imported

__all__ = ["install"]

_PINNED: Final = "_pinned_for_port"
"""Marks a storage as pinned. PyTorch keeps a storage's Python object, and so the mark, as long as the storage lives."""


def _ours() -> bool:
    device = torch.accelerator.current_accelerator()
    return device is not None and device.type == NAME


def _index(device: Any) -> int | None:
    """The index that a device argument means. Raises ``ValueError`` for another device type, as PyTorch does."""
    if device is None or isinstance(device, int):
        return device
    asked = torch.device(device)
    if asked.type != NAME:
        raise ValueError(f"{asked} doesn't match the current accelerator {NAME}.")
    return asked.index


def _in_use(fn: Callable[[Any], Any], unused: Any = None) -> Callable[[Any], Any]:
    """A function of the device module that answers ``unused`` as long as the device was not used."""

    def call(device: Any = None) -> Any:
        index = _index(device)
        return fn(index) if module.is_initialized() else unused

    return call


def _memory_stats(index: int | None) -> OrderedDict[str, Any]:
    used = module.memory_allocated(index)
    return OrderedDict({"allocated_bytes.all.current": used, "reserved_bytes.all.current": used})


_used: Final = _in_use(module.memory_allocated, 0)
_nothing: Final = _in_use(lambda index: None)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "current_device_index": lambda: module.current_device(),  # in C++ it would make the device ready
    "current_stream": lambda device=None: module.current_stream(_index(device)),  # the same; Dynamo asks every time
    "empty_cache": module.empty_cache,
    "empty_host_cache": module.empty_cache,
    "get_memory_info": _in_use(module.mem_get_info, (0, 0)),
    "max_memory_allocated": _used,
    "max_memory_reserved": _used,
    "memory_allocated": _used,
    "memory_reserved": _used,
    "memory_stats": _in_use(_memory_stats, OrderedDict()),
    "reset_accumulated_memory_stats": _nothing,
    "reset_peak_memory_stats": _nothing,
    "set_device_idx": lambda device: module.set_device(_index(device)),
    "set_device_index": lambda device: module.set_device(_index(device)),
    "synchronize": _in_use(module.synchronize),
}
"""What ``torch.accelerator`` does where this device is the accelerator."""


def install() -> None:
    """Wrap the functions; other accelerators keep PyTorch's."""
    for name, fn in _FUNCTIONS.items():
        if not has(f"torch.accelerator.{name}"):
            continue
        wrapped = _where_ours(getattr(torch.accelerator, name), fn)
        replace(f"torch.accelerator.{name}", wrapped)
        if (target := f"torch.accelerator.memory.{name}") in PATCHES:
            replace(target, wrapped)
    when_imported("torch._dynamo.utils", _streams_of_compiled_code)
    switch: Any = torch.accelerator.device_index
    enter, leave = switch.__enter__, switch.__exit__
    target = "torch.accelerator.device_index"
    replace(f"{target}.__enter__", _where_ours(enter, lambda self: module.set_device(self.idx)))
    replace(f"{target}.__exit__", _where_ours(leave, lambda self, *exc: None))
    replace("torch.Tensor.pin_memory", _pin_memory(torch.Tensor.pin_memory))
    replace("torch.Tensor.is_pinned", _is_pinned(torch.Tensor.is_pinned))


def _streams_of_compiled_code(module: Any) -> None:
    """From 2.15 on, functions that Dynamo has compiled ask C++ for the stream, which makes the device ready."""
    current_stream = _where_ours(module.get_current_stream, _FUNCTIONS["current_stream"])
    replace("torch._dynamo.utils.get_current_stream", current_stream)


def _where_ours(original: Callable[..., Any], fn: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (fn if _ours() else original)(*args, **kwargs)

    return opaque(call)


def _overridable(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that ``__torch_function__`` of modes and subclasses gets under its own name, as it gets PyTorch's."""

    @functools.wraps(method)
    def call(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if has_torch_function_unary(self):
            return handle_torch_function(call, (self,), self, *args, **kwargs)
        return method(self, *args, **kwargs)

    return opaque(call)


def _pin_memory(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def pin_memory(self: torch.Tensor, device: Any = None) -> torch.Tensor:
        """A copy, as with other accelerators. The copy is only marked as pinned: the device copies from any memory."""
        if device_of(self).type == NAME:
            for refuse in storages.refusals:
                refuse(self, "pin_memory")
        if not _for_ours(device) or device_of(self).type != "cpu":
            return original(self) if device is None else original(self, device)
        memory = _host_memory(self)
        if memory is None or hasattr(memory, _PINNED):
            return self
        copy = self.clone()
        setattr(copy.untyped_storage(), _PINNED, True)
        return copy

    return _overridable(pin_memory)


def _is_pinned(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def is_pinned(self: torch.Tensor, device: Any = None) -> bool:
        found: bool = original(self) if device is None else original(self, device)
        return found or (_for_ours(device) and hasattr(_host_memory(self), _PINNED))

    return _overridable(is_pinned)


def _for_ours(device: Any) -> bool:
    return _ours() if device is None else torch.device(device).type == NAME


def _host_memory(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The storage of a CPU tensor; ``None`` for other devices, sparse tensors and subclasses around other tensors."""
    if device_of(tensor).type != "cpu":
        return None
    try:
        with unheard():
            return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None
