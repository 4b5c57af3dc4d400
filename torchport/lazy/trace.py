"""The trace: a path in a trie of operator calls, a cursor on it, and the live values of it.

An op makes a key of the operator, the trace-local numbers of its tensor arguments and its other arguments. If the
cursor's node has a child under that key, shapes, dtypes and the dispatch decision are known already; making the
output handle and moving the cursor is all that is left. Only a first-time op does more (:mod:`.record`).

Numbers: outputs of ops count up from 0 along the path; leaves (values that exist before the trace) count up from
``LEAF``. A handle stores its number plus the trace's ``base``; a base is never used twice, so whatever is outside
``[base, base + SPAN)`` is not of this trace.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils._pytree import tree_map

from ..core.specs import TensorSpec
from .tensor import IndexedLazyTensor, LazyTensor

if TYPE_CHECKING:
    from ..core.errors import CompileError
    from .executor import Plan
    from .runtime import DeviceRuntime

__all__ = ["CHECKPOINT_EVERY", "FLOAT", "LEAF", "SPAN", "HostScalar", "Leaf", "Node", "Number", "RandomKey", "Trace", "Value"]

LEAF: Final = 1 << 30
SPAN: Final = 1 << 32
CHECKPOINT_EVERY: Final = 64
"""Every so many ops the trace forgets dead values and looks at the op bound, so that flushing stays cheap."""

_epochs = itertools.count(1)
_ref = weakref.ref


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
        "args",
        "barrier",
        "children",
        "container",
        "depth",
        "end",
        "is_factory",
        "key",
        "kwargs",
        "number",
        "op",
        "parent",
        "plans",
        "ready",
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
        self.args: Sequence[Any] = ()
        self.kwargs: dict[str, Any] = {}
        self.specs: tuple[TensorSpec | None, ...] = ()
        self.templates: tuple[LazyTensor | None, ...] = ()
        self.ready: LazyTensor | tuple[LazyTensor, ...] | None = None
        self.container: type | None = None
        self.is_factory = False
        self.source: str | None = None
        self.barrier: Callable[..., Any] | None = None
        self.number = 0 if parent is None else parent.end
        self.end = self.number
        self.depth = 0 if parent is None else parent.depth + 1

    @classmethod
    def root(cls) -> Node:
        """The node before the first op."""
        return cls(None, None, None)

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


class Trace:
    """One thread's pending ops on one device.

    ``refs`` are weak references to the handles made since the last flush (dead ones are dropped now and then),
    ``leaves`` the values the trace starts from in order of first use, ``numbers`` its run-time floats and ``keys``
    its random keys, in order.
    """

    __slots__ = (
        "__weakref__",
        "base",
        "cursor",
        "fresh",
        "index",
        "keep",
        "keys",
        "leaf_numbers",
        "leaves",
        "limit",
        "numbers",
        "ops_before",
        "refs",
        "runtime",
    )

    def __init__(self, runtime: DeviceRuntime) -> None:
        self.runtime = runtime
        self.index = runtime.index
        self.refs: list[weakref.ref[LazyTensor]] = []
        self.keep: Callable[[weakref.ref[LazyTensor]], None] = self.refs.append
        self.limit = CHECKPOINT_EVERY
        self.ops_before = 0
        self.base = 0
        self.restart()

    def restart(self) -> None:
        """Begin an empty trace under a base of its own. The former trace's handles keep their numbers."""
        owners.pop(self.base // SPAN, None)
        epoch = next(_epochs)
        self.base = epoch * SPAN
        self.cursor = self.runtime.root
        self.leaves: list[LazyTensor] = []
        self.leaf_numbers: dict[int, int] = {}
        self.numbers: list[float] = []
        self.keys: list[int] = []
        self.fresh = False
        self.refs.clear()
        owners[epoch] = self

    def drop_dead(self) -> None:
        """Forget handles nobody holds. Amortised constant per op: runs again only after the list has doubled."""
        self.refs[:] = [ref for ref in self.refs if ref() is not None]
        self.limit = 2 * len(self.refs) + CHECKPOINT_EVERY

    def live(self) -> list[LazyTensor]:
        """The handles of this trace that somebody holds and that have no value yet, oldest first."""
        handles = [handle for ref in self.refs if (handle := ref()) is not None]
        return [handle for handle in handles if handle.value is None and handle.failure is None]


owners: Final[weakref.WeakValueDictionary[int, Trace]] = weakref.WeakValueDictionary()
"""Epoch → trace, so that a thread can find the trace a pending handle belongs to."""

lock: Final = threading.RLock()
"""Held while a trace is flushed or recorded into; never on the steady-state path."""


# -- keys ----------------------------------------------------------------------------------------------------
def leaf(trace: Trace, tensor: LazyTensor) -> Any:
    """Key part of a value that is not of this trace: its spec on first use, its number afterwards."""
    known = trace.leaf_numbers.get(id(tensor))
    if known is not None:
        return known
    if tensor.value is None or tensor.value.info is not trace.runtime:
        from .executor import settle

        settle(trace, tensor)
    spec = tensor.spec
    if spec is None:
        from .tensor import intern_spec

        spec = tensor.spec = intern_spec(TensorSpec.of(tensor))
    if tensor.fresh:
        tensor.fresh = False
        trace.fresh = True
    number = LEAF + len(trace.leaves)
    tensor.number = trace.base + number
    trace.leaves.append(tensor)
    trace.leaf_numbers[id(tensor)] = number
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
    tensor = unwrap(value)
    cls = tensor.__class__
    if cls is LazyTensor or cls is IndexedLazyTensor:
        if (tensor.get_device() if cls is IndexedLazyTensor else 0) != trace.index:
            return FOREIGN_DEVICE
        offset = tensor.number - trace.base
        return leaf(trace, tensor) if offset < 0 else offset
    if tensor.dim() == 0 and tensor.device.type == "cpu":
        return host_scalar(trace, tensor)
    return FOREIGN_DEVICE


FOREIGN_DEVICE: Final = _Token("FOREIGN_DEVICE")
def host_scalar(trace: Trace, tensor: torch.Tensor) -> Any:
    """Key part of a 0-dim CPU tensor: its dtype, which counts in type promotion, and its value as a number."""
    return (tensor.dtype, number(trace, tensor.item()))


def tensors(trace: Trace, values: Sequence[Any]) -> tuple[Any, ...]:
    """Key part of a list of tensors, ``None`` allowed."""
    base = trace.base
    parts: list[Any] = []
    for value in values:
        if value.__class__ is LazyTensor and trace.index == 0:
            offset = value.number - base
            parts.append(leaf(trace, value) if offset < 0 else offset)
        else:
            parts.append(foreign(trace, value))
    return tuple(parts)


def unwrap(tensor: torch.Tensor) -> torch.Tensor:
    """The inner tensor of a functionalization wrapper, brought up to date; any other tensor unchanged."""
    if torch._is_functional_tensor(tensor):
        torch._sync(tensor)
        return torch._from_functional_tensor(tensor)
    return tensor


_FUNCTIONALIZE: Final = torch._C.DispatchKey.Functionalize


def wrap(tensor: torch.Tensor) -> torch.Tensor:
    """A new value as the user gets it: in a functionalization wrapper, unless functionalization itself asked for it."""
    if torch._C._dispatch_tls_is_dispatch_key_excluded(_FUNCTIONALIZE):
        return tensor
    return torch._to_functional_tensor(tensor)
