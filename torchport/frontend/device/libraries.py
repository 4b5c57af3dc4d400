"""Libraries that know devices by a list of their own: what they are told, and what they are asked to tell.

accelerate, and transformers' Trainer with it, look for the devices on their list and take the CPU if there is none,
also where a program has been using ``port``; so does Lightning. Nobody can add to the list, but each can be told
(``torchport doctor`` prints how). A program that uses the device and lets such a library pick the CPU is warned, once.

Called when the device is first used; changes a library when it is imported, and imports none.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from .names import NAME, device_of
from .patches import replace, when_imported

__all__ = ["install"]

ACCELERATE: Final = f"set the environment variable ACCELERATE_TORCH_DEVICE={NAME} before they are made"
LIGHTNING: Final = (
    "give Trainer or Fabric an accelerator object of its own for it, or move the model in a loop of yours"
)


@functools.cache
def install() -> None:
    """Ask to be told of each library, once: the device may be made ready again after it failed."""
    when_imported("accelerate.state", _accelerate)
    for package in ("lightning.pytorch", "pytorch_lightning"):
        when_imported(f"{package}.trainer.connectors.accelerator_connector", _lightning("_AcceleratorConnector"))
    for package in ("lightning.fabric", "lightning_fabric"):
        when_imported(f"{package}.connector", _lightning("_Connector"))
    when_imported("transformers.modeling_utils", _transformers)


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


def _transformers(module: Any) -> None:
    """``save_pretrained`` looks into the memory of what it saves: it gets copies, which are tied as the tensors are."""
    kind = module.PreTrainedModel
    original = kind.save_pretrained

    @functools.wraps(original)
    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) < 3 and any(device_of(parameter).type == NAME for parameter in self.parameters()):
            kwargs["state_dict"] = _on_host(kwargs.get("state_dict") or self.state_dict())
        return original(self, *args, **kwargs)

    replace("transformers.modeling_utils.PreTrainedModel.save_pretrained", save_pretrained)


def _on_host(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state with host copies for this device's tensors; one copy for those that are the same."""
    from .shims import storages_are_names  # on demand: such a library may never be loaded

    copies: dict[Any, torch.Tensor] = {}
    found: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and device_of(value).type == NAME:
            with storages_are_names():
                key = (value.untyped_storage()._cdata, value.storage_offset(), value.shape, value.stride())
            value = copies[key] if key in copies else copies.setdefault(key, value.detach().cpu())
        found[name] = value
    return found
