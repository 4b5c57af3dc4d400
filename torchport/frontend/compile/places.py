"""Where a compiled graph's tensors live: on the CPU, or on a ``port`` device. What differs between the two is here."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import torch

from ...backend.execution import Computation, execute, execute_on_host
from ...backend.interface import Backend, BackendData, BackendDevice
from ...backend.random import RANDOM
from ...backend.registry import resolve_device
from ...core.errors import ConfigError, DeviceMismatch
from ...core.specs import TensorSpec, contiguous_strides
from ...run.device_runtime import DeviceRuntime, default_backend, runtimes
from ...run.values import leaf_from_host, value_of
from ...trace.handle import DEVICE_TYPE, LazyTensor, intern_spec, make_handle, make_template
from ...trace.threads import threads
from ...trace.wrapping import inner_of
from .options import Options

__all__ = ["Caller", "DataPlace", "HostPlace", "PortPlace", "place_of"]

Caller: TypeAlias = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]


class DataPlace(ABC):
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
        """The next keys of the generator in charge, int64, on the CPU."""

    def is_here(self, device: torch.device) -> bool:
        """Whether tensors on that device are this place's own."""
        return device.type == self.device.type

    def is_current(self) -> bool:
        """Whether the user's device still stands for the backend that graphs were compiled for."""
        return True

    @abstractmethod
    def from_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """The user's tensor with the contents of a CPU tensor, to which others may write."""

    @abstractmethod
    def caller(self, computation: Computation) -> Caller:
        """The computation as a function from the user's tensors to the user's tensors."""


def _inner(tensor: torch.Tensor) -> Any:
    """The handle in a wrapper, brought up to date (``torch._sync`` without its detour through Python)."""
    torch._functionalize_sync(tensor)
    return inner_of(tensor)


def _told(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    """The strides that say something: those of dimensions of more than one element."""
    return [stride for size, stride in zip(shape, strides, strict=True) if size > 1]


def _is_permuted(spec: TensorSpec) -> bool:
    """Whether a value has other strides than a contiguous one, and memory of its own for each element."""
    told = _told(spec.shape, spec.strides)
    return 0 not in told and 0 not in spec.shape and told != _told(spec.shape, contiguous_strides(spec.shape))


class HostPlace(DataPlace):
    """Tensors on the CPU: lent to the backend for each call."""

    always_draw = False
    device = torch.device("cpu")

    def __init__(self, options: Options) -> None:
        chosen = options.backends()
        self.backends = chosen or [default_backend()[0]]
        first = resolve_device(self.backends[0], options.ordinal)
        self._devices = {backend.name: resolve_device(backend, 0) for backend in self.backends[1:]}
        self._devices[self.backends[0].name] = first

    def device_of(self, backend: Backend) -> BackendDevice:
        return self._devices[backend.name]

    def keys(self, count: int) -> torch.Tensor:
        return torch.randint(-(2**63), 2**63 - 1, (count,), dtype=torch.int64, device="cpu")

    def from_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def caller(self, computation: Computation) -> Caller:
        run = functools.partial(execute_on_host, computation)
        permuted = [(at, spec) for at, spec in enumerate(computation.results) if _is_permuted(spec)]
        if not permuted:
            return run

        def call(tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
            """With strides as they were recorded: compiled code and the user's views rely on them."""
            results = list(run(tensors))
            for at, spec in permuted:
                if _told(spec.shape, results[at].stride()) != _told(spec.shape, spec.strides):
                    made = torch.empty_strided(spec.shape, spec.strides, dtype=spec.dtype)
                    results[at] = made.copy_(results[at])
            return results

        return call


class PortPlace(DataPlace):
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

    def from_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch._to_functional_tensor(leaf_from_host(self.runtime, tensor.detach().clone()))

    def caller(self, computation: Computation) -> Caller:
        runtime, own = self.runtime, computation.backend is self.runtime.backend
        make = [self._maker(intern_spec(spec)) for spec in computation.results]

        def call(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            trace = threads.of(runtime.index)
            values = [value_of(_inner(tensor), trace) for tensor in tensors]
            results = execute(computation, values) if own else self._elsewhere(computation, values)
            return [wrapped(result) for wrapped, result in zip(make, results, strict=True)]

        return call

    def _maker(self, spec: TensorSpec) -> Callable[[BackendData], torch.Tensor]:
        """A function that gives a result of this spec to the user."""
        runtime, wrap = self.runtime, torch._to_functional_tensor
        template = make_template(spec) if runtime.index == 0 else None

        def wrapped(data: BackendData) -> torch.Tensor:
            if template is None:
                handle: Any = make_handle(spec, runtime.index)
            else:
                handle = template.data  # as new, without a dispatch
                handle.__class__ = LazyTensor
                handle.spec = spec
            data.info, data.exported = runtime, True
            handle.value = data
            return wrap(handle)

        return wrapped

    def is_current(self) -> bool:
        return threads.of(self.runtime.index).runtime is self.runtime

    def _elsewhere(self, computation: Computation, values: Sequence[BackendData]) -> list[BackendData]:
        """A computation of another backend than the device's: through the host."""
        mine = self.runtime.backend
        results = execute_on_host(computation, [mine.from_device(value) for value in values])
        return [mine.to_device(result, self.runtime.device) for result in results]


def place_of(values: Sequence[Any], options: Options) -> DataPlace:
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
    return PortPlace(runtimes.get(indices.pop()), options)
