"""A backend for tinygrad, a real engine with a compiler of its own: values stay on its device, kernels are its own.

A graph is lowered to tinygrad's lazy tensors, and ``TinyJit`` keeps the kernels: it runs the Python code of a
computation twice, and replays what it saw from the third call on. tinygrad picks the device (``DEV=CUDA``, ``DEV=CPU``,
…). It trains GPT-2 and ResNet with nothing left to the host.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import shutil
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._decomp import get_decompositions
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

import torchport as tp
from torchport.backend.serialize import decode, encode

Value = Any
"""A ``tinygrad.Tensor``. tinygrad is imported when the backend is first used."""
aten = torch.ops.aten
DTYPES = frozenset({"float32", "float64", "int32", "int64", "bool"})
TABLE = tp.LoweringTable()


def tinygrad() -> Any:
    return importlib.import_module("tinygrad")


def dtype_of(dtype: torch.dtype) -> Any:
    return getattr(tinygrad().dtypes, str(dtype).removeprefix("torch."))


def like(call: tp.Call, value: Any) -> Value:
    """A constant of the node's shape and dtype."""
    return tinygrad().Tensor.full(tuple(call.val.shape), value, dtype=dtype_of(call.val.dtype))


class Context(tp.LoweringContext[Value, list[Value]]):
    """Runs the table on lazy tensors: nothing is computed before :meth:`build`."""

    def __init__(self, arguments: Sequence[Value]) -> None:
        super().__init__(TABLE)
        self.arguments = arguments

    def parameter(self, position: int, spec: tp.TensorSpec, name: str) -> Value:
        return self.arguments[position]

    def finish(self, call: tp.Call, value: Any) -> Any:
        """What a row returned, with the dtypes that PyTorch promises."""
        if isinstance(value, list):
            return [one if one is None else one.cast(dtype_of(v.dtype)) for one, v in zip(value, call.val, strict=True)]
        return value.cast(dtype_of(call.val.dtype))

    def build(self) -> list[Value]:
        results = [result.contiguous() for result in self.results]
        tinygrad().Tensor.realize(*results)
        return results


# -- element by element ------------------------------------------------------------------------------------------------
def pointwise(op: Any, fn: Callable[..., Any]) -> None:
    """Enter an operator by a function of its tensors and numbers; ``alpha`` scales the second."""

    def lower(call: tp.Call, *args: Any, alpha: Any = None, **_: Any) -> Value:
        return fn(*args) if alpha is None else fn(args[0], args[1] * alpha)

    TABLE(op)(lower)


def quotient(a: Any, b: Any) -> Value:
    return a / b


for op, fn in {
    aten.add.Tensor: lambda a, b: a + b, aten.sub.Tensor: lambda a, b: a - b, aten.mul.Tensor: lambda a, b: a * b,
    aten.div.Tensor: quotient, aten.div.Scalar: quotient, aten.pow.Tensor_Scalar: lambda a, b: a**b,
    aten.neg.default: lambda x: -x, aten.abs.default: lambda x: x.abs(), aten.exp.default: lambda x: x.exp(),
    aten.log.default: lambda x: x.log(), aten.sqrt.default: lambda x: x.sqrt(), aten.rsqrt.default: lambda x: x.rsqrt(),
    aten.tanh.default: lambda x: x.tanh(), aten.relu.default: lambda x: x.relu(),
    aten.eq.Scalar: lambda a, b: a == b, aten.ne.Scalar: lambda a, b: a != b, aten.lt.Scalar: lambda a, b: a < b,
    aten.le.Scalar: lambda a, b: a <= b, aten.ge.Scalar: lambda a, b: a >= b,
    aten.bitwise_and.Tensor: lambda a, b: a & b, aten.bitwise_not.default: lambda x: ~x,
    aten.logical_and.default: lambda a, b: a.cast("bool") & b.cast("bool"),
    aten.logical_not.default: lambda x: ~x.cast("bool"), aten.where.self: lambda c, a, b: c.where(a, b),
    aten.mm.default: lambda a, b: a @ b, aten.bmm.default: lambda a, b: a @ b,
    aten._to_copy.default: lambda x: x.clone(), aten.clone.default: lambda x: x.clone(),
}.items():  # fmt: skip
    pointwise(op, fn)


@TABLE(aten.clamp.default, refuses=lambda node: "two bounds" if len(node.args) != 2 else None)
def clamp(call: tp.Call, x: Value, low: Any) -> Value:
    return x.maximum(low)


@TABLE(aten.full.default, aten.full_like.default)
def full(call: tp.Call, first: Any, value: Any, **_: Any) -> Value:
    return like(call, value)


@TABLE(aten.scalar_tensor.default)
def scalar(call: tp.Call, value: Any, **_: Any) -> Value:
    return like(call, value)


@TABLE(aten.arange.start_step)
def arange(call: tp.Call, start: float, stop: float, step: float = 1, **_: Any) -> Value:
    return tinygrad().Tensor.arange(start, stop, step, dtype=dtype_of(call.val.dtype))


