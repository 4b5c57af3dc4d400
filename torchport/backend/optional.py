"""What only some engines can do: protocols that a backend satisfies by having the methods.

Nothing has to be declared or inherited. torchport finds out once which of them a backend satisfies, when it is
registered (:func:`optional_of`); a call then looks at the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, cast, runtime_checkable

from ..core.errors import ContractError
from ..core.sharding import Sharding
from ..core.specs import CompileSpecs, TensorSpec
from .answers import checked_processed
from .interface import (
    Backend,
    BackendData,
    BackendDevice,
    ExecutionContext,
    InitContext,
    Processed,
    check_contract,
)

if TYPE_CHECKING:  # the runtime of program files runs without PyTorch where no delegate needs it
    import torch
    from torch import fx

__all__ = [
    "PROTOCOLS",
    "Chain",
    "ChainCall",
    "ChainRun",
    "OptionalMethods",
    "Started",
    "SupportsBorrow",
    "SupportsCacheKey",
    "SupportsChain",
    "SupportsCompilationDevices",
    "SupportsCompilerSettings",
    "SupportsFork",
    "SupportsHostExecution",
    "SupportsMemoryInfo",
    "SupportsMethods",
    "SupportsMetrics",
    "SupportsOverlap",
    "SupportsPreprocessAll",
    "SupportsSeed",
    "SupportsSharding",
    "SupportsStart",
    "SupportsSymbolicSizes",
    "SupportsText",
    "collectors",
    "ended",
    "optional_of",
    "preprocess_each",
]


# -- starting a computation --------------------------------------------------------------------------------------------
@dataclass(slots=True)
class Started:
    """A computation that :meth:`SupportsStart.start` has begun.

    ``results`` are placeholders, one per output, in order: :attr:`BackendData.has_value` is false until the computation
    has succeeded. ``done`` says, without waiting, whether it has ended, well or not. ``wait`` returns once it has: the
    seconds that it took, or raises what ``execute`` would have raised. Both may be called more than once, by several
    threads; ``wait`` leaves Python's global lock to others and lets an interrupt through.
    """

    results: Sequence[BackendData]
    done: Callable[[], bool]
    wait: Callable[[], float]


collectors: Final[list[Callable[[], object]]] = []
"""Called by :func:`ended`."""


def ended() -> None:
    """Say that something which was started has ended. A backend need not: then it is noticed at the next flush.

    Until then the memory of its arguments and results is kept. Call it on a thread of Python's that has nothing else to
    do, or have the main thread call it (``Py_AddPendingCall``).
    """
    for collect in collectors:
        collect()


@runtime_checkable
class SupportsStart(Protocol):
    """A backend with a queue of its own: a driver's stream, or a thread that runs without Python.

    Called by the device's queue, instead of ``execute``, where computing may overlap with the program.
    """

    def start(self, handle: Any, args: Sequence[BackendData], context: ExecutionContext) -> Started | None:
        """Begin what ``execute`` does and return at once; ``None``, nothing done, where it has to be ``execute``.

        ``args`` may be results of what was started before and has not ended. Computations run in the order in which
        they were started, so a donated argument is free once those before have ended. One whose argument did not come
        to have a value is not run: it fails, and its donated arguments keep their values
        (:attr:`Capabilities.restores_donated`). Only what has been through ``execute`` once is started; other
        computations may go through it meanwhile.
        """
        ...


@runtime_checkable
class SupportsOverlap(Protocol):
    """A backend that knows when overlap does not pay: where computing would use every core of the host.

    Asked by the device's queue before a computation is started or given to a thread;
    :attr:`torchport.config.execution` overrides it. Without it overlap always pays.
    """

    def should_overlap(self) -> bool | None:
        """Whether it pays now to compute while the program goes on; ``None`` where only measuring tells.

        Then each computation that the backend can start runs both ways a few times, and the quicker way is kept.
        """
        ...


# -- tensors on the host -----------------------------------------------------------------------------------------------
@runtime_checkable
class SupportsBorrow(Protocol):
    """A backend that can read a host tensor where it is.

    Called for each tensor that a model on the CPU gives to ``torch.compile``. Without it a tensor is copied, unless the
    backend's ``to_device`` is the default one, which keeps tensors as they are.
    """

    def borrow(self, tensor: torch.Tensor, spec: TensorSpec, device: BackendDevice) -> BackendData:
        """A CPU tensor as an argument of one call of ``execute``; its owner may write to it once that returned.

        ``spec`` is the tensor's.
        """
        ...


@runtime_checkable
class SupportsHostExecution(Protocol):
    """A backend that runs a computation on host tensors without making values of them first.

    Called for models on the CPU, by ``torch.compile``, once the computation has been through ``execute``. Without it
    tensors are borrowed, executed on, and brought back by ``from_device``.
    """

    def execute_on_host(
        self, handle: Any, tensors: list[torch.Tensor], specs: Sequence[TensorSpec], context: ExecutionContext
    ) -> Sequence[torch.Tensor] | None:
        """Run on CPU tensors that are lent for the call, to CPU tensors that are the caller's.

        ``specs`` are those of the computation's inputs. ``None``, nothing done, where it has to be ``execute``.
        """
        ...


@dataclass(frozen=True, slots=True)
class ChainCall:
    """One of a chain's calls: which values its arguments are, and which its results become."""

    handle: Any
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Chain:
    """Loaded computations that are called in order. Their values are numbered.

    The first values are the ``inputs`` of the whole. A part is a number of places of one of them, a vector: ``(which
    input, places)``. The results of the calls come after the parts. ``results`` are the numbers of the whole's.
    """

    inputs: int
    parts: tuple[tuple[int, tuple[int, ...]], ...]
    calls: tuple[ChainCall, ...]
    values: int
    results: tuple[int, ...]


