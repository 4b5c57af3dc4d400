"""Values on XLA devices, and their way from and to the host.

JAX arrays are immutable. A value on the CPU platform shares memory with the tensor it came from (nobody else may
write to that one, says the contract of ``to_device``) and with the tensor ``from_device`` gives (which is copied before
anyone writes to it).
"""

from __future__ import annotations

import contextlib
import time
import weakref
from typing import Any, Final

import jax
import numpy as np
import torch

from torchport.backend.interface import BackendData, BackendDevice
from torchport.core.errors import ExecutionError
from torchport.core.specs import TensorSpec, contiguous_strides

from .dtypes import JAX_DTYPES

__all__ = ["XlaData", "from_array", "shares_memory", "to_array", "wait_for_lent_memory"]

try:
    from jax._src.lib import _jax

    _import: Any = _jax.dlpack_managed_tensor_to_buffer
except (ImportError, AttributeError):
    _import = None

_SMALL: Final = 32
"""Up to this many elements a value stays a NumPy array: handing one to a compiled call on the CPU costs 1 µs, DLPack
20 µs; a copy to a GPU of its own cost 190 µs, and a training step made 56 of them."""
_ALIGNMENT: Final = 64
_FETCH: Final = "_single_device_array_to_np_array_did_copy"
"""JAX's own method, which gives a NumPy array and whether that is a copy."""
_ON_CPU: Final = 1
"""DLPack's number of the CPU."""
_BITS: Final = {torch.bfloat16: torch.int16}


class XlaData(BackendData):
    """A ``jax.Array``; small ones may still be NumPy arrays. ``None`` while it is a placeholder."""

    __slots__ = ("array", "shared", "used")

    def __init__(self, device: BackendDevice, spec: TensorSpec, array: Any) -> None:
        super().__init__(device, spec)
        self.array = array
        self.shared = False
        """Whether another value may hold the same array, which therefore is not given away."""
        self.used: Any = None
        """The sharding in which computations take a value that is stored in more parts; ``None``: as it is stored."""

    @property
    def handle(self) -> object:
        return self.array

    @property
    def has_value(self) -> bool:
        return self.array is not None

    def assign(self, other: BackendData) -> None:
        if not isinstance(other, XlaData):
            raise TypeError(f"expected XlaData, got {type(other).__name__}")
        self.array, self.used = other.array, other.used


def _as_numpy(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A contiguous CPU tensor's memory as a NumPy array."""
    bits = _BITS.get(tensor.dtype)
    array = tensor.numpy() if bits is None else tensor.view(bits).numpy()
    return array.view(JAX_DTYPES[tensor.dtype])


def to_array(tensor: torch.Tensor, device: Any, first: bool) -> Any:
    """A CPU tensor's value on a JAX device, without a copy where that is the CPU (``first``: JAX's first CPU device).

    Raises :class:`ExecutionError` for a dtype that XLA does not have.
    """
    if tensor.dtype not in JAX_DTYPES or tensor.layout is not torch.strided:
        raise ExecutionError(
            f"XLA has no {tensor.dtype} tensors of layout {tensor.layout}; convert the tensor before you move it"
        )
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if 1 in plain.shape:  # such a dimension's stride means nothing to PyTorch, and a layout to XLA
        plain = plain.as_strided(plain.shape, contiguous_strides(plain.shape))
    if plain.numel() <= _SMALL:
        return _as_numpy(plain)
    if first and plain.data_ptr() % _ALIGNMENT == 0:
        # A copy of a tensor is aligned; JAX copies what is not, and would warn.
        return _imported(plain, device)
    return jax.device_put(_as_numpy(plain), device)


_lent: Final[dict[int, tuple[weakref.ref[torch.Tensor], weakref.ref[Any]]]] = {}
"""The tensors whose memory XLA has, each an alias that nobody else holds, and the arrays that were made of them."""


def _imported(alias: torch.Tensor, device: Any) -> Any:
    """A tensor's memory as a JAX array: what ``jax.dlpack.from_dlpack`` comes to, without its 15 µs of checks.

    ``alias`` is a tensor object made for this, which lives as long as XLA uses the memory.
    """
    try:
        array = _import(torch._C._to_dlpack(alias), device, None, None, _ON_CPU)  # type: ignore[attr-defined]
    except TypeError:  # another JAX than those this was seen with, or none of its own functions
        array = jax.dlpack.from_dlpack(alias)
    key = id(alias)
    _lent[key] = weakref.ref(alias, lambda _: _lent.pop(key, None)), weakref.ref(array)
    return array


def wait_for_lent_memory(seconds: float) -> bool:
    """Return when XLA's threads have let go of all memory whose arrays are gone; false if that takes too long.

    For the end of the process. PyTorch takes Python's lock when it gets a tensor back; a thread of XLA's that asks for
    that lock while the interpreter ends is ended by Python (before 3.14) inside C++, which calls ``std::terminate``.
    """
    deadline = time.monotonic() + seconds
    while any(alias() is not None and array() is None for alias, array in list(_lent.values())):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.0002)
    return True


def shares_memory(tensor: torch.Tensor) -> bool:
    """Whether :func:`to_array` of a CPU tensor gives an array with the tensor's own memory."""
    return (
        tensor.numel() > _SMALL
        and tensor.is_contiguous()
        and not tensor.dtype.is_complex
        and tensor.data_ptr() % _ALIGNMENT == 0
    )


def from_array(array: Any, dtype: torch.dtype) -> torch.Tensor:
    """A JAX (or NumPy) array as a CPU tensor, sharing memory where it is the CPU's already."""
    if isinstance(array, np.ndarray):
        return _from_numpy(array, dtype)
    if not array.size:
        return torch.empty(array.shape, dtype=dtype)
    if next(iter(array.devices())).platform == "cpu" and len(array.devices()) == 1:
        return torch.from_dlpack(array)
    if not array.is_fully_addressable and not array.is_fully_replicated:
        from jax.experimental import multihost_utils  # on demand: only where several processes share a mesh

        return _from_numpy(np.array(multihost_utils.process_allgather(array, tiled=True)), dtype)
    return _from_numpy(_fetched(array), dtype)


def _fetched(array: Any) -> np.ndarray[Any, Any]:
    """An array's value in memory of its own on the host.

    ``np.array`` copies what it has just fetched once more, and JAX keeps the first copy as long as the array.
    """
    fetch = getattr(array, _FETCH, None)
    if fetch is not None and len(array.devices()) == 1:
        found, is_copy = fetch()
        if is_copy and not found.flags.writeable:
            with contextlib.suppress(ValueError):
                found.flags.writeable = True
        if is_copy and found.flags.writeable:
            return found
    return np.array(array)


def _from_numpy(array: np.ndarray[Any, Any], dtype: torch.dtype) -> torch.Tensor:
    bits = _BITS.get(dtype)
    return torch.from_numpy(array) if bits is None else torch.from_numpy(array.view(np.int16)).view(dtype)
