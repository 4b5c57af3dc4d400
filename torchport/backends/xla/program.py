"""A compiled computation on one JAX device, ready to run."""

from __future__ import annotations

import functools
import hashlib
import logging
import math
import os
import weakref
from collections import Counter, OrderedDict
from collections.abc import Sequence, Set
from typing import Any, Final

import jax
import numpy as np
import torch

from torchport.backend.interface import BackendData, BackendDevice
from torchport.core.errors import BackendUnavailable, ExecutionError
from torchport.core.forks import guarded_lock
from torchport.core.specs import TensorSpec

from . import executables, jax_api
from .container import XlaArtifact
from .dtypes import jax_dtype
from .spread import Spread, in_use
from .values import XlaData, from_array, shares_memory, to_array, wait_for_lent_memory

__all__ = ["XlaProgram", "compile_now", "end", "jax_device", "wait"]

log: Final = logging.getLogger("torchport.xla")
_x64 = jax.enable_x64
_address: Any = torch._C.TensorBase.data_ptr  # type: ignore[attr-defined]
"""``data_ptr`` of tensors that are known to have memory."""


@functools.cache
def jax_device(device: BackendDevice) -> Any:
    """JAX's own object for a device. Raises :class:`BackendUnavailable`."""
    found = jax.local_devices()
    if device.ordinal >= len(found) or found[device.ordinal].platform != device.type:
        raise BackendUnavailable(f"JAX has no device {device}; it has: {', '.join(map(str, found))}")
    return found[device.ordinal]


def wait(device: BackendDevice) -> None:
    """Return when every array on the device has its value. Raises :class:`ExecutionError` for one that has none."""
    for array in jax_device(device).client.live_arrays():
        if not array.is_deleted():
            try:
                array.block_until_ready()
            except Exception as error:
                raise ExecutionError(f"XLA failed: {type(error).__name__}: {error}") from error


_fresh: Final[OrderedDict[tuple[bytes, Any], Any]] = OrderedDict()
"""What ``preprocess`` has just compiled, by module and device: ``init`` in the same process need not load it."""
_FRESH: Final = 8
_lock: Final = guarded_lock()
_VARIANTS: Final = 2
_SPARE: Final = 8
"""Of the memory that is free, the part that a rehearsal takes at most."""
_LONGEST_END: Final = 10.0
"""Seconds that the end of the process waits for computations nobody reads."""


def _key(artifact: XlaArtifact, place: Any) -> tuple[bytes, Any]:
    text = repr((artifact.settings, artifact.placement)).encode()
    return hashlib.blake2b(artifact.module + text, digest_size=16).digest(), place


def compile_now(artifact: XlaArtifact) -> None:
    """Compile for JAX's first device, and put the executable's bytes into the artifact where there are any."""
    place = jax.devices()[0]
    compiled = jax_api.compile_module(artifact, place)
    if artifact.placement is None:
        artifact.executable = executables.serialise(compiled)
        artifact.made_by = {**artifact.made_by, "executable": executables.here(place)}
    with _lock:
        _fresh[_key(artifact, place)] = compiled
        while len(_fresh) > _FRESH:
            _fresh.popitem(last=False)


def executable_of(artifact: XlaArtifact, place: Any) -> tuple[Any, str]:
    """The artifact's executable: the one just compiled, the one in the artifact, or one compiled from the module.

    The text says why the one in the artifact was of no use, though it is for a device such as this.
    """
    with _lock:
        found = _fresh.pop(_key(artifact, place), None)
    if found is not None:
        return found, ""
    refused = ""
    if artifact.executable:
        made_for = artifact.made_by.get("executable", {})
        if executables.fits(made_for, place):
            computed = {
                origin: spec for origin, spec in zip(artifact.origins, artifact.outputs, strict=True) if origin >= 0
            }
            inputs = [(spec.shape, jax_dtype(spec.dtype)) for spec in artifact.inputs]
            outputs = [(computed[position].shape, jax_dtype(computed[position].dtype)) for position in sorted(computed)]
            loaded = executables.load(artifact.executable, inputs, outputs, place)
            if loaded is not None:
                return loaded, ""
            refused = "XLA cannot load the executable"
        else:
            here = executables.here(place)
            differing = [name for name in here if name != "device" and made_for.get(name) != here[name]]
            if differing:
                refused = f"XLA's executable was made for another {', '.join(differing)}"
    return jax_api.compile_module(artifact, place), refused