# -- views -------------------------------------------------------------------------------------------------------------
@TABLE(aten.view.default, aten.unsqueeze.default, aten.squeeze.dims)
def view(call: tp.Call, x: Value, *_: Any) -> Value:
    return x.reshape(tuple(call.val.shape))


@TABLE(aten.expand.default)
def expand(call: tp.Call, x: Value, *_: Any, **__: Any) -> Value:
    return x.expand(tuple(call.val.shape))


@TABLE(aten.permute.default)
def permute(call: tp.Call, x: Value, dims: Sequence[int]) -> Value:
    return x.permute(tuple(dims))


@TABLE(aten.select.int)
def select(call: tp.Call, x: Value, dim: int, at: int) -> Value:
    return x[(slice(None),) * (dim % x.ndim) + (at,)]


@TABLE(aten.slice.Tensor)
def slice_(call: tp.Call, x: Value, dim: int = 0, start: int | None = 0, stop: int | None = None, step: int = 1) -> Any:
    return x[(slice(None),) * (dim % x.ndim) + (slice(start, stop, step),)]


@TABLE(aten.split_with_sizes.default)
def split(call: tp.Call, x: Value, sizes: Sequence[int], dim: int = 0) -> list[Value]:
    return list(x.split(list(sizes), dim))


@TABLE(aten.cat.default)
def cat(call: tp.Call, parts: Sequence[Value], dim: int = 0) -> Value:
    first, *others = [part for part in parts if part.shape != (0,)] or parts  # PyTorch leaves them out
    return first.cat(*others, dim=dim)


@TABLE(aten.constant_pad_nd.default)
def pad(call: tp.Call, x: Value, widths: Sequence[int], value: float = 0) -> Value:
    return x.pad(tuple(widths), value=value)


# -- reductions and indices --------------------------------------------------------------------------------------------
@TABLE(aten.sum.dim_IntList, aten.mean.dim, aten.mean.default, aten.amax.default, aten.any.dim)
def reduce(call: tp.Call, x: Value, dims: Any = None, keepdim: bool = False, **_: Any) -> Value:
    axes = (dims,) if isinstance(dims, int) else tuple(dims or range(x.ndim))
    kind = {"amax": "max"}.get(name := str(call.node.target).split(".")[1], name)
    return getattr(x, kind)(axes, keepdim=keepdim)


@TABLE(aten._softmax.default)
def softmax(call: tp.Call, x: Value, dim: int, half: bool) -> Value:
    return x.softmax(dim)


@TABLE(aten._log_softmax.default)
def log_softmax(call: tp.Call, x: Value, dim: int, half: bool) -> Value:
    return x.log_softmax(dim)


@TABLE(aten.var_mean.correction)
def var_mean(call: tp.Call, x: Value, dims: Any = None, correction: Any = 1, keepdim: bool = False) -> list[Value]:
    axes = tuple(dims or range(x.ndim))
    return [x.var(axes, keepdim=keepdim, correction=correction), x.mean(axes, keepdim=keepdim)]


@TABLE(aten.embedding.default)
def embedding(call: tp.Call, table: Value, rows: Value, *_: Any) -> Value:
    return table[rows]


@TABLE(
    aten.embedding_dense_backward.default,
    refuses=lambda node: "rows that get no gradient, or a share of it" if node.args[3:] != (-1, False) else None,
)
def embedding_backward(call: tp.Call, grad: Value, rows: Value, count: int, *_: Any) -> Value:
    chosen = rows.reshape(1, -1) == tinygrad().Tensor.arange(count).reshape(-1, 1)
    return chosen.cast(grad.dtype) @ grad.reshape(-1, grad.shape[-1])


@TABLE(aten.gather.default)
def gather(call: tp.Call, x: Value, dim: int, places: Value, **_: Any) -> Value:
    return x.gather(dim, places)


@TABLE(aten.scatter.value)
def scatter(call: tp.Call, x: Value, dim: int, places: Value, value: Any) -> Value:
    return x.scatter(dim, places, value)


# -- images ------------------------------------------------------------------------------------------------------------
def transposed(position: int) -> Callable[[fx.Node], str | None]:
    return lambda node: "transposed convolution" if node.args[position] else None


def convolved(
    x: Value, weight: Value, bias: Value | None, stride: Any, padding: Any, dilation: Any, groups: int
) -> Any:
    widths = [width for one in reversed(padding) for width in (one, one)]
    return x.conv2d(weight, bias, groups=groups, stride=tuple(stride), dilation=tuple(dilation), padding=tuple(widths))


@TABLE(aten.convolution.default, refuses=transposed(6))
def convolution(
    call: tp.Call,
    x: Value,
    w: Value,
    b: Value | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    _: Any,
    __: Any,
    n: int,
) -> Value:
    return convolved(x, w, b, stride, padding, dilation, n)


