"""Computations whose inputs lie on several devices: XLA partitions them by the shardings of the inputs.

A computation is compiled once for each combination of shardings that its inputs come with. XLA finds the shardings of
everything else, but for outputs that are the next value of an input (an updated parameter, an optimizer's state): they
lie as that input did, so that the next step finds what this one was compiled for. Once one input lies on several
devices, inputs that do not are copied to all of them.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence
from typing import Any, Final

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from torchport.core import metrics
from torchport.core.errors import ExecutionError
from torchport.core.frames import warn_user
from torchport.core.sharding import Mesh, Sharding
from torchport.core.traffic import journal

from . import jax_api
from .container import XlaArtifact

__all__ = ["Spread", "collectives_in", "in_use", "of_array", "place", "used_as"]

_state: dict[str, bool] = {}
_MOST: Final = 8
"""Combinations of shardings that a computation is compiled for; others are brought to the first one's."""


def in_use() -> bool:
    """Whether any value of this process was ever put on several devices."""
    return bool(_state)


@functools.cache
def _mesh(mesh: Mesh, first: Any) -> jax.sharding.Mesh:
    """JAX's mesh. Raises :class:`ExecutionError` where there are fewer devices."""
    found = [first, *(other for other in jax.devices(first.platform) if other != first)]
    if jax.process_count() > 1:
        found = list(jax.devices(first.platform))  # in one order in every process
    if len(found) < mesh.size:
        raise ExecutionError(f"the mesh {mesh} needs {mesh.size} devices; JAX has {len(found)} ({first.platform})")
    return jax.sharding.Mesh(np.array(found[: mesh.size]).reshape(mesh.shape), mesh.axes)


def _named(sharding: Sharding, first: Any) -> NamedSharding:
    return NamedSharding(_mesh(sharding.mesh, first), PartitionSpec(*(axes or None for axes in sharding.dims)))


def place(array: Any, sharding: Sharding, first: Any) -> Any:
    """A value's array on the devices of a mesh that begins with the device ``first``."""
    _state["used"] = True
    return _put(array, _named(sharding, first))


def _put(array: Any, to: Any) -> Any:
    if to.is_fully_addressable:
        return jax.device_put(array, to)
    whole = np.asarray(array)  # some of the devices are other processes', each of which has the value
    return jax.make_array_from_callback(whole.shape, to, lambda index: whole[index])


def of_array(array: Any, used: Any = None) -> Sharding | None:
    """How an array lies on several devices; ``None`` for those on one."""
    found = getattr(array, "sharding", None)
    if not isinstance(found, NamedSharding) or found.mesh.size < 2:
        return None
    dims = tuple(() if one is None else (one,) if isinstance(one, str) else tuple(one) for one in found.spec)
    sizes = tuple(found.mesh.shape.values())
    return Sharding(Mesh(tuple(found.mesh.axis_names), sizes), dims, _gathered(dims, used))


def _gathered(dims: Sequence[Sequence[str]], used: Any) -> tuple[str, ...]:
    if used is None:
        return ()
    kept = {axis for one in used.spec for axis in ((one,) if isinstance(one, str) else one or ())}
    return tuple(axis for axes in dims for axis in axes if axis not in kept)


def used_as(sharding: Sharding, first: Any) -> Any:
    """The sharding in which computations take an array that lies so; ``None``: as it lies."""
    return _named(Sharding(sharding.mesh, sharding.used), first) if sharding.gathered else None


class _Variant:
    """The computation, compiled for inputs that lie in one way."""

    def __init__(self, artifact: XlaArtifact, device: Any, places: Sequence[Any], used: Sequence[Any]) -> None:
        self.places = list(places)
        pinned = [places[at] if at >= 0 else None for at in artifact.updates]
        compile_it = functools.partial(
            jax_api.compile_module, artifact, device, places=self.places, out_places=pinned or None, used=used
        )
        self.call = compile_it()
        self.collectives = collectives_in(self.call.as_text())
        if self._scatters() and not _scatters_right(self.places[0].mesh):
            self.call = compile_it(options={"xla_disable_hlo_passes": "reduce-scatter-creator"})
            self.collectives = collectives_in(self.call.as_text())
            if self._scatters():
                raise ExecutionError(
                    "XLA would run a reduce-scatter, whose sums are wrong on these devices (JAX issue 40830), and has "
                    "no other way to run this computation; shard over the devices of one process"
                )
        metrics.count("ShardedCompile")

    def _scatters(self) -> bool:
        return any(name == "reduce_scatter" for name, *_ in self.collectives)


_TESTED: Final = 8 << 20
"""Bytes that each device gives: XLA's reduce-scatter over processes on the CPU is wrong from 4 MiB on."""


