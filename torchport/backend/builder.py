"""What a backend takes into a graph, and the builder that brings operators there in normal form."""

from __future__ import annotations

import functools
import operator
import sys
import weakref
from abc import ABC, abstractmethod
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch
from torch import fx
from torch.fx.node import map_arg
from torch.utils._pytree import tree_iter, tree_map_only

from ..core.errors import GraphError
from ..core.specs import TensorSpec
from .answers import checked_decompositions, checked_support
from .control_flow import CONTROL_FLOW
from .declared import follow_declaration
from .decompositions import DECOMPOSE, OTHERWISE
from .infer import depends_on_data, fake_tensor, infer
from .inlined import NotTakenApart, Ref, taken_apart
from .interface import Backend, Support
from .lowering import LOWER, foreach_target, lower_foreach, lower_varying, view_form
from .normal_form import alias_root
from .own_kernels import OwnKernel, kernels_of

if TYPE_CHECKING:
    from .interface import Backend, Support

__all__ = [
    "OF_MEMORY",
    "REFUSAL",
    "REFUSED_OP",
    "Builder",
    "Capture",
    "GraphBuilder",
    "Refusal",
    "Refused",
    "capture_of",
    "is_factory",
    "refusals",
    "scalar_places",
]

aten = torch.ops.aten
_CPU: Final = torch.device("cpu")
_getitem: Any = operator.getitem
_Made = TypeVar("_Made")

REFUSAL: Final = "refusal"
"""``meta`` of a node that no backend was found for: the reason, in words."""
REFUSED_OP: Final = "refused_op"
"""``meta`` of the same node: the operator of the program that it is of, which was refused as a whole; ``None`` for what
the program did not call."""


def _spec_of_node(node: fx.Node) -> Any:
    return TensorSpec.of(node.meta["val"])


class Refused(Exception):
    """The backend takes neither an operator nor what it decomposes to; ``reason`` says what was tried."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Refusal:
    """An operator of a program that the host runs: which, the user's line, and why."""

    op: Any
    source: str | None
    reason: str


def refusals(graph: fx.GraphModule) -> tuple[Refusal, ...]:
    """The operators that a graph's nodes with :data:`REFUSAL` stand for, each once, in order."""
    found: dict[Any, Refusal] = {}
    for node in graph.graph.nodes:
        reason = node.meta.get(REFUSAL)
        op = node.meta.get(REFUSED_OP, node.target)
        if reason is not None and op is not None and op is not _getitem:
            found.setdefault((node.meta["debug_handle"], op), Refusal(op, node.meta.get("source"), reason))
    return tuple(found.values())


class Capture:
    """What a backend takes into its graphs, asked for once: its decompositions, and which operators it supports."""

    def __init__(self, backend: Backend) -> None:
        self.decompositions: Mapping[Any, Callable[..., Any]] = checked_decompositions(backend)
        self.kernels: Mapping[Any, OwnKernel] = kernels_of(backend.name) if backend.capabilities.holds_kernels else {}
        """Those that the program gave for operators of its libraries."""
        self.takes_all = type(backend).supports is Backend.supports
        self.answers: dict[Any, str | None] = {}
        """By call of an operator: why the backend takes it in no form, or ``None``; kept by who asks."""
        self._backend = weakref.ref(backend)

    def supports(self, node: fx.Node) -> Support:
        """The backend's own answer for a node of a graph in normal form."""
        backend = self._backend()
        if node.target in CONTROL_FLOW and not (backend is not None and backend.capabilities.control_flow):
            return Support.no("it is control flow, which the backend has no graphs for")
        if self.takes_all or backend is None or node.target in self.kernels:
            return Support.yes()
        return checked_support(backend, node)


_captures: Final[weakref.WeakKeyDictionary[Backend, Capture]] = weakref.WeakKeyDictionary()


def capture_of(backend: Backend) -> Capture:
    """The backend's :class:`Capture`, made once per backend."""
    found = _captures.get(backend)
    if found is None:
        follow_declaration(backend)
        found = _captures[backend] = Capture(backend)
    return found


