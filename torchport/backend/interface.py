"""The one contract: :class:`Backend`, and the values that pass through it.

A working backend defines ``preprocess`` and ``execute``; everything else has a default. Compiling is always
``init(preprocess(graph))``: the lazy device, ``torch.compile`` and ahead-of-time files take the very same path.
"""

from __future__ import annotations

import sys
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol

from ..core.forks import guarded_lock
from ..core.specs import CompileSpecs, TensorSpec
from .arrays import array_to_tensor, tensor_to_array

if TYPE_CHECKING:  # the runtime of program files runs without PyTorch where no delegate needs it
    import numpy as np
    import torch
    from torch import fx

__all__ = [
    "ArrayData",
    "Backend",
    "BackendData",
    "BackendDevice",
    "Computation",
    "ExecutionContext",
    "FreeableBuffer",
    "InitContext",
    "KernelRegistrar",
    "Processed",
    "Started",
    "Support",
    "TemporaryMemory",
    "TensorData",
    "Tracer",
    "ended",
]


@dataclass(frozen=True, slots=True)
class BackendDevice:
    """One piece of hardware a backend drives: its type (``"cpu"``, ``"cuda"``, ``"npu"``, …) and ordinal."""

    type: str
    ordinal: int = 0

    def __str__(self) -> str:
        return f"{self.type}:{self.ordinal}"


class BackendData:
    """A tensor's value on a backend, in the backend's own form (``torch::lazy::BackendData``).

    ``device`` and ``spec`` are fixed; ``info`` and ``exported`` are for the executor's own notes: the latter says that
    somebody else may see the value's memory. A subclass adds the value.
    A value is immutable once it has been handed out: torchport never writes into it.
    """

    __slots__ = ("__weakref__", "device", "exported", "info", "spec")

    def __init__(self, device: BackendDevice, spec: TensorSpec) -> None:
        self.device = device
        self.spec = spec
        self.info: object = None
        self.exported = False

    @property
    def handle(self) -> object:
        """The backend's own object for the value; opaque to torchport."""
        return self

    @property
    def has_value(self) -> bool:
        """Whether the value is there (a placeholder has none until it is assigned)."""
        return True

    def assign(self, other: BackendData) -> None:
        """Give a placeholder its value. Raises ``TypeError`` if the subclass has no placeholders."""
        raise TypeError(f"{type(self).__name__} has no placeholders: override assign() and has_value")


class TensorData(BackendData):
    """A value held as a CPU ``torch.Tensor``: what every backend gets whose data is host memory."""

    __slots__ = ("tensor",)

    def __init__(self, device: BackendDevice, spec: TensorSpec, tensor: torch.Tensor | None) -> None:
        # As BackendData's: a training step makes hundreds, and the call would take as long as all of this.
        self.device = device
        self.spec = spec
        self.info = None
        self.exported = False
        self.tensor = tensor

    @property
    def handle(self) -> object:
        return self.tensor

    @property
    def has_value(self) -> bool:
        return self.tensor is not None

    def assign(self, other: BackendData) -> None:
        if not isinstance(other, TensorData):
            raise TypeError(f"expected TensorData, got {type(other).__name__}")
        self.tensor = other.tensor


class ArrayData(BackendData):
    """A value held as a NumPy array: what a backend works on that needs no PyTorch (:attr:`Backend.torch_free`)."""

    __slots__ = ("array",)

    def __init__(self, device: BackendDevice, spec: TensorSpec, array: np.ndarray[Any, Any]) -> None:
        super().__init__(device, spec)
        self.array = array

    @property
    def handle(self) -> object:
        return self.array


@dataclass(frozen=True, slots=True)
class Support:
    """Whether a backend takes a node, with the reason where it does not."""

    ok: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.ok

    @classmethod
    def yes(cls) -> Support:
        """The node is taken."""
        return _YES

    @classmethod
    def no(cls, reason: str) -> Support:
        """The node is not taken, and why, in words a user can act on."""
        return cls(False, reason)


