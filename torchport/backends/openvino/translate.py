"""From a graph in normal form to OpenVINO's opset 13. One function per operator; what has none is not supported.

OpenVINO's CPU plugin computes 64-bit integers in 32 bits and float64 in float32, so only float32 and bool results are
taken; integers are taken as indices of an embedding.
"""

from __future__ import annotations

import importlib
import math
import operator
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import fx

from torchport.backend.interface import Support
from torchport.core.errors import CompileError

__all__ = ["supports", "to_ir"]

aten = torch.ops.aten
_getitem: Any = operator.getitem
_FLOATS: Final = (torch.float32,)
_INDEX_OPS: Final = {aten.embedding.default: 1}
"""Operators that take integers, and at which position."""

_INDEX_RESULTS: Final = {(aten.max_pool2d_with_indices.default, 1)}
"""Results that are integers, and small ones."""

Check = Callable[[fx.Node], str]
_RULES: Final[dict[Any, Callable[..., Any]]] = {}
_CHECKS: Final[dict[Any, Check]] = {}


def _ops() -> Any:
    return importlib.import_module("openvino.opset13")


def _rule(*ops: Any, check: Check | None = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for op in ops:
            _RULES[op] = function
            if check is not None:
                _CHECKS[op] = check
        return function

    return register


def _arg(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    return node.args[position] if position < len(node.args) else node.kwargs.get(name, default)


def _val(node: Any) -> torch.Tensor:
    return node.meta["val"]


# -- what is taken -------------------------------------------------------------------------------------------------
def supports(node: fx.Node) -> Support:
    """Whether :func:`to_ir` translates a node."""
    op = node.target
    if op is _getitem:
        return Support.yes()
    if op not in _RULES:
        return Support.no("there is no translation to OpenVINO")
    values = node.meta["val"]
    index_at = _INDEX_OPS.get(op)  # type: ignore[arg-type]
    for at, value in enumerate(values if isinstance(values, (list, tuple)) else [values]):
        if value is not None and (op, at) not in _INDEX_RESULTS and value.dtype not in (*_FLOATS, torch.bool):
            return Support.no(f"OpenVINO computes {value.dtype} in fewer bits")
    for position, arg in enumerate(node.args):
        for leaf in arg if isinstance(arg, (list, tuple)) else [arg]:
            if isinstance(leaf, fx.Node) and position != index_at and _val(leaf).dtype not in (*_FLOATS, torch.bool):
                return Support.no(f"OpenVINO computes {_val(leaf).dtype} in fewer bits")
    if any(0 in _val(value).shape for value in [node, *node.all_input_nodes] if hasattr(_val(value), "shape")):
        return Support.no("a tensor is empty")
    reason = _CHECKS[op](node) if op in _CHECKS else ""
    return Support.no(f"there is no translation {reason}") if reason else Support.yes()


class _Writer:
    """Translates one graph. Rules are called as ``rule(writer, node)`` and give an OpenVINO output, or several."""

    def __init__(self) -> None:
        self.ops = _ops()
        self.values: dict[fx.Node, Any] = {}

    def value(self, arg: Any) -> Any:
        """The OpenVINO output of an argument: a node, or a number as float32."""
        import numpy

        if isinstance(arg, fx.Node):
            return self.values[arg]
        if isinstance(arg, bool):
            return self.ops.constant(numpy.array(arg)).output(0)
        return self.ops.constant(numpy.float32(arg)).output(0)

    def numeric(self, arg: Any) -> Any:
        """The same, where bool tensors become float32."""
        made = self.value(arg)
        if isinstance(arg, fx.Node) and _val(arg).dtype is torch.bool:
            return self.ops.convert(made, "f32").output(0)
        return made

    def ints(self, numbers: Sequence[int] | int) -> Any:
        """An int64 constant."""
        import numpy

        return self.ops.constant(numpy.array(numbers, dtype=numpy.int64)).output(0)

    def reshape(self, value: Any, shape: Sequence[int]) -> Any:
        """A reshape; ``shape`` is whole."""
        if not shape:  # OpenVINO ends the process over a product that is reshaped to a scalar
            return self.ops.squeeze(value, self.ints(list(range(len(value.get_partial_shape()))))).output(0)
        return self.ops.reshape(value, self.ints(list(shape)), False).output(0)


def to_ir(graph: fx.GraphModule) -> tuple[bytes, bytes]:
    """The graph as OpenVINO IR: XML and weights. Raises :class:`CompileError`."""
    ov: Any = importlib.import_module("openvino")
    w = _Writer()
    parameters: list[Any] = []
    results: list[Any] = []
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            kind = str(_val(node).dtype).removeprefix("torch.")
            parameters.append(w.ops.parameter(list(_val(node).shape), getattr(ov.Type, _TYPES[kind]), name=node.name))
            w.values[node] = parameters[-1].output(0)
        elif node.op == "call_function":
            if node.target is not _getitem and node.target not in _RULES:
                raise CompileError("there is no translation to OpenVINO", op=str(node.target))
            made = w.values[node.args[0]][node.args[1]] if node.target is _getitem else _RULES[node.target](w, node)
            w.values[node] = made if isinstance(made, list) else made.output(0) if hasattr(made, "output") else made
        else:
            results = [w.ops.result(w.values[value]) for value in node.args[0]]
    model = ov.Model(results, parameters, "torchport")
    with tempfile.TemporaryDirectory(prefix="torchport-openvino-") as folder:
        path = Path(folder) / "model.xml"
        ov.serialize(model, str(path), str(path.with_suffix(".bin")))
        return path.read_bytes(), path.with_suffix(".bin").read_bytes()


_TYPES: Final = {
    "float32": "f32", "float64": "f64", "float16": "f16", "bfloat16": "bf16", "bool": "boolean", "int64": "i64",
    "int32": "i32", "uint8": "u8", "int8": "i8", "int16": "i16",
}  # fmt: skip


# -- elementwise ---------------------------------------------------------------------------------------------------
def _no_alpha(node: fx.Node) -> str:
    return "" if node.kwargs.get("alpha", 1) == 1 else "with alpha"


def _float_result(node: fx.Node) -> str:
    return "" if _val(node).dtype is torch.float32 else f"with a result of {_val(node).dtype}"


def _both(*checks: Check) -> Check:
    return lambda node: next((why for check in checks if (why := check(node))), "")


for _targets, _name in (
    ((aten.add.Tensor, aten.add.Scalar), "add"),
    ((aten.sub.Tensor, aten.sub.Scalar), "subtract"),
    ((aten.mul.Tensor, aten.mul.Scalar), "multiply"),
    ((aten.div.Tensor, aten.div.Scalar), "divide"),
    ((aten.maximum.default,), "maximum"),
    ((aten.minimum.default,), "minimum"),
    ((aten.pow.Tensor_Scalar, aten.pow.Tensor_Tensor), "power"),
):

    @_rule(*_targets, check=_both(_no_alpha, _float_result))
    def _binary(w: _Writer, node: fx.Node, name: str = _name) -> Any:
        return getattr(w.ops, name)(w.numeric(node.args[0]), w.numeric(node.args[1]))


@_rule(aten.rsub.Scalar, check=_both(_no_alpha, _float_result))
def _rsub(w: _Writer, node: fx.Node) -> Any:
    return w.ops.subtract(w.numeric(node.args[1]), w.numeric(node.args[0]))


for _targets, _name in (
    ((aten.eq.Tensor, aten.eq.Scalar), "equal"),
    ((aten.ne.Tensor, aten.ne.Scalar), "not_equal"),
    ((aten.lt.Tensor, aten.lt.Scalar), "less"),
    ((aten.le.Tensor, aten.le.Scalar), "less_equal"),
    ((aten.gt.Tensor, aten.gt.Scalar), "greater"),
    ((aten.ge.Tensor, aten.ge.Scalar), "greater_equal"),
):

    @_rule(*_targets)
    def _compare(w: _Writer, node: fx.Node, name: str = _name) -> Any:
        return getattr(w.ops, name)(w.numeric(node.args[0]), w.numeric(node.args[1]))


for _target, _name in (
    (aten.neg.default, "negative"), (aten.exp.default, "exp"), (aten.log.default, "log"), (aten.sqrt.default, "sqrt"),
    (aten.tanh.default, "tanh"), (aten.sigmoid.default, "sigmoid"), (aten.relu.default, "relu"),
    (aten.erf.default, "erf"), (aten.abs.default, "abs"), (aten.sin.default, "sin"), (aten.cos.default, "cos"),
    (aten.floor.default, "floor"), (aten.ceil.default, "ceiling"),
):  # fmt: skip

    @_rule(_target, check=_float_result)
    def _unary(w: _Writer, node: fx.Node, name: str = _name) -> Any:
        return getattr(w.ops, name)(w.numeric(node.args[0]))


@_rule(aten.logical_not.default)
@_rule(aten.bitwise_not.default, check=lambda n: "" if _val(n).dtype is torch.bool else "of numbers")
def _not(w: _Writer, node: fx.Node) -> Any:
    value = w.value(node.args[0])
    return w.ops.logical_not(value) if _val(node.args[0]).dtype is torch.bool else w.ops.equal(value, w.value(0.0))


for _targets, _name in (
    ((aten.logical_and.default, aten.bitwise_and.Tensor, aten.__and__.Tensor), "logical_and"),
    ((aten.logical_or.default, aten.bitwise_or.Tensor, aten.__or__.Tensor), "logical_or"),
    ((aten.logical_xor.default, aten.bitwise_xor.Tensor, aten.__xor__.Tensor), "logical_xor"),
):

    @_rule(*_targets, check=lambda n: "" if all(_val(a).dtype is torch.bool for a in n.args) else "of numbers")
    def _logic(w: _Writer, node: fx.Node, name: str = _name) -> Any:
        return getattr(w.ops, name)(w.value(node.args[0]), w.value(node.args[1]))


@_rule(aten.rsqrt.default, check=_float_result)
def _rsqrt(w: _Writer, node: fx.Node) -> Any:
    return w.ops.divide(w.value(1.0), w.ops.sqrt(w.numeric(node.args[0])))


@_rule(aten.reciprocal.default, check=_float_result)
def _reciprocal(w: _Writer, node: fx.Node) -> Any:
    return w.ops.divide(w.value(1.0), w.numeric(node.args[0]))


@_rule(aten.silu.default)
def _silu(w: _Writer, node: fx.Node) -> Any:
    return w.ops.swish(w.value(node.args[0]))


@_rule(aten.gelu.default)
def _gelu(w: _Writer, node: fx.Node) -> Any:
    return w.ops.gelu(w.value(node.args[0]), "TANH" if node.kwargs.get("approximate") == "tanh" else "ERF")


@_rule(aten.clamp.default, check=_float_result)
def _clamp(w: _Writer, node: fx.Node) -> Any:
    low, high = _arg(node, 1, "min"), _arg(node, 2, "max")
    value = w.value(node.args[0])
    if low is not None:
        value = w.ops.maximum(value, w.value(low))
    return value if high is None else w.ops.minimum(value, w.value(high))


@_rule(aten.hardtanh.default)
def _hardtanh(w: _Writer, node: fx.Node) -> Any:
    return w.ops.clamp(
        w.value(node.args[0]), float(_arg(node, 1, "min_val", -1.0)), float(_arg(node, 2, "max_val", 1.0))
    )


@_rule(aten.where.self)
def _where(w: _Writer, node: fx.Node) -> Any:
    return w.ops.select(*(w.value(arg) for arg in node.args))


@_rule(aten.masked_fill.Scalar, check=_float_result)
def _masked_fill(w: _Writer, node: fx.Node) -> Any:
    return w.ops.select(w.value(node.args[1]), w.value(node.args[2]), w.value(node.args[0]))


@_rule(aten.clone.default, aten.dropout.default, check=lambda n: "in training" if _arg(n, 2, "train", False) else "")
def _identity(w: _Writer, node: fx.Node) -> Any:
    return w.value(node.args[0])


@_rule(aten._to_copy.default)
def _to_copy(w: _Writer, node: fx.Node) -> Any:
    value, source, wanted = w.value(node.args[0]), _val(node.args[0]).dtype, _val(node).dtype
    if source is wanted:
        return value
    return w.ops.not_equal(value, w.value(0.0)) if wanted is torch.bool else w.ops.convert(value, "f32")


@_rule(aten.full.default, aten.scalar_tensor.default)
def _full(w: _Writer, node: fx.Node) -> Any:
    import numpy

    number: Any = node.args[1] if node.target is aten.full.default else node.args[0]
    kind = numpy.bool_ if _val(node).dtype is torch.bool else numpy.float32
    return w.ops.constant(numpy.full(tuple(_val(node).shape), number, kind))


@_rule(aten.tril.default, aten.triu.default)
def _triangle(w: _Writer, node: fx.Node) -> Any:
    import numpy

    diagonal = int(_arg(node, 1, "diagonal", 0))
    kept = (numpy.tril if node.target is aten.tril.default else numpy.triu)(
        numpy.ones(tuple(_val(node).shape[-2:]), bool), diagonal
    )
    value, mask = w.value(node.args[0]), w.ops.constant(kept)
    return w.ops.logical_and(value, mask) if _val(node).dtype is torch.bool else w.ops.select(mask, value, w.value(0.0))


# -- shapes --------------------------------------------------------------------------------------------------------
@_rule(
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim,
    aten.squeeze.dims, aten.flatten.using_ints,
)  # fmt: skip
def _reshape(w: _Writer, node: fx.Node) -> Any:
    return w.reshape(w.value(node.args[0]), _val(node).shape)


@_rule(aten.expand.default)
def _expand(w: _Writer, node: fx.Node) -> Any:
    if _val(node).shape == _val(node.args[0]).shape:
        return w.value(node.args[0])  # OpenVINO ends the process over two such broadcasts of a scalar
    return w.ops.broadcast(w.value(node.args[0]), w.ints(list(_val(node).shape)))


@_rule(aten.permute.default)
def _permute(w: _Writer, node: fx.Node) -> Any:
    rank = len(_val(node).shape)
    order: Any = node.args[1]
    return w.ops.transpose(w.value(node.args[0]), w.ints([axis % rank for axis in order]))


@_rule(aten.transpose.int, aten.t.default)
def _transpose(w: _Writer, node: fx.Node) -> Any:
    order: list[int] = list(range(_val(node).dim()))
    args: Any = node.args
    first, second = (args[1], args[2]) if len(args) > 2 else (0, len(order) - 1)
    if order:
        order[first], order[second] = order[second], order[first]
    return w.ops.transpose(w.value(node.args[0]), w.ints(order))


@_rule(aten.slice.Tensor)
def _slice(w: _Writer, node: fx.Node) -> Any:
    axis, start = int(_arg(node, 1, "dim", 0)), _arg(node, 2, "start") or 0
    stop, step = _arg(node, 3, "end"), _arg(node, 4, "step", 1)
    size = _val(node.args[0]).shape[axis]
    begin, end, _ = slice(start, stop, step).indices(size)
    end = max(begin, end)
    value = w.value(node.args[0])
    return w.ops.slice(value, *(w.ints([number]) for number in (begin, end, step, axis % _val(node).dim())))


@_rule(aten.select.int)
def _select(w: _Writer, node: fx.Node) -> Any:
    axis, index = int(node.args[1]), int(node.args[2])  # type: ignore[arg-type]
    source = _val(node.args[0])
    return w.ops.gather(w.value(node.args[0]), w.ints(index % source.shape[axis]), w.ints(axis % source.dim()))


@_rule(
    aten.cat.default, check=lambda n: "of mixed dtypes" if len({_val(x).dtype for x in n.all_input_nodes}) > 1 else ""
)
def _cat(w: _Writer, node: fx.Node) -> Any:
    parts: Any = node.args[0]
    values, rank = [w.value(part) for part in parts], _val(node).dim()
    if rank > 1:
        return w.ops.concat(values, int(_arg(node, 1, "dim", 0)))
    # In rows: OpenVINO 2026.4 gives abs(c) for both where c, joined from vectors, and abs(c) are results.
    rows = [w.reshape(value, (1, *_val(part).shape)) for value, part in zip(values, parts, strict=True)]
    return w.reshape(w.ops.concat(rows, 1), _val(node).shape)


@_rule(aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default)
def _split(w: _Writer, node: fx.Node) -> Any:
    values: Any = node.meta["val"]
    axis = int(_arg(node, 2, "dim", 0))
    sizes = [value.shape[axis] for value in values]
    return list(w.ops.variadic_split(w.value(node.args[0]), w.ints(axis), w.ints(sizes)).outputs())


# -- reductions ----------------------------------------------------------------------------------------------------
_WORST: Final = {"reduce_max": -math.inf, "reduce_min": math.inf}

for _target, _name in (
    (aten.mean.dim, "reduce_mean"),
    (aten.sum.dim_IntList, "reduce_sum"),
    (aten.amax.default, "reduce_max"),
    (aten.amin.default, "reduce_min"),
):

    @_rule(_target, check=_float_result)
    def _reduce(w: _Writer, node: fx.Node, name: str = _name) -> Any:
        rank = _val(node.args[0]).dim()
        if rank == 0:
            return w.numeric(node.args[0])
        axes: Any = _arg(node, 1, "dim")
        chosen = [axes] if isinstance(axes, int) else list(axes or range(rank))
        keep = bool(_arg(node, 2, "keepdim", False))
        value, where = w.numeric(node.args[0]), w.ints([axis % rank for axis in chosen])
        made = getattr(w.ops, name)(value, where, keep)
        if name not in _WORST:
            return made
        import numpy

        # OpenVINO starts from the largest finite number and passes over NaN.
        worst = w.ops.constant(numpy.float32(_WORST[name]))
        nothing_else = w.ops.reduce_logical_and(w.ops.equal(value, worst), where, keep)
        any_nan = w.ops.reduce_logical_or(w.ops.is_nan(value), where, keep)
        return w.ops.select(any_nan, w.ops.constant(numpy.float32("nan")), w.ops.select(nothing_else, worst, made))


@_rule(aten._softmax.default, aten.softmax.int, check=_float_result)
def _softmax(w: _Writer, node: fx.Node) -> Any:
    return w.ops.softmax(w.value(node.args[0]), int(node.args[1]) % max(_val(node).dim(), 1))  # type: ignore[arg-type]


@_rule(aten._safe_softmax.default, check=_float_result)
def _safe_softmax(w: _Writer, node: fx.Node) -> Any:
    """Softmax that gives zeros where nothing is to be seen."""
    value, axis = w.value(node.args[0]), int(node.args[1]) % max(_val(node).dim(), 1)  # type: ignore[call-overload]
    hidden = w.ops.reduce_logical_and(w.ops.equal(value, w.value(-math.inf)), w.ints([axis]), True)
    return w.ops.select(hidden, w.value(0.0), w.ops.softmax(value, axis))


def _normalised(w: _Writer, node: fx.Node, epsilon: float) -> Any:
    shape: Any = node.args[1]
    value = w.value(node.args[0])
    rank = _val(node.args[0]).dim()
    axes = w.ints(list(range(rank - len(shape), rank)))
    made = w.ops.mvn(value, axes, True, epsilon, "INSIDE_SQRT")
    for position, name, op in ((2, "weight", "multiply"), (3, "bias", "add")):
        given = _arg(node, position, name)
        if given is not None:
            made = getattr(w.ops, op)(made, w.value(given))
    return made


@_rule(aten.layer_norm.default)
def _layer_norm(w: _Writer, node: fx.Node) -> Any:
    return _normalised(w, node, float(_arg(node, 4, "eps", 1e-5)))


@_rule(aten.native_layer_norm.default)
def _native_layer_norm(w: _Writer, node: fx.Node) -> Any:
    shape: Any = node.args[1]
    value, rank = w.value(node.args[0]), _val(node.args[0]).dim()
    epsilon = float(_arg(node, 4, "eps"))
    axes = w.ints(list(range(rank - len(shape), rank)))
    mean = w.ops.reduce_mean(value, axes, True)
    squares = w.ops.reduce_mean(w.ops.squared_difference(value, mean), axes, True)
    scale = w.ops.divide(w.value(1.0), w.ops.sqrt(w.ops.add(squares, w.value(epsilon))))
    return [_normalised(w, node, epsilon).output(0), mean.output(0), scale.output(0)]


for _targets, _name in (
    ((aten.any.default, aten.any.dim, aten.any.dims), "reduce_logical_or"),
    ((aten.all.default, aten.all.dim, aten.all.dims), "reduce_logical_and"),
):

    @_rule(*_targets, check=lambda n: "" if _val(n.args[0]).dtype is torch.bool else "of numbers")
    def _reduce_logical(w: _Writer, node: fx.Node, name: str = _name) -> Any:
        rank = _val(node.args[0]).dim()
        if rank == 0:
            return w.value(node.args[0])
        axes: Any = _arg(node, 1, "dim")
        chosen = list(range(rank)) if axes is None else [axes] if isinstance(axes, int) else list(axes)
        where = w.ints([axis % rank for axis in chosen])
        return getattr(w.ops, name)(w.value(node.args[0]), where, bool(_arg(node, 2, "keepdim", False)))


# -- matrices ------------------------------------------------------------------------------------------------------
@_rule(aten.mm.default, aten.bmm.default, aten.matmul.default)
def _matmul(w: _Writer, node: fx.Node) -> Any:
    return w.ops.matmul(w.value(node.args[0]), w.value(node.args[1]), False, False)


@_rule(aten.addmm.default, check=lambda n: "with alpha or beta" if n.kwargs else "")  # 1 is left out
def _addmm(w: _Writer, node: fx.Node) -> Any:
    bias, left, right = (w.value(arg) for arg in node.args[:3])
    return w.ops.add(w.ops.matmul(left, right, False, False), bias)


@_rule(aten.linear.default)
def _linear(w: _Writer, node: fx.Node) -> Any:
    made = w.ops.matmul(w.value(node.args[0]), w.value(node.args[1]), False, True)
    bias = _arg(node, 2, "bias")
    return made if bias is None else w.ops.add(made, w.value(bias))


def _attention_check(node: fx.Node) -> str:
    if float(_arg(node, 4, "dropout_p", 0.0)):
        return "with dropout"
    if node.kwargs.get("enable_gqa"):
        return "with grouped queries"
    mask = _arg(node, 3, "attn_mask")
    return "with a causal mask and another one" if mask is not None and _arg(node, 5, "is_causal", False) else ""


@_rule(aten.scaled_dot_product_attention.default, check=_attention_check)
def _attention(w: _Writer, node: fx.Node) -> Any:
    query, key, value = (w.value(arg) for arg in node.args[:3])
    mask, causal = _arg(node, 3, "attn_mask"), bool(_arg(node, 5, "is_causal", False))
    scale = node.kwargs.get("scale")
    factor = w.value(1 / math.sqrt(_val(node.args[0]).shape[-1]) if scale is None else scale)
    given = w.value(0.0) if mask is None else w.value(mask)
    if mask is not None and _val(mask).dtype is torch.bool:
        given = w.ops.select(given, w.value(0.0), w.value(-math.inf)).output(0)
    if mask is None and not causal:
        return w.ops.scaled_dot_product_attention(query, key, value, w.value(0.0), factor)
    return w.ops.scaled_dot_product_attention(query, key, value, given, factor, causal)


def _flash_check(node: fx.Node) -> str:
    if float(_arg(node, 3, "dropout_p", 0.0)):
        return "with dropout"
    query, key = (_val(arg) for arg in node.args[:2])
    if query.shape[1] != key.shape[1]:
        return "with grouped queries"
    mask = _arg(node, 5, "attn_mask")
    if mask is not None and _val(mask).dtype is torch.bool:
        return "with a mask that may hide all keys"
    return "with a causal mask and another one" if mask is not None and _arg(node, 4, "is_causal", False) else ""


@_rule(aten._scaled_dot_product_flash_attention_for_cpu.default, check=_flash_check)
def _flash_attention(w: _Writer, node: fx.Node) -> Any:
    import numpy

    query, key, value = (w.value(arg) for arg in node.args[:3])
    mask, causal, scale = _arg(node, 5, "attn_mask"), bool(_arg(node, 4, "is_causal", False)), node.kwargs.get("scale")
    factor = w.value(1 / math.sqrt(_val(node.args[0]).shape[-1]) if scale is None else scale)
    given = None if mask is None else w.value(mask)
    if causal:
        rows, columns = _val(node.args[0]).shape[-2], _val(node.args[1]).shape[-2]
        hidden = numpy.where(numpy.tril(numpy.ones((rows, columns), bool)), numpy.float32(0), numpy.float32(-math.inf))
        given = w.ops.constant(hidden).output(0)
    attended = [query, key, value, w.value(0.0) if given is None else given, factor]
    made = w.ops.scaled_dot_product_attention(*attended)
    # The second result, which only backward reads.
    scores = w.ops.multiply(w.ops.matmul(query, key, False, True), factor)
    scores = scores if given is None else w.ops.add(scores, given)
    most, last = w.ops.reduce_max(scores, w.ints([3]), True), w.ints([3])
    total = w.ops.reduce_sum(w.ops.exp(w.ops.subtract(scores, most)), last, True)
    logsumexp = w.ops.squeeze(w.ops.add(w.ops.log(total), most), last)
    return [made.output(0), logsumexp.output(0)]


@_rule(aten.embedding.default)
def _embedding(w: _Writer, node: fx.Node) -> Any:
    return w.ops.gather(w.value(node.args[0]), w.value(node.args[1]), w.ints(0))


# -- images --------------------------------------------------------------------------------------------------------
def _pair(value: Any, count: int) -> list[int]:
    numbers = [value] * count if isinstance(value, int) else list(value)
    return numbers * count if len(numbers) == 1 else numbers


def _convolution_check(node: fx.Node) -> str:
    if isinstance(_arg(node, 4, "padding", 0), str):
        return "with padding by name"
    return "" if _val(node.args[0]).dim() == _val(node.args[1]).dim() else "without a batch"


@_rule(aten.conv1d.default, aten.conv2d.default, check=_convolution_check)
def _convolution(w: _Writer, node: fx.Node) -> Any:
    stride, padding, dilation = _arg(node, 3, "stride", 1), _arg(node, 4, "padding", 0), _arg(node, 5, "dilation", 1)
    return _convolve(w, node, stride, padding, dilation, _arg(node, 6, "groups", 1))


def _convolve(w: _Writer, node: fx.Node, stride: Any, padding: Any, dilation: Any, groups: Any) -> Any:
    weight = _val(node.args[1])
    rank = weight.dim() - 2
    strides, pads, dilations = _pair(stride, rank), _pair(padding, rank), _pair(dilation, rank)
    value, kernel = w.value(node.args[0]), w.value(node.args[1])
    if groups == 1:
        made = w.ops.convolution(value, kernel, strides, pads, pads, dilations)
    else:
        kernel = w.reshape(kernel, [groups, weight.shape[0] // groups, *weight.shape[1:]])
        made = w.ops.group_convolution(value, kernel, strides, pads, pads, dilations)
    bias = _arg(node, 2, "bias")
    return made if bias is None else w.ops.add(made, w.reshape(w.value(bias), [1, -1, *([1] * rank)]))


def _any_convolution_check(node: fx.Node) -> str:
    if _val(node.args[0]).dim() != _val(node.args[1]).dim():
        return "without a batch"
    return "that is transposed, with padding of the result" if any(_pair(node.args[7], 1)) else ""


@_rule(aten.convolution.default, check=_any_convolution_check)
def _any_convolution(w: _Writer, node: fx.Node) -> Any:
    if not node.args[6]:
        groups = node.args[8]
        return _convolve(w, node, node.args[3], node.args[4], node.args[5], groups)
    weight = _val(node.args[1])
    rank, groups = weight.dim() - 2, int(node.args[8])  # type: ignore[call-overload]
    strides, pads, dilations = (_pair(node.args[at], rank) for at in (3, 4, 5))
    value, kernel, bias = w.value(node.args[0]), w.value(node.args[1]), node.args[2]
    how = {"strides": strides, "pads_begin": pads, "pads_end": pads, "dilations": dilations}
    if groups == 1:
        made = w.ops.convolution_backprop_data(value, kernel, **how)
    else:
        kernel = w.reshape(kernel, [groups, weight.shape[0] // groups, *weight.shape[1:]])
        made = w.ops.group_convolution_backprop_data(value, kernel, **how)
    return made if bias is None else w.ops.add(made, w.reshape(w.value(bias), [1, -1, *([1] * rank)]))


@_rule(aten.batch_norm.default, check=lambda n: "in training" if _arg(n, 5, "training") else "")
def _batch_norm(w: _Writer, node: fx.Node) -> Any:
    return _scaled(w, node, 3, 7)


def _scaled(w: _Writer, node: fx.Node, mean_at: int, epsilon_at: int) -> Any:
    channels, rank = _val(node.args[0]).shape[1], _val(node.args[0]).dim()
    weight = w.value(1.0) if node.args[1] is None else w.value(node.args[1])
    bias = w.value(0.0) if node.args[2] is None else w.value(node.args[2])
    mean, variance = w.value(node.args[mean_at]), w.value(node.args[mean_at + 1])
    epsilon = w.value(float(_arg(node, epsilon_at, "eps", 1e-5)))
    scale = w.ops.divide(weight, w.ops.sqrt(w.ops.add(variance, epsilon)))
    shift = w.ops.subtract(bias, w.ops.multiply(mean, scale))
    shape = [1, channels, *([1] * (rank - 2))]
    scaled = w.ops.multiply(w.value(node.args[0]), w.reshape(scale.output(0), shape))
    return w.ops.add(scaled, w.reshape(shift.output(0), shape))


@_rule(aten._native_batch_norm_legit_no_training.default)
def _batch_norm_inference(w: _Writer, node: fx.Node) -> Any:
    import numpy

    nothing = w.ops.constant(numpy.empty(0, numpy.float32)).output(0)
    return [_scaled(w, node, 3, 6).output(0), nothing, nothing]


def _native_batch_norm_check(node: fx.Node) -> str:
    if node.args[5]:
        return "in training"
    return "with statistics of the batch" if any(_val(node)[at].numel() for at in (1, 2)) else ""  # type: ignore[index]


@_rule(aten.native_batch_norm.default, check=_native_batch_norm_check)
def _native_batch_norm(w: _Writer, node: fx.Node) -> Any:
    import numpy

    nothing = w.ops.constant(numpy.empty(0, numpy.float32)).output(0)
    return [_scaled(w, node, 3, 7).output(0), nothing, nothing]


@_rule(aten.max_pool2d.default, check=lambda n: "" if _val(n.args[0]).dim() == 4 else "without a batch")
def _max_pool(w: _Writer, node: fx.Node) -> Any:
    return _pooled(w, node).output(0)


@_rule(aten.max_pool2d_with_indices.default, check=lambda n: "" if _val(n.args[0]).dim() == 4 else "without a batch")
def _max_pool_with_indices(w: _Writer, node: fx.Node) -> Any:
    return list(_pooled(w, node).outputs())


def _pooled(w: _Writer, node: fx.Node) -> Any:
    kernel = _pair(node.args[1], 2)
    strides, pads = _pair(_arg(node, 2, "stride") or kernel, 2), _pair(_arg(node, 3, "padding", 0), 2)
    dilations = _pair(_arg(node, 4, "dilation", 1), 2)
    rounding = "ceil_torch" if _arg(node, 5, "ceil_mode", False) else "floor"
    opset14: Any = importlib.import_module("openvino.opset14")
    value = w.value(node.args[0])  # indices count within an image, as PyTorch's do
    return opset14.max_pool(value, strides, dilations, pads, pads, kernel, rounding, index_element_type="i64", axis=2)


@_rule(
    aten.adaptive_avg_pool2d.default,
    check=lambda n: "" if list(_val(n).shape[-2:]) == [1, 1] else "to other than one value",
)
def _adaptive(w: _Writer, node: fx.Node) -> Any:
    rank = _val(node).dim()
    return w.ops.reduce_mean(w.value(node.args[0]), w.ints([rank - 2, rank - 1]), True)