class XlaProgram:
    """One executable, and one more for each set of inputs that is given away; ``close`` releases them."""

    def __init__(self, artifact: XlaArtifact, device: BackendDevice) -> None:
        self.device = device
        self.inputs = artifact.inputs
        self.outputs = artifact.outputs
        self._origins = artifact.origins
        self._all_new = artifact.origins == tuple(range(len(artifact.outputs)))
        self._shared = frozenset(at for at, o in enumerate(artifact.origins) if o < 0 or artifact.origins.count(o) > 1)
        made = dict(zip(artifact.origins, artifact.outputs, strict=True))
        self._rooms = Counter((spec.shape, spec.dtype) for origin, spec in made.items() if origin >= 0)
        self._kept = frozenset(-1 - origin for origin in artifact.origins if origin < 0)
        self._artifact = artifact
        self._place = jax_device(device)
        self.refused = ""
        self._plain: Any = self._compiled_later
        if not in_use() or artifact.placement is not None:
            self._plain, self.refused = executable_of(artifact, self._place)
        self._spread = Spread(artifact, self._place)
        self._places = jax_api.input_places(artifact, self._place) if artifact.placement is not None else None
        self._here = device.type == "cpu" and device.ordinal == 0 and self._places is None
        self._lent: list[tuple[int, Any]] = [(0, None)] * len(artifact.inputs)
        self._asked: Counter[frozenset[int]] = Counter()
        self._donating: dict[frozenset[int], Any] = {}
        _open.add(self)

    def run(self, args: Sequence[BackendData], donated: frozenset[int]) -> list[BackendData]:
        """Start the computation; values are there when they are needed. Raises :class:`ExecutionError`."""
        call = self._plain if not donated else self._giving_away(args, donated)
        try:
            # NumPy arrays among the arguments would lose half of their 64 bits outside of this.
            with _x64(True):
                arrays = [arg.array for arg in args]  # pyright: ignore[reportAttributeAccessIssue]
                results = None
                if self._places is not None:
                    arrays = jax.device_put(arrays, self._places)
                elif in_use():
                    results = self._spread.call(args, arrays)
                if results is None:
                    results = call(*arrays)
        except Exception as error:
            raise self._explained(args, error) from error
        if self._all_new:
            made: list[BackendData] = [
                XlaData(self.device, spec, array) for spec, array in zip(self.outputs, results, strict=True)
            ]
        else:
            made = self._shared_out(args, results)
        if in_use():
            self._spread.hand_on(args, made)
        return made

    def rehearse(self) -> None:
        """Run once on zeros, for nothing: XLA's first run takes some 0.2 s more than any other.

        Not where memory may be scarce, and not with a loop in it, which zeros may lead nowhere.
        """
        if not self._here or self._plain == self._compiled_later or b"while" in self._artifact.module:
            return
        size = sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in (*self.inputs, *self.outputs))
        if size > os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / _SPARE:
            return
        try:
            with _x64(True):
                results = self._plain(*(np.zeros(spec.shape, jax_dtype(spec.dtype)) for spec in self.inputs))
            for result in results:
                result.block_until_ready()
        except Exception as error:  # the program's own first run says what is wrong
            log.debug("a rehearsal failed: %s", error)

    def _compiled_later(self, *arrays: Any) -> Any:
        """Stands for the executable for one device while nobody has asked for it."""
        self._plain, self.refused = executable_of(self._artifact, self._place)
        return self._plain(*arrays)

    def run_on_host(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """Compute on CPU tensors that are lent for the call; ``None`` where the device does not share their memory.

        An input that comes again with the same memory, as parameters do, is not handed over again. Results have memory
        of their own, and are there when this returns. Raises :class:`ExecutionError`.
        """
        if not self._here or self._plain is None or len(tensors) != len(self.inputs):
            return None
        try:
            with _x64(True):
                arrays = [self._lend(at, tensor) for at, tensor in enumerate(tensors)]
                results = self._plain(*arrays)
            values = [results[o] if o >= 0 else arrays[-1 - o] for o in self._origins]
            made = [from_array(value, spec.dtype) for value, spec in zip(values, self.outputs, strict=True)]
        except Exception as error:
            raise ExecutionError(f"XLA failed: {type(error).__name__}: {error}") from error
        return [tensor.clone() if at in self._shared else tensor for at, tensor in enumerate(made)]

    def _lend(self, at: int, tensor: torch.Tensor) -> Any:
        """An input as an array with the tensor's memory, kept from the second time on that the memory comes."""
        place = _address(tensor)
        before, array = self._lent[at]
        if before == place and array is not None and tensor.is_contiguous():
            return array
        array = to_array(tensor, self._place, True)
        kept = before == place and shares_memory(tensor)
        self._lent[at] = (place, array if kept else None)
        return array

    def _shared_out(self, args: Sequence[Any], values: Sequence[Any]) -> list[BackendData]:
        """One value per output where several outputs, or an output and an input, are the same array."""
        arrays = [values[origin] if origin >= 0 else args[-1 - origin].array for origin in self._origins]
        results = [XlaData(self.device, spec, array) for spec, array in zip(self.outputs, arrays, strict=True)]
        for value in (*(results[at] for at in self._shared), *(args[at] for at in self._kept)):
            value.shared = True
        return list(results)

    def _giving_away(self, args: Sequence[Any], donated: frozenset[int]) -> Any:
        """The executable that takes these arguments' memory, from the second time on that the same ones are offered.

        Each set of arguments costs a compilation, so there are at most two; taking nothing is always right.
        """
        offered = self._of_use({at for at in donated - self._kept if not getattr(args[at], "shared", True)})
        found = self._donating.get(offered)
        if found is None and offered:
            self._asked[offered] += 1
            if self._asked[offered] > 1 and len(self._donating) < _VARIANTS:
                found = jax_api.compile_module(self._artifact, self._place, offered)
                self._donating[offered] = found
        return found or self._plain

    def _of_use(self, offered: Set[int]) -> frozenset[int]:
        """The inputs whose memory a result can have: one for each result of the same shape and dtype.

        JAX finds the same ones, compiles for the others all the same, and warns of them.
        """
        room = Counter(self._rooms)
        taken: list[int] = []
        for at in sorted(offered):
            kind = self.inputs[at].shape, self.inputs[at].dtype
            if room[kind]:
                room[kind] -= 1
                taken.append(at)
        return frozenset(taken)

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
        self._spread.close()
        self._donating = {}
        self._lent = []


_open: Final[weakref.WeakSet[XlaProgram]] = weakref.WeakSet()


def end() -> None:
    """Release every executable, and wait until XLA's threads need nothing of Python's any more."""
    with _lock:
        _fresh.clear()
    for program in list(_open):
        program.close()
    wait_for_lent_memory(_LONGEST_END)


def _plain(spec: TensorSpec) -> str:
    """A spec without strides: XLA's values have none."""
    return f"{str(spec.dtype).removeprefix('torch.')}{list(spec.shape)}"
