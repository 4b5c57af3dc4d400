"""Convolutions, pooling and batch normalisation."""

from __future__ import annotations

from typing import Any

import numpy
import torch
from torch import fx

from .modules import openvino_module
from .writer import Writer, arg_of, rule, val

aten = torch.ops.aten


def _pair(value: Any, count: int) -> list[int]:
    numbers = [value] * count if isinstance(value, int) else list(value)
    return numbers * count if len(numbers) == 1 else numbers


def _convolution_check(node: fx.Node) -> str:
    if isinstance(arg_of(node, 4, "padding", 0), str):
        return "with padding by name"
    return "" if val(node.args[0]).dim() == val(node.args[1]).dim() else "without a batch"


@rule(aten.conv1d.default, aten.conv2d.default, aten.conv3d.default, check=_convolution_check)
def _convolution(w: Writer, node: fx.Node) -> Any:
    stride, padding = arg_of(node, 3, "stride", 1), arg_of(node, 4, "padding", 0)
    dilation = arg_of(node, 5, "dilation", 1)
    return _convolve(w, node, stride, padding, dilation, arg_of(node, 6, "groups", 1))


def _convolve(w: Writer, node: fx.Node, stride: Any, padding: Any, dilation: Any, groups: Any) -> Any:
    weight = val(node.args[1])
    rank = weight.dim() - 2
    strides, pads, dilations = _pair(stride, rank), _pair(padding, rank), _pair(dilation, rank)
    value, kernel = w.value(node.args[0]), w.value(node.args[1])
    if groups == 1:
        made = w.ops.convolution(value, kernel, strides, pads, pads, dilations)
    else:
        kernel = w.reshape(kernel, [groups, weight.shape[0] // groups, *weight.shape[1:]])
        made = w.ops.group_convolution(value, kernel, strides, pads, pads, dilations)
    bias = arg_of(node, 2, "bias")
    return made if bias is None else w.ops.add(made, w.reshape(w.value(bias), [1, -1, *([1] * rank)]))


def _any_convolution_check(node: fx.Node) -> str:
    return "" if val(node.args[0]).dim() == val(node.args[1]).dim() else "without a batch"


@rule(aten.convolution.default, check=_any_convolution_check)
def _any_convolution(w: Writer, node: fx.Node) -> Any:
    if not node.args[6]:
        groups = node.args[8]
        return _convolve(w, node, node.args[3], node.args[4], node.args[5], groups)
    weight = val(node.args[1])
    rank, groups = weight.dim() - 2, int(node.args[8])  # type: ignore[call-overload]
    strides, pads, dilations = (_pair(node.args[at], rank) for at in (3, 4, 5))
    value, kernel, bias = w.value(node.args[0]), w.value(node.args[1]), node.args[2]
    how = {"strides": strides, "pads_begin": pads, "pads_end": pads, "dilations": dilations}
    how["output_padding"] = _pair(node.args[7], rank)
    if groups == 1:
        made = w.ops.convolution_backprop_data(value, kernel, **how)
    else:
        kernel = w.reshape(kernel, [groups, weight.shape[0] // groups, *weight.shape[1:]])
        made = w.ops.group_convolution_backprop_data(value, kernel, **how)
    return made if bias is None else w.ops.add(made, w.reshape(w.value(bias), [1, -1, *([1] * rank)]))


@rule(aten.batch_norm.default, check=lambda n: "in training" if arg_of(n, 5, "training") else "")
def _batch_norm(w: Writer, node: fx.Node) -> Any:
    return _scaled(w, node, 3, 7)


def _scaled(w: Writer, node: fx.Node, mean_at: int, epsilon_at: int) -> Any:
    channels, rank = val(node.args[0]).shape[1], val(node.args[0]).dim()
    weight = w.value(1.0) if node.args[1] is None else w.value(node.args[1])
    bias = w.value(0.0) if node.args[2] is None else w.value(node.args[2])
    mean, variance = w.value(node.args[mean_at]), w.value(node.args[mean_at + 1])
    epsilon = w.value(float(arg_of(node, epsilon_at, "eps", 1e-5)))
    scale = w.ops.divide(weight, w.ops.sqrt(w.ops.add(variance, epsilon)))
    shift = w.ops.subtract(bias, w.ops.multiply(mean, scale))
    shape = [1, channels, *([1] * (rank - 2))]
    scaled = w.ops.multiply(w.value(node.args[0]), w.reshape(scale.output(0), shape))
    return w.ops.add(scaled, w.reshape(shift.output(0), shape))


@rule(aten._native_batch_norm_legit_no_training.default)
def _batch_norm_inference(w: Writer, node: fx.Node) -> Any:
    nothing = w.ops.constant(numpy.empty(0, numpy.float32)).output(0)
    return [_scaled(w, node, 3, 6).output(0), nothing, nothing]


def _native_batch_norm_check(node: fx.Node) -> str:
    if node.args[5]:
        return "in training"
    return "with statistics of the batch" if any(val(node)[at].numel() for at in (1, 2)) else ""  # type: ignore[index]


@rule(aten.native_batch_norm.default, check=_native_batch_norm_check)
def _native_batch_norm(w: Writer, node: fx.Node) -> Any:
    nothing = w.ops.constant(numpy.empty(0, numpy.float32)).output(0)
    return [_scaled(w, node, 3, 7).output(0), nothing, nothing]


@rule(aten.max_pool2d.default, check=lambda n: "" if val(n.args[0]).dim() == 4 else "without a batch")
def _max_pool(w: Writer, node: fx.Node) -> Any:
    return _pooled(w, node, 2)[0]


@rule(aten.max_pool2d_with_indices.default, gives=[1])
def _max_pool2d_with_indices(w: Writer, node: fx.Node) -> Any:
    return _pooled(w, node, 2)


@rule(aten.max_pool3d_with_indices.default, gives=[1])
def _max_pool3d_with_indices(w: Writer, node: fx.Node) -> Any:
    return _pooled(w, node, 3)


def _pooled(w: Writer, node: fx.Node, rank: int) -> list[Any]:
    """Maxima, and where they are: indices count within an image, as PyTorch's do."""
    kernel = _pair(node.args[1], rank)
    strides, pads = _pair(arg_of(node, 2, "stride") or kernel, rank), _pair(arg_of(node, 3, "padding", 0), rank)
    dilations = _pair(arg_of(node, 4, "dilation", 1), rank)
    rounding = "ceil_torch" if arg_of(node, 5, "ceil_mode", False) else "floor"
    opset14: Any = openvino_module("openvino.opset14")
    value, shape = w.value(node.args[0]), list(val(node.args[0]).shape)
    if len(shape) == rank + 1:  # without a batch
        value = w.reshape(value, [1, *shape])
    made = opset14.max_pool(value, strides, dilations, pads, pads, kernel, rounding, index_element_type="i32", axis=2)
    values = node.meta["val"]
    if isinstance(values, torch.Tensor):
        return [made.output(0)]
    wanted = list(values[0].shape)
    found, places = (w.reshape(one, wanted) if len(shape) == rank + 1 else one for one in made.outputs())
    return [found, w.wide(places)]


@rule(
    aten.adaptive_avg_pool2d.default,
    check=lambda n: "" if list(val(n).shape[-2:]) == [1, 1] else "to other than one value",
)
def _adaptive(w: Writer, node: fx.Node) -> Any:
    rank = val(node).dim()
    return w.ops.reduce_mean(w.value(node.args[0]), w.ints([rank - 2, rank - 1]), True)
