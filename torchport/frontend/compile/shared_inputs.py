"""Inputs that share memory: AOTAutograd replaces them by one that is all of it (a *synthetic base*).

The base counts as written where autograd looks on if one of the inputs does, and an input that nobody writes to does:
its writes are neither hidden from autograd nor under ``no_grad``. Then AOTAutograd copies the new value to the base
as a write that autograd sees, and the gradient of what was there before is lost. Here inputs without writes have no
say.

Inputs count as sharing memory where they overlap. PyTorch's test takes rows of one tensor for gaps between rows of
another that has rows of the whole width (``x`` and ``x[1:, :2]``); here they overlap.

The gradients that AOTAutograd expects with bases, and which results are inputs that the graph has written, are counted
anew: it miscounts both. So are results that are views of other results.

The inputs are taken of the base by size, strides and storage offset. Here they are conjugate and negative views, too,
where they were.

An input that Dynamo met first as the base of another one has the sizes that it had then: the numbers of a buffer, say.
AOTAutograd would give it symbols that nothing guards; here it gets the numbers, too.

Private torch APIs used here: ``torch._guards.TracingContext.tensor_to_context`` (which sizes vary),
``torch._functorch._aot_autograd.runtime_wrappers.create_synthetic_base_metadata``, ``gen_alias_from_base`` and
``make_output_handler``,
``torch._functorch._aot_autograd.input_output_analysis.compute_overlapping_tensors``,
``torch._functorch._aot_autograd.graph_capture.create_functionalized_fn``.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import combinations
from typing import Any, Final

import torch
from torch import fx
from torch._guards import TracingContext
from torch.fx.experimental.symbolic_shapes import DimDynamic

from ...core import releases
from ...core.errors import UnsupportedOp
from ...trace.handle import DEVICE_TYPE
from ..device.fake import saw_conjugate_views
from ..device.patches import replaced
from .aliased_results import OF_RESULT, repeated

__all__ = ["keep_fixed_sizes", "mended_bases"]

_AUTOGRAD: Final = "torch._functorch._aot_autograd"


def keep_fixed_sizes(graph: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Have AOTAutograd take a size of an input for a number where it is a number in the graph that Dynamo captured."""
    tracing = TracingContext.try_get()
    if tracing is None:
        return
    for node, value in zip(graph.graph.find_nodes(op="placeholder"), inputs, strict=False):
        if isinstance(value, torch.Tensor):
            _keep_fixed_sizes(node.meta.get("example_value"), tracing.tensor_to_context.get(value))


def _keep_fixed_sizes(seen: Any, context: Any) -> None:
    """Write the fixed sizes of a fake tensor, and of the tensor that it is a view of, into what says how they vary."""
    varying = getattr(context, "dynamic_sizes", None)
    if not isinstance(seen, torch.Tensor) or varying is None or seen.dim() != len(varying):
        return
    if not any(getattr(context, "shape_env_to_source_to_symbol_cache", {}).values()):  # else made with this context
        for dim, size in enumerate(seen.shape):
            if not isinstance(size, torch.SymInt):
                varying[dim] = DimDynamic.STATIC
    _keep_fixed_sizes(seen._base, context.view_base_context)


