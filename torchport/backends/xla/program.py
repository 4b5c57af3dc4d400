"""A compiled computation on one JAX device, ready to run."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax

from torchport.backend.interface import BackendData, BackendDevice
from torchport.core.errors import BackendUnavailable, ExecutionError
from torchport.core.specs import TensorSpec

from . import jax_api
from .container import Artifact
from .values import XlaData

__all__ = ["XlaProgram", "jax_device", "wait"]

_x64 = jax.enable_x64


@functools.cache
def jax_device(device: BackendDevice) -> Any:
    """JAX's own object for a device. Raises :class:`BackendUnavailable`."""
    found = jax.devices()
    if device.ordinal >= len(found) or found[device.ordinal].platform != device.type:
        raise BackendUnavailable(f"JAX has no device {device}; it has: {', '.join(map(str, found))}")
    return found[device.ordinal]


def wait(device: BackendDevice) -> None:
    """Return when every array on the device has its value."""
    for array in jax_device(device).client.live_arrays():
        if not array.is_deleted():
            array.block_until_ready()


class XlaProgram:
    """One executable, and one more for each set of inputs that is given away; ``close`` releases them."""

    def __init__(self, artifact: Artifact, device: BackendDevice) -> None:
        self.device = device
        self.inputs = artifact.inputs
        self.outputs = artifact.outputs
        self._origins = artifact.origins
        self._all_new = artifact.origins == tuple(range(len(artifact.outputs)))
        self._kept = frozenset(-1 - origin for origin in artifact.origins if origin < 0)
        self._artifact = artifact
        self._place = jax_device(device)
        self._plain: Any = jax_api.compile_module(artifact, self._place, frozenset())
        self._donating: dict[frozenset[int], Any] = {}

    def run(self, args: Sequence[BackendData], donated: frozenset[int]) -> list[BackendData]:
        """Start the computation; values are there when they are needed. Raises :class:`ExecutionError`."""
        call = self._plain if not donated else self._giving_away(donated - self._kept)
        try:
            # NumPy arrays among the arguments would lose half of their 64 bits outside of this.
            with _x64(True):
                results = call(*[arg.array for arg in args])  # pyright: ignore[reportAttributeAccessIssue]
        except Exception as error:
            raise self._explained(args, error) from error
        device = self.device
        if not self._all_new:
            results = [results[o] if o >= 0 else args[-1 - o].array for o in self._origins]  # pyright: ignore[reportAttributeAccessIssue]
        return [XlaData(device, spec, array) for spec, array in zip(self.outputs, results, strict=True)]

    def _giving_away(self, donated: frozenset[int]) -> Any:
        found = self._donating.get(donated)
        if found is None:
            found = self._donating[donated] = jax_api.compile_module(self._artifact, self._place, donated)
        return found

    def _explained(self, args: Sequence[BackendData], error: Exception) -> ExecutionError:
        """Why a call failed: wrong arguments first, since JAX's own words do not name ours."""
        if self._plain is None:
            return ExecutionError("the computation was destroyed; it cannot run any more")
        if len(args) != len(self.inputs):
            return ExecutionError(f"the computation takes {len(self.inputs)} inputs, but got {len(args)}")
        for position, (arg, spec) in enumerate(zip(args, self.inputs, strict=True)):
            if not isinstance(arg, XlaData) or arg.array is None:
                return ExecutionError(f"input {position} is not an XlaData with a value")
            if arg.spec.shape != spec.shape or arg.spec.dtype != spec.dtype:
                return ExecutionError(f"input {position} should be {_plain(spec)}, but is {_plain(arg.spec)}")
        return ExecutionError(f"XLA failed: {type(error).__name__}: {error}")

    def close(self) -> None:
        """Release the executables; results stay valid. May be called more than once."""
        self._plain = None
        self._donating = {}


def _plain(spec: TensorSpec) -> str:
    """A spec without strides: XLA's values have none."""
    return f"{str(spec.dtype).removeprefix('torch.')}{list(spec.shape)}"
