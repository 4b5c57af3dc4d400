"""``add_sub``: the demonstration backend that knows ``add``, ``sub`` and constants, on float32 tensors of one size.

It follows PyTorch's TorchScript demonstration, ``backend_with_compiler_demo``
(``test/cpp/jit/test_backend_compiler_lib.cpp``): compiled code is a line of text, one token per operator with its debug
handle; what it cannot compile is refused ahead of time; what it cannot run names the debug handle; it reports a timed
event per operator and the memory it takes. Where the original computes the first element of two inputs only, this one
computes all elements, of any number of inputs. It needs no PyTorch to run.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from torchport.backend.interface import (
    ArrayData,
    Backend,
    BackendData,
    Capabilities,
    ExecutionContext,
    FreeableBuffer,
    InitContext,
    Processed,
    Support,
)
from torchport.core.errors import CompileError, DelegateError, ErrorCode
from torchport.core.specs import CompileSpecs, TensorSpec

if TYPE_CHECKING:
    import torch
    from torch import fx

__all__ = ["AddSubBackend", "AddSubProgram", "Token"]

_OPS: Final = {"aten.add.Tensor": "aten::add", "aten.sub.Tensor": "aten::sub"}
_TOKEN: Final = re.compile(
    r"(?:prim::Constant#(?P<value>[^<]+)|(?P<op>[\w:]+)\((?P<left>%\d+),(?P<right>%\d+)\))<debug_handle>(?P<handle>\d+)"
)


@dataclass(frozen=True, slots=True)
class Token:
    """One instruction: a constant's value, or an operator of two earlier values."""

    op: str
    left: int
    right: int
    value: float
    handle: int


@dataclass(frozen=True, slots=True)
class AddSubProgram:
    """Parsed text: instructions, and which values are the results."""

    inputs: int
    tokens: tuple[Token, ...]
    results: tuple[int, ...]


def parse(text: str, inputs: int) -> AddSubProgram:
    """The program a blob spells: ``token;token;…|%i,%j``. Raises :class:`CompileError` for anything else."""
    body, bar, results = text.partition("|")
    tokens: list[Token] = []
    for part in body.split(";") if body else []:
        found = _TOKEN.fullmatch(part)
        if found is None:
            raise CompileError(f"instruction {part[:60]!r} is not supported; compile the model again")
        left, right = (int(found[name][1:]) if found[name] else 0 for name in ("left", "right"))
        if found["op"] and max(left, right) >= inputs + len(tokens):
            raise CompileError(f"instruction {part[:60]!r} reads a value that is not there")
        value = float(found["value"]) if found["value"] else 0.0
        tokens.append(Token(found["op"] or "prim::Constant", left, right, value, int(found["handle"])))
    numbers = tuple(int(one[1:]) for one in results.split(","))
    if not bar or any(one >= inputs + len(tokens) for one in numbers):
        raise CompileError("the program does not say what it returns; compile the model again")
    return AddSubProgram(inputs, tuple(tokens), numbers)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


