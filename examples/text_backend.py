"""A backend for an engine that reads a program as text, and that knows its own line numbers only.

The first part stands for the engine: an assembler, which reads one instruction per line, and a machine, which runs them
with NumPy. Both complain about lines of their text. The second part is the backend: it writes the text, shows it
(``text``), and says which node of the graph each line came from (``Processed.debug_map``), so that complaints reach the
user as lines of the user's program.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, fx
from torch._decomp import get_decompositions

import torchport as tp

# -- the engine --------------------------------------------------------------------------------------------------------
Array = np.ndarray[Any, Any]
MOST_DIMENSIONS = 8
LINE = re.compile(r"%(\d+) = (\w+)((?: \S+)*?)(?: (\{.*\}))? : (\w+)\[([\d,]*)\]")
RETURN = re.compile(r"return((?: %\d+)*)")


class EngineError(Exception):
    """What the engine says about a line of a program."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(f"line {line}: {message}")
        self.line = line


@dataclass(frozen=True)
class Instruction:
    line: int
    op: str
    operands: tuple[str, ...]
    attributes: dict[str, Any]
    dtype: str
    shape: tuple[int, ...]


def _take(shape: Any, x: Array, rows: Array) -> Array:
    if rows.size and not (rows.min() >= 0 and rows.max() < len(x)):
        raise IndexError(f"rows {rows.min()} to {rows.max()} of a table that has {len(x)}")
    return x[rows]


def _add_rows(shape: Any, rows: Array, values: Array) -> Array:
    result = np.zeros(shape, values.dtype)
    np.add.at(result, rows, values)
    return result


def _put(shape: Any, x: Array, places: Array, value: Any, axis: int) -> Array:
    result = x.copy()
    np.put_along_axis(result, places, value, axis)
    return result


