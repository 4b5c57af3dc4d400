"""Sizes that vary, for backends without symbolic sizes: inputs are padded to a bucket's, where that is exact.

What is compiled is the graph for the sizes of a bucket, with masks (:mod:`..masking`); it is told the true sizes. A
call then copies the inputs that have such a size, and of each such result the true part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import fx
from torch.fx.node import map_arg

from ...core.specs import TensorSpec
from ..batch_norm import BATCH_NORM, BATCH_NORM_BACKWARD
from ..buckets import other_size, require_products
from ..builder import GraphBuilder, capture_of
from ..container import spec_from_json, spec_to_json
from ..execution import Computation
from ..interface import Backend, BackendData, BackendDevice, ExecutionContext
from ..masker import TRUE_SIZE
from ..masking import Inexact, Layout, mask_padding
from ..prepare import Prepared
from ..runner import CallingBackend, runner_of
from .form import Form, Sketch, memory_order, replaced, strides_in

if TYPE_CHECKING:
    from .symbolic import SymbolicGraph

__all__ = ["Padding", "make_padded", "padded_graph", "padding_from_json", "padding_to_json"]

_EXACT: Final = 1 << 24
"""The largest size that can be masked: float32 has all whole numbers up to it."""
_APART: Final = {**BATCH_NORM, **BATCH_NORM_BACKWARD}
"""Operators that sum over what is padded: taken apart, each sum can be masked."""


def padding_to_json(padding: Padding) -> list[Any]:
    """A padding as plain data."""
    inputs = [[at, spec_to_json(spec)] for at, spec in padding.inputs.items()]
    results = [[list(map(list, dim)) for dim in layout] for layout in padding.results]
    return [list(padding.bucket), inputs, results, list(map(list, padding.sums))]


def padding_from_json(known: Any) -> Padding:
    """What :func:`padding_to_json` was given. Raises what unfit data causes."""
    bucket, inputs, results, sums = known
    layouts = tuple(tuple(tuple((size, symbol) for size, symbol in dim) for dim in layout) for layout in results)
    of_sums = tuple((at, constant) for at, constant in sums)
    return Padding(tuple(bucket), {at: spec_from_json(spec) for at, spec in inputs}, layouts, of_sums)


# -- the graph ---------------------------------------------------------------------------------------------------------
def _resized(graph: fx.GraphModule, form: Form, sketch: Sketch, values: Sequence[int]) -> fx.GraphModule:
    """The graph for other values of the symbols. Raises what shape inference raises where it is not for these."""
    integers = iter(form.integers_at(values))
    builder = GraphBuilder()
    made: dict[fx.Node, Any] = {}
    given = iter(sketch.inputs)

    def other(_: int) -> int:
        return next(integers)

    for node in graph.graph.nodes:
        if node.op == "placeholder":
            spec = next(given)
            shape = tuple(next(integers) for _ in spec.shape)
            made[node] = builder.placeholder(
                node.name, TensorSpec(shape, spec.dtype, strides_in(memory_order(spec), shape))
            )
        elif node.op == "output":
            results = [made[one] for one in node.args[0]]  # type: ignore[union-attr]
            output = builder.graph.output(tuple(results))
            output.meta["val"] = tuple(one.meta["val"] for one in results)
        else:
            builder.debug_handle, builder.source = node.meta["debug_handle"], node.meta.get("source")
            args = map_arg(tuple(replaced(one, other) for one in node.args), made.__getitem__)
            kwargs = map_arg({name: replaced(one, other) for name, one in node.kwargs.items()}, made.__getitem__)
            if node.target in _APART:
                made[node] = builder.inline(_APART[node.target], args, kwargs, ("sizes", node.target))
            elif isinstance(node.target, torch._ops.OpOverload):
                made[node] = builder.call(node.target, args, kwargs)
            else:
                made[node] = builder.item(*args)
    return fx.GraphModule(torch.nn.Module(), builder.graph)


@dataclass(frozen=True, slots=True)
class Padding:
    """How inputs are padded and results cut: specs by the input's number, and each result's layout.

    ``bucket``: the sizes that are padded to. ``sums``: the symbols of results beyond these (:attr:`.Masked.sums`).
    """

    bucket: tuple[int, ...]
    inputs: Mapping[int, TensorSpec]
    results: tuple[Layout, ...]
    sums: tuple[tuple[int, int], ...] = ()


def padded_graph(
    backend: Backend,
    graph: fx.GraphModule,
    form: Form,
    sketch: Sketch,
    symbolic: SymbolicGraph,
    bucket: tuple[int, ...],
) -> tuple[fx.GraphModule, Padding]:
    """The graph for a bucket that its sizes fit, with masks: it takes the true sizes, too. Raises :class:`Inexact`."""
    if any(node.name.startswith(TRUE_SIZE) for node in graph.graph.find_nodes(op="placeholder")):
        raise Inexact("it is padded already")
    require_products(symbolic.module, [symbol.node.expr for symbol in symbolic.symbols], sums=True)
    if max(bucket) > _EXACT:
        raise Inexact(f"a size of more than {_EXACT} is no exact number in the comparisons of masks")
    others = [other_size(size) for size in bucket]
    sets = [bucket, *((*bucket[:at], other, *bucket[at + 1 :]) for at, other in enumerate(others))]
    try:
        graphs = [_resized(graph, form, sketch, one) for one in sets]
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise Inexact(f"the graph is not for every size: {error}") from error
    # Compared as float32: some engines have no order of integers, and sizes are exact in it up to this one.
    masked = mask_padding(graphs, bucket, others, capture_of(backend), number=torch.float32, sums=True)
    module = masked.module
    output: Any = module.graph.output_node()
    separate = GraphBuilder(capture_of(backend))
    separate.graph = module.graph
    with module.graph.inserting_before(output):
        results = separate.separate(list(output.args[0]))
    output.args = (tuple(results),)
    output.meta["val"] = tuple(one.meta["val"] for one in results)
    inputs = {
        at: TensorSpec.of(node.meta["val"])
        for at, node in enumerate(graphs[0].graph.find_nodes(op="placeholder"))
        if any(number in form.varying for number in _numbers(sketch, at))
    }
    layouts = [layout for layout in masked.results if layout is not None]
    return module, Padding(bucket, inputs, tuple(layouts), masked.sums)


def _numbers(sketch: Sketch, at: int) -> range:
    """The numbers of an input's dimensions among a sketch's integers."""
    first = sum(len(spec.shape) for spec in sketch.inputs[:at])
    return range(first, first + len(sketch.inputs[at].shape))


# -- running -----------------------------------------------------------------------------------------------------------
@dataclass(slots=True)
class PaddedHandle:
    """A computation for the sizes of a bucket, and what is done before and after it."""

    computation: Computation
    pads: Mapping[int, TensorSpec]
    true_sizes: Sequence[torch.Tensor]
    cuts: Sequence[Callable[[torch.Tensor], torch.Tensor] | None]


class _Padding(CallingBackend):
    """Pads inputs, runs a computation, and cuts its results."""

    def execute(
        self, handle: PaddedHandle, args: Sequence[BackendData], context: ExecutionContext
    ) -> Sequence[BackendData]:
        backend, computation, device = self.of, handle.computation, context.device
        given = list(args)
        for at, spec in handle.pads.items():
            given[at] = backend.to_device(_padded(backend.from_device(args[at]), spec), device)
        given += [backend.to_device(size, device) for size in handle.true_sizes]
        with computation.lock:
            results = list(backend.execute(computation.handle, given, computation.context))
        for at, cut in enumerate(handle.cuts):
            if cut is not None:
                results[at] = backend.to_device(cut(backend.from_device(results[at])), device)
        return results

    def destroy(self, handle: PaddedHandle | None) -> None:
        """Nothing: the computation is given back by itself."""


def _padded(tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    made = torch.empty_strided(spec.shape, spec.strides, dtype=spec.dtype).zero_()
    made[tuple(slice(size) for size in tensor.shape)].copy_(tensor)
    return made


def _cutting(layout: Layout, values: Sequence[int], wanted: TensorSpec) -> Callable[[torch.Tensor], torch.Tensor]:
    """What takes the true part of a result, in memory of its own."""
    factors = [factor for dim in layout for factor in dim or ((1, None),)]
    sizes = [size for size, _ in factors]
    true = tuple(slice(size if symbol is None else values[symbol]) for size, symbol in factors)

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        part = tensor.reshape(sizes)[true].reshape(wanted.shape)
        return torch.empty_strided(wanted.shape, wanted.strides, dtype=wanted.dtype).copy_(part)

    return cut


def make_padded(
    backend: Backend, device: BackendDevice, about: Prepared, base: Computation, padding: Padding, values: Sequence[int]
) -> Computation:
    """The computation of a graph, of which ``about`` is known, by that for its bucket; ``values``: the symbols'."""
    of_results = [*values, *(values[at] + constant for at, constant in padding.sums)]
    cuts = [
        None if spec == base.results[at] else _cutting(layout, of_results, spec)
        for at, (layout, spec) in enumerate(zip(padding.results, about.outputs, strict=True))
    ]
    sizes = [torch.tensor(value, dtype=torch.float32) for value in values]
    program = PaddedHandle(base, dict(padding.inputs), sizes, cuts)
    made = Computation(
        runner_of(backend, _Padding), device, about.inputs, about.names, about.outputs, program,
        ExecutionContext(device, about.outputs), about.mark, about.ops, about.seconds,
    )  # fmt: skip
    made.resized = base
    return made