@functools.cache
def _scatters_right(mesh: jax.sharding.Mesh) -> bool:
    """Whether a reduce-scatter over the devices of a mesh gives the parts of the sum; a few tries, a warning if not."""
    flat = jax.sharding.Mesh(mesh.devices.reshape(-1), ("all",))
    rows, everywhere = (NamedSharding(flat, spec) for spec in (PartitionSpec("all"), PartitionSpec()))
    shape = (flat.size, _TESTED // 4)
    given = _put(np.arange(math.prod(shape), dtype=np.float32).reshape(shape) % 251, rows)
    scatter = jax.jit(
        jax.shard_map(
            lambda x: jax.lax.psum_scatter(x[0], "all", tiled=True),
            mesh=flat,
            in_specs=PartitionSpec("all"),
            out_specs=PartitionSpec("all"),
        )
    )
    same = jax.jit(lambda x, parts: (x.sum(0) == parts).all(), out_shardings=everywhere)
    right = all(bool(np.asarray(same(given, scatter(given)))) for _ in range(3))
    if not right:
        warn_user(
            "XLA's reduce-scatter gives wrong sums on these devices (JAX issue 40830); computations are compiled with "
            "all-reduces in its place"
        )
    return right


class Spread:
    """The executables of one computation for inputs on several devices."""

    def __init__(self, artifact: XlaArtifact, device: Any) -> None:
        self._artifact, self._device = artifact, device
        self._variants: dict[tuple[Any, ...], _Variant] = {}

    def call(self, args: Sequence[Any], arrays: Sequence[Any]) -> Any | None:
        """The results; ``None`` where every input is on one device. Inputs that had to be copied stay copied.

        Raises :class:`ExecutionError` for inputs of two meshes.
        """
        mesh = None
        for array in arrays:
            if array.__class__ is not np.ndarray and len(array.sharding.device_set) > 1:
                if mesh is not None and array.sharding.mesh != mesh:
                    raise ExecutionError(
                        f"inputs of one computation lie on two meshes ({mesh.shape} and {array.sharding.mesh.shape}); "
                        "shard them over one"
                    )
                mesh = array.sharding.mesh
        if mesh is None:
            return None
        everywhere = NamedSharding(mesh, PartitionSpec())
        taken = list(arrays)
        for at, array in enumerate(arrays):
            if array.__class__ is np.ndarray or len(array.sharding.device_set) == 1:
                args[at].array = taken[at] = _put(array, everywhere)
        places, used = tuple(array.sharding for array in taken), tuple(arg.used for arg in args)
        variant = self._variants.get((places, used))
        if variant is None:
            variant = self._variant(places, used)
            if places != tuple(variant.places):
                taken = [_put(array, to) for array, to in zip(taken, variant.places, strict=True)]
        for name, what, origin, ranks, nbytes in variant.collectives:
            record = journal.new(name, what, "mesh", ranks, origin)
            record.nbytes, record.arrived = nbytes, True
        return variant.call(*taken)

    def _variant(self, places: tuple[Any, ...], used: tuple[Any, ...]) -> _Variant:
        if len(self._variants) >= _MOST:
            metrics.count("ShardedOtherwise")
            return next(iter(self._variants.values()))
        made = self._variants[places, used] = _Variant(self._artifact, self._device, places, used)
        return made

    def hand_on(self, args: Sequence[Any], results: Sequence[Any]) -> None:
        """Have the next value of an input, and an input that is a result, be taken by computations as the input was."""
        for result, origin in zip(results, self._artifact.origins, strict=True):
            at = -1 - origin if origin < 0 else self._artifact.updates[origin] if self._artifact.updates else -1
            if at >= 0:
                result.used = args[at].used

    def close(self) -> None:
        """Release the executables."""
        self._variants = {}


_INSTRUCTION: Final = re.compile(
    r"= (?P<result>\([^)]*\)|\S+) (?P<name>all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)"
    r"(?:-start)?\("
)
_GROUPS: Final = re.compile(r"replica_groups=(?:\[\d+,(\d+)\]|\{\{([\d,]+)\}|mesh\[([^]]*)\][^{]*\{([^}]*)\})")
_PAIRS: Final = re.compile(r"source_target_pairs=\{(\{[\d,{} ]*\})\}")
_AXIS: Final = re.compile(r"'([^']+)'(?:=(\d+))?")
_ORIGIN: Final = re.compile(r'op_name="(?:[^"]*/)?([^"/]+)"')
_SHAPE: Final = re.compile(r"\b([a-z]+)(\d*)\w*\[([\d,]*)\]")


def collectives_in(text: str) -> list[tuple[str, str, str, int, int]]:
    """Collectives in XLA's text of a partitioned computation: name, text, origin, ranks, bytes that each rank gives."""
    found: list[tuple[str, str, str, int, int]] = []
    for line in text.splitlines():
        match = _INSTRUCTION.search(line)
        if match is None:
            continue
        shapes = _SHAPE.findall(match["result"])
        if "-start(" in line and match["name"] in ("all-gather", "collective-permute"):
            shapes = shapes[len(shapes) // 2 :]  # a start's result begins with its operands
        nbytes = sum(_bytes(bits, sizes) for _, bits, sizes in shapes)
        ranks, origin = _ranks(line), _ORIGIN.search(line)
        name = match["name"].replace("-", "_")
        given = nbytes // ranks if name == "all_gather" else nbytes * ranks if name == "reduce_scatter" else nbytes
        what = f"{name} of {', '.join(f'{kind}{bits}[{sizes}]' for kind, bits, sizes in shapes)}"
        found.append((name, what, f"{origin[1] if origin else 'a computation'}, partitioned by XLA", ranks, given))
    return found


def _ranks(line: str) -> int:
    """How many devices each group of a collective has: groups are written in three ways. A permutation has pairs."""
    if (pairs := _PAIRS.search(line)) is not None:
        moved = [source != target for source, target in re.findall(r"(\d+),(\d+)", pairs[1])]
        return 2 if any(moved) else 1
    groups = _GROUPS.search(line)
    if groups is None:
        return 1
    count, members, axes, chosen = groups.groups()
    if count:
        return int(count)
    if members:
        return members.count(",") + 1
    sizes = {name: int(size) for name, size in _AXIS.findall(axes)}
    return math.prod(sizes.get(name, 1) for name, _ in _AXIS.findall(chosen))


def _bytes(bits: str, sizes: str) -> int:
    return math.prod(int(size) for size in sizes.split(",") if size) * max(1, int(bits or 8) // 8)
