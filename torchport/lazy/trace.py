"""The trace: a path in a trie of operator calls, a cursor on it, and the live values of it.

An op makes a key of the operator, the trace-local numbers of its tensor arguments and its other arguments. If the
cursor's node has a child under that key, shapes, dtypes and the dispatch decision are known already; making the
output handle and moving the cursor is all that is left. Only a first-time op does more (:mod:`.record`).

Numbers: a trace has the span ``[base, base + SPAN)`` of them for itself. Outputs of ops count up from its base along
the path; leaves (values that exist before the trace) count up from ``base + LEAF``. A handle that belongs to no pending
trace has the number ``NONE``; any other number outside the span is of another thread's trace.

A handle that died before a flush never had a value, so its node hands the very same object out on the next step: see
``Node.ready`` and :meth:`Trace.sweep`.
"""

from __future__ import annotations

import itertools
import operator
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch.utils._pytree import tree_map

from ..core.config import config
from ..core.specs import TensorSpec
from .tensor import IndexedLazyTensor, LazyTensor

if TYPE_CHECKING:
    from ..core.errors import CompileError
    from .executor import Plan
    from .runtime import DeviceRuntime

__all__ = [
    "CHECKPOINT_EVERY",
    "COPIES_UNDER_GRAD",
    "FLOAT",
    "LEAF",
    "NONE",
    "SPAN",
    "HostScalar",
    "Leaf",
    "Node",
    "Number",
    "RandomKey",
    "Trace",
    "Value",
]

LEAF: Final = 1 << 30
SPAN: Final = 1 << 32
NONE: Final = -1
"""The number of a handle that belongs to no trace."""
CHECKPOINT_EVERY: Final = 256
"""Every so many ops the trace forgets dead values and looks at the op bound, so that flushing stays cheap."""

COPIES_UNDER_GRAD: Final = 4
"""While gradients are recorded the optimizer ends a step, and a copy after the forward is likely the batch's labels:
only the fourth such copy counts as a new batch. Without gradients the first one does."""

_epochs = itertools.count()


class _Token:
    """A constant in a trace key that equals nothing but itself."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


FLOAT: Final = _Token("FLOAT")
"""Stands in a key for a floating-point number that is an input of the computation."""


# -- argument templates: what a node remembers of the arguments it was called with ------------------------------
class Value:
    """Argument template: the value with this number, made by an op of the trace."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


class Leaf(Value):
    """Argument template: the trace's leaf at this position."""

    __slots__ = ()


class Number(Value):
    """Argument template: the trace's run-time number at this position."""

    __slots__ = ()


class HostScalar:
    """Argument template: a 0-dim CPU tensor that is no Python number: its dtype counts in type promotion."""

    __slots__ = ("dtype", "value")

    def __init__(self, dtype: torch.dtype, value: Any) -> None:
        self.dtype = dtype
        self.value = value


class RandomKey(Value):
    """Argument template: the trace's random key at this position."""

    __slots__ = ()


class Node:
    """An op at one place of a trace: its parent is the op before it, its children the ops seen after it."""

    __slots__ = (
        "apart",
        "args",
        "barrier",
        "children",
        "container",
        "depth",
        "end",
        "fits",
        "is_factory",
        "key",
        "kwargs",
        "number",
        "op",
        "parent",
        "plans",
        "ready",
        "records",
        "source",
        "specs",
        "templates",
    )

    def __init__(self, parent: Node | None, key: Any, op: Any) -> None:
        self.parent = parent
        self.key = key
        self.op = op
        self.children: dict[Any, Node] = {}
        self.plans: dict[tuple[int, ...], Plan | CompileError] | None = None
        self.apart: dict[tuple[tuple[int, ...], int], tuple[tuple[int, ...], ...]] | None = None
        self.args: Sequence[Any] = ()
        self.kwargs: dict[str, Any] = {}
        self.specs: tuple[TensorSpec | None, ...] = ()
        self.templates: tuple[LazyTensor | None, ...] = ()
        self.ready: LazyTensor | Sequence[LazyTensor | None] | None = None
        self.container: type | None = None
        self.records: object = None  # what ``core/native/follow.cpp`` knows of the calls that led to children
        self.is_factory = False
        self.fits = False  # whether results are known to be like what an in-place form writes to
        self.source: str | None = None
        self.barrier: Callable[..., Any] | None = None
        self.number = 0 if parent is None else parent.end
        self.end = self.number
        self.depth = 0 if parent is None else parent.depth + 1

    @classmethod
    def root(cls, base: int = 0) -> Node:
        """The node before the first op, whose results count up from ``base``."""
        root = cls(None, None, None)
        root.number = root.end = base
        return root

    def path(self) -> list[Node]:
        """The nodes from the first op to this one."""
        nodes: list[Node] = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes


