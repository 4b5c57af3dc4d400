"""The one contract: :class:`Backend`, and the values that pass through it.

A working backend defines ``preprocess`` and ``execute``; everything else has a default. Compiling is always
``init(preprocess(graph))``: the lazy device, ``torch.compile`` and ahead-of-time files take the very same path.
What only some engines can do is in :mod:`.optional`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol

from ..core.errors import TorchportError
from ..core.specs import DTYPE_NAMES, CompileSpecs, TensorSpec
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
    "Capabilities",
    "ExecutionContext",
    "FreeableBuffer",
    "InitContext",
    "KernelRegistrar",
    "Processed",
    "Support",
    "TemporaryMemory",
    "TensorData",
    "Tracer",
    "check_contract",
]


@dataclass(frozen=True, slots=True)
class BackendDevice:
    """One piece of hardware a backend drives: its type (``"cpu"``, ``"cuda"``, ``"npu"``, …) and ordinal."""

    type: str
    ordinal: int = 0

    def __str__(self) -> str:
        return f"{self.type}:{self.ordinal}"


VIEWS: Final = "views"
"""For :attr:`BackendData.exported`: the value was an argument or a result of an operator whose result may be a view."""


class BackendData:
    """A tensor's value on a backend, in the backend's own form (``torch::lazy::BackendData``).

    ``device`` and ``spec`` are fixed; ``info`` and ``exported`` are for the executor's own notes: the latter says that
    somebody else may see the value's memory, or :data:`VIEWS` if that is only for as long as the memory has other
    references. A subclass adds the value.
    A value is immutable once it has been handed out: torchport writes only into memory of PyTorch's own to which
    nothing else refers.
    """

    __slots__ = ("__weakref__", "device", "exported", "info", "spec")

    def __init__(self, device: BackendDevice, spec: TensorSpec) -> None:
        self.device = device
        self.spec = spec
        self.info: object = None
        self.exported: bool | str = False

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
    """A value held as a NumPy array, for backends that need no PyTorch (:attr:`Capabilities.torch_free`)."""

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
    inputs by position, for a backend that :attr:`~Capabilities.binds_constants`; ``named_data`` what
    :attr:`Processed.named_data` was; ``tracer`` is there while somebody is profiling. ``beside``: the program goes on
    while ``init`` runs, so that what the first run would be slow at may be done here.
    """

    device: BackendDevice
    inputs: Sequence[TensorSpec] = ()
    outputs: Sequence[TensorSpec] = ()
    method: str = "forward"
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    constants: Mapping[int, BackendData] = field(default_factory=dict[int, BackendData])
    named_data: Mapping[str, memoryview] = field(default_factory=dict[str, memoryview])
    tracer: Tracer | None = None
    beside: bool = False
    refused: str = ""
    """Set by ``init``: why the engine did not take what the bytes hold compiled, so that it was compiled again. The
    disk cache counts that, and drops the entry."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """What torchport may rely on with a backend (:attr:`Backend.capabilities`). The defaults hold for every backend.

    ``dataclasses.replace`` makes a subclass's from its parent's. Raises ``ValueError`` for fields that contradict each
    other.
    """

    compile_options: Mapping[str, str] = field(default_factory=dict[str, str])
    """The compile specs that ``preprocess`` and ``init`` read, as name → what it does; ``torch.compile`` refuses
    others."""
    control_flow: bool = False
    """Graphs may hold ``cond`` and ``while_loop`` (:mod:`torchport.backend.control_flow`): ``supports`` is asked about
    each. Otherwise they split the graph."""
    releases_gil: bool = False
    """``execute`` spends its time outside Python's global lock: longer computations then run on a thread of their own
    while the program traces the next. Where it holds the lock, a second thread only gets in the way."""
    concurrent: bool = False
    """``execute`` of several handles may run at once: a short computation whose value the program waits for then does
    not queue behind a long one that it does not depend on."""
    donation: bool = False
    """``execute`` makes use of :attr:`ExecutionContext.donated`; finding them out costs a little per call.
    ``preprocess`` is told which large inputs will probably be donated (``meta["donated"]`` on the placeholder): it may
    count on that for memory and speed, but each call can donate others."""
    restores_donated: bool = False
    """With ``donation``: donated arguments that have a value after ``execute`` has raised have the one they had before.
    Then what does not depend on the failure is still computed from them."""
    binds_constants: bool = False
    """In a program, inputs that are constants (``meta["constant"]`` on the placeholder in ``preprocess``) are given to
    ``init`` (:attr:`InitContext.constants`) and not to ``execute``."""
    embeds_constants: bool = False
    """In a program, ``preprocess`` puts inputs that are constants (``meta["constant"]`` on the placeholder) into its
    bytes: neither ``init`` nor ``execute`` is given them, and a file has no second copy. The lazy device has none."""
    holds_kernels: bool = False
    """Graphs may hold operators of ``torch.library`` for which the program gave a kernel (:func:`torchport.kernel`):
    ``meta["kernel"].fn`` on the node, which :class:`.LoweringContext` calls; ``supports`` is not asked. Otherwise such
    kernels run at once, on CPU tensors."""
    torch_free: bool = False
    """``init``, ``execute`` and ``destroy`` need no PyTorch: in a program they get :class:`ArrayData`, and specs with
    dtype names (``"float32"``) where PyTorch is not loaded."""
    dtypes: frozenset[str] = frozenset()
    """The dtypes that the engine has, by name (``{"float32", "int32", "bool"}``); empty: all. torchport holds values of
    others on the host, and runs there what reads or makes one: ``supports`` and ``to_device`` see none of them."""
    no_empty: bool = False
    """The engine has no tensors without elements: they are treated as dtypes that it does not have."""
    slow_to_compile: bool = False
    """A new graph takes longer to compile than its operators take to be interpreted, as with most engines: torchport
    then interprets what is new on CPU tensors and has it compiled beside the program once it comes back
    (``config.tiers``). ``init`` then runs on a thread of its own, while ``execute`` of other handles may run. Leave it
    out while you write a backend, so that yours is called at once."""
    seconds_per_operator: float = 0.0
    """About how long compiling takes for each operator of a graph, in seconds (0: some milliseconds). It is believed
    until the program has compiled something and knows better."""
    fixed_compile_cost: int = 0
    """How many operators take as long to compile as a graph of none. Where it is given, a graph whose layers repeat
    becomes pieces if that is quicker: each different one is compiled once, and called for each layer
    (:mod:`torchport.backend.pieces`). 0: graphs are compiled as a whole."""
    compiled_saves: float = 0.0
    """About which part of the interpreter's time a compiled graph saves where operators compute for long (0: a third).
    It is believed until the program has compared the two. Where compiling takes a core from the program, the less it
    saves the later it begins."""
    skips_cache: bool = False
    """What ``preprocess`` returns is not kept in the disk cache: it is made as fast as it could be read, or it is not
    all that ``init`` of another process needs."""

    def __post_init__(self) -> None:
        if self.restores_donated and not self.donation:
            raise ValueError("restores_donated says what becomes of donated arguments; set donation=True with it")
        if not 0 <= self.compiled_saves < 1:
            raise ValueError(
                f"compiled_saves is {self.compiled_saves}, and has to be a part of the interpreter's time below 1: "
                "0.25 where compiled graphs take three quarters of it"
            )
        names = frozenset(str(one).removeprefix("torch.") for one in self.dtypes)
        if unknown := sorted(names - DTYPE_NAMES):
            raise ValueError(
                f"dtypes has {', '.join(map(repr, unknown))}, which is no dtype of PyTorch's; "
                "write names such as 'float32'"
            )
        object.__setattr__(self, "dtypes", names)


_DEFAULT: Final = Capabilities()

_FORMER: Final[Mapping[str, str]] = {
    **{one.name: f"capabilities = torchport.Capabilities({one.name}=...)" for one in fields(Capabilities)},
    "computes_aside": "def should_overlap(self) -> bool (torchport.SupportsOverlap)",
    "placeholder": "nothing: nobody calls it; start() makes its placeholders itself",
}
"""Names of the contract that are gone → what to write instead."""


def check_contract(owner: str, named: Mapping[str, object]) -> None:
    """Raise :class:`TorchportError` for a backend that is written for a former contract.

    ``named`` are the attributes of ``owner``, a class or an instance.
    """
    former = [f"  {name}: write {_FORMER[name]}" for name in _FORMER if name in named]
    if former:
        lines = "\n".join(former)
        raise TorchportError(
            f"backend {owner} has names that the contract does not have any more, so they would have no effect:\n"
            f"{lines}\n  (If one of them is the backend's own, give it another name.)"
        )
    given = named.get("capabilities", _DEFAULT)
    if not isinstance(given, (Capabilities, property, cached_property)):
        raise TorchportError(
            f"backend {owner}: capabilities is a {type(given).__name__}; write "
            "capabilities = torchport.Capabilities(releases_gil=True), or what else holds"
        )


class Backend(ABC):
    """One compiler or accelerator. Subclass it, give it a ``name``, register it; every frontend then runs on it.

    Required are ``preprocess`` and ``execute``; mostly there are four::

        class Mine(torchport.Backend):
            name = "mine"

            def supports(self, node): ...  # Support.yes(), or Support.no("reason"): then it runs elsewhere
            def preprocess(self, graph, specs): ...  # an FX graph in normal form → Processed(bytes)
            def init(self, processed, specs, context): ...  # the bytes → a handle: anything
            def execute(self, handle, args, context): ...  # the handle and values → a list of values

    The others have defaults, which are right for an engine on the host that works on CPU tensors. An engine with memory
    of its own writes ``to_device``, ``from_device`` and ``devices``. ``capabilities`` says what torchport may rely on,
    such as donation. What only some engines can do (start a computation and return at once, borrow host tensors, show
    code, report memory, …) are protocols of their own: a backend satisfies one by having its methods
    (:mod:`torchport.backend.optional`).

    Shapes, dtypes and strides of all inputs and outputs are static per computation. Methods may be called from any
    thread; ``execute`` of one handle is never called by two threads at once. What a method raises is mapped to
    torchport's errors and chained.
    """

    name: ClassVar[str]
    """By which users ask for it: an identifier."""
    version: ClassVar[str] = "0"
    """Part of the compile cache's key: change it whenever ``preprocess`` would produce other bytes."""
    capabilities: Capabilities = _DEFAULT
    """What torchport may rely on. It does not change once the backend is registered."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for one in cls.__mro__:
            if one not in Backend.__mro__:
                check_contract(f"class {one.__qualname__}", vars(one))

    # -- identity ----------------------------------------------------------------------------------------------
    def is_available(self) -> bool:
        """Whether the backend can run in this process. Must be cheap and must not raise.

        Where it is false, whoever asks for the backend gets :class:`.BackendUnavailable` with the reason.
        """
        return True

    def unavailable_reason(self) -> str:
        """What to install or do when :meth:`is_available` is false.

        A sentence that begins with what is missing; empty where nothing is.
        """
        return ""

    def devices(self) -> Sequence[BackendDevice]:
        """The hardware this backend drives, in ordinal order; at least one.

        ``torchport.device(name, ordinal)`` picks one. What it raises becomes :class:`.BackendUnavailable`.
        """
        return (BackendDevice("cpu", 0),)

    # -- data --------------------------------------------------------------------------------------------------
    def to_device(self, tensor: torch.Tensor, device: BackendDevice) -> BackendData:
        """A value with the contents of a CPU tensor. ``tensor`` is the backend's to keep: nobody else writes to it.

        ``tensor`` may have any shape, none and zero among its sizes included, and any strides; its dtype is one of
        :attr:`Capabilities.dtypes`. The value's ``spec`` has the tensor's shape and dtype: others are a
        :class:`.ContractError`. What the method raises becomes :class:`.ExecutionError`.
        """
        if self.capabilities.torch_free:
            plain = tensor.detach().resolve_conj().resolve_neg()
            return ArrayData(device, TensorSpec.of(tensor), tensor_to_array(plain))
        return TensorData(device, TensorSpec.of(tensor), tensor)

    def from_device(self, data: BackendData) -> torch.Tensor:
        """A CPU tensor with the value's contents. It may share memory: torchport copies before anyone writes.

        It has the shape and the dtype of ``data.spec``: others are a :class:`.ContractError`. ``data`` has a value; the
        method waits for one that is still being computed. What it raises becomes :class:`.ExecutionError`.
        """
        if isinstance(data, ArrayData):
            return array_to_tensor(data.array, data.spec.dtype)
        if not isinstance(data, TensorData) or data.tensor is None:
            raise TypeError(f"{type(self).__name__} must override from_device() for {type(data).__name__}")
        return data.tensor

    # -- what it can take --------------------------------------------------------------------------------------
    def supports(self, node: fx.Node) -> Support:
        """Whether the backend takes a node of a graph in normal form (its inputs' ``meta["val"]`` are fake tensors).

        ``node.target`` is an operator overload, ``node.meta["val"]`` its result: a fake tensor, or a sequence of them.
        The answer depends on the node and its inputs' specs alone, and is remembered. The method answers for every
        node: what it raises becomes :class:`.ContractError`. Default: everything is taken.
        """
        return Support.yes()

    def decompositions(self) -> Mapping[torch._ops.OpOverload, Callable[..., Any]]:
        """Operators to rewrite before they reach the backend, as in ``torch._decomp``.

        Operator overload → a function that takes the operator's arguments, calls PyTorch on them, and returns the
        same number of results, with the same shapes and dtypes. It is run on fake tensors, when a graph is made, so it
        cannot look at values. It may lead to operators that are rewritten in turn. For arguments that it is not meant
        for it returns ``NotImplemented``: the operator stays as it is, and :meth:`supports` is asked about it. So it
        does where the function asks for a value after all.
        """
        return {}

    def register_kernels(self, registrar: KernelRegistrar) -> None:
        """Register kernels of the backend's own for single operators: eager, autograd, quantized, …

        Called once, when the backend is first used. A kernel comes before the graph: it is called at once,
        with values. The registrar raises :class:`.DispatchError` for a kernel that could never be called.
        """

    # -- compile and run ---------------------------------------------------------------------------------------
    @abstractmethod
    def preprocess(self, graph: fx.GraphModule, specs: CompileSpecs) -> Processed:
        """Compile a graph in normal form to bytes that :meth:`init` of another process could load.

        ``graph``: placeholders in the order of :meth:`execute`'s arguments, calls of operators that :meth:`supports`
        took, one tuple of results. ``node.meta`` has ``"val"`` (a fake tensor: shape, dtype, strides),
        ``"debug_handle"`` and ``"source"`` (the user's line). ``specs`` holds the options that
        :attr:`Capabilities.compile_options` names. The same graph and specs must give bytes that do the same. What
        the method raises becomes :class:`.CompileError`.
        """

    def init(self, processed: FreeableBuffer, specs: CompileSpecs, context: InitContext) -> Any:
        """Make compiled bytes runnable; the result is the handle given to :meth:`execute`. Default: the bytes.

        ``processed.data`` are the bytes, ``specs`` those that :meth:`preprocess` had, ``context.inputs`` and
        ``context.outputs`` the computation's specs. The bytes may come from a file or from another version: check
        them. What the method raises becomes :class:`.CompileError`, and in a program :class:`.DelegateError`.
        """
        return processed

    @abstractmethod
    def execute(self, handle: Any, args: Sequence[BackendData], context: ExecutionContext) -> Sequence[BackendData]:
        """Run the computation. Returns new values, one per output, in order; never changes its arguments.

        ``args`` has a value per placeholder, ``context.outputs`` the specs of the results. Shapes and dtypes of results
        are compared with them the first time, their number always. A result is no argument and shares no memory with
        one, nor with another result, unless the argument is in ``context.donated``. What the method raises becomes
        :class:`.ExecutionError`, and in a program :class:`.DelegateError`; the arguments are still good then, but for
        donated ones.
        """

    def destroy(self, handle: Any) -> None:
        """Release a handle. Called once per successful :meth:`init`, also for a ``None`` handle.

        It comes when the last reference to the computation goes, on whichever thread that is; not for handles that are
        alive when the process ends, which :meth:`shutdown` is for.
        """

    # -- housekeeping ------------------------------------------------------------------------------------------
    def synchronize(self, device: BackendDevice) -> None:
        """Return when all work handed to the device is done.

        Called by ``torchport.sync()`` and ``torch.port.synchronize()``. An engine that computes within :meth:`execute`
        has nothing to wait for.
        """

    def shutdown(self) -> None:
        """The process is about to end.

        Called once, if the backend was used, after the last computation. What it raises is printed, and no more.
        """