_YES = Support(True)


@dataclass(frozen=True, slots=True)
class Processed:
    """What ``preprocess`` returns: opaque bytes, and a map from the backend's own ids to debug handles.

    ``named_data`` is stored once per key and program, apart from the bytes, for all delegates of the backend to share;
    two delegates that give one key different bytes are an error.
    """

    data: bytes
    debug_map: Mapping[int | str, tuple[int, ...]] = field(default_factory=dict[int | str, tuple[int, ...]])
    named_data: Mapping[str, bytes] = field(default_factory=dict[str, bytes])


class FreeableBuffer:
    """Bytes handed to ``init`` that the backend may free as soon as it no longer needs them.

    ``data`` raises ``ValueError`` after :meth:`free`; freeing twice is allowed (ExecuTorch's ``FreeableBuffer``).
    """

    __slots__ = ("_data",)

    def __init__(self, data: bytes | memoryview) -> None:
        self._data: bytes | memoryview | None = data

    @property
    def data(self) -> bytes | memoryview:
        """The bytes. Raises ``ValueError`` once freed."""
        if self._data is None:
            raise ValueError("the buffer was freed; read its data before calling free()")
        return self._data

    @property
    def freed(self) -> bool:
        """Whether :meth:`free` was called."""
        return self._data is None

    def __len__(self) -> int:
        return 0 if self._data is None else len(self._data)

    def free(self) -> None:
        """Release the bytes. Safe to call more than once."""
        self._data = None


class Tracer(Protocol):
    """Where a delegate reports what it did, while somebody is profiling (ExecuTorch's ``EventTracer``)."""

    def event(self, name: str, start: float, end: float, ident: int | str | None = None, metadata: str = "") -> None:
        """One operator, ``start`` and ``end`` as ``time.perf_counter()``; ``ident`` is a key of the debug map."""
        ...

    def memory(self, name: str, nbytes: int) -> None:
        """The delegate allocated memory (or, with a negative number, released it)."""
        ...

    def value(self, ident: int | str, value: object) -> None:
        """An intermediate result (a tensor or an array), for numerical comparison."""
        ...


class TemporaryMemory:
    """Scratch memory of a program's delegates: given back, all at once, before and after every instruction."""

    __slots__ = ("_blocks", "limit", "used")

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.used = 0
        self._blocks: list[bytearray] = []

    def allocate(self, nbytes: int) -> memoryview:
        """Zeroed bytes, valid until the delegate returns. Raises ``MemoryError`` beyond :attr:`limit`."""
        if nbytes < 0 or (self.limit is not None and self.used + nbytes > self.limit):
            raise MemoryError(f"{nbytes} bytes of temporary memory asked for; {self.used} of {self.limit} are in use")
        block = bytearray(nbytes)
        self.used += nbytes
        self._blocks.append(block)
        return memoryview(block)

    def reset(self) -> None:
        """Give everything back."""
        if self._blocks:
            self._blocks.clear()
            self.used = 0


@dataclass(slots=True)
class InitContext:
    """What ``init`` may know besides the bytes.

    ``inputs`` and ``outputs`` are the computation's specs in order; ``method`` names the program's method;
    ``options`` are run-time options given by whoever loads the program. ``constants`` holds the values of constant
    inputs by position, for a backend that :attr:`~Backend.binds_constants`; ``named_data`` what
    :attr:`Processed.named_data` was; ``tracer`` is there while somebody is profiling.
    """

    device: BackendDevice
    inputs: Sequence[TensorSpec] = ()
    outputs: Sequence[TensorSpec] = ()
    method: str = "forward"
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    constants: Mapping[int, BackendData] = field(default_factory=dict[int, BackendData])
    named_data: Mapping[str, memoryview] = field(default_factory=dict[str, memoryview])
    tracer: Tracer | None = None


