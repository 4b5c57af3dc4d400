"""Storages of the device: there are none, but files name them.

``torch.load(map_location="port")``, reading a file saved from the device and making a storage may each be the first use
of the device. PyTorch would ask for an allocator, which a device defined in Python does not have, and end the process.
So this is in place from ``import torch`` on, and imports nothing of the device.

Public torch APIs used here: ``torch.serialization.register_package``, ``torch.UntypedStorage``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from .patches import replace

__all__ = ["HostStorage", "install", "refusals"]

_NAME: Final = "port"

refusals: Final[list[Callable[[torch.Tensor, str], None]]] = []
"""Functions that raise for a tensor of the device whose memory is asked for. ``memory.py`` adds one at first use;
before, the device has no tensors."""


class HostStorage(torch.UntypedStorage):
    """A CPU storage that stands for one on the device while a file is written or read.

    ``torch.load`` makes an empty tensor on ``storage.device`` and sets the storage into it; the device's ``set_``
    copies the contents.
    """

    index = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.takers: list[Callable[[], bool]] = []
        """For each tensor that has taken the contents: takes them again; False once something was computed with it."""

    @classmethod
    def of(cls, storage: torch.UntypedStorage, index: int) -> HostStorage:
        """A copy of a CPU storage that says it is on ``port:index``."""
        made = cls(storage.nbytes())
        torch.UntypedStorage.copy_(made, storage)
        made.index = index
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device(_NAME, self.index)

    def _set_from_file(self, *args: Any) -> Any:
        """A file of the format before PyTorch 1.6 has its values behind the tensors, which have the memory by then."""
        result = super()._set_from_file(*args)
        if not all(take() for take in self.takers):
            raise _refused(
                "a file of the format before PyTorch 1.6 has its values behind the tensors, and a class in this one "
                f"computes with a tensor on {self.device} while it is read; write torch.load(file, map_location='cpu') "
                "and move what it returns"
            )
        return result

    def cpu(self) -> torch.UntypedStorage:
        made = torch.UntypedStorage(self.nbytes())
        return made.copy_(self)


def install() -> None:
    """``torch.save`` tags storages of the device, ``torch.load`` puts storages on it, and nobody else makes one."""
    torch.serialization.register_package(5, _tag, _deserialize)
    replace("torch.UntypedStorage.__new__", _new)


def _tag(storage: Any) -> str | None:
    return f"{_NAME}:{storage.index}" if isinstance(storage, HostStorage) else None


def _deserialize(storage: Any, location: str) -> Any:
    if not location.startswith(_NAME):
        return None
    return HostStorage.of(storage, torch.device(location).index or 0)


def _refused(why: str) -> Exception:
    from ...core.errors import StorageAccess  # on demand: ``import torch`` must stay light

    return StorageAccess(why)


def _new(cls: Any, *args: Any, **kwargs: Any) -> Any:
    if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == _NAME:
        raise _refused(f"there are no storages on {kwargs['device']}: its tensors have no memory in this process")
    return torch._C.StorageBase.__new__(cls, *args, **kwargs)
