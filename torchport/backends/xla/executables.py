"""Compiled executables as bytes and back, without pickle.

JAX's own way (``jax.experimental.serialize_executable``) pickles what lies around XLA's bytes. Here only XLA's
bytes are kept: the rest (shapes, dtypes, one device) is made again from the artifact's specs. That needs private
classes of JAX, all of them in :func:`load`; where they are not as expected, or the machine is another one, the
StableHLO is compiled instead.
"""

from __future__ import annotations

import functools
import hashlib
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jaxlib
import numpy as np

__all__ = ["fits", "here", "load", "prepare_lapack", "serialise"]

Shape = tuple[tuple[int, ...], Any]


@functools.cache
def _processor() -> str:
    """A hash of the CPU's instruction set extensions: XLA compiles for the CPU it runs on."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    found = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", text, re.MULTILINE)
    flags = " ".join(sorted(found.group(1).split())) if found else platform.processor()
    return hashlib.sha256(flags.encode()).hexdigest()[:16]


def here(device: Any) -> dict[str, str]:
    """What an executable for this device depends on."""
    client = device.client
    return {
        "jaxlib": jaxlib.__version__,
        "platform": device.platform,
        "runtime": str(client.platform_version),
        "device": f"{device.device_kind} {device.id}",
        "machine": platform.machine(),
        "processor": _processor() if device.platform == "cpu" else "",
    }


def fits(made_for: Mapping[str, Any], device: Any) -> bool:
    """Whether an executable made for ``made_for`` may be loaded for this device."""
    return dict(made_for) == here(device)


def prepare_lapack(code: bytes) -> None:
    """Find LAPACK's functions if an executable or a module calls them.

    JAX does when it lowers such a call; what another process lowered would call a null pointer.
    """
    if b"lapack_" in code:
        from jaxlib import lapack  # on demand: it imports SciPy's LAPACK

        lapack.prepare_lapack_call("getrf_ffi", np.dtype(np.float32))


def serialise(compiled: Any) -> bytes:
    """XLA's own bytes of a compiled function; empty where the platform cannot serialise."""
    try:
        return bytes(compiled.runtime_executable().serialize())
    except Exception:
        return b""


def load(data: bytes, inputs: Sequence[Shape], outputs: Sequence[Shape], device: Any) -> Any | None:
    """The compiled function again, for one device, or ``None`` where this JAX or this machine cannot load it.

    Checked on JAX 0.10.2. The function was compiled with ``keep_unused``, takes arrays and returns a tuple.
    """
    try:
        from jax._src import core
        from jax._src.interpreters import pxla
        from jax._src.lib import xla_client

        prepare_lapack(data)
        devices = xla_client.DeviceList((device,))
        place = jax.sharding.SingleDeviceSharding(device)
        takes = [core.ShapedArray(shape, dtype) for shape, dtype in inputs]
        gives = [core.ShapedArray(shape, dtype) for shape, dtype in outputs]
        unloaded = pxla.UnloadedMeshExecutable(
            xla_executable=device.client.deserialize_executable(data, executable_devices=devices),
            device_list=devices, backend=device.client, name="torchport", committed=True,
            input_avals=takes, input_shardings=[place] * len(takes),
            output_avals=gives, output_shardings=[place] * len(gives),
            unordered_effects=[], ordered_effects=[], keepalive=[], host_callbacks=[],
            kept_var_idx=set(range(len(takes))), mut=None, all_args_info=None, pgle_profiler=None,
            xla_in_layouts=[None] * len(takes), dispatch_in_layouts=[None] * len(takes),
            xla_out_layouts=[None] * len(gives),
        )  # fmt: skip
        tree = jax.tree_util.tree_structure((tuple(takes), {}))
        described = jax.tree_util.tree_unflatten(tree, [jax.stages.ArgInfo(aval, False) for aval in takes])
        out_tree = jax.tree_util.tree_structure(tuple(gives))
        return jax.stages.Compiled(unloaded.load(), [], described, out_tree, no_kwargs=True)
    except Exception:
        return None
