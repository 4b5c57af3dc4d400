"""Operators that OpenVINO's own PyTorch front end translates: one node at a time, from FX to nodes of OpenVINO.

The front end knows more operators than are listed here. An operator is listed where its results are PyTorch's, for NaN,
infinities, empty sums and 0-dim tensors, too; where they are not, this package has a rule of its own, with the reason,
or the operator stays with PyTorch. A node that the front end cannot convert, or converts to another shape or dtype, is
not supported: ``supports`` tries it (a millisecond), and remembers.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import fx

from .modules import openvino_module
from .sizes import is_symbolic, known
from .writer import WORDS, Takes, Writer, same_shape, val

__all__ = ["FRONT_END", "converted", "why_not"]

aten = torch.ops.aten

_PLAIN: Final = Takes()
FRONT_END: Final[dict[Any, Takes]] = dict.fromkeys(
    (
        aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool3d.default, aten.acos.default, aten.acosh.default,
        aten.asin.default, aten.asinh.default, aten.atan.default, aten.atanh.default,
        aten.constant_pad_nd.default, aten.cosh.default, aten.cumsum.default,
        aten.elu.default, aten.erfc.default, aten.glu.default, aten.hardswish.default, aten.isfinite.default,
        aten.isinf.default, aten.isnan.default, aten.leaky_relu.default, aten.log10.default,
        aten.log1p.default, aten.log2.default, aten.mish.default, aten.prod.default,
        aten.prod.dim_int, aten.rad2deg.default, aten.round.default, aten.sinh.default,
        aten.tan.default, aten.upsample_bicubic2d.default, aten.upsample_bilinear2d.default,
        aten.upsample_bilinear2d.vec, aten.upsample_bicubic2d.vec, aten.upsample_linear1d.vec,
        aten.upsample_trilinear3d.vec,
    ),
    _PLAIN,
) | {
    aten.adaptive_max_pool2d.default: Takes(gives=frozenset({1})),
    aten.adaptive_max_pool3d.default: Takes(gives=frozenset({1})),
    aten.index.Tensor: Takes(reads=frozenset({1})),
    aten.index_copy.default: Takes(reads=frozenset({2})),
    aten.index_fill.int_Scalar: Takes(reads=frozenset({2})),
    aten.masked_scatter.default: _PLAIN,
    aten.scatter.src: Takes(reads=frozenset({2})),
    aten.scatter.value: Takes(reads=frozenset({2})),
}  # fmt: skip
"""Operators that are given to the front end, and what they take."""


@functools.cache
def _front_end() -> Any:
    manager = openvino_module("openvino.frontend").FrontEndManager()
    _front_end_managers.append(manager)
    return manager.load_by_framework("pytorch")


_front_end_managers: Final[list[Any]] = []
"""A front end is the library's that its manager has loaded."""


def _flat(value: Any) -> Iterator[tuple[int, torch.Tensor]]:
    for at, one in enumerate(value if isinstance(value, (list, tuple)) else [value]):
        if one is not None:
            yield at, one


def _model(node: fx.Node) -> tuple[Any, list[fx.Node]]:
    """A model of one node, and the nodes that its inputs stand for, by position in their names."""
    graph = fx.Graph()
    inputs = list(node.all_input_nodes)
    stand_ins: dict[fx.Node, fx.Node] = {}
    for at, source in enumerate(inputs):
        stand_ins[source] = graph.placeholder(f"input_{at}")
        stand_ins[source].meta["val"] = val(source)
    call = graph.node_copy(node, lambda source: stand_ins[source])
    call.meta = {"val": node.meta["val"]}
    several = isinstance(node.meta["val"], (list, tuple))
    outputs = [graph.call_function(operator.getitem, (call, at)) for at, _ in _flat(node.meta["val"])]
    graph.output(tuple(outputs if several else [call]))
    if not several:
        graph.erase_node(outputs[0])
    decoders: Any = openvino_module("openvino.frontend.pytorch.fx_decoder")
    # The decoder is what the front end calls while it converts, and it does not keep it.
    decoder = decoders.TorchFXPythonDecoder(
        fx.GraphModule(torch.nn.Module(), graph),
        input_shapes=[_open(val(source).shape) for source in inputs],
        input_types=[val(source).dtype for source in inputs],
    )
    loaded = _front_end().load(decoder)
    return _front_end().convert(loaded), inputs


