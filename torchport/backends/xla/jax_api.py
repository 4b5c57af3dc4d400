"""Compiling and running through JAX: everything that depends on JAX's state is here.

JAX reads thread-local and global options while it traces and compiles. Ours must not depend on what the user's program
set for its own use of JAX, nor change it: each step runs inside :func:`scope`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import export

from torchport.core.errors import CompileError

from .container import XlaArtifact
from .executables import prepare_lapack
from .settings import Settings
from .sharding import Placement

__all__ = ["compile_module", "export_function", "input_places", "module_text", "platforms", "scope", "x64"]


def x64() -> Any:
    """JAX with 64-bit types in this thread, until the ``with`` block ends."""
    return jax.enable_x64(True)


@contextlib.contextmanager
def scope(settings: Settings) -> Iterator[None]:
    """The options of JAX that change what a trace means, set for this thread until the ``with`` block ends."""
    with (
        jax.enable_x64(True),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
        jax.default_matmul_precision(settings.matmul_precision),
        jax.debug_nans(False),
        jax.debug_infs(False),
    ):
        yield


def platforms() -> list[str]:
    """The platforms of JAX's devices in this process, by the names that exported modules have."""
    return list(dict.fromkeys(exported_as(device) for device in jax.devices()))


def exported_as(device: Any) -> str:
    """The name that an exported module has for a device's platform: ``cuda`` or ``rocm`` where the device says gpu."""
    return export.default_export_platform() if device.platform == jax.default_backend() else device.platform


def export_function(
    function: Callable[..., Any], shapes: Sequence[tuple[tuple[int, ...], Any]], settings: Settings
) -> bytes:
    """Trace a function of arrays and serialise it as StableHLO for this process's platforms."""
    with scope(settings):
        arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
        exported = export.export(jax.jit(function), platforms=platforms())(*arguments)
        return bytes(exported.serialize())


def _deserialised(module: bytes) -> export.Exported:
    try:
        return export.deserialize(bytearray(module))
    except Exception as error:
        raise CompileError(
            f"this JAX ({jax.__version__}) cannot read the StableHLO: {type(error).__name__}: {error}; compile again"
        ) from error


def compile_module(
    artifact: XlaArtifact,
    device: Any,
    donated: frozenset[int] = frozenset(),
    places: Sequence[Any] | None = None,
    out_places: Sequence[Any] | None = None,
    used: Sequence[Any] = (),
    options: Mapping[str, Any] | None = None,
) -> Any:
    """The artifact's module as an executable: called with arrays, it returns a tuple of arrays.

    For one JAX device; for the devices of the artifact's mesh, ``device`` first; or for inputs with the shardings
    ``places``, and results with ``out_places`` (``None``: XLA's choice). ``used``: the shardings to which inputs are
    brought before anything but updates of them is computed from them; ``None``: they stay. ``options``: further ones of
    XLA's.
    """
    settings = Settings.from_json(artifact.settings)
    exported = _deserialised(artifact.module)
    prepare_lapack(exported.mlir_module_serialized)
    if exported_as(device) not in exported.platforms:
        raise CompileError(
            f"this was compiled for {', '.join(exported.platforms)}, but the device is {device}; compile again"
        )
    with scope(settings):
        several = places is not None or artifact.placement is not None
        places = input_places(artifact, device) if places is None else places
        arguments = [
            jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=place)
            for aval, place in zip(exported.in_avals[: len(artifact.inputs)], places, strict=True)
        ]
        jitted = jax.jit(
            _called(exported.call, used, artifact.again),
            donate_argnums=tuple(sorted(donated)),
            keep_unused=True,
            out_shardings=_out_places(out_places) if several else jax.sharding.SingleDeviceSharding(device),
        )
        return jitted.lower(*arguments).compile(compiler_options={**settings.options, **(options or {})})


def _called(call: Any, used: Sequence[Any], again: Sequence[int]) -> Any:
    """The module's function of its inputs, which are brought to where they are used but for updates of them."""
    if not again and all(to is None for to in used):
        return call
    bring = jax.lax.with_sharding_constraint
    to_use = dict(enumerate(used))

    def run(*arrays: Any) -> Any:
        brought = (a if to_use.get(at) is None else bring(a, to_use[at]) for at, a in enumerate(arrays))
        return call(*brought, *(arrays[at] for at in again))

    return run


def _out_places(places: Sequence[Any] | None) -> tuple[Any, ...] | None:
    return None if places is None else tuple(places)


def input_places(artifact: XlaArtifact, device: Any) -> list[Any]:
    """The sharding of every input. Raises :class:`CompileError` where there are fewer devices than the mesh has."""
    if artifact.placement is None:
        return [jax.sharding.SingleDeviceSharding(device)] * len(artifact.inputs)
    placement = Placement.from_json(artifact.placement, artifact.inputs)
    count = placement.mesh.size
    found = [device, *(other for other in jax.devices(device.platform) if other != device)][:count]
    if len(found) < count:
        raise CompileError(
            f"the mesh has {count} devices, but JAX has {len(found)} of the platform {device.platform}; "
            "compile for a smaller mesh"
        )
    mesh = jax.sharding.Mesh(np.array(found).reshape(placement.mesh.shape), placement.mesh.axes)
    return [
        jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*(dim or None for dim in dims or ())))
        for dims in placement.inputs
    ]


def module_text(module: bytes) -> str:
    """StableHLO as text."""
    return str(_deserialised(module).mlir_module())
