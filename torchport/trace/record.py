"""Recording an operator call that the trie does not have: decide who runs it, infer its results, add a node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from ..backend.random import is_random
from ..core.config import config
from ..core.default_state import default_state
from ..core.errors import DeviceMismatch
from ..core.frames import user_line
from ..core.specs import TensorSpec
from .decide import AtOnce, decide
from .eager import EagerTrace
from .finalizers import without_collecting
from .handle import LazyTensor, intern_spec, make_handle, make_template, shown_spec
from .keys import leaf, parts
from .layouts import kind_of, refusal
from .pool import fill_pool, new_handle
from .trace import CHECKPOINT_EVERY, Trace, lock
from .trie import (
    FOREIGN_DEVICE,
    LEAF,
    NONE,
    WRAPPED,
    HostScalar,
    Leaf,
    Node,
    RandomKey,
    ScalarInput,
    Sights,
    Value,
    Varying,
)
from .wrapping import call_above, unwrap, wrap

if TYPE_CHECKING:
    from ..backend.infer import Inferred
    from .kernels import Kernel

__all__ = ["emit", "mismatch", "record"]


# -- recording ---------------------------------------------------------------------------------------------------
def record(trace: Trace, kernel: Kernel, key: tuple[Any, ...], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Handle an op the trie has not seen at this place.

    Raises what PyTorch's own shape inference raises for wrong arguments, and :class:`DeviceMismatch`,
    with the operator and the user's line as notes; the trace is then as if the op had not been called.
    """
    if trace.bypassed and any(part is WRAPPED for part in parts(key)):
        trace.bypassed = False
        _Mark(trace, key, is_random(kernel.op)).undo()
        return call_above(kernel.op, args, kwargs)
    if trace.index == 0 and (index := _index_of_wrapper(args)):
        # Below functionalization, PyTorch's dispatcher looks for what is on other indices at a key that wrappers lack.
        _Mark(trace, key, is_random(kernel.op)).undo()
        return kernel.indexed(kernel.threads.of(index), *args, **kwargs)
    region = trace.region
    if region is None and trace.runtime.begins_region(kernel, args, kwargs):
        _Mark(trace, key, is_random(kernel.op)).undo()
        return trace.runtime.enter_region(trace, kernel, args, kwargs)
    if region is not None and not region.goes_on(trace.cursor, kernel.serial):
        trace.recording = False  # what comes after it is another path each time
    if not trace.recording and trace.runtime.interprets:
        sights = _sights(trace.cursor, key)
        if sights.first is None:
            if trace.cursor.parent is None:
                sights.first = kernel.op, key
            elif sights.times:  # not worth a walk if it never comes back
                first = trace.cursor.path()[0]
                sights.first = first.op, first.key
        worth = region is None and trace.runtime.is_worth_recording(sights)
        if not worth or not sights.observed:
            sights.observed = worth  # computed at once a last time, so that nothing has to be inferred
            return _at_once(trace, sights, kernel, key, args, kwargs)
        trace.cursor.missed.pop(key)  # type: ignore[union-attr]  # it becomes a child
        trace.recording = True
        trace.spent = sights.seconds
        trace.share = trace.left = sights.share or trace.runtime.share_to_record(sights)
    elif trace.recording and trace.left <= 0:
        return _at_once(trace, _rest(trace, key), kernel, key, args, kwargs)
    trace.left -= 1
    if isinstance(trace, EagerTrace):
        return trace.at_once(
            key, lambda node: emit(trace, node, args, kwargs), lambda: _record(trace, kernel, key, args, kwargs)
        )
    return _record(trace, kernel, key, args, kwargs)