ChainRun: TypeAlias = Callable[[Sequence[BackendData], ExecutionContext], Sequence[BackendData]]
"""Does what ``execute`` does, for a chain."""


@runtime_checkable
class SupportsChain(Protocol):
    """A backend that runs several loaded computations in order in one call, without Python in between.

    Called for a graph that was compiled in pieces, once each of them has been through ``execute``. Without it
    ``execute`` is called for each.
    """

    def chained(self, chain: Chain) -> ChainRun | None:
        """What runs the chain; ``None`` where ``execute`` has to be called for each.

        One thread at a time calls it. The handles are not destroyed before what is returned is let go.
        """
        ...


# -- compiling, processes, people --------------------------------------------------------------------------------------
@runtime_checkable
class SupportsMethods(Protocol):
    """A backend that compiles the graphs of a program together, to share work or data among them.

    Called by :func:`torchport.aot.lower`, once per program, instead of ``preprocess`` for each graph.
    """

    def preprocess_methods(
        self, graphs: Mapping[str, Sequence[fx.GraphModule]], specs: Mapping[str, Sequence[CompileSpecs]]
    ) -> Mapping[str, Sequence[Processed]]:
        """All graphs of a program that are this backend's, by method (ExecuTorch's ``preprocess_multimethod``)."""
        ...


@runtime_checkable
class SupportsPreprocessAll(Protocol):
    """A backend that compiles several graphs faster together than one after the other, in threads or in one call.

    Called instead of ``preprocess`` where a program waits for several graphs at a time: the segments of a computation
    of which the backend takes only parts. What the disk cache has is not among them.
    """

    def preprocess_all(self, graphs: Sequence[fx.GraphModule], specs: CompileSpecs) -> Sequence[Processed]:
        """What ``preprocess`` would give for each graph, in order; each is loaded by itself (LTC's ``Compile``)."""
        ...


