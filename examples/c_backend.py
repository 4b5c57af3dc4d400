"""A backend that emits C: a graph becomes one function, elementwise operators and views disappear into its loops."""

from __future__ import annotations

import ctypes
import itertools
import math
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import fx

import torchport as tp

aten = torch.ops.aten
C = {
    torch.float32: "float",
    torch.float64: "double",
    torch.int32: "int32_t",
    torch.int64: "int64_t",
    torch.bool: "bool",
}
counter = itertools.count()  # names of loop variables


@dataclass(frozen=True)
class Value:
    """A tensor as C text: ``at(["i0", "i1"])`` is the expression of one element."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    at: Callable[[Sequence[str]], str]
    cost: int = 0  # per element: 0 a look into memory, 1 some arithmetic, 2 a loop
    memory: str = ""  # the array that holds exactly this, row by row


def position(index: Sequence[str], shape: Sequence[int]) -> str:
    """The row-major position of an index."""
    text = "0"
    for i, size in zip(index, shape, strict=True):
        text = f"({text} * {size} + {i})" if text != "0" else i
    return text


def in_memory(name: str, shape: Sequence[int], dtype: torch.dtype) -> Value:
    return Value(tuple(shape), dtype, lambda index: f"{name}[{position(index, shape)}]", memory=name)


def nest(index: Sequence[str], shape: Sequence[int], body: str) -> str:
    """``body`` inside one loop per dimension."""
    return "".join(f"for (int64_t {i} = 0; {i} < {n}; {i}++) " for i, n in zip(index, shape, strict=True)) + body


TABLE = tp.LoweringTable()


def element(value: Any, index: Sequence[str], single: bool) -> str:
    """An argument's element in C: tensors are broadcast from the right, numbers are written out."""
    if isinstance(value, Value):
        own = index[len(index) - len(value.shape) :]
        return value.at(["0" if size == 1 else i for i, size in zip(own, value.shape, strict=True)])
    if isinstance(value, float) and not math.isfinite(value):
        return "NAN" if math.isnan(value) else "INFINITY" if value > 0 else "-INFINITY"
    return f"{value!r}f" if isinstance(value, float) and single else repr(value).lower()


def pointwise(op: Any, text: str) -> None:
    """Enter an operator: ``{0}``, ``{1}``, … are its arguments' elements, ``{T}`` its C type, ``{f}`` as in expf."""

    def lower(call: tp.Call, *args: Any, **_: Any) -> Value:
        single = any(isinstance(a, Value) and a.dtype == torch.float32 for a in args) or call.val.dtype == torch.float32
        names = {"T": C[call.val.dtype], "f": "f" if single else ""}
        expression = f"({{T}})({text})"  # the dtype that PyTorch promised, whatever C makes of the operands
        return Value(
            tuple(call.val.shape),
            call.val.dtype,
            lambda index: expression.format(*[element(a, index, single) for a in args], **names),
            cost=1,
        )

    def refuses(node: fx.Node) -> str | None:
        return "alpha is not 1" if node.kwargs.get("alpha", 1) != 1 else None

    TABLE(op, refuses=refuses)(lower)


for op, text in {
    aten.add.Tensor: "{0} + {1}", aten.sub.Tensor: "{0} - {1}", aten.mul.Tensor: "{0} * {1}",
    aten.div.Tensor: "({T}){0} / ({T}){1}", aten.neg.default: "-{0}", aten.exp.default: "exp{f}({0})",
    aten.tanh.default: "tanh{f}({0})", aten.sqrt.default: "sqrt{f}({0})", aten.relu.default: "{0} < 0 ? 0 : {0}",
    aten.pow.Tensor_Scalar: "pow{f}({0}, {1})", aten.le.Scalar: "{0} <= {1}", aten.where.self: "{0} ? {1} : {2}",
    aten.clone.default: "{0}", aten._to_copy.default: "{0}", aten.scalar_tensor.default: "{0}",
    aten.full.default: "{1}", aten.full_like.default: "{1}",
}.items():  # fmt: skip
    pointwise(op, text)


@TABLE(aten.permute.default)
def permute(call: tp.Call, x: Value, dims: Sequence[int]) -> Value:
    places = [dims.index(d) if d in dims else dims.index(d - len(dims)) for d in range(len(dims))]
    return replace(x, shape=tuple(call.val.shape), at=lambda index: x.at([index[p] for p in places]), memory="")


@TABLE(aten.expand.default)
def expand(call: tp.Call, x: Value, sizes: Any, **_: Any) -> Value:
    return replace(x, shape=tuple(call.val.shape), at=lambda index: element(x, index, False), memory="")


@TABLE(aten.select.int)
def select(call: tp.Call, x: Value, dim: int, at: int) -> Value:
    dim, at = dim % len(x.shape), at % x.shape[dim]
    return replace(x, shape=tuple(call.val.shape), at=lambda i: x.at([*i[:dim], str(at), *i[dim:]]), memory="")


@TABLE(aten.view.default)
def view(call: tp.Call, x: Value, sizes: Any) -> Value:
    shape = tuple(call.val.shape)
    if x.memory:
        return in_memory(x.memory, shape, x.dtype)

    def at(index: Sequence[str]) -> str:
        here, steps = position(index, shape), [max(math.prod(x.shape[d + 1 :]), 1) for d in range(len(x.shape))]
        return x.at([f"(({here}) / {step} % {size})" for step, size in zip(steps, x.shape, strict=True)])

    return replace(x, shape=shape, at=at, memory="")