def _open(shape: Any) -> list[int]:
    """A shape as the front end takes it: -1 where a size is symbolic."""
    return [-1 if is_symbolic(size) else known(size) for size in shape]


def converted(w: Writer, node: fx.Node) -> Any:
    """The front end's translation of a node, on the values that the writer holds."""
    model, inputs = _model(node)
    for at, parameter in enumerate(model.get_parameters()):
        source = inputs[at]
        value = w.value(source)
        if val(source).dtype in (torch.int64, torch.int32):
            kind = "i64" if val(source).dtype is torch.int64 else "i32"
            value = w.ops.convert(w.index(source), kind).output(0)
            if (size := _counted_in(node, source)) is not None:
                count = w.ints(size) if kind == "i64" else w.word_of(size)
                value = w.ops.floor_mod(value, count).output(0)
        for target in list(parameter.output(0).get_target_inputs()):
            target.replace_source_output(value)
    made = [
        w.wide(result.input_value(0)) if one.dtype in WORDS else result.input_value(0)
        for result, (_, one) in zip(model.get_results(), _flat(node.meta["val"]), strict=True)
    ]
    if not isinstance(node.meta["val"], (list, tuple)):
        return made[0]
    places = {at: value for (at, _), value in zip(_flat(node.meta["val"]), made, strict=True)}
    return [places.get(at) for at in range(len(node.meta["val"]))]


def _counted_in(node: fx.Node, source: fx.Node) -> Any:
    """The size of the dimension in which an index of ``aten.index`` picks, or ``None``.

    The front end joins several indices to one, in which a negative one would be a place in another row.
    """
    if node.target is not aten.index.Tensor or source is node.args[0]:
        return None
    indices: Any = node.args[1]
    if any(one is not None and val(one).dtype is torch.bool for one in indices):
        return None
    sizes = [val(node.args[0]).shape[at] for at, one in enumerate(indices) if one is source]  # type: ignore[arg-type]
    return sizes[0] if sizes and all(same_shape([size], sizes[:1]) for size in sizes) else None


_tried: Final[dict[Any, str]] = {}


def why_not(node: fx.Node) -> str:
    """What keeps the front end from translating a node, after "there is no translation", or nothing."""
    specs = fx.map_arg((node.args, node.kwargs), _Spec)  # type: ignore[arg-type]
    key = (node.target, repr(specs))
    if key not in _tried:
        _tried[key] = _try(node)
    return _tried[key]


class _Spec:
    """What a key says of an input."""

    def __init__(self, node: fx.Node) -> None:
        self.said = f"{val(node).dtype}{_open(val(node).shape)}"

    def __repr__(self) -> str:
        return self.said


def _try(node: fx.Node) -> str:
    if any(is_symbolic(arg) for arg in (*node.args, *node.kwargs.values())):
        return "by OpenVINO's front end: an argument is a size that varies"
    try:
        model, inputs = _model(node)
    except Exception as error:
        said = [line.strip() for line in str(error).splitlines() if line.strip()]
        return f"by OpenVINO's front end: {said[-1] if said else type(error).__name__}"
    if len(model.get_parameters()) != len(inputs):
        return "by OpenVINO's front end: it leaves inputs out"
    wanted = [one for _, one in _flat(node.meta["val"])]
    if len(model.outputs) != len(wanted):
        return f"by OpenVINO's front end: it makes {len(model.outputs)} results of {len(wanted)}"
    for output, one in zip(model.outputs, wanted, strict=True):
        shape, kind = output.get_partial_shape(), output.get_element_type().get_type_name()
        if not _fits(shape, _open(one.shape)):
            return f"by OpenVINO's front end: it makes the shape {shape} of {list(one.shape)}"
        if kind not in _NAMES.get(one.dtype, ()):
            return f"by OpenVINO's front end: it makes {kind} of {one.dtype}"
    return ""


def _fits(shape: Any, wanted: list[int]) -> bool:
    """Whether a shape that the front end made is the one that it should be, as far as that is known."""
    if shape.rank.is_dynamic or len(shape) != len(wanted):
        return False
    return all(
        size < 0 or (not found.is_dynamic and found.get_length() == size)
        for found, size in zip(shape, wanted, strict=True)
    )


_NAMES: Final = {torch.float32: ("f32",), torch.bool: ("boolean",), torch.int64: ("i64", "i32"), torch.int32: ("i32",)}
