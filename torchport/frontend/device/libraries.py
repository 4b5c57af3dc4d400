"""Libraries that have a fixed list of devices, or that read and write tensors' memory.

accelerate, transformers' Trainer and Lightning pick a device from a list of their own. If none of the list is there,
they pick the CPU, even where the program has been using ``port``. The lists cannot be extended, but each library can be
told a device (``torchport doctor`` prints how). A program that uses the device while such a library picks the CPU is
warned, once.

Changes a library when it is imported, and imports none.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable
from typing import Any, Final

import torch

from .names import NAME, device_of
from .patches import replace, when_imported

__all__ = ["expect", "install"]

ACCELERATE: Final = f"set the environment variable ACCELERATE_TORCH_DEVICE={NAME} before they are made"
LIGHTNING: Final = f"give Trainer or Fabric accelerator={NAME!r}"


def expect() -> None:
    """Change safetensors when it is imported: it may be the first to use the device. Called while torch is imported."""
    for package in ("safetensors", "safetensors.torch"):
        when_imported(package, _safetensors)


@functools.cache
def install() -> None:
    """Change each library when it is imported. Runs once: the device may be made ready again after it failed."""
    when_imported("accelerate.state", _accelerate)
    for package in ("lightning.pytorch", "pytorch_lightning"):
        when_imported(f"{package}.trainer.connectors.accelerator_connector", _lightning("_AcceleratorConnector"))
    for package in ("lightning.fabric", "lightning_fabric"):
        when_imported(f"{package}.connector", _lightning("_Connector"))
    when_imported("torch.distributed.checkpoint._state_dict_stager", _staged_checkpoints)


_warned: list[str] = []


def _warn(library: str, instead: str) -> None:
    """Warn that a library has picked the CPU; the first time only."""
    if not _warned:
        _warned.append(library)
        warnings.warn(
            f"{library} works on the CPU, though this process uses the device {NAME!r}: it picks a device from a list "
            f"of its own, which {NAME!r} is not on. To use {NAME!r}, {instead}; to mean the CPU, tell it so "
            "(use_cpu=True, cpu=True, accelerator='cpu')",
            stacklevel=4,
        )


def _accelerate(module: Any) -> None:
    kind = module.PartialState
    original = kind.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        picked = getattr(self.device, "type", None) == "cpu" and not vars(self).get("_cpu")
        if picked and "ACCELERATE_TORCH_DEVICE" not in os.environ:
            _warn("accelerate (and a Trainer of transformers)", ACCELERATE)

    replace("accelerate.state.PartialState.__init__", init)


_CHOICE: Final = "_choose_auto_accelerator"


def _lightning(owner: str) -> Callable[[Any], None]:
    def change(module: Any) -> None:
        kind = getattr(module, owner)
        original = getattr(kind, _CHOICE)

        def choose() -> Any:
            chosen = original()
            if chosen == "cpu":
                _warn("Lightning", LIGHTNING)
            return chosen

        replace(f"{module.__name__}.{owner}.{_CHOICE}", staticmethod(choose))

    return change


# -- files -----------------------------------------------------------------------------------------------------------
class _Slice:
    """A tensor of a file, of which an indexed part is read and moved to the device."""

    def __init__(self, part: Any, device: Any) -> None:
        self._part, self._device = part, device

    def __getitem__(self, at: Any) -> torch.Tensor:
        return self._part[at].to(self._device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)


class _Opened:
    """An open safetensors file whose tensors are read into host memory and moved to the device."""

    def __init__(self, file: Any, device: Any) -> None:
        self._file, self._device = file, device

    def get_tensor(self, name: str) -> torch.Tensor:
        return self._file.get_tensor(name).to(self._device)

    def get_tensors(self, *args: Any) -> dict[str, torch.Tensor]:
        return {name: value.to(self._device) for name, value in self._file.get_tensors(*args).items()}

    def get_slice(self, name: str) -> _Slice:
        return _Slice(self._file.get_slice(name), self._device)

    def __enter__(self) -> _Opened:
        self._file.__enter__()
        return self

    def __exit__(self, *error: Any) -> Any:
        return self._file.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _safetensors(module: Any) -> None:
    original = module.safe_open
    if not isinstance(original, type):  # already replaced: imported from the changed package
        return

    @functools.wraps(original, updated=())
    def safe_open(filename: Any, framework: str, device: Any = "cpu", **kwargs: Any) -> Any:
        if not isinstance(device, (str, torch.device)) or torch.device(device).type != NAME:
            return original(filename, framework, device, **kwargs)
        return _Opened(original(filename, framework, "cpu", **kwargs), device)

    replace(f"{module.__name__}.safe_open", safe_open)


def _staged_checkpoints(module: Any) -> None:
    """Staging copies storages to the host. A tensor of the device is copied as a tensor, once for all equal views."""
    kind = module.StateDictStager
    original = kind._offload_tensor

    @functools.wraps(original)
    def offload(self: Any, x: torch.Tensor, memo: dict[Any, Any], non_blocking: bool = False) -> torch.Tensor:
        if device_of(x).type != NAME:
            return original(self, x, memo, non_blocking=non_blocking)
        key = (id(x.untyped_storage()), x.storage_offset(), x.shape, x.stride(), x.dtype)
        if key not in memo:
            memo[key] = x.detach().cpu()
        memo[id(x)] = memo[key]
        return memo[key]

    replace("torch.distributed.checkpoint._state_dict_stager.StateDictStager._offload_tensor", offload)