@functools.cache
def _core_decompositions() -> Mapping[Any, Callable[..., Any]]:
    from torch._decomp import core_aten_decompositions

    # Before PyTorch 2.13 the table is no dict, and to list it asks all operators there are, also of other libraries.
    table: Any = core_aten_decompositions()
    return ChainMap(OTHERWISE, table)


_DEEPEST: Final = 16
"""How many decompositions may lie inside each other; a table that goes round in circles ends here."""


def is_factory(op: Any) -> bool:
    """Whether an operator's schema has no tensor anywhere among its arguments."""
    return not any("Tensor" in str(argument.real_type) for argument in op._schema.arguments)


def _takes_device(op: Any) -> bool:
    return any(argument.name == "device" for argument in op._schema.arguments)


_ASK_FOR_THE_DEVICE: Final = frozenset(
    getattr(getattr(aten, name), overload)
    for name in ("linspace", "logspace")
    for overload in ("Tensor_Tensor", "Tensor_Scalar", "Scalar_Tensor")
)
"""Operators with tensors whose decompositions want to know the device all the same."""


class Builder(ABC):
    """What lowerings are written against: operators called on things that stand for tensors, in normal form.

    In a :class:`GraphBuilder` those are nodes of a graph; in :mod:`.interpret` they are CPU tensors, and a lowering
    computes. So an operator means the same whether it is compiled or interpreted.
    """

    # -- what a thing is, and how an operator is called on it ----------------------------------------------------
    @staticmethod
    @abstractmethod
    def is_node(value: Any) -> bool:
        """Whether an argument stands for a tensor, rather than being a Python number."""

    @staticmethod
    @abstractmethod
    def val(node: Any) -> torch.Tensor:
        """A tensor with the shape, dtype and strides of what one thing stands for."""

    @abstractmethod
    def item(self, node: Any, position: int) -> Any:
        """One result of an op that returns several."""

    @abstractmethod
    def inline(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], known_as: Any = None
    ) -> Any:
        """What a decomposition written with tensors amounts to.

        ``known_as``: what the function is known by in every process, if in them all it is the same.
        """

    @abstractmethod
    def _emit(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call an operator that needs no rewriting."""

    def drawn(self, key: Any, shape: Sequence[int], dtype: torch.dtype, draw: int) -> Any:
        """The random numbers of a key's draw if they can be made at once, without the operators that give them."""
        return None

    # -- what lowerings use ----------------------------------------------------------------------------------
    def __call__(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        return self.call(op, args, kwargs)

    def call(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What calling ``op`` gives; goes through the rewrites of varying numbers."""
        if self._varies(op, args, kwargs):
            lower = lower_varying(op)
            if lower is None:
                raise GraphError(f"{op} was given a number that varies, but has no form that takes one")
            return lower(self, *args, **kwargs)
        return self._emit(op, args, kwargs)

    def _varies(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether something that stands for a tensor is where the operator takes a number."""
        for position, name in scalar_places(op):
            value = args[position] if position < len(args) else kwargs.get(name)
            if value is not None and self.is_node(value):
                return True
        return False

    def lower(self, op: Any, specs: Sequence[Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The nodes of a functional operator as a frontend recorded it, with these result specs, in normal form."""
        kwargs = {name: value for name, value in kwargs.items() if name not in {"generator", "pin_memory"}}
        if op in LOWER:
            return LOWER[op](self, specs, *args, **kwargs)
        if op in DECOMPOSE:
            return self.inline(DECOMPOSE[op], args, kwargs, ("torchport", op))
        if foreach_target(op) is not None:
            return lower_foreach(self, op, specs, args, kwargs)
        if op in _ASK_FOR_THE_DEVICE or (is_factory(op) and _takes_device(op)):
            kwargs["device"] = _CPU
        elif "device" in kwargs:
            del kwargs["device"]
        return self.call(view_form(op), args, kwargs)

    def cast(self, value: Any, dtype: torch.dtype) -> Any:
        """A node of this dtype: a number becomes a 0-dim tensor."""
        if not self.is_node(value):
            return self(aten.full.default, [], value, dtype=dtype, device=_CPU)
        if self.val(value).dtype == dtype:
            return value
        return self(aten._to_copy.default, value, dtype=dtype)

    def times(self, factor: Any, value: Any) -> Any:
        """The product of two things of which ``value`` is a Python number."""
        return self(aten.mul.Tensor, factor, value) if self.is_node(factor) else factor * value

    def filled(self, spec: TensorSpec, value: Any) -> Any:
        """A constant tensor with this spec's shape and, where they are those of a permuted dense tensor, strides."""
        order = sorted(range(len(spec.shape)), key=lambda d: (-spec.strides[d], d))
        shape = [spec.shape[d] for d in order]
        node = self(aten.full.default, shape, value, dtype=spec.dtype, device=_CPU)
        if order == list(range(len(order))):
            return node
        return self(aten.permute.default, node, [order.index(d) for d in range(len(order))])


OF_MEMORY: Final = frozenset(
    {
        *(aten.as_strided.default, aten.as_strided_copy.default, aten.as_strided_scatter.default),
        *(aten.view.dtype, aten.view_copy.dtype),
    }
)
"""Operators that go by where their first argument lies in memory, whatever its strides are."""


class GraphBuilder(Builder):
    """Adds operators to an FX graph, inferring ``meta["val"]``, on behalf of one operator of a program at a time.

    What the backend does not support is replaced by PyTorch's core ATen decomposition, as deep as need be. Where there
    is none, a ``strict`` builder raises :class:`Refused`; any other leaves the operator to the backend's own error.
    """

    def __init__(self, capture: Capture | None = None, strict: bool = False) -> None:
        self.graph = fx.Graph()
        self.debug_handle = 0
        self.source: str | None = None
        self.origin: Mapping[str, Any] = {}
        """More ``meta`` for the nodes of the present operator, such as its place in the user's modules."""
        self.capture = capture
        self.strict = strict
        self._depth = 0

    # -- how an operator is called ---------------------------------------------------------------------------
    @staticmethod
    def is_node(value: Any) -> bool:
        """Whether an argument is a node of the graph, rather than a Python number."""
        return isinstance(value, fx.Node)

    @staticmethod
    def val(node: Any) -> torch.Tensor:
        """The fake tensor of a node that holds one tensor."""
        return node.meta["val"]

    def item(self, node: Any, position: int) -> Any:
        """One result of an op that returns several."""
        if isinstance(node, (list, tuple)):
            return node[position]
        value = node.meta["val"][position]
        if value is None:
            return None
        made = self.graph.call_function(_getitem, (node, position))
        return self._describe(made, value)

    def _emit(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if self.capture is not None and op in self.capture.decompositions:
            try:
                fn = self.capture.decompositions[op]
                return self._rewritten(op, fn, args, kwargs, _known_as(fn, op))
            except NotTakenApart:
                pass
            except RuntimeError as error:
                if not depends_on_data(error):
                    raise
        return self._add(op, args, kwargs)

    # -- on behalf of a backend --------------------------------------------------------------------------------
    def attempt(self, capture: Capture | None, lower: Callable[[], _Made]) -> _Made:
        """What an operator is lowered to for a backend. Raises :class:`Refused`, and the graph is as it was."""
        graph = self.graph
        last = next(iter(reversed(graph.nodes)), None)  # before PyTorch 2.13 it is a list, no iterator
        before = self.capture, self.strict
        self.capture, self.strict = capture, True
        try:
            return lower()
        except Refused:
            for node in reversed(graph.nodes):
                if node is last:
                    break
                graph.erase_node(node)
            raise
        finally:
            self.capture, self.strict = before

    def for_the_host(self, op: Any, reason: str, lower: Callable[[], _Made]) -> _Made:
        """What an operator that no backend takes is lowered to, as nodes that say so."""
        capture, outer = self.capture, self.origin
        self.capture, self.origin = None, {**outer, REFUSAL: reason, REFUSED_OP: op}
        try:
            return lower()
        finally:
            self.capture, self.origin = capture, outer

    def whole(self, op: Any, lower: Callable[[], _Made]) -> _Made:
        """What an operator is lowered to: for the backend if that takes all of it, else for the host.

        A ``strict`` builder raises :class:`Refused` instead.
        """
        if self.capture is None or self.capture.takes_all or self.strict:
            return lower()
        try:
            return self.attempt(self.capture, lower)
        except Refused as refused:
            return self.for_the_host(op, refused.reason, lower)

    def taken_out(self, node: fx.Node, position: int) -> fx.Node:
        """An element of a 1-D input, by the backend if that takes it; else by whoever calls the backend."""

        def element() -> fx.Node:
            return self(aten.select.int, node, 0, position)

        if self.capture is None or self.capture.takes_all:
            return element()
        try:
            return self.attempt(self.capture, element)
        except Refused as refused:
            return self.for_the_host(None, refused.reason, element)

    def laid_out(self, node: fx.Node, strides: Sequence[int]) -> fx.Node:
        """A dense value in the order of memory that these strides tell: a lowering may have given it another.

        For the first argument of what is in :data:`OF_MEMORY`. The value itself where the orders are equal.
        """
        order = sorted(range(len(strides)), key=lambda d: (-strides[d], d))
        if self.val(node).permute(order).is_contiguous():
            return node
        copied = self(aten.permute.default, node, order)
        copied = self(aten.clone.default, copied, memory_format=torch.contiguous_format)
        return self(aten.permute.default, copied, [order.index(d) for d in range(len(order))])

    # -- adding nodes ----------------------------------------------------------------------------------------
    def placeholder(self, name: str, spec: TensorSpec) -> fx.Node:
        """An input."""
        node = self.graph.placeholder(name)
        node.meta["val"] = fake_tensor(spec)
        return node

    def _describe(self, node: fx.Node, value: Any) -> fx.Node:
        node.meta.update(self.origin, val=value, debug_handle=self.debug_handle, source=self.source)
        return node

    def _add(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> fx.Node:
        try:
            value = self._run(op, args, kwargs)
        except (RuntimeError, ValueError):
            if op is not aten.view.default or self.val(args[0]).is_contiguous():
                raise
            # A rewrite gave the input other strides than the trace saw; a contiguous copy has every view there is.
            contiguous = self._add(aten.clone.default, [args[0]], {"memory_format": torch.contiguous_format})
            return self._add(op, [contiguous, *args[1:]], kwargs)
        node = self._describe(self.graph.call_function(op, *_without_defaults(op, args, kwargs)), value)
        if self.capture is None:
            return node
        own = self.capture.kernels.get(op)
        if own is not None:
            node.meta["kernel"] = own
            return node
        return node if self.capture.takes_all else self._supported(node)

    def _supported(self, node: fx.Node) -> Any:
        """The node if the backend takes it, else the nodes it decomposes to."""
        assert self.capture is not None
        support = self.capture.supports(node)
        if support:
            return node
        rewrite = _core_decompositions().get(node.target)
        if rewrite is None or self._depth >= _DEEPEST:
            if not self.strict:
                return node
            raise Refused(f"{node.target}: {support.reason or 'not supported'}")
        self._depth += 1
        try:
            made = self._rewritten(node.target, rewrite, node.args, node.kwargs, ("core", node.target))
        except RuntimeError as error:
            if not depends_on_data(error):
                raise
            if not self.strict:
                return node
            raise Refused(f"{node.target}: not supported, and its decomposition asks for a value") from None
        finally:
            self._depth -= 1
        self.graph.erase_node(node)
        return made

    def _rewritten(
        self,
        op: Any,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        known_as: Any = None,
    ) -> Any:
        """What a decomposition gives; its nodes tell by ``meta["decomposed"]`` which operator they stand for."""
        outer = self.origin
        self.origin = {"decomposed": str(op), **outer}
        try:
            return self.inline(fn, args, kwargs, known_as)
        finally:
            self.origin = outer

    def _run(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The fake results of an operator, from the specs of its arguments."""
        spec_args, spec_kwargs = map_arg((tuple(args), dict(kwargs)), _spec_of_node)
        inferred = infer(op, spec_args, spec_kwargs)
        values = [None if spec is None else fake_tensor(spec) for spec in inferred.specs]
        return values[0] if inferred.container is None else inferred.container(values)

    def inline(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], known_as: Any = None
    ) -> Any:
        """The nodes that a decomposition written with tensors amounts to, added to the graph.

        What it calls is remembered where it has a name.
        """
        given = [leaf for leaf in tree_iter((list(args), dict(kwargs))) if isinstance(leaf, fx.Node)]
        specs = map_arg((tuple(args), dict(kwargs)), _spec_of_node)
        found = taken_apart(fn, args, kwargs, given, specs, known_as)
        values: list[Any] = list(given)

        def here(value: Any) -> Any:
            return tree_map_only(Ref, lambda ref: values[ref.position], value)

        for target, inner_args, inner_kwargs in found.calls:
            if target is None:
                values.append(self.item(*here(inner_args)))
            else:
                values.append(self.call(target, here(inner_args), here(inner_kwargs)))
        return here(found.returns)

    # -- outputs ---------------------------------------------------------------------------------------------
    def separate(self, values: Sequence[fx.Node]) -> list[fx.Node]:
        """The values as outputs: what would share memory with an input or an earlier one is cloned."""
        taken: set[fx.Node] = set()
        results: list[fx.Node] = []
        for node in values:
            root = alias_root(node)
            if root.op != "call_function" or root in taken:
                node = root = self(aten.clone.default, node)
            taken.add(root)
            results.append(node)
        return results


def _known_as(fn: Callable[..., Any], op: Any) -> Any:
    """What a backend's decomposition is known by in every process with the same PyTorch and torchport.

    ``None`` for any but a function of theirs that its module has by that name: others may depend on more than their
    arguments.
    """
    module, name = getattr(fn, "__module__", None) or "", getattr(fn, "__qualname__", "")
    if module.partition(".")[0] not in ("torch", "torchport") or getattr(sys.modules.get(module), name, None) is not fn:
        return None
    return ("backend", module, name, op)


@functools.cache
def _defaults(op: Any) -> tuple[tuple[str, Any], ...]:
    """Name and default of each argument; :data:`_NO_DEFAULT` where there is none."""
    if not isinstance(op, torch._ops.OpOverload):
        return ()
    return tuple(
        (argument.name, argument.default_value if argument.has_default_value() else _NO_DEFAULT)
        for argument in op._schema.arguments
    )


_NO_DEFAULT: Final = object()


def _is_default(value: Any, default: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return isinstance(default, list) and len(value) == len(default) and all(map(_is_default, value, default))
    return value is default or (value.__class__ is default.__class__ and value == default)


def _without_defaults(
    op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments without those that say what is so anyway: as PyTorch's dispatcher hands them to Python."""
    defaults = _defaults(op)
    if not defaults:
        return tuple(args), dict(kwargs)
    count = len(args)
    while count and _is_default(args[count - 1], defaults[count - 1][1]):
        count -= 1
    by_name = dict(defaults)
    return tuple(args[:count]), {name: one for name, one in kwargs.items() if not _is_default(one, by_name.get(name))}


@functools.cache
def scalar_places(op: Any) -> tuple[tuple[int, str], ...]:
    """Position and name of the arguments where an operator takes a Python number."""
    if not isinstance(op, torch._ops.OpOverload):
        return ()
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(op._schema.arguments)
        if str(argument.real_type) in {"number", "Optional[number]"}
    )