def _at_once(
    trace: Trace, sights: Sights, kernel: Kernel, key: tuple[Any, ...], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Compute what is pending, and then this operator and those that follow, without recording them."""
    _Mark(trace, key, is_random(kernel.op)).undo()
    trace.runtime.begin_direct(trace, sights)
    return trace.runtime.run_direct(trace, kernel, args, kwargs)


def _rest(trace: Trace, key: tuple[Any, ...]) -> Sights:
    """What is known of the rest of a path, of which as much was recorded as is to be at one time.

    It is recorded when the path comes again: what the whole has cost so far counts for the rest.
    """
    sights = _sights(trace.cursor, key)
    sights.seconds, sights.observed, sights.share = trace.spent, True, trace.share
    trace.spent = 0.0  # the part that is recorded is no computation that comes back
    return sights


def _sights(node: Node, key: tuple[Any, ...]) -> Sights:
    """How often an operator that is no child of a node was seen there, and what that has cost."""
    sights = node.missed.pop(key, None) if node.missed else None
    if sights is None:
        sights = Sights()
        if node.missed is None:
            node.missed = {}
        elif len(node.missed) >= _MISSED_AT_MOST:
            del node.missed[next(iter(node.missed))]
    node.missed[key] = sights  # type: ignore[index]  # the last in order is the one that was seen last
    return sights


_MISSED_AT_MOST: Final = 4_096
"""Keys remembered at one place of a trie that are not recorded: a loop whose sizes grow adds one in each round."""


def _index_of_wrapper(args: Sequence[Any]) -> int:
    """The index above 0 of an operator's first tensor, if that is in a wrapper; else 0."""
    for value in args:
        first = value[0] if isinstance(value, (list, tuple)) and value else value
        if isinstance(first, torch.Tensor):
            return unwrap(first).get_device() if torch._is_functional_tensor(first) else 0
    return 0


def _record(trace: Trace, kernel: Kernel, key: tuple[Any, ...], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    with lock, without_collecting:
        mark = _Mark(trace, key, is_random(kernel.op))
        if any(_is_strayed(trace, key[at] if is_list else (key[at],)) for is_list, at in kernel.tensor_parts):
            # A pending value of another thread or of a former binding: it becomes a leaf, and the key is made again.
            mark.undo()
            for tensor in _handles((args, kwargs)):
                if not trace.holds(tensor.value_id) and leaf(trace, tensor) is FOREIGN_DEVICE:
                    raise mismatch(trace, kernel.op, tensor)
            call = kernel.fast if trace.index == 0 else kernel.indexed
            return call(*(() if trace.index == 0 else (trace,)), *args, **kwargs)
        try:
            with default_state():
                node = _make_node(trace, kernel, key, args, kwargs, mark)
        except BaseException as error:
            mark.undo()
            if not isinstance(error, DeviceMismatch):
                error.add_note(f"torchport: while tracing {kernel.op}")
                error.add_note(f"torchport: called at {user_line()}")
            raise
        trace.cursor.children[key] = node
        trace.nodes += 1
    return emit(trace, node, args, kwargs)


def _added_by(key: tuple[Any, ...]) -> tuple[int, int]:
    """How many leaves and scalar inputs came with a key."""
    leaves = scalar_inputs = 0
    for part in key:
        if part.__class__ is tuple:
            of_part = _added_by(part)
            leaves, scalar_inputs = leaves + of_part[0], scalar_inputs + of_part[1]
        elif isinstance(part, TensorSpec):
            leaves += 1
        elif part.__class__ is Varying:
            scalar_inputs += 1
    return leaves, scalar_inputs


def _is_strayed(trace: Trace, part: Sequence[Any]) -> bool:
    """Whether one of the key parts of tensors is a value id of another thread's trace."""
    return any(value_id.__class__ is int and not trace.holds(value_id) for value_id in part)


def _handles(value: Any) -> list[LazyTensor]:
    leaves: list[Any] = tree_leaves(value)
    return [inner for x in leaves if isinstance(x, torch.Tensor) and isinstance(inner := unwrap(x), LazyTensor)]


class _Mark:
    """How far leaves, scalar inputs and random keys had come before an op's key: where to go back if it is refused."""

    def __init__(self, trace: Trace, key: tuple[Any, ...], random: bool) -> None:
        leaves, scalar_inputs = _added_by(key)
        self.trace = trace
        self.leaves = len(trace.leaves) - leaves
        self.scalar_inputs = len(trace.scalar_inputs) - scalar_inputs
        self.random_keys = len(trace.random_keys) - random
        self.random = random

    def undo(self) -> None:
        trace = self.trace
        for tensor in trace.leaves[self.leaves :]:
            del trace.leaf_ids[id(tensor)]
            tensor.value_id = NONE
        del trace.leaves[self.leaves :]
        first = trace.base + LEAF + self.leaves
        for handle in trace.made:  # another handle of such a leaf's value has the leaf's id, and is kept there
            if handle.value_id >= first and trace.holds(handle.value_id):
                handle.value_id = NONE
        del trace.scalar_inputs[self.scalar_inputs :]
        if self.random:
            trace.runtime.take_back(trace.random_keys[self.random_keys])
            del trace.random_keys[self.random_keys :]


# -- arguments ---------------------------------------------------------------------------------------------------
class _DecodedCall:
    """An op's arguments twice, from its trace key: as templates for the node, and for shape inference.

    The key says everything about the call except the values of scalar inputs; parts are in schema order.
    """

    def __init__(self, trace: Trace, kernel: Kernel, mark: _Mark) -> None:
        self.trace = trace
        self.op = kernel.op
        self.next_leaf = mark.leaves
        self.next_scalar_input = mark.scalar_inputs
        self.args: list[Any] = []
        self.kwargs: dict[str, Any] = {}
        self.infer_args: list[Any] = []
        self.infer_kwargs: dict[str, Any] = {}

    @classmethod
    def of(
        cls,
        trace: Trace,
        kernel: Kernel,
        key: tuple[Any, ...],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        mark: _Mark,
    ) -> _DecodedCall:
        """Decode a key. Raises :class:`DeviceMismatch`."""
        call = cls(trace, kernel, mark)
        for position, argument in enumerate(kernel.arguments):
            given = kwargs[argument.name] if argument.kwarg_only else args[position]
            if argument.part is None:
                shape_only = argument.is_device and kernel.is_factory
                template, inferred = None, torch.device("cpu") if shape_only else None
            elif argument.holds_tensors:
                template, inferred = call._tensor_argument(key[argument.part], given)
            else:
                template, inferred = call._other(key[argument.part], given), given
            if not argument.kwarg_only:
                call.args.append(template)
                call.infer_args.append(inferred)
            elif inferred is not None or template is not None or not argument.has_default:
                call.kwargs[argument.name] = template
                call.infer_kwargs[argument.name] = inferred
        return call

    def _tensor_argument(self, part: Any, given: Any) -> tuple[Any, Any]:
        if not isinstance(given, (list, tuple)):
            return self._tensor(part, given)
        pairs = [self._tensor(p, g) for p, g in zip(part, given, strict=True)]
        return [template for template, _ in pairs], [inferred for _, inferred in pairs]

    def _tensor(self, part: Any, given: Any) -> tuple[Any, Any]:
        if part is None:
            return None, None
        if part.__class__ is int:
            leaf_at = part - self.trace.base - LEAF
            return Leaf(leaf_at) if leaf_at >= 0 else Value(part), TensorSpec.of(given)
        if isinstance(part, TensorSpec):
            self.next_leaf += 1
            return Leaf(self.next_leaf - 1), shown_spec(part)
        if part is FOREIGN_DEVICE:
            raise mismatch(self.trace, self.op, given)
        if part.__class__ is tuple and isinstance(part[0], torch.dtype):
            dtype, inner = part
            template = self._scalar(inner)
            held = HostScalar(dtype, template)
            return held, given
        return self._scalar(part), given

    def _scalar(self, part: Any) -> Any:
        if part.__class__ is Varying:
            self.next_scalar_input += 1
            return ScalarInput(self.next_scalar_input - 1)
        value, kind = part
        return kind(value) if kind is float or kind is complex else value

    def _other(self, part: Any, given: Any) -> Any:
        """The template of an argument that is no tensor: itself, with scalar inputs cut out."""
        if part.__class__ is Varying:
            return self._scalar(part)
        if part.__class__ is tuple and any(p.__class__ is Varying for p in part):
            return [self._scalar(p) if p.__class__ is Varying else g for p, g in zip(part, given, strict=True)]
        return list(given) if isinstance(given, (list, tuple)) else given


def mismatch(trace: Trace, op: Any, given: torch.Tensor) -> DeviceMismatch:
    """What is wrong with a tensor that an operator of the trace's device was given."""
    here = f"port:{trace.index}"
    if given.layout is not torch.strided:
        return DeviceMismatch(refusal(kind_of(given.layout)), op=str(op), source=user_line())
    if str(unwrap(given).device) == here:
        # Handles below functionalization are no wrappers; only Python code that runs down there mixes the two.
        return DeviceMismatch(
            f"a tensor of {here} is not in the form that operators take there: the Python code of a custom operator "
            "(torch.library.custom_op) uses tensors that it made itself; call that code as a plain function instead",
            op=str(op),
            source=user_line(),
        )
    return DeviceMismatch(
        f"expected all tensors to be on the same device, but found at least two devices, {here} and "
        f"{unwrap(given).device}; move the tensor with .to({here!r})",
        op=str(op),
        source=user_line(),
    )


def _make_node(
    trace: Trace, kernel: Kernel, key: tuple[Any, ...], args: Sequence[Any], kwargs: Mapping[str, Any], mark: _Mark
) -> Node:
    call = _DecodedCall.of(trace, kernel, key, args, kwargs, mark)
    node = Node(trace.cursor, key, kernel.op)
    node.args, node.kwargs, node.source = call.args, call.kwargs, user_line()
    node.is_factory = kernel.is_factory
    if is_random(kernel.op):
        node.kwargs["random_key"] = RandomKey(mark.random_keys)
    decision = decide(trace.runtime, node, call.infer_args, call.infer_kwargs)
    if isinstance(decision, AtOnce):
        node.barrier = trace.runtime.barrier(node, decision)
    else:
        _describe_outputs(node, decision, trace.index)
    return node


def _describe_outputs(node: Node, inferred: Inferred, index: int) -> None:
    """Specs, value ids and templates of a node's results."""
    node.container = inferred.container
    node.specs = tuple(None if spec is None else intern_spec(spec) for spec in inferred.specs)
    node.end_id = node.first_id + len(node.specs)
    if index == 0:
        node.templates = tuple(None if spec is None else make_template(spec) for spec in node.specs)
    plain = not node.is_factory and node.depth % CHECKPOINT_EVERY != 0
    if plain and node.templates:
        if node.container is not None:
            node.ready = node.container([None] * len(node.specs))
        for offset, spec in enumerate(node.specs):
            if spec is not None:
                fill_pool(node, offset)


# -- emitting ----------------------------------------------------------------------------------------------------
def emit(trace: Trace, node: Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Everything a kernel's one-tensor path does not do: several results, factories, barriers, checkpoints."""
    if node.barrier is not None:
        made = node.barrier(trace, node, args, kwargs)
        return tree_map_only(LazyTensor, wrap, made) if node.is_factory else made
    trace.cursor = node
    if node.ready is not None:  # a node just recorded
        return node.ready
    results: list[Any] = []
    for offset, spec in enumerate(node.specs):
        result = None
        if spec is not None:
            result = new_handle(node, offset) if trace.index == 0 else make_handle(spec, trace.index)
            result.value_id = node.first_id + offset
            trace.keep(result)
        results.append(result)
    if node.is_factory:
        results = [wrap(result) for result in results]
    if node.depth % CHECKPOINT_EVERY == 0:
        checkpoint(trace)
    if node.container is None:
        return results[0]
    return node.container(results)


def checkpoint(trace: Trace) -> None:
    """Now and then: forget dead values, and flush a trace that has grown past the bound."""
    trace.sweep()
    if trace.cursor.depth >= config.max_trace_ops:
        trace.runtime.flush(trace, "op bound")