def is_template(value: Any) -> bool:
    """Whether a leaf of a node's arguments stands for something the trace holds."""
    return isinstance(value, (Value, HostScalar))


def single_op(node: Node, position_of: dict[Any, int]) -> Node:
    """A copy of the node as a path of its own; tensor arguments become leaves at the positions given per template key.

    Keys are ``("leaf", n)`` for a trace's leaf and ``("value", n)`` for a value made by an op.
    """

    def relocate(template: Any) -> Any:
        if template.__class__ is Leaf:
            return Leaf(position_of["leaf", template.number])
        if template.__class__ is Value:
            return Leaf(position_of["value", template.number])
        return template

    copy = Node(Node.root(), node.key, node.op)
    copy.args, copy.kwargs = tree_map(relocate, (list(node.args), dict(node.kwargs)), is_leaf=is_template)
    copy.specs, copy.container, copy.is_factory = node.specs, node.container, node.is_factory
    copy.source, copy.end = node.source, len(node.specs)
    return copy


# -- handles -------------------------------------------------------------------------------------------------------
# A node's pool (``Node.ready``) is what its kernel returns, with numbers that never change. A handle of it that is
# still held when its trace ends is replaced then. Both its reference counts tell: C++ code holds handles, too.
def make_alive_filter() -> Callable[[Iterable[LazyTensor]], list[LazyTensor]]:
    """A function that keeps the handles somebody holds besides the list it is given and their nodes' pools."""
    count = sys.getrefcount

    def counts(handles: Iterable[Any]) -> list[int]:
        return [count(h) for h in handles]

    (alone,) = counts([object()])

    def alive(handles: Iterable[LazyTensor]) -> list[LazyTensor]:
        return [h for h in handles if h._use_count() > 1 or count(h) > alone + (h.home is not None)]  # type: ignore[attr-defined]

    return alive


def alive(handles: list[LazyTensor]) -> list[LazyTensor]:
    """The handles that somebody holds besides the list and their nodes' pools. Nothing else may hold them meanwhile."""
    return _forms.alive(handles)


def new_handle(node: Node, offset: int) -> LazyTensor:
    """A handle of a node's result that is in no pool."""
    template = node.templates[offset]
    made: Any = template.data  # type: ignore[union-attr]
    made.__class__ = LazyTensor
    made.number = node.number + offset
    return made


def fill_pool(node: Node, offset: int) -> None:
    """Give a node's pool a new handle for one of its results, and let go of the one it had."""
    made = new_handle(node, offset)
    made.home = (node, offset)
    former = node.ready
    if node.container is None:
        node.ready = made
    else:
        assert node.ready is not None
        results: list[Any] = list(node.ready)  # type: ignore[arg-type]
        former, results[offset] = results[offset], made
        node.ready = node.container(results)
    if former is not None:
        former.home = None  # type: ignore[union-attr]


def release(handle: LazyTensor) -> None:
    """Take a handle out of its node's pool: it is about to get a value, or is otherwise no longer like new."""
    if handle.home is not None:
        fill_pool(*handle.home)


def _release_all(handles: Iterable[LazyTensor]) -> None:
    """:func:`release` for many: where a node has several results, its pool is made anew once and not for each."""
    pools: dict[Node, list[Any]] = {}
    for handle in handles:
        if handle.home is None:
            continue
        node, offset = handle.home
        if node.container is None:
            fill_pool(node, offset)
            continue
        if node not in pools:
            pools[node] = list(node.ready)  # type: ignore[arg-type]
        made = pools[node][offset] = new_handle(node, offset)
        made.home, handle.home = handle.home, None
    for node, results in pools.items():
        assert node.container is not None
        node.ready = node.container(results)


def sweep(made: list[LazyTensor], node: Node, swept: Node) -> None:
    """Keep of a list the handles that are held, and add those of the nodes from one up to another, without the latter.

    Results that Python code holds as one leave their pool: the list or tuple itself would tell nothing of each.
    """
    while node is not swept:
        ready = node.ready
        if ready.__class__ is LazyTensor:
            made.append(ready)  # type: ignore[arg-type]
        elif ready is not None:
            results: Any = ready
            made.extend([handle for handle in results if handle is not None])
            if sys.getrefcount(results) > _CONTAINER_ALONE:
                for handle in results:
                    if handle is not None:
                        release(handle)
        assert node.parent is not None
        node = node.parent
    ready = results = handle = None  # each name would count as a holder
    made[:] = PYTHON.alive(made)


def pending(handles: Iterable[LazyTensor]) -> list[LazyTensor]:
    """Those without value and failure, oldest first; their nodes let go of them."""
    found = [handle for handle in handles if handle.value is None and handle.failure is None]
    _release_all(found)
    found.sort(key=_number_of)
    return found


