"""``Trainer(accelerator="port")`` and ``Fabric(accelerator="port")``: an accelerator in Lightning's registry.

Lightning has no way for a package to announce an accelerator, so torchport adds one when Lightning is imported. That
may be before the device is first used, so :func:`install` runs inside ``import torch``. It imports nothing of
Lightning.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import torch

from .names import NAME
from .patches import replace, when_imported

__all__ = ["install"]

_CHOICE: Final = "_choose_strategy"


def install() -> None:
    """Change Lightning's packages when they are imported, under both names that each has."""
    for package in ("lightning.pytorch", "pytorch_lightning"):
        when_imported(f"{package}.accelerators", _registered_in("AcceleratorRegistry"))
        when_imported(f"{package}.trainer.connectors.accelerator_connector", _on_one_device("_AcceleratorConnector"))
    for package in ("lightning.fabric", "lightning_fabric"):
        when_imported(f"{package}.accelerators", _registered_in("ACCELERATOR_REGISTRY"))
        when_imported(f"{package}.connector", _on_one_device("_Connector"))


def _registered_in(registry: str) -> Callable[[Any], None]:
    def change(module: Any) -> None:
        if hasattr(module, registry):
            getattr(module, registry).register(NAME, _accelerator(module.Accelerator), description="torchport's device")

    return change


def _accelerator(base: Any) -> Any:
    """Our accelerator, as a class of Lightning's kind."""

    class PortAccelerator(base):
        """The device of torchport: one per process, in as many processes as the program asks for."""

        def setup_device(self, device: torch.device) -> None:
            if device.type != NAME:
                raise ValueError(f"the accelerator {NAME!r} was given the device {device}; use {NAME!r}")

        def get_device_stats(self, device: Any) -> dict[str, Any]:
            return dict(torch.accelerator.memory_stats())

        def teardown(self) -> None:
            """Nothing: pending values are computed when they are needed."""

        @staticmethod
        def parse_devices(devices: Any) -> int:
            """How many devices: a number, perhaps as text, or the length of a list. ``-1`` and ``auto``: one."""
            count = len(devices) if isinstance(devices, (list, tuple)) else 1 if devices == "auto" else int(devices)
            return 1 if count == -1 else count

        @staticmethod
        def get_parallel_devices(devices: Any) -> list[torch.device]:
            """The current device, once for each process."""
            return [torch.device(NAME)] * devices

        @staticmethod
        def auto_device_count() -> int:
            return 1

        @staticmethod
        def is_available() -> bool:
            return True

        @staticmethod
        def name() -> str:
            return NAME

    return PortAccelerator


def _on_one_device(owner: str) -> Callable[[Any], None]:
    """Have the single-device strategy use ``port``: for an accelerator not on its list, Lightning uses the CPU."""

    def change(module: Any) -> None:
        original: Any = getattr(getattr(module, owner, None), _CHOICE, None)
        if original is None:  # a release before 2.0 or after this one, which raises its own error about the device
            return

        @functools.wraps(original)
        def choose(self: Any) -> Any:
            made = original(self)
            single = module.SingleDeviceStrategy
            return single(device=NAME) if type(made) is single and self.accelerator.name() == NAME else made

        replace(f"{module.__name__}.{owner}.{_CHOICE}", choose)

    return change
