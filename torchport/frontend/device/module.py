"""``torch.port``: what PyTorch and its users expect of a device module.

Everything that needs the lazy core imports it when called, so that ``import torch`` stays light.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch

from ...core.random_state import DEFAULT_SEED, RandomState
from . import streams
from .fork import forked_after_use
from .ready import at_first_use, init, is_ready
from .streams import DeviceEvent, Stream, current_stream, default_stream, set_stream, stream

__all__ = [
    "Event",
    "Stream",
    "current_device",
    "current_stream",
    "default_generators",
    "default_stream",
    "device",
    "device_count",
    "empty_cache",
    "get_amp_supported_dtype",
    "get_device_capability",
    "get_device_name",
    "get_device_properties",
    "get_rng_state",
    "get_rng_state_all",
    "init",
    "initial_seed",
    "is_available",
    "is_bf16_supported",
    "is_initialized",
    "manual_seed",
    "manual_seed_all",
    "max_memory_allocated",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_reserved",
    "memory_stats",
    "reset_peak_memory_stats",
    "seed",
    "seed_all",
    "set_device",
    "set_rng_state",
    "set_rng_state_all",
    "set_stream",
    "stream",
    "synchronize",
]

_initialized = True
"""Read by PyTorch's checkpointing, which saves generators' states of an initialized device only, and refuses a forward
that has initialized one. This device's generators can be asked at any time."""
_current = 0
_seed: int | None = None
"""The seed that ``torch.manual_seed`` was given before the device was used."""


_lazy_init = init
"""What PyTorch calls when the device is first used."""


def _seed_at_first_use() -> None:
    if _seed is not None:
        _runtimes().seed_all(_seed)


at_first_use.append(_seed_at_first_use)


def _runtimes() -> Any:
    from ...run.device_runtime import runtimes  # on demand: ``import torch`` must stay light

    return runtimes


def is_available() -> bool:
    """The device can always be used: the reference backend needs nothing."""
    return True


def is_initialized() -> bool:
    """Whether the device has been used."""
    return is_ready()


def _is_in_bad_fork() -> bool:
    return is_ready() and forked_after_use()


def device_count() -> int:
    """How many device indices are bound to backends; index 0 always counts."""
    if not is_ready():
        return 1
    return _runtimes().count


def current_device() -> int:
    """The index ``torch.device("port")`` stands for."""
    return _current


def set_device(device: Any) -> None:
    """Only index 0 can be the current device: PyTorch's Python-defined devices know no other.

    A process of a distributed program may name its own number: each has one device, which is index 0 there.
    Raises ``RuntimeError`` for another index. ``torchport.use(name)`` binds index 0 to another backend.
    """
    from ...core.traffic import is_own_rank  # on demand: ``import torch`` must stay light

    index = _index(device)
    if index != 0 and not is_own_rank(index):
        raise RuntimeError(
            f"port:{index} cannot be made the current device: PyTorch knows index 0 only for devices defined in "
            "Python. Write the index in full, torch.device('port', index), or bind index 0 with torchport.use(name)"
        )


class device:
    """Context manager that leaves the current device as it is; it takes the indices that :func:`set_device` takes."""

    def __init__(self, device: Any) -> None:
        self.idx = _index(device)

    def __enter__(self) -> None:
        set_device(self.idx)

    def __exit__(self, *exc: object) -> None:
        return None


def _index(device: Any) -> int:
    if device is None:
        return _current
    if isinstance(device, int):
        return _current if device < 0 else device
    index: Any = torch.device(device).index
    return _current if index is None else index


def _runtime(device: Any) -> Any:
    _lazy_init()
    return _runtimes().get(_index(device))


def synchronize(device: Any = None) -> None:
    """Compute everything pending and wait until the device is idle. Raises the first error among pending values."""
    if not is_ready():  # a profiler asks in programs that never use the device
        return
    from ...run.sync import compute_pending  # on demand: ``import torch`` must stay light

    compute_pending(None if device is None else _index(device))


# -- random numbers ----------------------------------------------------------------------------------------------
def manual_seed(seed: int) -> None:
    """Seed the current device's generator."""
    _runtime(None).set_seed(int(seed) & ((1 << 64) - 1))


def manual_seed_all(seed: int) -> None:
    """Seed every device's generator, and those bound later. ``torch.manual_seed`` calls it, also in a program that
    never uses the device: that one must not import the lazy core for it."""
    global _seed
    if not is_ready():
        _seed = int(seed)
        return
    _runtimes().seed_all(int(seed))


