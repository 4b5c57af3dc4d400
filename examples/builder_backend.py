"""A backend for an engine that is built through calls: each call appends an instruction and returns a handle.

The first part, ``Tape``, stands for the engine: a builder whose calls record instructions, bytes of a finished tape,
and a player that runs them with NumPy. The second part is the backend: a table in which each operator of PyTorch is a
few calls of the builder. It trains GPT-2 with nothing left to the host.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import fx
from torch._decomp import get_decompositions

import torchport as tp

# -- the engine --------------------------------------------------------------------------------------------------------
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Handle:
    """What the builder's calls return."""

    instruction: int


class Tape:
    """The engine's builder. A handle is good for calls of the tape that returned it."""

    def __init__(self) -> None:
        self.instructions: list[dict[str, Any]] = []

    def _append(self, op: str, *inputs: Handle, **attributes: Any) -> Handle:
        numbers = [one.instruction for one in inputs]
        self.instructions.append({"op": op, "inputs": numbers, "attributes": attributes, "dtype": None})
        return Handle(len(self.instructions) - 1)

    def set_type(self, handle: Handle, dtype: str) -> None:
        """Have an instruction round its result to a dtype."""
        self.instructions[handle.instruction]["dtype"] = dtype

    def parameter(self, position: int) -> Handle:
        return self._append("parameter", position=position)

    def constant(self, value: float) -> Handle:
        return self._append("constant", value=value)

    def iota(self, start: float, stop: float, step: float) -> Handle:
        return self._append("iota", start=start, stop=stop, step=step)

    def unary(self, kind: str, x: Handle) -> Handle:
        return self._append(kind, x)

    def binary(self, kind: str, a: Handle, b: Handle) -> Handle:
        return self._append(kind, a, b)

    def choose(self, condition: Handle, a: Handle, b: Handle) -> Handle:
        return self._append("choose", condition, a, b)

    def reduce(self, kind: str, x: Handle, axes: Sequence[int]) -> Handle:
        """Over axes, which stay with size 1."""
        return self._append(kind, x, axes=list(axes))

    def reshape(self, x: Handle, shape: Sequence[int]) -> Handle:
        return self._append("reshape", x, shape=list(shape))

    def broadcast(self, x: Handle, shape: Sequence[int]) -> Handle:
        return self._append("broadcast", x, shape=list(shape))

    def transpose(self, x: Handle, order: Sequence[int]) -> Handle:
        return self._append("transpose", x, order=list(order))

    def slice(self, x: Handle, axis: int, start: int, stop: int, step: int = 1) -> Handle:
        return self._append("slice", x, axis=axis, start=start, stop=stop, step=step)

    def concat(self, parts: Sequence[Handle], axis: int) -> Handle:
        return self._append("concat", *parts, axis=axis)

    def pad(self, x: Handle, widths: Sequence[tuple[int, int]], value: float) -> Handle:
        return self._append("pad", x, widths=list(widths), value=value)

    def take(self, x: Handle, rows: Handle) -> Handle:
        return self._append("take", x, rows)

    def add_rows(self, x: Handle, rows: Handle, values: Handle) -> Handle:
        """``x`` with ``values`` added at rows; a row that is named twice gets both."""
        return self._append("add_rows", x, rows, values)

    def pick(self, x: Handle, places: Handle, axis: int) -> Handle:
        """One element per place along an axis."""
        return self._append("pick", x, places, axis=axis)

    def put(self, x: Handle, places: Handle, value: Handle, axis: int) -> Handle:
        """``x`` with another value at places along an axis."""
        return self._append("put", x, places, value, axis=axis)

    def finish(self, results: Sequence[Handle]) -> bytes:
        """The tape as bytes."""
        numbers = [one.instruction for one in results]
        return json.dumps({"instructions": self.instructions, "results": numbers}).encode()


def _cut(x: Array, axis: int, start: int, stop: int, step: int) -> Array:
    return x[(slice(None),) * axis + (slice(start, stop, step),)]


def _add_rows(x: Array, rows: Array, values: Array) -> Array:
    result = x.copy()
    np.add.at(result, rows, values)
    return result


def _put(x: Array, places: Array, value: Any, axis: int) -> Array:
    result = x.copy()
    np.put_along_axis(result, places, value, axis)
    return result