@runtime_checkable
class SupportsSymbolicSizes(Protocol):
    """A backend that compiles one computation for several sizes.

    Called where a graph comes that is equal to an earlier one but for sizes: another length, another batch. Without it
    each set of sizes is compiled for itself, or padded.
    """

    def preprocess_symbolic(self, graph: fx.GraphModule, specs: CompileSpecs) -> Processed:
        """As ``preprocess`` for a graph whose sizes are symbols, as PyTorch's own front ends write it.

        ``meta["val"]`` has fake tensors whose sizes may be ``torch.SymInt``; what computes sizes are nodes
        (``aten.sym_size.int``, Python's arithmetic). Every symbol is a dimension of an input. What is asked of the
        symbols' values, be it by comparing them, becomes a condition for the use of what is returned. Raises
        :class:`.NotSymbolic` for a graph that it has no code for with symbols: then sizes are padded, where values are
        in memory of the host.
        """
        ...

    def resized(self, handle: Any, context: InitContext) -> Any:
        """What ``init`` made of those bytes, as a handle for the inputs and outputs of ``context``.

        ``handle`` is destroyed after it; one call of either runs at a time.
        """
        ...


@runtime_checkable
class SupportsCompilationDevices(Protocol):
    """A backend that loads a computation once for several of its devices.

    Called when a computation is looked for. Without it ``init`` is called for each device, on the same bytes.
    """

    def compilation_devices(self, device: BackendDevice) -> Sequence[BackendDevice]:
        """The devices that what was loaded for this one runs on, too (LTC's ``GetCompilationDevices``).

        ``execute`` is told in ``context.device`` which of them it is called for, and one call runs at a time.
        """
        ...


def preprocess_each(
    backend: Backend, graphs: Mapping[str, Sequence[fx.GraphModule]], specs: Mapping[str, Sequence[CompileSpecs]]
) -> dict[str, list[Processed]]:
    """What stands in for ``preprocess_methods`` where a backend does not have it: ``preprocess`` for each graph."""
    return {
        method: [
            checked_processed(backend, backend.preprocess(graph, spec))
            for graph, spec in zip(given, specs[method], strict=True)
        ]
        for method, given in graphs.items()
    }


@runtime_checkable
class SupportsCompilerSettings(Protocol):
    """A backend whose engine has settings that hold for a whole process, and that ``preprocess`` goes by.

    Called by the compile service: in the program for each request, and in the process that compiles around
    ``preprocess``.
    """

    def compiler_settings(self) -> Mapping[str, Any]:
        """What the program has changed of them, as plain data."""
        ...

    def compiling_under(self, settings: Mapping[str, Any]) -> AbstractContextManager[object]:
        """Have what ``compiler_settings`` gave in another process."""
        ...


@runtime_checkable
class SupportsCacheKey(Protocol):
    """A backend whose bytes depend on more than the graph, the compile specs and the backend's own code.

    Called before the disk cache is asked for a computation, also in processes that will not compile anything: it must
    not import what only compiling needs. Without it nothing but the backend's name, version and sources tells one
    engine from another.
    """

    def engine_files(self) -> Sequence[str]:
        """Paths of the engine's shared libraries and compilers. What they hold is hashed when they have changed."""
        ...

    def cache_key(self, device: BackendDevice) -> Mapping[str, str]:
        """What else the bytes depend on, as name → text: settings of the engine, the kind of an accelerator.

        ``device`` is one of the backend's; its ordinal is not part of the key.
        """
        ...


@runtime_checkable
class SupportsFork(Protocol):
    """A backend whose engine has threads of its own, which a forked process does not have.

    Called in the child of a fork, before anything else runs there, so it must not wait for a lock.
    """

    def forked(self) -> str:
        """Make the engine fit this process, or say why it cannot work; ``""`` as long as it had not started threads.

        A reason is what everything that needs the engine raises from then on; handles are not destroyed any more, and
        only ``from_device`` is called. :func:`torchport.backend.forked.abandon` keeps an engine's destructors from
        waiting for its threads.
        """
        ...


@runtime_checkable
class SupportsSeed(Protocol):
    """A backend with random numbers of its own, besides torchport's.

    Called by ``torch.manual_seed``, and when a device is first bound after that.
    """

    def seed(self, seed: int) -> None:
        """Start the backend's own generators from ``seed``."""
        ...


@runtime_checkable
class SupportsMemoryInfo(Protocol):
    """A backend that knows how much memory its device has.

    Called by ``mem_get_info``, ``memory_allocated`` and ``get_device_properties`` of ``torch.port``.
    """

    def memory_info(self, device: BackendDevice) -> Mapping[str, int]:
        """``{"free": bytes, "total": bytes, "allocated": bytes}`` as far as known."""
        ...