class AddSubBackend(Backend):
    """``add`` and ``sub`` of float32 tensors of equal size, and of such a tensor and a number."""

    name = "add_sub"
    version = "1"
    capabilities = Capabilities(torch_free=True, skips_cache=True)

    def supports(self, node: fx.Node) -> Support:
        name = str(node.target)
        if name not in _OPS:
            return Support.no("this backend adds and subtracts, nothing else")
        if node.kwargs.get("alpha", 1) != 1:
            return Support.no("alpha is not 1: multiply first")
        values: list[torch.Tensor] = [node.meta["val"]]
        for arg in node.args:
            if _is_number(arg):
                continue
            value = arg.meta.get("val") if hasattr(arg, "meta") else None  # type: ignore[union-attr]
            if value is None:
                return Support.no(f"operand {arg!r} is neither a tensor nor a number")
            values.append(value)
        dtypes = sorted({str(value.dtype) for value in values})
        if dtypes != ["torch.float32"]:
            return Support.no(f"only float tensors are compatible with add and sub, not {', '.join(dtypes)}")
        if len({tuple(value.shape) for value in values}) > 1:
            return Support.no(f"tensors of different sizes: {[tuple(value.shape) for value in values[1:]]}")
        if not all(value.is_contiguous() for value in values):
            return Support.no("tensors that are not contiguous")
        return Support.yes()

    def preprocess(self, graph: fx.GraphModule, specs: CompileSpecs) -> Processed:
        inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
        calls = [node for node in graph.graph.nodes if node.op == "call_function"]
        numbers: dict[Any, int] = {node: number for number, node in enumerate(inputs)}
        tokens: list[str] = []
        debug: dict[int | str, tuple[int, ...]] = {}

        def number_of(arg: Any, handle: int) -> int:
            if not _is_number(arg):
                return numbers[arg]
            tokens.append(f"prim::Constant#{float(arg)!r}<debug_handle>{handle}")
            return len(inputs) + len(tokens) - 1

        for node in calls:
            support = self.supports(node)
            if not support:
                raise CompileError(support.reason, op=str(node.target), source=node.meta.get("source"))
            handle = node.meta["debug_handle"]
            left, right = (number_of(arg, handle) for arg in node.args)
            tokens.append(f"{_OPS[str(node.target)]}(%{left},%{right})<debug_handle>{handle}")
            numbers[node] = len(inputs) + len(tokens) - 1
            debug[handle] = (handle,)
        outputs: Any = graph.graph.output_node().args[0]
        results = ",".join(f"%{numbers[node]}" for node in outputs)
        return Processed(f"{';'.join(tokens)}|{results}".encode(), debug)

    def init(self, processed: FreeableBuffer, specs: CompileSpecs, context: InitContext) -> AddSubProgram:
        try:
            program = parse(bytes(processed.data).decode(), len(context.inputs))
        except ValueError as error:
            raise CompileError(f"these bytes were not made by add_sub: {error}") from error
        processed.free()
        return program

    def execute(
        self, handle: AddSubProgram, args: Sequence[BackendData], context: ExecutionContext
    ) -> Sequence[BackendData]:
        if len(args) != handle.inputs:
            raise DelegateError(
                f"the program takes {handle.inputs} inputs, but got {len(args)}", code=ErrorCode.INVALID_ARGUMENT
            )
        arrays: list[Any] = [arg.array if isinstance(arg, ArrayData) else None for arg in args]
        for token in handle.tokens:
            start = time.perf_counter()
            arrays.append(self._run(token, arrays, context))
            if context.tracer is not None:
                context.tracer.event(token.op, start, time.perf_counter(), token.handle)
                context.tracer.value(token.handle, arrays[-1])
        results = [arrays[number] for number in handle.results]
        return [
            ArrayData(context.device, TensorSpec(result.shape, spec.dtype, spec.strides), result)
            for result, spec in zip(results, context.outputs, strict=True)
        ]

    def _run(self, token: Token, values: Sequence[Any], context: ExecutionContext) -> Any:
        import numpy

        if token.op == "prim::Constant":
            return numpy.float32(token.value)
        left, right = values[token.left], values[token.right]
        if token.op not in _OPS.values():
            raise DelegateError(
                f"instruction {token.op} is not supported", code=ErrorCode.NOT_SUPPORTED, ident=token.handle
            )
        for value in (left, right):
            if value is None or value.dtype != numpy.float32:
                kind = "nothing" if value is None else value.dtype
                raise DelegateError(
                    f"only float tensors are compatible with add and sub, but got {kind}",
                    code=ErrorCode.INVALID_TYPE,
                    ident=token.handle,
                )
        if left.shape != right.shape and left.shape and right.shape:
            raise DelegateError(
                f"{token.op} of tensors of different sizes: {list(left.shape)} and {list(right.shape)}",
                code=ErrorCode.INVALID_ARGUMENT,
                ident=token.handle,
            )
        result = numpy.asarray(left + right if token.op == "aten::add" else left - right)
        if context.tracer is not None:
            context.tracer.memory(token.op, result.nbytes)
        return result

    def text(self, processed: Processed) -> str:
        return processed.data.decode()