PLAYER: dict[str, Callable[..., Any]] = {
    "constant": lambda value: value,
    "iota": lambda start, stop, step: np.arange(start, stop, step),
    "neg": np.negative, "abs": np.abs, "exp": np.exp, "log": np.log, "sqrt": np.sqrt, "tanh": np.tanh,
    "invert": np.invert, "not": np.logical_not, "copy": np.asarray,
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "pow": np.power,
    "max": np.maximum, "min": np.minimum, "and": np.bitwise_and, "both": np.logical_and,
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "ge": np.greater_equal,
    "choose": np.where, "matmul": np.matmul,
    "sum": lambda x, axes: np.sum(x, tuple(axes), keepdims=True),
    "mean": lambda x, axes: np.mean(x, tuple(axes), keepdims=True),
    "amax": lambda x, axes: np.max(x, tuple(axes), keepdims=True),
    "any": lambda x, axes: np.any(x, tuple(axes), keepdims=True),
    "reshape": lambda x, shape: np.reshape(x, shape), "broadcast": lambda x, shape: np.broadcast_to(x, shape),
    "transpose": lambda x, order: np.transpose(x, order), "slice": _cut,
    "concat": lambda *parts, axis: np.concatenate(parts, axis),
    "pad": lambda x, widths, value: np.pad(x, widths, constant_values=value),
    "take": lambda x, rows: x[rows], "add_rows": _add_rows,
    "pick": lambda x, places, axis: np.take_along_axis(x, places, axis), "put": _put,
}  # fmt: skip


def play(tape: Any, parameters: Sequence[Array]) -> list[Array]:
    """Run a tape that was read from its bytes."""
    values: list[Any] = []
    for one in tape["instructions"]:
        if one["op"] == "parameter":
            value: Any = parameters[one["attributes"]["position"]]
        else:
            value = PLAYER[one["op"]](*[values[at] for at in one["inputs"]], **one["attributes"])
        values.append(value if one["dtype"] is None else np.asarray(value, one["dtype"]))
    return [values[at] for at in tape["results"]]


# -- the backend -------------------------------------------------------------------------------------------------------
aten = torch.ops.aten
DTYPES = frozenset({"float32", "float64", "int32", "int64", "bool"})
TABLE = tp.LoweringTable()


class TapeContext(tp.LoweringContext[Handle, bytes]):
    """Emits one graph to one tape."""

    def __init__(self) -> None:
        super().__init__(TABLE)
        self.tape = Tape()

    def parameter(self, position: int, spec: tp.TensorSpec, name: str) -> Handle:
        return self.tape.parameter(position)

    def finish(self, call: tp.Call, value: Any) -> Any:
        """Have the engine round to the dtype that PyTorch promises, whatever its own rules of promotion are."""
        handles, fakes = (value, call.val) if isinstance(value, list) else ([value], [call.val])
        for handle, fake in zip(cast(list[Handle], handles), fakes, strict=True):
            self.tape.set_type(handle, tp.TensorSpec.of(fake).dtype_name)
        return value

    def build(self) -> bytes:
        return self.tape.finish(self.results)


def tape_of(call: tp.Call) -> Tape:
    return cast(TapeContext, call.context).tape


def operand(call: tp.Call, value: Any) -> Handle:
    """An argument that may be a tensor or a number; a number becomes a constant of the tape."""
    return value if isinstance(value, Handle) else tape_of(call).constant(value)


def axes_of(call: tp.Call, dims: Sequence[int] | None) -> list[int]:
    """Dimensions of the first argument, as PyTorch counts them; none of them means all."""
    rank = call.arg(0).dim()
    return sorted({dim % rank for dim in dims or range(rank)}) if rank else []


def unary(op: Any, kind: str) -> None:
    @TABLE(op)
    def lower(call: tp.Call, x: Handle, **_: Any) -> Handle:
        tape, fake = tape_of(call), call.arg(0)
        if call.val.is_floating_point() and not fake.is_floating_point():
            x = tape.unary("copy", x)  # the engine would compute with a dtype of its own choice, float16 for bool
            tape.set_type(x, tp.TensorSpec.of(call.val).dtype_name)
        return tape.unary(kind, x)


def binary(op: Any, kind: str) -> None:
    @TABLE(op)
    def lower(call: tp.Call, a: Any, b: Any, alpha: Any = None) -> Handle:
        tape, second = tape_of(call), operand(call, b)
        if alpha is not None:
            second = tape.binary("mul", second, operand(call, alpha))
        return tape.binary(kind, operand(call, a), second)


for op, kind in {
    aten.neg.default: "neg", aten.abs.default: "abs", aten.exp.default: "exp", aten.log.default: "log",
    aten.sqrt.default: "sqrt", aten.tanh.default: "tanh", aten.bitwise_not.default: "invert",
    aten.logical_not.default: "not", aten.clone.default: "copy", aten._to_copy.default: "copy",
}.items():  # fmt: skip
    unary(op, kind)