def seed() -> int:
    """Seed the current device's generator from the operating system; returns the seed."""
    import secrets

    value = secrets.randbits(63)
    manual_seed(value)
    return value


def seed_all() -> None:
    """Seed every device's generator from the operating system."""
    import secrets

    manual_seed_all(secrets.randbits(63))


def initial_seed() -> int:
    """The seed of the current device's generator."""
    return _runtime(None).random.seed


def get_rng_state(device: Any = "port") -> torch.Tensor:
    """The generator's state: 16 bytes on the CPU, the seed and the number of random ops since."""
    if not is_ready() and _index(device) == 0:  # ``fork_rng`` asks in programs that never use the device
        state = RandomState()
        state.set_seed(DEFAULT_SEED if _seed is None else _seed)
    else:
        state = _runtime(device).random
    return torch.tensor(list(state.to_bytes()), dtype=torch.uint8, device="cpu")


def set_rng_state(new_state: torch.Tensor, device: Any = "port") -> None:
    """Restore a state that :func:`get_rng_state` gave. Raises ``ValueError`` for anything else."""
    if new_state.dtype != torch.uint8 or new_state.numel() != 16 or new_state.device.type != "cpu":
        raise ValueError("a generator state of this device is a CPU uint8 tensor of 16 elements, from get_rng_state()")
    data = bytes(new_state.tolist())
    if not is_ready() and _index(device) == 0 and not any(data[8:]):
        manual_seed_all(int.from_bytes(data[:8], "little"))
        return
    _runtime(device).random.from_bytes(data)


def get_rng_state_all() -> list[torch.Tensor]:
    """The state of every device's generator."""
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    """Restore states that :func:`get_rng_state_all` gave."""
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


default_generators: tuple[torch.Generator, ...] = ()
"""Empty: the default generator of an index is a seed and a count, and no generator object of PyTorch's."""


# -- properties and memory ---------------------------------------------------------------------------------------
def get_amp_supported_dtype() -> list[torch.dtype]:
    """The dtypes ``torch.autocast("port")`` may cast to."""
    return [torch.bfloat16, torch.float16]


def is_bf16_supported() -> bool:
    """bfloat16 tensors work on every backend."""
    return True


def get_device_name(device: Any = None) -> str:
    """The backend and hardware behind an index, such as ``inductor on cpu:0``."""
    runtime = _runtime(device)
    return f"{runtime.backend.name} on {runtime.device}"


class DeviceProperties(dict[str, Any]):
    """What is known of a device: by key, and as attributes, which is how programs read CUDA's properties."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"nothing is known of {name!r}; there are: {', '.join(self)}") from None


def get_device_properties(device: Any = None) -> DeviceProperties:
    """The backend's name, hardware and memory; ``total_memory`` is the machine's where the device is its CPU."""
    runtime = _runtime(device)
    info = runtime.memory_info()
    total = info.get("total", 0)
    if not total and runtime.device.type == "cpu" and hasattr(os, "sysconf"):
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return DeviceProperties(
        name=get_device_name(device),
        backend=runtime.backend.name,
        hardware=str(runtime.device),
        total_memory=total,
        **info,
    )


def get_device_capability(device: Any = None) -> tuple[int, int]:
    """There are no capability levels; always ``(0, 0)``."""
    return (0, 0)


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """``(free, total)`` bytes as far as the backend says, else zeros."""
    info = _runtime(device).memory_info()
    return info.get("free", 0), info.get("total", 0)


def memory_stats(device: Any = None) -> dict[str, int]:
    """The figures that the backend has, by CUDA's names; those it has not are left out."""
    allocated = _runtime(device).memory_info().get("allocated")
    return {} if allocated is None else {"allocated_bytes.all.current": allocated}


def memory_allocated(device: Any = None) -> int:
    """Bytes in use as far as the backend says, else 0."""
    return _runtime(device).memory_info().get("allocated", 0)


memory_reserved = memory_allocated
max_memory_allocated = memory_allocated
max_memory_reserved = memory_allocated


def reset_peak_memory_stats(device: Any = None) -> None:
    """Peaks are not kept: what is in use now is what the figures say."""


def empty_cache() -> None:
    """Values are freed with their last reference; there is no cache of memory to empty."""


streams.install(synchronize)
Event = DeviceEvent