@TABLE(aten.sum.dim_IntList, aten.sum.default, aten.mean.default, aten.mean.dim)
def reduce(call: tp.Call, x: Value, dims: Any = None, keepdim: bool = False, **_: Any) -> Value:
    rank = len(x.shape)
    over = sorted({d % rank for d in dims or range(rank)} if rank else ())
    count = math.prod(x.shape[d] for d in over)
    tail = f" / ({C[call.val.dtype]}){count}" if "mean" in str(call.node.target) else ""

    def at(index: Sequence[str]) -> str:
        names = [f"k{next(counter)}" for _ in over]
        rest = iter(i for d, i in enumerate(index) if not (keepdim and d in over))
        inner = [names[over.index(d)] if d in over else next(rest) for d in range(rank)]
        body = nest(names, [x.shape[d] for d in over], f"s += {x.at(inner)};")
        return f"({{ {C[call.val.dtype]} s = 0; {body} s{tail}; }})"

    return Value(tuple(call.val.shape), call.val.dtype, at, cost=2)


@TABLE(aten.mm.default)
def mm(call: tp.Call, a: Value, b: Value) -> Value:
    def at(index: Sequence[str]) -> str:
        k = f"k{next(counter)}"
        body = nest([k], a.shape[1:], f"s += {a.at([index[0], k])} * {b.at([k, index[1]])};")
        return f"({{ {C[call.val.dtype]} s = 0; {body} s; }})"

    return Value(tuple(call.val.shape), call.val.dtype, at, cost=2)


class CLowering(tp.LoweringContext[Value, str]):
    """Statements of one C function. A value that is wanted more than once gets memory; the others stay expressions."""

    def __init__(self) -> None:
        super().__init__(TABLE)
        self.statements: list[str] = []
        self.arrays: dict[str, str] = {}  # name → declaration

    def parameter(self, position: int, spec: tp.TensorSpec, name: str) -> Value:
        self.arrays[f"in{position}"] = f"const {C[spec.dtype]} *in{position} = inputs[{position}];"
        return in_memory(f"in{position}", spec.shape, spec.dtype)

    def finish(self, call: tp.Call, value: Value) -> Value:
        (user, *others) = call.node.users or [None]
        fuses = not others and user is not None and user.target is not aten.mm.default
        return value if value.cost == 0 or (value.cost == 1 and fuses) else self.store(value)

    def store(self, value: Value) -> Value:
        """Emit the loops that compute a value into memory of its own."""
        stored = in_memory(f"t{len(self.arrays)}", value.shape, value.dtype)
        self.arrays[stored.memory] = f"static {C[value.dtype]} {stored.memory}[{max(math.prod(value.shape), 1)}];"
        self.copy(stored, value)
        return stored

    def copy(self, to: Value, value: Value) -> None:
        index = [f"i{d}" for d in range(len(to.shape))]
        self.statements.append(nest(index, to.shape, f"{to.at(index)} = {value.at(index)};"))

    def build(self) -> str:
        for number, value in enumerate(self.results):
            pointer = f"{C[value.dtype]} *{{}} = outputs[{number}];"
            if value.memory.startswith("t") and "static" in self.arrays[value.memory]:
                self.arrays[value.memory] = pointer.format(value.memory)  # computed where the caller wants it
            else:
                self.arrays[f"out{number}"] = pointer.format(f"out{number}")
                self.copy(in_memory(f"out{number}", value.shape, value.dtype), value)
        lines = "\n    ".join([*self.arrays.values(), *self.statements])
        head = "".join(f"#include <{name}.h>\n" for name in ("math", "stdbool", "stdint"))
        return f"{head}\nvoid run(void **inputs, void **outputs) {{\n    {lines}\n}}\n"


def addresses(tensors: Sequence[torch.Tensor]) -> Any:
    return (ctypes.c_void_p * len(tensors))(*[tensor.data_ptr() for tensor in tensors])


@tp.register
class CBackend(tp.Backend):
    name = "c"

    def is_available(self) -> bool:
        return shutil.which("cc") is not None

    def unavailable_reason(self) -> str:
        return "there is no C compiler; install one that is called cc"

    def supports(self, node: fx.Node) -> tp.Support:
        dtypes = {value.meta["val"].dtype for value in (node, *node.all_input_nodes)}
        return TABLE.supports(node) if dtypes <= set(C) else tp.Support.no(f"C: no {dtypes - set(C)}")

    def decompositions(self) -> Any:
        return {aten.addmm.default: lambda bias, a, b, beta=1, alpha=1: beta * bias + alpha * torch.mm(a, b)}

    def preprocess(self, graph: fx.GraphModule, specs: tp.CompileSpecs) -> tp.Processed:
        lowering = CLowering()
        lowering.lower_graph(graph)
        return tp.Processed(lowering.build().encode())

    def text(self, processed: tp.Processed) -> str:
        return processed.data.decode()

    def init(self, processed: tp.FreeableBuffer, specs: tp.CompileSpecs, context: tp.InitContext) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder) / "graph.so"
            command = ["cc", "-O2", "-w", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library), "-lm"]
            subprocess.run(command, input=processed.data, check=True, capture_output=True)
            return ctypes.CDLL(str(library)).run

    def execute(self, handle: Any, args: Sequence[tp.BackendData], context: tp.ExecutionContext) -> list[Any]:
        inputs = [self.from_device(value).contiguous() for value in args]
        results = [torch.empty(spec.shape, dtype=spec.dtype) for spec in context.outputs]
        handle(addresses(inputs), addresses(results))
        return [tp.TensorData(context.device, tp.TensorSpec.of(t), t) for t in results]