@dataclass(slots=True)
class ExecutionContext:
    """What ``execute`` may know besides its arguments.

    ``outputs`` are the specs the caller expects, in order; ``donated`` the positions of arguments nobody else will
    read again, whose memory the backend may reuse or free early, whether or not the call succeeds. In a program,
    ``options`` are the run-time options as they are now, ``tracer`` is there while somebody is profiling, and
    ``temporary`` is scratch memory.
    """

    device: BackendDevice
    outputs: Sequence[TensorSpec] = ()
    donated: frozenset[int] = frozenset()
    method: str = "forward"
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    tracer: Tracer | None = None
    temporary: TemporaryMemory = field(default_factory=TemporaryMemory)


@dataclass(slots=True)
class Started:
    """A computation that :meth:`Backend.start` has begun.

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


@dataclass(slots=True, eq=False)
class Computation:
    """A compiled graph, ready to run (``torch::lazy::Computation``): specs of inputs and results, and the handle."""

    backend: Backend
    device: BackendDevice
    parameters: tuple[TensorSpec, ...]
    parameter_names: tuple[str, ...]
    results: tuple[TensorSpec, ...]
    handle: Any
    context: ExecutionContext
    fingerprint: str = ""
    graph_ops: int = 0
    compile_seconds: float = 0.0
    key: tuple[str, ...] = ()
    """Under which it is kept in memory."""
    users: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet[Any])
    """Objects that hold it as their ``computation``, which becomes ``None`` when it is dropped from memory."""
    lock: threading.Lock = field(default_factory=guarded_lock)
    """Held while the computation runs: one call at a time, whichever door it came by."""
    checked: bool = False
    """Whether the backend's results were once seen to be what they should be."""
    seconds: float = 0.0
    """How long the last run took."""

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """Release the handle with the last reference to the computation; not while the interpreter ends."""
        if not is_finalizing():
            self.backend.destroy(self.handle)


class KernelRegistrar(Protocol):
    """Where a backend registers its own kernels; see :meth:`Backend.register_kernels`."""

    def impl(self, op: str | torch._ops.OpOverload, key: str, fn: Callable[..., Any]) -> object:
        """Register ``fn`` for an operator at a functionality key (``"Dense"``, ``"Autograd"``, ``"Sparse"``, …).

        A Dense kernel is called as ``fn(*args, **kwargs)`` with :class:`BackendData` where the operator has tensors.
        """
        ...

    def fallback(self, key: str, fn: Callable[..., Any]) -> object:
        """Register a boxed kernel, ``fn(op, args, kwargs)``, for operators that cannot be part of a graph."""
        ...


