"""``torch.accelerator`` and pinned memory: where PyTorch asks its C++ allocators, which a device in Python has none of.

Left alone, the functions of ``torch.accelerator.memory`` end in an internal assertion or in a crash of the process, and
``DataLoader(pin_memory=True)`` fails as soon as this device is registered. Runs inside ``import torch`` and makes
nothing ready: a device that was not used yet has used no memory.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final

import torch

from . import module

__all__ = ["NAME", "install"]

NAME: Final = "port"


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
    """A function of the device module, or what it comes to as long as nobody has used the device."""

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
        wrapped = _where_ours(getattr(torch.accelerator, name), fn)
        for owner in (torch.accelerator, torch.accelerator.memory):
            if hasattr(owner, name):
                setattr(owner, name, wrapped)
    switch: Any = torch.accelerator.device_index
    switch.__enter__ = _where_ours(switch.__enter__, lambda self: module.set_device(self.idx))
    switch.__exit__ = _where_ours(switch.__exit__, lambda self, *exc: None)
    torch.Tensor.pin_memory = _pin_memory(torch.Tensor.pin_memory)  # type: ignore[method-assign]


def _where_ours(original: Callable[..., Any], fn: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (fn if _ours() else original)(*args, **kwargs)

    return call


def _pin_memory(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def pin_memory(self: torch.Tensor, device: Any = None) -> torch.Tensor:
        """Host memory need not be pinned for this device: a CPU tensor is good as it is."""
        asked = NAME if device is None and _ours() else device
        if self.device.type == "cpu" and asked is not None and torch.device(asked).type == NAME:
            return self
        return original(self) if device is None else original(self, device)

    return pin_memory
