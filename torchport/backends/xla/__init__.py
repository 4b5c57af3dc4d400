"""``xla``: lowers a graph to StableHLO through JAX and runs it with PJRT, on whatever devices JAX has.

The parts: :mod:`.ops` is the lowering table, :mod:`.lowering` turns a graph into a function of JAX arrays,
:mod:`.jax_api` compiles it, :mod:`.container` frames the bytes, :mod:`.values` holds the values. JAX is imported when
the backend is first used; without it the backend is unavailable and says what to install.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from torchport import native
from torchport.backend.container import check_interface
from torchport.backend.engine_files import environment, libraries_of
from torchport.backend.forked import abandon
from torchport.backend.interface import (
    Backend,
    BackendData,
    BackendDevice,
    Capabilities,
    ExecutionContext,
    FreeableBuffer,
    InitContext,
    KernelRegistrar,
    Processed,
    Support,
)
from torchport.backend.normal_form import input_specs, output_specs
from torchport.core.errors import ExecutionError
from torchport.core.sharding import Sharding
from torchport.core.specs import CompileSpecs, TensorSpec
from torchport.native import beside

from . import container
from .settings import Settings
from .sharding import Placement

if TYPE_CHECKING:
    from .program import XlaProgram

__all__ = ["XlaBackend"]

_NEEDED = ("jax", "jaxlib", "flatbuffers")
_ENGINE = frozenset({"jax", "jaxlib"})
_READ = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_ASIDE = re.compile("CACHE|LOG|TRACEBACK|PROFILER|DUMP")
"""Environment variables that XLA's compiler reads, and which of JAX's do not concern it."""


def _missing() -> list[str]:
    """The packages that are needed and cannot be found."""

    def found(name: str) -> bool:
        try:
            return importlib.util.find_spec(name) is not None
        except (ImportError, ValueError):
            return False

    return [name for name in _NEEDED if not found(name)]


def _engine() -> Any:
    """What running needs of JAX: imported when the backend is first used, since that takes a second."""
    from . import engine  # on demand: it imports JAX

    return engine


def _lowering() -> Any:
    """What compiling needs besides: imported when something is first compiled; programs from files never do."""
    from . import compiling  # on demand: it imports JAX

    return compiling


class XlaBackend(Backend):
    """XLA through JAX. Compile specs: see :mod:`.settings`."""

    name = "xla"
    version = "2"

    @functools.cached_property
    def capabilities(self) -> Capabilities:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Donation where memory is scarce: on the CPU it saved 4% of a step at most, and every set of inputs is
        compiled."""
        return Capabilities(
            control_flow=True,
            holds_kernels=True,
            slow_to_compile=True,
            seconds_per_operator=0.012,
            fixed_compile_cost=60,
            compiled_saves=0.1,  # on the CPU: of a training step of GPT-2 some 0.1, of ResNet-18's nothing
            donation=any(device.type != "cpu" for device in self.devices()),
            compile_options={
                "xla.matmul_precision": "highest (default), high or default: of float32 products",
                "xla.options": "a JSON object of XLA compiler options",
                "mesh": "devices in named dimensions, as JSON",
                "input_shardings": "how each input is split over the mesh, as JSON",
            },
        )

    # -- identity ------------------------------------------------------------------------------------------------
    def is_available(self) -> bool:
        return not _missing()

    def unavailable_reason(self) -> str:
        missing = _missing()
        if not missing:
            return ""
        return f"{', '.join(missing)} not found; install what it needs with: pip install 'torchport[xla]'"

    def devices(self) -> Sequence[BackendDevice]:
        import jax

        return tuple(BackendDevice(device.platform, ordinal) for ordinal, device in enumerate(jax.local_devices()))

    # -- data ----------------------------------------------------------------------------------------------------
    def to_device(self, tensor: torch.Tensor, device: BackendDevice) -> BackendData:
        engine = _engine()
        place = engine.jax_device(device)
        with engine.x64():
            array = engine.to_array(tensor, place, device.type == "cpu" and device.ordinal == 0)
        return engine.XlaData(device, TensorSpec.of(tensor), array)

    def from_device(self, data: BackendData) -> torch.Tensor:
        engine = _engine()
        value: Any = data
        if not isinstance(data, engine.XlaData) or value.array is None:
            raise ExecutionError("a value is not an XlaData with a value")
        made = engine.from_array(value.array, data.spec.dtype)
        return made.clone() if value.shared else made  # another value, an input or a constant, has this memory

    def shard(self, data: BackendData, sharding: Sharding) -> None:
        engine = _engine()
        value: Any = data
        if not isinstance(data, engine.XlaData) or value.array is None:
            raise ExecutionError("a value is not an XlaData with a value")
        first = engine.jax_device(data.device)
        with engine.x64():
            value.array = engine.place(value.array, sharding, first)
        value.used = engine.used_as(sharding, first)

    def sharding_of(self, data: BackendData) -> Sharding | None:
        return _engine().of_array(getattr(data, "array", None), getattr(data, "used", None))

    def mesh_devices(self) -> int:
        import jax

        return len(jax.devices())

    # -- what it can take ----------------------------------------------------------------------------------------
    def supports(self, node: fx.Node) -> Support:
        return _lowering().supports(node)

    def decompositions(self) -> Mapping[torch._ops.OpOverload, Any]:
        return _lowering().decompositions()

    def register_kernels(self, registrar: KernelRegistrar) -> None:
        _lowering().register(self, registrar)

    # -- compile and run -----------------------------------------------------------------------------------------
    def preprocess(self, graph: fx.GraphModule, specs: CompileSpecs) -> Processed:
        import jax

        compiling = _lowering()
        on_an_accelerator = self.capabilities.donation
        if on_an_accelerator:
            beside.build_beside()
        settings = Settings.of(specs)
        placement = Placement.of(specs, input_specs(graph))
        program = compiling.JaxFunction(graph)
        module = compiling.export_function(program, program.shapes(), settings)
        artifact = container.XlaArtifact(
            module=module,
            inputs=input_specs(graph),
            outputs=output_specs(graph),
            origins=program.origins,
            updates=program.updates(),
            again=program.again,
            settings=settings.to_json(),
            placement=placement.to_json() if placement is not None and placement.mesh.size > 1 else None,
            made_by={"jax": jax.__version__, "platforms": compiling.platforms()},
        )
        if not _engine().in_use():  # else what is compiled for one device may never be run
            _engine().compile_now(artifact)
        if on_an_accelerator:
            native.announce()
        return Processed(container.encode(artifact))

    def engine_files(self) -> Sequence[str]:
        # JAX's own sources lower a graph further; they are hashed by its version.
        return [*libraries_of("jaxlib", "*.so", "*.dylib"), *libraries_of("jax", "version.py")]

    def cache_key(self, device: BackendDevice) -> Mapping[str, str]:
        settings = environment(lambda name: name in _READ or (name.startswith("JAX_") and not _ASIDE.search(name)))
        if device.type == "cpu":
            return settings
        place = _engine().jax_device(device)
        return {**settings, "device": f"{place.device_kind}, {place.client.platform_version}"}

    def init(self, processed: FreeableBuffer, specs: CompileSpecs, context: InitContext) -> XlaProgram:
        artifact = container.decode(processed.data)
        processed.free()
        check_interface("xla", artifact.inputs, artifact.outputs, context)
        program = _engine().XlaProgram(artifact, context.device)
        context.refused = program.refused
        if context.beside:
            program.rehearse()
        return program

    def execute(
        self, handle: XlaProgram, args: Sequence[BackendData], context: ExecutionContext
    ) -> Sequence[BackendData]:
        return handle.run(args, context.donated)

    def execute_on_host(
        self, handle: XlaProgram, tensors: list[torch.Tensor], specs: Sequence[TensorSpec], context: ExecutionContext
    ) -> Sequence[torch.Tensor] | None:
        return handle.run_on_host(tensors)

    def destroy(self, handle: XlaProgram | None) -> None:
        if handle is not None:
            handle.close()

    # -- housekeeping --------------------------------------------------------------------------------------------
    def synchronize(self, device: BackendDevice) -> None:
        _engine().wait(device)

    def forked(self) -> str:
        bridge: Any = sys.modules.get("jax._src.xla_bridge")
        clients: list[Any] = [] if bridge is None else list(bridge._backends.values())
        if not clients:  # they are there, too, where the program has started JAX itself
            return ""
        # Python clears modules when it ends; in JAX's are objects that wait for threads, such as MLIR's pool of them.
        modules = [list(vars(m).values()) for name, m in sys.modules.items() if name.partition(".")[0] in _ENGINE]
        abandon(clients, modules)
        atexit.unregister(sys.modules["jax._src.api"].clean_up)  # it waits for the clients' threads
        return "JAX was used before the fork, and its threads stayed in the parent"

    def memory_info(self, device: BackendDevice) -> Mapping[str, int]:
        stats = _engine().jax_device(device).memory_stats()
        if stats and "bytes_limit" in stats:
            total, used = stats["bytes_limit"], stats.get("bytes_in_use", 0)
            return {"free": total - used, "total": total}
        if device.type == "cpu" and hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names:
            page = os.sysconf("SC_PAGE_SIZE")
            return {"free": os.sysconf("SC_AVPHYS_PAGES") * page, "total": os.sysconf("SC_PHYS_PAGES") * page}
        return {}

    def shutdown(self) -> None:
        if f"{__name__}.program" in sys.modules:
            _engine().end()

    def text(self, processed: Processed) -> str:
        return _engine().module_text(container.decode(processed.data).module)