class Backend(ABC):
    """One compiler or accelerator. Subclass it, give it a ``name``, register it; every door opens.

    Shapes, dtypes and strides of all inputs and outputs are static per computation. Methods may be called from any
    thread; ``execute`` of one handle is never called by two threads at once.
    """

    name: ClassVar[str]
    version: ClassVar[str] = "0"
    """Part of the compile cache's key: change it whenever ``preprocess`` would produce other bytes."""
    torch_free: ClassVar[bool] = False
    """``init``, ``execute`` and ``destroy`` need no PyTorch: in a program they get :class:`ArrayData`, and specs with
    dtype names (``"float32"``) where PyTorch is not loaded."""
    compile_options: ClassVar[Mapping[str, str]] = {}
    """The compile specs that :meth:`preprocess` and :meth:`init` read: name → what it does. Others are refused."""
    binds_constants: ClassVar[bool] = False
    """In a program, inputs that are constants (``meta["constant"]`` on the placeholder in ``preprocess``) are given
    to ``init`` (:attr:`InitContext.constants`) and not to ``execute``."""
    releases_gil: ClassVar[bool] = False
    """Whether ``execute`` spends its time outside Python's global lock: longer computations then run on a thread of
    their own while the program traces the next. Where it holds the lock, a second thread only gets in the way."""
    concurrent: ClassVar[bool] = False
    """Whether ``execute`` of several handles may run at once: a short computation whose value the program waits for
    then does not queue behind a long one that it does not depend on."""
    control_flow: ClassVar[bool] = False
    """Whether graphs may hold ``cond`` and ``while_loop`` (:mod:`torchport.backend.control_flow`): ``supports`` is
    asked about each. Otherwise they split the graph."""
    donation: ClassVar[bool] = False
    """Whether ``execute`` makes use of :attr:`ExecutionContext.donated`; finding them out costs a little per call.
    ``preprocess`` is told which large inputs will probably be donated (``meta["donated"]`` on the placeholder): it may
    count on that for memory and speed, but each call can donate others."""
    restores_donated: ClassVar[bool] = False
    """Whether donated arguments that have a value after ``execute`` has raised have the one they had before: then what
    does not depend on the failure is still computed from them."""

    # -- identity ----------------------------------------------------------------------------------------------
    def is_available(self) -> bool:
        """Whether the backend can run in this process. Must be cheap and must not raise."""
        return True

    def unavailable_reason(self) -> str:
        """What to install or do when :meth:`is_available` is false."""
        return ""

    def devices(self) -> Sequence[BackendDevice]:
        """The hardware this backend drives, in ordinal order; at least one."""
        return (BackendDevice("cpu", 0),)

    # -- data --------------------------------------------------------------------------------------------------
    def to_device(self, tensor: torch.Tensor, device: BackendDevice) -> BackendData:
        """A value with the contents of a CPU tensor. ``tensor`` is the backend's to keep: nobody else writes to it."""
        if self.torch_free:
            plain = tensor.detach().resolve_conj().resolve_neg()
            return ArrayData(device, TensorSpec.of(tensor), tensor_to_array(plain))
        return TensorData(device, TensorSpec.of(tensor), tensor)

    def borrow(self, tensor: torch.Tensor, spec: TensorSpec, device: BackendDevice) -> BackendData:
        """A CPU tensor as an argument of one call of :meth:`execute`; its owner may write to it once that returned.

        ``spec`` is the tensor's. Default: :meth:`to_device`, of a copy where a subclass overrides that.
        """
        if type(self).to_device is Backend.to_device and not self.torch_free:
            return TensorData(device, spec, tensor)
        return self.to_device(tensor.detach().clone(), device)

    def from_device(self, data: BackendData) -> torch.Tensor:
        """A CPU tensor with the value's contents. It may share memory: torchport copies before anyone writes."""
        if isinstance(data, ArrayData):
            return array_to_tensor(data.array, data.spec.dtype)
        if not isinstance(data, TensorData) or data.tensor is None:
            raise TypeError(f"{type(self).__name__} must override from_device() for {type(data).__name__}")
        return data.tensor

    def placeholder(self, spec: TensorSpec, device: BackendDevice) -> BackendData:
        """A value to be assigned later."""
        return TensorData(device, spec, None)

    # -- what it can take --------------------------------------------------------------------------------------
    def supports(self, node: fx.Node) -> Support:
        """Whether the backend takes a node of a graph in normal form (its inputs' ``meta["val"]`` are fake tensors)."""
        return Support.yes()

    def decompositions(self) -> Mapping[torch._ops.OpOverload, Callable[..., Any]]:
        """Operators to rewrite before they reach the backend, as in ``torch._decomp``."""
        return {}

    def register_kernels(self, registrar: KernelRegistrar) -> None:
        """Register kernels of the backend's own for single operators: eager, autograd, quantized, …"""

    # -- compile and run ---------------------------------------------------------------------------------------
    @abstractmethod
    def preprocess(self, graph: fx.GraphModule, specs: CompileSpecs) -> Processed:
        """Compile a graph in normal form to bytes that :meth:`init` of another process could load."""

    def preprocess_methods(
        self, graphs: Mapping[str, Sequence[fx.GraphModule]], specs: Mapping[str, Sequence[CompileSpecs]]
    ) -> Mapping[str, Sequence[Processed]]:
        """All graphs of a program that are this backend's, by method: to share work or data among them.

        Default: :meth:`preprocess` for each (ExecuTorch's ``preprocess_multimethod``).
        """
        return {
            method: [self.preprocess(graph, spec) for graph, spec in zip(given, specs[method], strict=True)]
            for method, given in graphs.items()
        }

    def init(self, processed: FreeableBuffer, specs: CompileSpecs, context: InitContext) -> Any:
        """Make compiled bytes runnable; the result is the handle given to :meth:`execute`. Default: the bytes."""
        return processed

    @abstractmethod
    def execute(self, handle: Any, args: Sequence[BackendData], context: ExecutionContext) -> Sequence[BackendData]:
        """Run the computation. Returns new values, one per output, in order; never changes its arguments."""

    def computes_aside(self) -> bool:
        """Whether it pays now to compute while the program goes on: not where that would use every core of the host.

        Asked before a computation is started or given to a thread; :attr:`torchport.config.execution` overrides it.
        """
        return True

    def start(self, handle: Any, args: Sequence[BackendData], context: ExecutionContext) -> Started | None:
        """Begin what :meth:`execute` does and return at once; ``None``, nothing done, where it has to be ``execute``.

        For a backend with a queue of its own: a driver's stream, or a thread that runs without Python. ``args`` may be
        results of what was started before and has not ended. Computations run in the order in which they were started,
        so a donated argument is free once those before have ended. One whose argument did not come to have a value is
        not run: it fails, and its donated arguments keep their values (:attr:`restores_donated`). Only what has been
        through :meth:`execute` once is started; other computations may go through it meanwhile.
        """
        return None

    def execute_on_host(
        self, handle: Any, tensors: list[torch.Tensor], specs: Sequence[TensorSpec], context: ExecutionContext
    ) -> Sequence[torch.Tensor]:
        """Run the computation on CPU tensors that are lent for the call, to CPU tensors that are the caller's.

        This is what models on the CPU call. ``specs`` are those of the computation's inputs. Default: :meth:`borrow`,
        :meth:`execute`, :meth:`from_device`.
        """
        args = [self.borrow(t, spec, context.device) for t, spec in zip(tensors, specs, strict=True)]
        return [self.from_device(result) for result in self.execute(handle, args, context)]

    def destroy(self, handle: Any) -> None:
        """Release a handle. Called once per successful :meth:`init`, also for a ``None`` handle."""

    # -- housekeeping ------------------------------------------------------------------------------------------
    def seed(self, seed: int) -> None:
        """``torch.manual_seed`` was called. torchport's own random numbers do not need it."""

    def synchronize(self, device: BackendDevice) -> None:
        """Return when all work handed to the device is done."""

    def forked(self) -> str:
        """This process was just forked from one that had the backend: make the engine fit, or say why it cannot work.

        For an engine with threads of its own, which stay in the parent; ``""`` as long as it had not started them. A
        reason is what everything that needs the engine raises from then on; handles are not destroyed any more, and
        only :meth:`from_device` is called. Called before anything else runs in the child, so it must not wait for a
        lock. :func:`torchport.backend.forked.abandon` keeps an engine's destructors from waiting for its threads.
        """
        return ""

    def memory_info(self, device: BackendDevice) -> Mapping[str, int]:
        """``{"free": bytes, "total": bytes}`` as far as known."""
        return {}

    def text(self, processed: Processed) -> str:
        """The compiled code as text, for people."""
        return f"<{len(processed.data)} bytes>"

    def metrics(self) -> Mapping[str, float]:
        """The backend's own counters for ``torchport.metrics.report()``."""
        return {}

    def shutdown(self) -> None:
        """The process is about to end."""
