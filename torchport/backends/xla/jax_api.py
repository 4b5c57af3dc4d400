"""Compiling and running through JAX: everything that depends on JAX's state is here.

JAX reads thread-local and global options while it traces and compiles. Ours must not depend on what the user's program
set for its own use of JAX, nor change it: each step runs inside :func:`scope`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax import export

from torchport.core.errors import CompileError

from .container import Artifact
from .settings import Settings

__all__ = ["compile_module", "export_function", "module_text", "scope", "x64"]


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
    """The platforms of JAX's devices in this process."""
    return list(dict.fromkeys(device.platform for device in jax.devices()))


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


def compile_module(artifact: Artifact, device: Any, donated: frozenset[int]) -> Any:
    """The artifact's module as an executable of a JAX device: called with arrays, it returns a tuple of arrays."""
    settings = Settings.from_json(artifact.settings)
    exported = _deserialised(artifact.module)
    if device.platform not in exported.platforms:
        raise CompileError(
            f"this was compiled for {', '.join(exported.platforms)}, but the device is {device}; compile again"
        )
    with scope(settings):
        place = jax.sharding.SingleDeviceSharding(device)
        arguments = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place) for a in exported.in_avals]
        jitted = jax.jit(exported.call, donate_argnums=tuple(sorted(donated)), out_shardings=place)
        return jitted.lower(*arguments).compile(compiler_options=dict(settings.options))


def module_text(module: bytes) -> str:
    """StableHLO as text."""
    return str(_deserialised(module).mlir_module())