@TABLE(aten.convolution_backward.default, refuses=transposed(7))
def convolution_backward(
    call: tp.Call, grad: Value, x: Value, w: Value, sizes: Any, stride: Any, padding: Any, dilation: Any, _: Any,
    __: Any, groups: int, wanted: Sequence[bool],
) -> list[Value | None]:  # fmt: skip
    """tinygrad derives a convolution's gradients itself."""
    made = convolved(x, w, None, stride, padding, dilation, groups)
    by_input, by_weight = made.gradient(x, w, gradient=grad)
    by_bias = grad.sum((0, *range(2, grad.ndim)))
    return [one if want else None for one, want in zip((by_input, by_weight, by_bias), wanted, strict=True)]


@TABLE(aten.max_pool2d_with_indices.default)
def max_pool(
    call: tp.Call,
    x: Value,
    kernel: Any,
    stride: Any = (),
    padding: Any = (0, 0),
    dilation: Any = (1, 1),
    up: Any = False,
) -> list[Value]:
    two = [tuple(one) * (2 // len(one)) for one in (kernel, stride or kernel, dilation, padding)]
    return list(x.max_pool2d(two[0], two[1], two[2], two[3], ceil_mode=up, return_indices=True))


@TABLE(aten.max_pool2d_with_indices_backward.default)
def max_pool_backward(call: tp.Call, grad: Value, x: Value, *rest: Any) -> Value:
    """Each gradient goes to the place that had the maximum; places are counted within an image."""
    places, (*outer, height, width) = rest[-1], x.shape
    flat = places.reshape(*outer, -1, 1) == tinygrad().Tensor.arange(height * width)
    return flat.where(grad.reshape(*outer, -1, 1), 0).sum(-2).reshape(x.shape)


# -- the backend -------------------------------------------------------------------------------------------------------
class TinygradData(tp.BackendData):
    """A value in the memory of tinygrad's device."""

    __slots__ = ("value",)

    def __init__(self, device: tp.BackendDevice, spec: tp.TensorSpec, value: Value) -> None:
        super().__init__(device, spec)
        self.value = value

    @property
    def handle(self) -> object:
        return self.value


@functools.cache
def no_device() -> str:
    """Why tinygrad has no device that works here, or nothing where it has one."""
    try:
        device = tinygrad().Device.DEFAULT
        if device == "CPU" and shutil.which(os.environ.get("CC", "clang")) is None:
            raise FileNotFoundError("clang")
        _ = tinygrad().Device[device]
    except Exception as error:
        return f"tinygrad has no device that works here ({error}); its CPU device needs clang, DEV=CUDA names another"
    return ""


@tp.register
class TinygradBackend(tp.Backend):
    name = "tinygrad"
    capabilities = tp.Capabilities(dtypes=DTYPES)

    def is_available(self) -> bool:
        return not self.unavailable_reason()

    def unavailable_reason(self) -> str:
        if importlib.util.find_spec("tinygrad") is None:
            return "there is no tinygrad; install it: pip install tinygrad"
        return no_device()

    def to_device(self, tensor: torch.Tensor, device: tp.BackendDevice) -> tp.BackendData:
        value = tinygrad().Tensor(tensor.detach().contiguous().numpy().copy()).realize()
        return TinygradData(device, tp.TensorSpec.of(tensor), value.clone().realize())

    def from_device(self, data: tp.BackendData) -> torch.Tensor:
        assert isinstance(data, TinygradData)
        return torch.tensor(data.value.numpy()).view(data.spec.shape)

    def supports(self, node: fx.Node) -> tp.Support:
        return TABLE.supports(node)

    def decompositions(self) -> Any:
        return get_decompositions(
            [aten.addmm.default, aten.native_layer_norm.default, aten._native_batch_norm_legit_functional.default]
        )

    def preprocess(self, graph: fx.GraphModule, specs: tp.CompileSpecs) -> tp.Processed:
        return tp.Processed(encode(graph))  # tinygrad keeps compiled kernels in a cache of its own

    def init(self, processed: tp.FreeableBuffer, specs: tp.CompileSpecs, context: tp.InitContext) -> Any:
        graph = decode(processed.data)  # calls and constants; what "val" said comes from running it on fake tensors
        with FakeTensorMode() as fake:
            inputs = [torch.empty_strided(one.shape, one.strides, dtype=one.dtype) for one in context.inputs]
            FakeTensorProp(graph, fake).propagate_dont_convert_inputs(*inputs)

        def run(*arguments: Value) -> list[Value]:
            lowering = Context(arguments)
            lowering.lower_graph(graph)
            return lowering.build()

        return tinygrad().TinyJit(run)

    def execute(self, handle: Any, args: Sequence[tp.BackendData], context: tp.ExecutionContext) -> list[Any]:
        results = handle(*[value.handle for value in args])
        fresh = [result.clone() for result in results]  # the next call writes to the memory of this one's
        tinygrad().Tensor.realize(*fresh)
        return [TinygradData(context.device, s, one) for s, one in zip(context.outputs, fresh, strict=True)]