for op, kind in {
    aten.add.Tensor: "add", aten.sub.Tensor: "sub", aten.mul.Tensor: "mul", aten.div.Tensor: "div",
    aten.pow.Tensor_Scalar: "pow", aten.bitwise_and.Tensor: "and", aten.logical_and.default: "both",
    aten.eq.Scalar: "eq", aten.ne.Scalar: "ne", aten.lt.Scalar: "lt", aten.le.Scalar: "le", aten.ge.Scalar: "ge",
    aten.mm.default: "matmul", aten.bmm.default: "matmul",
}.items():  # fmt: skip
    binary(op, kind)


@TABLE(aten.relu.default)
def relu(call: tp.Call, x: Handle) -> Handle:
    return tape_of(call).binary("max", x, tape_of(call).constant(0))


@TABLE(aten.clamp.default)
def clamp(call: tp.Call, x: Handle, low: Any = None, high: Any = None) -> Handle:
    for kind, bound in (("max", low), ("min", high)):
        x = x if bound is None else tape_of(call).binary(kind, x, operand(call, bound))
    return x


@TABLE(aten.where.self)
def where(call: tp.Call, condition: Handle, a: Handle, b: Handle) -> Handle:
    return tape_of(call).choose(condition, a, b)


@TABLE(aten.full.default, aten.full_like.default, aten.scalar_tensor.default)
def full(call: tp.Call, first: Any, value: Any = None, **_: Any) -> Handle:
    number = first if call.node.target is aten.scalar_tensor.default else value
    return tape_of(call).broadcast(operand(call, number), call.val.shape)


@TABLE(aten.arange.start_step)
def arange(call: tp.Call, start: float, stop: float, step: float = 1, **_: Any) -> Handle:
    return tape_of(call).iota(start, stop, step)


# Shapes are static, so the node's fake result says what a view comes to.
@TABLE(aten.view.default, aten.unsqueeze.default, aten.squeeze.dims)
def view(call: tp.Call, x: Handle, *_: Any) -> Handle:
    return tape_of(call).reshape(x, call.val.shape)


@TABLE(aten.expand.default)
def expand(call: tp.Call, x: Handle, *_: Any, **__: Any) -> Handle:
    return tape_of(call).broadcast(x, call.val.shape)


@TABLE(aten.permute.default)
def permute(call: tp.Call, x: Handle, dims: Sequence[int]) -> Handle:
    return tape_of(call).transpose(x, [dim % len(dims) for dim in dims])


@TABLE(aten.select.int)
def select(call: tp.Call, x: Handle, dim: int, at: int) -> Handle:
    tape, shape = tape_of(call), call.arg(0).shape
    axis, start = dim % len(shape), at % shape[dim]
    return tape.reshape(tape.slice(x, axis, start, start + 1), call.val.shape)


@TABLE(aten.slice.Tensor)
def slice_(call: tp.Call, x: Handle, dim: int = 0, start: int | None = 0, end: int | None = None, step: int = 1) -> Any:
    first, last, _ = slice(start, end).indices(call.arg(0).shape[dim])
    return tape_of(call).slice(x, dim % call.arg(0).dim(), first, max(first, last), step)


@TABLE(aten.split_with_sizes.default)
def split(call: tp.Call, x: Handle, sizes: Sequence[int], dim: int = 0) -> list[Handle]:
    axis, starts = dim % call.arg(0).dim(), [0, *itertools.accumulate(sizes)]
    return [tape_of(call).slice(x, axis, start, stop) for start, stop in itertools.pairwise(starts)]


@TABLE(aten.cat.default)
def cat(call: tp.Call, parts: Sequence[Handle], dim: int = 0) -> Handle:
    fakes = [part.meta["val"] for part in cast(Sequence[fx.Node], call.node.args[0])]
    joined = [part for part, fake in zip(parts, fakes, strict=True) if fake.shape != (0,)]  # PyTorch leaves them out
    return tape_of(call).concat(joined or parts, dim % call.val.dim())


@TABLE(
    aten.constant_pad_nd.default,
    refuses=lambda node: "padding that cuts off" if min(cast(Any, node.args[1])) < 0 else None,
)
def pad(call: tp.Call, x: Handle, widths: Sequence[int], value: float = 0) -> Handle:
    pairs = [(widths[at], widths[at + 1]) for at in range(0, len(widths), 2)]  # of the last dimension first
    pairs += [(0, 0)] * (call.val.dim() - len(pairs))
    return tape_of(call).pad(x, pairs[::-1], value)


