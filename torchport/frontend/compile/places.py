"""Where a compiled graph's tensors live: on the CPU, or on a ``port`` device. What differs between the two is here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from ...backend.interface import Backend, BackendData, BackendDevice
from ...backend.registry import resolve_device
from ...core.errors import ConfigError, DeviceMismatch
from ...core.specs import TensorSpec
from ...lazy.random import RANDOM
from ...lazy.tensor import DEVICE_TYPE
from .options import Options

if TYPE_CHECKING:
    from ...lazy.runtime import DeviceRuntime

__all__ = ["HostPlace", "Place", "PortPlace", "place_of"]


class Place(ABC):
    """How the user's tensors become a backend's values and back."""

    backends: Sequence[Backend]
    device: torch.device
    """The user's device."""
    always_draw: bool
    """Whether random operators always draw the device's own numbers, rather than the backend's."""
    random: Final[Mapping[Any, Callable[..., Any]]] = RANDOM

    @abstractmethod
    def device_of(self, backend: Backend) -> BackendDevice:
        """The backend's device that computes."""

    @abstractmethod
    def keys(self, count: int) -> torch.Tensor:
        """The next keys of the generator in charge, int64."""

    @abstractmethod
    def is_here(self, device: torch.device) -> bool:
        """Whether the user's tensors on that device are this place's own."""

    @abstractmethod
    def take(self, tensor: torch.Tensor, backend: Backend, spec: TensorSpec) -> BackendData:
        """A tensor of this place as an argument of one call."""

    @abstractmethod
    def give(self, data: BackendData, backend: Backend, spec: TensorSpec) -> torch.Tensor:
        """A result as the user's tensor."""


class HostPlace(Place):
    """Tensors on the CPU: lent to the backend for each call."""

    always_draw = False
    device = torch.device("cpu")

    def __init__(self, options: Options) -> None:
        from ...lazy.runtime import default_backend

        chosen = options.backends()
        self.backends = chosen or [default_backend()[0]]
        first = resolve_device(self.backends[0], options.ordinal)
        self._devices = {backend.name: resolve_device(backend, 0) for backend in self.backends[1:]}
        self._devices[self.backends[0].name] = first

    def device_of(self, backend: Backend) -> BackendDevice:
        return self._devices[backend.name]

    def keys(self, count: int) -> torch.Tensor:
        return torch.randint(-(2**63), 2**63 - 1, (count,), dtype=torch.int64, device="cpu")

    def is_here(self, device: torch.device) -> bool:
        return device.type == "cpu"

    def take(self, tensor: torch.Tensor, backend: Backend, spec: TensorSpec) -> BackendData:
        return backend.borrow(tensor, spec, self._devices[backend.name])

    def give(self, data: BackendData, backend: Backend, spec: TensorSpec) -> torch.Tensor:
        return backend.from_device(data)


class PortPlace(Place):
    """Tensors on a ``port`` device: the backend's own values go in and come out, and never leave it."""

    always_draw = True

    def __init__(self, runtime: DeviceRuntime, options: Options) -> None:
        self.runtime = runtime
        self.device = torch.device(DEVICE_TYPE, runtime.index)
        chosen = options.backends()
        if chosen and chosen[0] is not runtime.backend:
            raise ConfigError(
                f"the model's tensors are on {self.device}, which is backend {runtime.backend.name!r}, but option "
                f'"backend" says {chosen[0].name!r}; leave the option out, or move the model to '
                f"torchport.device({chosen[0].name!r})"
            )
        self.backends = chosen or [runtime.backend]

    def device_of(self, backend: Backend) -> BackendDevice:
        return self.runtime.device if backend is self.runtime.backend else resolve_device(backend, 0)

    def keys(self, count: int) -> torch.Tensor:
        return torch.tensor([self.runtime.next_key() for _ in range(count)], dtype=torch.int64, device="cpu")

    def is_here(self, device: torch.device) -> bool:
        return device.type == DEVICE_TYPE

    def take(self, tensor: torch.Tensor, backend: Backend, spec: TensorSpec) -> BackendData:
        from ...lazy.executor import value_of
        from ...lazy.runtime import threads
        from ...lazy.trace import unwrap

        trace = threads.of(self.runtime.index)
        value = value_of(unwrap(tensor), trace)  # type: ignore[arg-type]
        if backend is self.runtime.backend:
            return value
        return backend.to_device(self.runtime.backend.from_device(value).clone(), self.device_of(backend))

    def give(self, data: BackendData, backend: Backend, spec: TensorSpec) -> torch.Tensor:
        from ...lazy.executor import leaf_from_data

        if backend is not self.runtime.backend:
            data = self.runtime.backend.to_device(backend.from_device(data).clone(), self.runtime.device)
        return torch._to_functional_tensor(leaf_from_data(self.runtime, data))


def place_of(values: Sequence[Any], options: Options) -> Place:
    """The place of a graph whose inputs, or else outputs, are these fake tensors.

    Raises :class:`DeviceMismatch` if they are on several ``port`` devices, or on a device that is neither.
    """
    devices = {value.device for value in values if isinstance(value, torch.Tensor)}
    other = [device for device in devices if device.type not in ("cpu", DEVICE_TYPE)]
    if other:
        raise DeviceMismatch(
            f'backend="torchport" compiles models on cpu and {DEVICE_TYPE}, but this one has tensors on {other[0]}'
        )
    indices = {device.index or 0 for device in devices if device.type == DEVICE_TYPE}
    if len(indices) > 1:
        shown = " and ".join(f"{DEVICE_TYPE}:{index}" for index in sorted(indices))
        raise DeviceMismatch(f"one compiled graph has tensors on {shown}; move them to one device first")
    if not indices:
        return HostPlace(options)
    from ...lazy.runtime import runtimes

    return PortPlace(runtimes.get(indices.pop()), options)