@contextmanager
def mended_bases() -> Iterator[None]:
    """While AOTAutograd compiles a graph, under the lock that Dynamo holds then."""
    from torch._functorch._aot_autograd import graph_capture, input_output_analysis, runtime_wrappers  # imports Dynamo

    overlapping = input_output_analysis.compute_overlapping_tensors
    compiling = True
    metadata, alias = runtime_wrappers.create_synthetic_base_metadata, runtime_wrappers.gen_alias_from_base
    functionalized = graph_capture.create_functionalized_fn

    def create(known: Any, places: Sequence[Any], *args: Any) -> Any:
        _refuse_conjugate_views(places, args[0])
        made, reshaped = metadata(_of_inputs_alone(_without_a_say(known, places)), places, *args)  # type: ignore[arg-type]
        return _of_own_results(_with_own_tangents(made, known), known), reshaped

    def functional(*args: Any, meta: Any, **kwargs: Any) -> Any:
        return functionalized(*args, meta=_with_written_inputs_last(meta), **kwargs)

    def taken(base: torch.Tensor, like: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not compiling:  # what is compiled holds on to this function, for its results
            made = repeated(base, like, *args[:1])
            return alias(base, like, *args, **kwargs) if made is None else made
        made = alias(base, like, *args, **kwargs)
        made = made.conj() if made.is_conj() != like.is_conj() else made
        return torch._neg_view(made) if made.is_neg() != like.is_neg() else made

    def all_overlapping(tensors: Sequence[torch.Tensor], symbolic: bool = True) -> set[int]:
        pairs = combinations(enumerate(tensors), 2)
        found = {at for (one, x), (other, y) in pairs if _rows_overlap(x, y) for at in (one, other)}
        known = overlapping(list(tensors), symbolic=symbolic)
        if symbolic and not found <= known:  # the guard on it asks PyTorch's test, in C++, and would fail at once
            raise UnsupportedOp("inputs whose sizes vary share rows of one matrix, and PyTorch takes them for separate")
        return {*known, *found}

    make_handler = runtime_wrappers.make_output_handler

    def handler(*args: Any) -> Any:
        return _with_own_aliases(make_handler(*args), taken)

    with (
        replaced(f"{_AUTOGRAD}.input_output_analysis.compute_overlapping_tensors", all_overlapping),
        replaced(f"{_AUTOGRAD}.graph_capture.create_functionalized_fn", functional),
        replaced(f"{_AUTOGRAD}.runtime_wrappers.create_synthetic_base_metadata", create),
        replaced(f"{_AUTOGRAD}.runtime_wrappers.gen_alias_from_base", taken),
        # From 2.13 on the code that makes results holds on to the function above; before, handlers look it up when they
        # are called, and by then it is PyTorch's again.
        nullcontext()
        if releases.version() >= (2, 13)
        else replaced(f"{_AUTOGRAD}.runtime_wrappers.make_output_handler", handler),
    ):
        try:
            yield
        finally:
            compiling = False


def _with_own_aliases(handler: Any, taken: Callable[..., torch.Tensor]) -> Any:
    """What makes a result that is an alias, of PyTorch 2.11: the same with another function that takes the alias."""
    if not hasattr(handler, "view_meta_sequence"):  # no alias
        return handler
    of_result = vars(handler).get("_unwrap_aliased_base_tensor")  # an attribute of objects alone

    def made(inputs: Sequence[Any], results: Sequence[Any], result: Any) -> torch.Tensor:
        base = inputs[handler.base_idx] if of_result is None else of_result(results[handler.base_idx])
        views, how = handler.view_meta_sequence, {"replay_views": handler.replay_views}
        return taken(base, handler.unwrap_out(result), handler.requires_grad, views, **how)

    return made


def _rows_overlap(one: Any, other: Any) -> bool:
    """Whether rows of two matrices in one storage, as far apart in both, have elements in common."""
    if one.dim() != 2 or other.dim() != 2 or 0 in (*one.shape, *other.shape):
        return False
    x, y = (one, other) if one.storage_offset() <= other.storage_offset() else (other, one)
    between = x.stride(0)
    if between != y.stride(0) or x.stride(1) != 1 or y.stride(1) != 1 or between < max(x.size(1), y.size(1)):
        return False
    apart = y.storage_offset() - x.storage_offset()
    row, column = apart // between, apart % between
    # The first row of ``y`` begins in a row of ``x``, or ends in the next.
    return (row < x.size(0) and column < x.size(1)) or (row + 1 < x.size(0) and column + y.size(1) > between)


def _refuse_conjugate_views(places: Sequence[Any], inputs: Sequence[Any]) -> None:
    """Raise :class:`UnsupportedOp` where an input of the device may be a conjugate view of a base.

    On the device such a view has the conjugated values, and nothing says of which input it is one.
    """
    tracing = TracingContext.try_get()
    ours = [
        value
        for value, place in zip(inputs, places, strict=True)
        if isinstance(place, tuple) and value.device.type == DEVICE_TYPE and value.dtype.is_complex
    ]
    if ours and tracing is not None and tracing.fake_mode is not None and saw_conjugate_views(tracing.fake_mode):
        raise UnsupportedOp(
            "inputs of the compiled function share memory, one of them is written, and one may be a conjugate view, "
            "which this device does not tell from its base; take x.conj() inside the function, or pass a clone of it",
            op="aten._conj.default",
        )


def _with_written_inputs_last(known: Any) -> Any:
    """What is known of a graph, as to be told to what traces it.

    A result that is an input which the graph writes to becomes that input. AOTAutograd counts results from the first
    output, which is the new value of another input where autograd is to see that one's writes: then every result stays
    what was computed.
    """
    before = known.num_mutated_inp_runtime_indices + len(known.tokens)
    if not before or not any(info.output_type.name == _IS_INPUT for info in known.output_info):
        return known
    told = copy.copy(known)
    told.output_info = [
        dataclasses.replace(info, output_type=type(info.output_type).non_alias)
        if info.output_type.name == _IS_INPUT
        else info
        for info in known.output_info
    ]
    return told


_IS_INPUT: Final = "is_input"


def _with_own_tangents(made: Any, known: Any) -> Any:
    """What is known of a graph with bases, given what was known before: a gradient for each output that has one.

    AOTAutograd counts gradients of inputs that the graph itself writes to, and takes as many of those from before away
    as there are bases, not as many as there were written inputs.
    """
    shown = [info for info in made.input_info if info.mutates_data and info.requires_grad]
    own = [at for at, info in enumerate(shown) if info.mutation_type.name == _SEEN]
    before = sum(i.mutates_data and i.requires_grad and i.mutation_type.name == _SEEN for i in known.input_info)
    names = ("traced_tangents", "traced_tangents_descs", "subclass_tangent_meta")
    lists = {name: [getattr(made, name)[at] for at in own] + getattr(known, name)[before:] for name in names}
    return dataclasses.replace(made, **lists)


_SEEN: Final = "MUTATED_OUT_GRAPH"


def _of_inputs_alone(known: Any) -> Any:
    """What is known of a graph, without which results are views of other results.

    AOTAutograd counts the inputs anew when it puts bases in their place, and what results are views of with them, also
    where that is another result.
    """
    told = copy.copy(known)
    told.output_info = [
        dataclasses.replace(info, base_idx=None) if info.output_type.name.startswith(OF_RESULT) else info
        for info in known.output_info
    ]
    return told


def _of_own_results(made: Any, known: Any) -> Any:
    """The opposite of :func:`_of_inputs_alone`, once AOTAutograd has counted: results keep their numbers."""
    for at, info in enumerate(known.output_info):
        if info.output_type.name.startswith(OF_RESULT):
            made.output_info[at] = dataclasses.replace(made.output_info[at], base_idx=info.base_idx)
    return made


def _without_a_say(known: Any, places: Sequence[Any]) -> Any:
    """What is known of the inputs, ``places`` saying which base each is in: those that are not written agree to all."""
    bases = [place[0] if isinstance(place, tuple) else place for place in places]
    shared = Counter(bases)
    mended = copy.copy(known)
    mended.input_info = [
        dataclasses.replace(info, mutations_hidden_from_autograd=True, mutations_under_no_grad_or_inference_mode=True)
        if shared[base] > 1 and not info.mutates_data
        else info
        for info, base in zip(known.input_info, bases, strict=True)
    ]
    return mended