@TABLE(aten.sum.dim_IntList, aten.mean.dim, aten.mean.default, aten.amax.default, aten.any.dim)
def reduce(call: tp.Call, x: Handle, dims: Sequence[int] | int | None = None, *_: Any, **__: Any) -> Handle:
    kind = str(call.node.target).split(".")[1]
    axes = axes_of(call, [dims] if isinstance(dims, int) else dims)
    return tape_of(call).reshape(tape_of(call).reduce(kind, x, axes), call.val.shape)


# An operator may be several calls. Results that are several come back as a list.
@TABLE(
    aten._softmax.default,
    aten._log_softmax.default,
    refuses=lambda node: None if node.meta["val"].numel() else "there is no largest of no elements",
)
def softmax(call: tp.Call, x: Handle, dim: int, half: bool) -> Handle:
    tape, axes = tape_of(call), axes_of(call, [dim])
    shifted = tape.binary("sub", x, tape.reduce("amax", x, axes))
    exponentials = tape.unary("exp", shifted)
    total = tape.reduce("sum", exponentials, axes)
    if call.node.target is aten._softmax.default:
        return tape.binary("div", exponentials, total)
    return tape.binary("sub", shifted, tape.unary("log", total))


@TABLE(aten.native_layer_norm.default)
def layer_norm(
    call: tp.Call, x: Handle, shape: Sequence[int], weight: Handle | None, bias: Handle | None, eps: float
) -> list[Handle]:
    tape, rank = tape_of(call), call.arg(0).dim()
    axes = list(range(rank - len(shape), rank))
    mean = tape.reduce("mean", x, axes)
    centred = tape.binary("sub", x, mean)
    variance = tape.reduce("mean", tape.binary("mul", centred, centred), axes)
    deviation = tape.unary("sqrt", tape.binary("add", variance, tape.constant(eps)))
    inverse = tape.binary("div", tape.constant(1.0), deviation)
    result = tape.binary("mul", centred, inverse)
    result = result if weight is None else tape.binary("mul", result, weight)
    result = result if bias is None else tape.binary("add", result, bias)
    return [result, mean, inverse]


@TABLE(aten.embedding.default)
def embedding(call: tp.Call, table: Handle, rows: Handle, *_: Any) -> Handle:
    return tape_of(call).take(table, rows)


@TABLE(
    aten.embedding_dense_backward.default,
    refuses=lambda node: "rows that get no gradient, or a share of it" if node.args[3:] != (-1, False) else None,
)
def embedding_backward(call: tp.Call, grad: Handle, rows: Handle, *_: Any) -> Handle:
    tape = tape_of(call)
    zeros = tape.broadcast(tape.constant(0.0), call.val.shape)
    return tape.add_rows(zeros, rows, grad)


def no_dimensions(node: fx.Node) -> str | None:
    fakes = [node.meta["val"], node.all_input_nodes[0].meta["val"]]
    return None if all(fake.dim() for fake in fakes) else "the engine picks along an axis, and there is none"


@TABLE(aten.gather.default, refuses=no_dimensions)
def gather(call: tp.Call, x: Handle, dim: int, places: Handle, **_: Any) -> Handle:
    return tape_of(call).pick(x, places, dim)


@TABLE(aten.scatter.value, refuses=no_dimensions)
def scatter(call: tp.Call, x: Handle, dim: int, places: Handle, value: Any) -> Handle:
    return tape_of(call).put(x, places, operand(call, value), dim)


@tp.register
class BuilderBackend(tp.Backend):
    name = "builder"
    capabilities = tp.Capabilities(dtypes=DTYPES)

    def supports(self, node: fx.Node) -> tp.Support:
        return TABLE.supports(node)

    def decompositions(self) -> Any:
        return get_decompositions([aten.addmm.default])

    def preprocess(self, graph: fx.GraphModule, specs: tp.CompileSpecs) -> tp.Processed:
        context = TapeContext()
        context.lower_graph(graph)
        return tp.Processed(context.build())

    def init(self, processed: tp.FreeableBuffer, specs: tp.CompileSpecs, context: tp.InitContext) -> Any:
        return json.loads(bytes(processed.data))

    def execute(self, handle: Any, args: Sequence[tp.BackendData], context: tp.ExecutionContext) -> list[Any]:
        with np.errstate(all="ignore"):
            arrays = play(handle, [self.from_device(value).numpy() for value in args])
        return [self.to_device(torch.tensor(array), context.device) for array in arrays]