def forget(handles: Iterable[LazyTensor]) -> None:
    """Have handles belong to no trace; those that are in their nodes' pools leave them."""
    for handle in handles:
        if handle.home is not None:
            fill_pool(*handle.home)
        handle.number = NONE


class Forms(NamedTuple):
    """What is done to every handle when a trace ends: here, or in C++ (:data:`torchport.core.native.flush`)."""

    alive: Callable[[list[LazyTensor]], list[LazyTensor]]
    sweep: Callable[[list[LazyTensor], Node, Node], None]
    pending: Callable[[list[LazyTensor]], list[LazyTensor]]
    forget: Callable[[list[LazyTensor]], None]


PYTHON: Final = Forms(make_alive_filter(), sweep, pending, forget)
_forms = PYTHON


def use(forms: Forms) -> None:
    """Handle handles by these from now on."""
    global _forms
    _forms = forms


class Trace:
    """One thread's pending ops on one device.

    ``made`` are handles made since the last flush: those in no pool, and those of pools up to the node ``swept`` that
    were held when the trace came by; ``computed`` are those that another thread has given a value. ``leaves`` are the
    values the trace starts from in order of first use, ``numbers`` its run-time floats and ``keys`` its random keys, in
    order. ``fresh`` tells whether one of the leaves came from the host for this trace, ``copies`` how many copies from
    the host came after that leaf was used.
    """

    eager = False
    """Whether each op is computed at once."""

    __slots__ = (
        "__weakref__",
        "base",
        "computed",
        "copies",
        "cursor",
        "fresh",
        "generation",
        "index",
        "keep",
        "keys",
        "leaf_numbers",
        "leaves",
        "made",
        "nodes",
        "numbers",
        "root",
        "runtime",
        "swept",
    )

    def __init__(self, runtime: DeviceRuntime) -> None:
        self.runtime = runtime
        self.index = runtime.index
        self.made: list[LazyTensor] = []
        self.computed: list[LazyTensor] = []
        self.keep: Callable[[LazyTensor], None] = self.made.append
        epoch = next(_epochs)
        self.base = epoch * SPAN
        self.generation = runtime.generation
        self.nodes = 0
        self.root = self.cursor = self.swept = Node.root(self.base)
        self.leaves: list[LazyTensor] = []
        self.leaf_numbers: dict[int, int] = {}
        self.numbers: list[float] = []
        self.keys: list[int] = []
        self.fresh = False
        self.copies = 0
        owners[epoch] = self

    def restart(self) -> None:
        """Begin an empty trace. Handles of the former one belong to no trace from now on."""
        if self.swept is not self.cursor:  # a flush has looked already
            self.sweep()
        _forms.forget(self.made)
        _forms.forget(self.leaves)
        for handle in self.computed:
            if self.holds(handle.number):
                handle.number = NONE
        self.computed.clear()
        if self.generation != self.runtime.generation or self.nodes > config.max_trace_nodes:
            self.generation = self.runtime.generation
            self.root, self.nodes = Node.root(self.base), 0
        self.cursor = self.swept = self.root
        self.leaves = []
        self.leaf_numbers = {}
        self.numbers = []
        self.keys = []
        self.fresh = False
        self.copies = 0
        self.made.clear()

    def holds(self, number: int) -> bool:
        """Whether a number is of this trace's span."""
        return self.base <= number < self.base + SPAN

    def sweep(self) -> None:
        """Look which handles are still held, of the nodes since the last sweep and of those that were held then."""
        _forms.sweep(self.made, self.cursor, self.swept)
        self.swept = self.cursor

    def live(self) -> list[LazyTensor]:
        """The handles that somebody holds and that have no value yet, oldest first; their nodes let go of them."""
        self.sweep()
        return _forms.pending(self.made)


_CONTAINER_ALONE: Final = 4
"""What ``sys.getrefcount`` says in :func:`sweep` of results that only their node holds: node, two names, call."""

_number_of: Final = operator.attrgetter("number")

owners: Final[weakref.WeakValueDictionary[int, Trace]] = weakref.WeakValueDictionary()
"""Epoch → trace, so that a thread can find the trace a pending handle belongs to."""

lock: Final = threading.RLock()
"""Held while a trace is flushed or recorded into; never on the steady-state path."""


