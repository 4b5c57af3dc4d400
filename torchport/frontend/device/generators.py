"""``torch.Generator("port")``: PyTorch makes generators of devices in C++ only.

A generator of the device is a seed and a count (``core/random_state.py``), and a Python object. Each is also a CPU
generator, which PyTorch's C++ can pass on. Operators of this device find the Python object by the CPU generator's
address. Operators of the CPU that are given one, such as ``torch.randperm(n, generator=g)`` in a sampler, draw from the
CPU generator. Runs inside ``import torch`` and does not make the device ready.

Private torch APIs used here: ``torch._C.Generator`` (what ``torch.Generator`` is), its ``_cdata``.
"""

from __future__ import annotations

import secrets
import weakref
from typing import Any, Final

import torch

from ...core.random_state import RandomState
from .names import NAME
from .patches import replace

__all__ = ["PortGenerator", "install", "owner_of"]

_Plain: Final[Any] = torch._C.Generator
_Meta: Final[Any] = type(_Plain)
_OWN_BYTES: Final = 16


class _Kind(_Meta):
    """Makes PyTorch's generators instances of :class:`Generator`, which replaces ``torch.Generator``."""

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, _Plain)

    def __subclasscheck__(self, subclass: type) -> bool:
        return issubclass(subclass, _Plain)


class Generator(_Plain, metaclass=_Kind):
    __doc__ = _Plain.__doc__

    def __new__(cls, device: Any = "cpu") -> Any:
        asked = torch.device(device)
        if asked.type != NAME:
            return _Plain(asked)
        return PortGenerator(asked.index or 0)


class PortGenerator(_Plain):
    """A generator of the device. The numbers that an operator draws depend on the seed and on the count of draws."""

    def __new__(cls, index: int = 0) -> PortGenerator:
        made = _Plain.__new__(cls, "cpu")
        made.index = index
        made.random = RandomState()
        _by_address[made._cdata] = made
        return made

    index: int
    random: RandomState

    @property
    def device(self) -> torch.device:
        """The device that the generator was made for."""
        return torch.device(NAME, self.index)

    def manual_seed(self, seed: int) -> PortGenerator:
        """Start anew from a seed; returns the generator."""
        _Plain.manual_seed(self, seed)
        self.random.set_seed(int(seed))
        return self

    def seed(self) -> int:
        """Start anew from a seed of the operating system; returns the seed."""
        seed = secrets.randbits(63)
        self.manual_seed(seed)
        return seed

    def initial_seed(self) -> int:
        """The seed."""
        return self.random.seed

    def get_state(self) -> torch.Tensor:
        """Seed, count and the state of the CPU generator: uint8 elements on the CPU."""
        own = torch.frombuffer(bytearray(self.random.to_bytes()), dtype=torch.uint8)
        return torch.cat([own, _Plain.get_state(self)])

    def set_state(self, new_state: torch.Tensor) -> PortGenerator:
        """Go on from a state of :meth:`get_state` or ``torch.port.get_rng_state``; ``ValueError`` for anything else."""
        rest = new_state[_OWN_BYTES:]
        known = new_state.dtype == torch.uint8 and new_state.device.type == "cpu" and len(new_state) >= _OWN_BYTES
        if not known or len(rest) not in (0, len(_Plain.get_state(self))):
            raise ValueError(
                f"this is no state of a generator on {self.device}, which is a CPU tensor of uint8 from get_state()"
            )
        self.random.from_bytes(bytes(new_state[:_OWN_BYTES].tolist()))
        if len(rest):
            _Plain.set_state(self, rest.clone())
        return self

    def clone_state(self) -> PortGenerator:
        """Another generator with the same state."""
        return PortGenerator(self.index).set_state(self.get_state())

    def graphsafe_get_state(self) -> PortGenerator:
        """The same as :meth:`clone_state`."""
        return self.clone_state()

    def graphsafe_set_state(self, state: PortGenerator) -> PortGenerator:
        """Go on from another generator's state."""
        return self.set_state(state.get_state())

    def get_offset(self) -> int:
        """How many random operators have drawn since the generator was seeded."""
        return self.random.draws

    def set_offset(self, offset: int) -> PortGenerator:
        """Go on as after ``offset`` random operators."""
        self.random.draws = int(offset)
        return self

    def __reduce__(self) -> Any:
        return _restored, (self.index, self.get_state())

    def __repr__(self) -> str:
        return f"<torch.Generator on {self.device}, seed {self.random.seed}, {self.random.draws} draws>"


def _restored(index: int, state: torch.Tensor) -> PortGenerator:
    return PortGenerator(index).set_state(state)


_by_address: Final[weakref.WeakValueDictionary[int, PortGenerator]] = weakref.WeakValueDictionary()


def owner_of(generator: Any) -> PortGenerator | None:
    """The generator of this device that PyTorch's C++ has passed on as a CPU generator, if it is one."""
    return _by_address.get(generator._cdata)


def install() -> None:
    """Replace ``torch.Generator`` by the class that makes generators of all devices."""
    replace("torch.Generator", Generator)