@runtime_checkable
class SupportsText(Protocol):
    """A backend whose compiled code can be read.

    Called by :func:`torchport.dump` with ``format="backend"``.
    """

    def text(self, processed: Processed) -> str:
        """The compiled code as text, for people."""
        ...


@runtime_checkable
class SupportsMetrics(Protocol):
    """A backend with counters of its own.

    Called by ``torchport.metrics.report()``, for backends that were used.
    """

    def metrics(self) -> Mapping[str, float]:
        """Counters by name; the report puts the backend's name before them."""
        ...


@runtime_checkable
class SupportsSharding(Protocol):
    """A backend whose engine partitions computations over several devices by how their inputs lie there.

    Called by :func:`torchport.shard`. Computations on values that lie on several devices are run by ``execute`` as any
    other; their results may lie on several devices, too.
    """

    def shard(self, data: BackendData, sharding: Sharding) -> None:
        """Put a value of the backend on the devices of a mesh. ``from_device`` gives all of it, as before."""
        ...

    def sharding_of(self, data: BackendData) -> Sharding | None:
        """How a value lies on several devices; ``None`` for one that lies on one."""
        ...

    def mesh_devices(self) -> int:
        """How many devices a mesh may have: those of all processes."""
        ...


PROTOCOLS: Final = (
    SupportsStart, SupportsOverlap, SupportsBorrow, SupportsHostExecution, SupportsChain, SupportsMethods,
    SupportsPreprocessAll,
    SupportsSymbolicSizes, SupportsCompilationDevices, SupportsCompilerSettings,
    SupportsCacheKey, SupportsFork, SupportsSeed, SupportsMemoryInfo, SupportsText, SupportsMetrics,
    SupportsSharding,
)  # fmt: skip
"""Every optional protocol, in the order of the documentation."""


def compilation_devices(backend: Backend, device: BackendDevice) -> list[BackendDevice]:
    """The other devices that what is loaded for one of them runs on. Raises :class:`ContractError`."""
    asked = optional_of(backend).compilation_devices
    if asked is None:
        return []
    given: Any = asked.compilation_devices(device)
    if not isinstance(given, Sequence) or not all(
        isinstance(one, BackendDevice) for one in cast("Sequence[Any]", given)
    ):
        raise ContractError(
            f"backend {backend.name!r}: compilation_devices() returned {given!r}; return devices of the backend",
            method="compilation_devices",
        )
    return [one for one in cast("Sequence[BackendDevice]", given) if one != device]


@dataclass(frozen=True, slots=True)
class OptionalMethods:
    """The backend as each optional protocol it satisfies, else ``None``."""

    start: SupportsStart | None
    overlap: SupportsOverlap | None
    borrow: SupportsBorrow | None
    host_execution: SupportsHostExecution | None
    chain: SupportsChain | None
    methods: SupportsMethods | None
    preprocess_all: SupportsPreprocessAll | None
    symbolic_sizes: SupportsSymbolicSizes | None
    compilation_devices: SupportsCompilationDevices | None
    compiler_settings: SupportsCompilerSettings | None
    cache_key: SupportsCacheKey | None
    fork: SupportsFork | None
    seed: SupportsSeed | None
    memory_info: SupportsMemoryInfo | None
    text: SupportsText | None
    metrics: SupportsMetrics | None
    sharding: SupportsSharding | None


def optional_of(backend: Backend) -> OptionalMethods:
    """Which optional protocols a backend satisfies. Found out the first time, which is when it is registered.

    Raises :class:`TorchportError` for a backend that is written for a former contract.
    """
    found = vars(backend).get("_optional")
    if found is None:
        check_contract(type(backend).__qualname__, vars(backend))
        satisfied: list[Any] = [backend if isinstance(backend, protocol) else None for protocol in PROTOCOLS]
        found = OptionalMethods(*satisfied)
        vars(backend)["_optional"] = found
    return found