# -- keys ----------------------------------------------------------------------------------------------------
def leaf(trace: Trace, tensor: LazyTensor) -> Any:
    """Key part of a value that is not of this trace: its spec on first use, its number afterwards."""
    known = trace.leaf_numbers.get(id(tensor))
    if known is not None:
        tensor.number = known  # another thread may have used it meanwhile and left its own number
        return known
    if (tensor.get_device() if tensor.__class__ is IndexedLazyTensor else 0) != trace.index:
        return FOREIGN_DEVICE
    if tensor.value is None or tensor.value.info is not trace.runtime:
        from .executor import flush, settle

        try:
            settle(trace, tensor)
        except BaseException:
            # The key is half made: the leaves and numbers it has brought so far belong to no op.
            flush(trace, "failure")
            raise
    spec = tensor.spec
    if spec is None:
        from .tensor import intern_spec

        spec = tensor.spec = intern_spec(TensorSpec.of(tensor))
    if tensor.fresh:
        tensor.fresh = False
        trace.fresh = True
        if not torch.is_grad_enabled():
            trace.copies = COPIES_UNDER_GRAD
    first = trace.base + LEAF
    other = trace.leaf_numbers.get(id(tensor.value))
    if other is not None and other - first < len(trace.leaves):
        held = trace.leaves[other - first]
        if held.value is tensor.value and held.spec is spec:
            # Another handle of the same value is a leaf already: as two, neither could be donated.
            tensor.number = other
            trace.keep(tensor)
            return other
    number = tensor.number = first + len(trace.leaves)
    trace.leaves.append(tensor)
    trace.leaf_numbers[id(tensor)] = trace.leaf_numbers[id(tensor.value)] = number
    return spec


def number(trace: Trace, value: Any) -> Any:
    """Key part of a Python number that may vary between steps: finite floats become inputs, the rest stays constant."""
    if value.__class__ is float:
        if value - value != 0.0:  # infinite or NaN
            return constant(value)
        trace.numbers.append(value)
        return FLOAT
    return constant(value)


def filler(trace: Trace, value: Any) -> Any:
    """Key part of a number that a tensor is filled with: 0 and 1 stay constants, which compilers make much of."""
    return constant(value) if value == 0.0 or value == 1.0 else number(trace, value)


def constant(value: Any) -> Any:
    """Key part of a number that stays constant; 1, 1.0 and True differ, and NaN equals itself."""
    if value is None:
        return None
    if value.__class__ is float:
        return (repr(value), float)
    if value.__class__ is complex:
        return (repr(value), complex)
    return (value, value.__class__)


def numbers(trace: Trace, values: Sequence[Any]) -> tuple[Any, ...]:
    """Key part of a list of numbers that may vary."""
    return tuple([number(trace, value) for value in values])


def constants(values: Sequence[Any]) -> tuple[Any, ...]:
    """Key part of a list of constants."""
    return tuple([constant(value) for value in values])


def foreign(trace: Trace, value: Any) -> Any:
    """Key part of what stands where a tensor does but is no handle of this device: ``None``, a number, a mistake.

    A 0-dim CPU tensor acts as a number, as on CUDA. A tensor of another device becomes :data:`FOREIGN_DEVICE` and is
    refused when the op is recorded.
    """
    if value is None:
        return None
    if not isinstance(value, torch.Tensor):  # a Python number: PyTorch hands wrapped numbers to Python as such
        return number(trace, value)
    tensor: Any = unwrap(value)
    cls = tensor.__class__
    if cls is LazyTensor or cls is IndexedLazyTensor:
        return leaf(trace, tensor) if tensor.number < 0 else tensor.number
    if tensor.dim() == 0 and tensor.device.type == "cpu":
        return host_scalar(trace, tensor)
    return FOREIGN_DEVICE


FOREIGN_DEVICE: Final = _Token("FOREIGN_DEVICE")


def host_scalar(trace: Trace, tensor: torch.Tensor) -> Any:
    """Key part of a 0-dim CPU tensor: its dtype, which counts in type promotion, and its value as a number."""
    return (tensor.dtype, number(trace, tensor.item()))


def tensors(trace: Trace, values: Sequence[Any]) -> tuple[Any, ...]:
    """Key part of a list of tensors, ``None`` allowed."""
    mixed: list[Any] = []
    for value in values:
        if value.__class__ is LazyTensor:
            mixed.append(leaf(trace, value) if value.number < 0 else value.number)
        else:
            mixed.append(foreign(trace, value))
    return tuple(mixed)


def unwrap(tensor: torch.Tensor) -> torch.Tensor:
    """The inner tensor of a functionalization wrapper, brought up to date; any other tensor unchanged."""
    if torch._is_functional_tensor(tensor):
        torch._functionalize_sync(tensor)  # what ``torch._sync`` comes to for a wrapper, 3 µs later
        return torch._from_functional_tensor(tensor)
    return tensor


_FUNCTIONALIZE: Final = torch._C.DispatchKey.Functionalize


def wrap(tensor: torch.Tensor) -> torch.Tensor:
    """A new value as the user gets it: in a functionalization wrapper, unless functionalization itself asked for it."""
    if torch._C._dispatch_tls_is_dispatch_key_excluded(_FUNCTIONALIZE):
        return tensor
    return torch._to_functional_tensor(tensor)