def _plain(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda shape, *operands: fn(*operands)


def _reduction(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda shape, x, axes: np.reshape(fn(x, axis=tuple(axes)), shape)


MACHINE: dict[str, Callable[..., Any]] = {
    **{name: _plain(getattr(np, name)) for name in ("exp", "log", "sqrt", "tanh", "abs", "where", "matmul", "maximum",
        "minimum", "equal", "not_equal", "less", "less_equal", "greater_equal", "logical_and", "logical_not",
        "bitwise_and", "add", "subtract", "multiply", "divide", "power", "negative", "invert")},
    "copy": lambda shape, x: x, "fill": lambda shape, value: np.full(shape, value),
    "iota": lambda shape, start, step: start + step * np.arange(shape[0]),
    "sum": _reduction(np.sum), "mean": _reduction(np.mean), "amax": _reduction(np.max), "any": _reduction(np.any),
    "reshape": lambda shape, x: np.reshape(x, shape), "broadcast": lambda shape, x: np.broadcast_to(x, shape),
    "transpose": lambda shape, x, order: np.transpose(x, order),
    "slice": lambda shape, x, axis, start, stop, step: x[(slice(None),) * axis + (slice(start, stop, step),)],
    "concat": lambda shape, *parts, axis: np.concatenate(parts, axis),
    "pad": lambda shape, x, value, widths: np.pad(x, widths, constant_values=value),
    "take": _take, "add_rows": _add_rows, "put": _put,
    "pick": lambda shape, x, places, axis: np.take_along_axis(x, places, axis),
}  # fmt: skip


def assemble(text: str) -> tuple[list[Instruction], list[str]]:
    """Instructions and names of results. Raises :class:`EngineError` for the first line that is wrong."""
    program: list[Instruction] = []
    known: set[str] = set()
    for number, line in enumerate(text.splitlines(), 1):
        if found := RETURN.fullmatch(line):
            return program, found[1].split()
        if not (found := LINE.fullmatch(line)):
            raise EngineError(number, f"cannot read {line!r}")
        shape = tuple(map(int, filter(None, found[6].split(","))))
        one = Instruction(number, found[2], tuple(found[3].split()), json.loads(found[4] or "{}"), found[5], shape)
        if one.op != "input" and one.op not in MACHINE:
            raise EngineError(number, f"there is no instruction {one.op!r}")
        if len(shape) > MOST_DIMENSIONS:
            raise EngineError(number, f"a register has at most {MOST_DIMENSIONS} dimensions, not {len(shape)}")
        if undefined := [name for name in one.operands if name.startswith("%") and name not in known]:
            raise EngineError(number, f"{undefined[0]} has no value yet")
        known.add(f"%{found[1]}")
        program.append(one)
    raise EngineError(len(text.splitlines()), "the program ends without a return")


def run(
    program: Sequence[Instruction], inputs: Sequence[Array], event: Callable[[Instruction, float], None] | None
) -> dict[str, Any]:
    """The registers after a program. ``event`` is told of each instruction and when it began."""
    registers: dict[str, Any] = {}
    for number, one in enumerate(program):
        start = time.perf_counter()
        if one.op == "input":
            value: Any = inputs[number]
        else:
            operands = [registers[name] if name.startswith("%") else json.loads(name) for name in one.operands]
            try:
                value = MACHINE[one.op](one.shape, *operands, **one.attributes)
            except (IndexError, ValueError) as error:
                raise EngineError(one.line, f"{one.op}: {error}") from error
        registers[f"%{number}"] = np.asarray(value, one.dtype)
        if event is not None:
            event(one, start)
    return registers


# -- the backend -------------------------------------------------------------------------------------------------------
aten = torch.ops.aten
TABLE = tp.LoweringTable()


class TextContext(tp.LoweringContext[str, str]):
    """Writes one graph as text. Its values are names of registers."""

    def __init__(self) -> None:
        super().__init__(TABLE)
        self.lines: list[str] = []
        self.nodes: dict[int, fx.Node] = {}
        """Line → the node that it was written for."""

    def line(self, op: str, operands: Sequence[str], spec: tp.TensorSpec, attributes: Any = None) -> str:
        register = f"%{len(self.lines)}"
        words = [register, "=", op, *operands, *([json.dumps(attributes)] if attributes else [])]
        self.lines.append(f"{' '.join(words)} : {spec.dtype_name}[{','.join(map(str, spec.shape))}]")
        return register

    def parameter(self, position: int, spec: tp.TensorSpec, name: str) -> str:
        return self.line("input", [], spec)

    def build(self) -> str:
        return "\n".join([*self.lines, " ".join(["return", *self.results])])

    @property
    def debug_map(self) -> dict[int | str, tuple[int, ...]]:
        return {line: (node.meta["debug_handle"],) for line, node in self.nodes.items()}


def emit(call: tp.Call, op: str, *operands: Any, **attributes: Any) -> str:
    """One line: its type is the node's, its operands are registers and numbers."""
    context = cast(TextContext, call.context)
    context.nodes[len(context.lines) + 1] = call.node
    words = [one if isinstance(one, str) else json.dumps(one) for one in operands]
    return context.line(op, words, tp.TensorSpec.of(call.val), attributes)


def pointwise(target: Any, op: str) -> None:
    def lower(call: tp.Call, *args: Any, **_: Any) -> str:
        return emit(call, op, *args)

    def refuses(node: fx.Node) -> str | None:
        if node.kwargs.get("alpha", 1) != 1:
            return "alpha is not 1"
        made, given = node.meta["val"].dtype, [one.meta["val"].dtype for one in node.all_input_nodes]
        few = torch.bool in given and made.is_floating_point and op in ("exp", "log", "sqrt", "tanh")
        return f"the engine computes {op} of bool with float16" if few else None

    TABLE(target, refuses=refuses)(lower)


for target, op in {
    aten.add.Tensor: "add", aten.sub.Tensor: "subtract", aten.mul.Tensor: "multiply", aten.div.Tensor: "divide",
    aten.pow.Tensor_Scalar: "power", aten.neg.default: "negative", aten.abs.default: "abs", aten.exp.default: "exp",
    aten.log.default: "log", aten.sqrt.default: "sqrt", aten.tanh.default: "tanh", aten.bitwise_not.default: "invert",
    aten.logical_not.default: "logical_not", aten.logical_and.default: "logical_and", aten.where.self: "where",
    aten.bitwise_and.Tensor: "bitwise_and", aten.eq.Scalar: "equal", aten.ne.Scalar: "not_equal",
    aten.lt.Scalar: "less", aten.le.Scalar: "less_equal", aten.ge.Scalar: "greater_equal", aten.mm.default: "matmul",
    aten.bmm.default: "matmul", aten.embedding.default: "take", aten.clone.default: "copy",
    aten._to_copy.default: "copy", aten.scalar_tensor.default: "fill",
}.items():  # fmt: skip
    pointwise(target, op)


@TABLE(aten.relu.default)
def relu(call: tp.Call, x: str) -> str:
    return emit(call, "maximum", x, 0)


@TABLE(aten.clamp.default, refuses=lambda node: "two bounds" if len(node.args) != 2 else None)
def clamp(call: tp.Call, x: str, low: Any) -> str:
    return emit(call, "maximum", x, low)


@TABLE(aten.full.default, aten.full_like.default)
def full(call: tp.Call, first: Any, value: Any, **_: Any) -> str:
    return emit(call, "fill", value)


@TABLE(aten.arange.start_step)
def arange(call: tp.Call, start: float, stop: float, step: float = 1, **_: Any) -> str:
    return emit(call, "iota", start, step)


@TABLE(aten.view.default, aten.unsqueeze.default, aten.squeeze.dims)
def view(call: tp.Call, x: str, *_: Any) -> str:
    return emit(call, "reshape", x)


@TABLE(aten.expand.default)
def expand(call: tp.Call, x: str, *_: Any, **__: Any) -> str:
    return emit(call, "broadcast", x)


@TABLE(aten.permute.default)
def permute(call: tp.Call, x: str, dims: Sequence[int]) -> str:
    return emit(call, "transpose", x, order=[dim % len(dims) for dim in dims])


@TABLE(aten.slice.Tensor)
def slice_(call: tp.Call, x: str, dim: int = 0, start: int | None = 0, stop: int | None = None, step: int = 1) -> str:
    first, last, _ = slice(start, stop).indices(call.arg(0).shape[dim])
    return emit(call, "slice", x, axis=dim % call.val.dim(), start=first, stop=max(first, last), step=step)


@TABLE(aten.cat.default)
def cat(call: tp.Call, parts: Sequence[str], dim: int = 0) -> str:
    fakes = [part.meta["val"] for part in cast(Sequence[fx.Node], call.node.args[0])]
    joined = [part for part, fake in zip(parts, fakes, strict=True) if fake.shape != (0,)]  # PyTorch leaves them out
    return emit(call, "concat", *(joined or parts), axis=dim % call.val.dim())


@TABLE(
    aten.constant_pad_nd.default,
    refuses=lambda node: "padding that cuts off" if min(cast(Any, node.args[1])) < 0 else None,
)
def pad(call: tp.Call, x: str, widths: Sequence[int], value: float = 0) -> str:
    pairs = [(widths[at], widths[at + 1]) for at in range(0, len(widths), 2)]  # of the last dimension first
    return emit(call, "pad", x, value, widths=[*[(0, 0)] * (call.val.dim() - len(pairs)), *pairs[::-1]])


@TABLE(aten.sum.dim_IntList, aten.mean.dim, aten.mean.default, aten.amax.default, aten.any.dim)
def reduce(call: tp.Call, x: str, dims: Any = None, *_: Any, **__: Any) -> str:
    rank = call.arg(0).dim()
    dims = [dims] if isinstance(dims, int) else dims or range(rank)
    return emit(call, str(call.node.target).split(".")[1], x, axes=sorted({d % rank for d in dims}) if rank else [])


@TABLE(
    aten.embedding_dense_backward.default,
    refuses=lambda node: "rows that get no gradient, or a share of it" if node.args[3:] != (-1, False) else None,
)
def embedding_backward(call: tp.Call, grad: str, rows: str, *_: Any) -> str:
    return emit(call, "add_rows", rows, grad)


def no_dimensions(node: fx.Node) -> str | None:
    fakes = [node.meta["val"], node.all_input_nodes[0].meta["val"]]
    return None if all(fake.dim() for fake in fakes) else "the engine picks along an axis, and there is none"


@TABLE(aten.gather.default, refuses=no_dimensions)
def gather(call: tp.Call, x: str, dim: int, places: str, **_: Any) -> str:
    return emit(call, "pick", x, places, axis=dim)


@TABLE(aten.scatter.value, refuses=no_dimensions)
def scatter(call: tp.Call, x: str, dim: int, places: str, value: Any) -> str:
    return emit(call, "put", x, places, value, axis=dim)


# Each of these would be several lines. Written on tensors, they become operators that have one line each.
def layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    dims = list(range(x.dim() - len(shape), x.dim()))
    mean = x.mean(dims, keepdim=True)
    inverse = ((x - mean) ** 2).mean(dims, keepdim=True).add(eps) ** -0.5
    result = (x - mean) * inverse
    result = result if weight is None else result * weight
    return result if bias is None else result + bias, mean, inverse


def select(x: Tensor, dim: int, at: int) -> Tensor:
    at %= x.shape[dim]
    return x.narrow(dim, at, 1).squeeze(dim)


def split(x: Tensor, sizes: Sequence[int], dim: int = 0) -> list[Tensor]:
    return [x.narrow(dim, sum(sizes[:at]), size) for at, size in enumerate(sizes)]


TAKEN_APART: dict[Any, Callable[..., Any]] = {
    **get_decompositions([aten.addmm.default, aten._softmax.default, aten._log_softmax.default]),  # PyTorch's
    aten.native_layer_norm.default: layer_norm,
    aten.split_with_sizes.default: split,
    aten.select.int: select,
}


@tp.register
class TextBackend(tp.Backend):
    name = "text"
    capabilities = tp.Capabilities(dtypes=frozenset({"float32", "float64", "int32", "int64", "bool"}))

    def supports(self, node: fx.Node) -> tp.Support:
        return TABLE.supports(node)

    def decompositions(self) -> Any:
        return TAKEN_APART

    def preprocess(self, graph: fx.GraphModule, specs: tp.CompileSpecs) -> tp.Processed:
        context = TextContext()
        context.lower_graph(graph)
        text = context.build()
        try:
            assemble(text)  # what is wrong with the text comes out here, where the graph is at hand
        except EngineError as error:
            node = context.nodes.get(error.line)
            if node is None:
                raise
            raise tp.CompileError(str(error), op=str(node.target), source=str(node.meta["source"])) from error
        return tp.Processed(text.encode(), context.debug_map)

    def text(self, processed: tp.Processed) -> str:
        return processed.data.decode()

    def init(self, processed: tp.FreeableBuffer, specs: tp.CompileSpecs, context: tp.InitContext) -> Any:
        try:
            return assemble(bytes(processed.data).decode())
        except EngineError as error:  # the bytes are another version's
            code = tp.ErrorCode.DELEGATE_INVALID_COMPATIBILITY
            raise tp.DelegateError(str(error), code=code, ident=error.line) from error

    def execute(self, handle: Any, args: Sequence[tp.BackendData], context: tp.ExecutionContext) -> list[Any]:
        program, results = handle
        tracer = context.tracer

        def event(one: Instruction, start: float) -> None:
            if tracer is not None:
                tracer.event(one.op, start, time.perf_counter(), ident=one.line)

        try:
            with np.errstate(all="ignore"):
                inputs = [self.from_device(value).numpy() for value in args]
                registers = run(program, inputs, None if tracer is None else event)
        except EngineError as error:
            raise tp.DelegateError(str(error), code=tp.ErrorCode.INVALID_ARGUMENT, ident=error.line) from error
        return [self.to_device(torch.tensor(registers[name]), context.device) for name in results]
