"""Convolutions, pooling and batch normalisation."""

from __future__ import annotations

from typing import Any

import numpy
import torch
from torch import fx

from torchport.backend.sizes.guards import NotSymbolic

from .modules import openvino_module
from .sizes import is_symbolic
from .writer import Writer, arg_of, rule, val

aten = torch.ops.aten


def pair(value: Any, count: int) -> list[int]:
    """A setting for each of ``count`` dimensions; a single number is that of all."""
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
    strides, pads, dilations = pair(stride, rank), pair(padding, rank), pair(dilation, rank)
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
    strides, pads, dilations = (pair(node.args[at], rank) for at in (3, 4, 5))
    value, kernel, bias = w.value(node.args[0]), w.value(node.args[1]), node.args[2]
    how = {"strides": strides, "pads_begin": pads, "pads_end": pads, "dilations": dilations}
    how["output_padding"] = pair(node.args[7], rank)
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
    kernel = pair(node.args[1], rank)
    strides, pads = pair(arg_of(node, 2, "stride") or kernel, rank), pair(arg_of(node, 3, "padding", 0), rank)
    dilations = pair(arg_of(node, 4, "dilation", 1), rank)
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


def _rounded_up(node: fx.Node, rank: int) -> list[list[int]]:
    """Kernel, strides and padding before and after, with which rounding down gives as many windows as PyTorch's."""
    kernel = pair(node.args[1], rank)
    strides, pads = pair(arg_of(node, 2, "stride") or kernel, rank), pair(arg_of(node, 3, "padding", 0), rank)
    sizes, wanted = val(node.args[0]).shape[-rank:], val(node).shape[-rank:]
    after = [
        max((count - 1) * step + window - size - before, 0)
        for count, step, window, size, before in zip(wanted, strides, kernel, sizes, pads, strict=True)
    ]
    return [kernel, strides, pads, after]


@rule(aten.avg_pool2d.default, aten.avg_pool3d.default)
def _average(w: Writer, node: fx.Node) -> Any:
    """By hand: the front end divides by other counts where it rounds up, and by no number of one's own.

    Windows are averaged over all of their elements, with zeros around the image. What PyTorch divides by is known
    when the graph is compiled: it is asked for the averages of ones.
    """
    rank = 2 if node.target is aten.avg_pool2d.default else 3
    source, target = val(node.args[0]), node.target
    kernel, strides, before, after = _rounded_up(node, rank)
    shape = list(source.shape)
    value = w.value(node.args[0])
    if len(shape) == rank + 1:  # without a batch
        value = w.reshape(value, [1, *shape])
    if any(before) or any(after):
        around = [w.ints([0, 0, *pads]) for pads in (before, after)]
        value = w.ops.pad(value, *around, "constant", w.value(0.0)).output(0)
    extent = [size + low + high for size, low, high in zip(shape[-rank:], before, after, strict=True)]
    used = [
        (count - 1) * step + window
        for count, step, window in zip(val(node).shape[-rank:], strides, kernel, strict=True)
    ]
    if used != extent:  # what no window reaches
        where = w.ints(list(range(2, rank + 2)))
        value = w.ops.slice(value, w.ints([0] * rank), w.ints(used), w.ints([1] * rank), where).output(0)
    made = w.ops.avg_pool(value, strides, [0] * rank, [0] * rank, kernel, False).output(0)
    ones = torch.ones([1, 1, *shape[-rank:]])
    averages: Any = target(ones, *node.args[1:], **node.kwargs)  # type: ignore[operator]
    padding = [side for low, high in zip(before[::-1], after[::-1], strict=True) for side in (low, high)]
    pool = torch.nn.functional.avg_pool2d if rank == 2 else torch.nn.functional.avg_pool3d
    share = averages / pool(torch.nn.functional.pad(ones, padding), kernel, strides).clamp(min=1e-30)
    share = share[tuple(slice(size) for size in averages.shape)]
    if not bool((share == 1).all()):
        made = w.ops.multiply(made, w.ops.constant(share.numpy().copy())).output(0)
    return w.reshape(made, list(val(node).shape)) if len(shape) == rank + 1 else made


@rule(aten.avg_pool2d_backward.default, aten.avg_pool3d_backward.default)
def _average_backward(w: Writer, node: fx.Node) -> Any:
    """Each window's gradient, divided as its average was, goes to all of its elements: a transposed convolution."""
    rank = 2 if node.target is aten.avg_pool2d_backward.default else 3
    pool: Any = aten.avg_pool2d.default if rank == 2 else aten.avg_pool3d.default
    grad, sizes = val(node.args[0]), val(node).shape[-rank:]
    if is_symbolic(list(sizes)):
        raise NotSymbolic("what averages are divided by is found out when the graph is compiled")
    kernel, pads = pair(node.args[2], rank), pair(arg_of(node, 4, "padding", 0), rank)
    strides = pair(arg_of(node, 3, "stride") or kernel, rank)
    images, channels = val(node).shape[0] if val(node).dim() == rank + 2 else 1, val(node).shape[-rank - 1]
    # Averages of ones, over their sums, are what a window's elements count.
    ones = torch.ones([1, 1, *map(int, sizes)])
    each = pool(ones, kernel, strides, pads, *node.args[5:]) / pool(ones, kernel, strides, pads, node.args[5], True, 1)
    value = w.reshape(w.value(node.args[0]), [images, channels, *grad.shape[-rank:]])
    if bool((each == each.flatten()[0]).all()):
        element = each.flatten()[0].expand(channels, 1, 1, *kernel)
    else:
        value = w.ops.multiply(value, w.ops.constant(each.numpy().copy()))
        element = torch.ones(channels, 1, 1, *kernel)
    spread = w.ops.constant(element.contiguous().numpy())
    reached = [(count - 1) * step + size for count, step, size in zip(each.shape[2:], strides, kernel, strict=True)]
    # What is beyond the image is cut off, and what no window reaches is 0.
    after = [reach - pad - int(size) for reach, pad, size in zip(reached, pads, sizes, strict=True)]
    none = [0] * rank
    made = w.ops.group_convolution_backprop_data(value, spread, strides, pads_begin=none, pads_end=none).output(0)
    if any(pads) or any(after):
        ends = [w.ints([0, 0, *(-side for side in sides)]) for sides in (pads, after)]
        made = w.ops.pad(made, *ends, "constant", w.value(0.0)).output(0)
    return w.reshape(made, list(val(node).shape))


def _linear_ways(target: Any, size: int, wanted: int, corners: bool, scale: Any) -> tuple[Any, Any]:
    """Of each element along an axis, the two that it lies between and their weights: [wanted, 2] each.

    PyTorch says which, on the columns of a unit matrix.
    """
    columns = target(torch.eye(size)[None], [wanted], corners, scale)[0].t()  # [wanted, size]
    weights, places = columns.topk(min(2, size), 1)
    return places, weights


def _resized_check(node: fx.Node) -> str:
    return "" if val(node).numel() <= 1 << 24 else "of so many elements"


@rule(aten.upsample_linear1d.default, aten.upsample_trilinear3d.default, check=_resized_check)
def _linear_resize(w: Writer, node: fx.Node) -> Any:
    """One axis after the other. By hand: the front end has them for scales only."""
    rank, args = val(node).dim() - 2, node.args
    sizes: Any = args[1]
    value = w.value(args[0])
    for at in range(rank):
        scale = args[3 + at] if len(args) > 3 + at else None
        places, weights = _linear_ways(
            aten.upsample_linear1d.default, val(args[0]).shape[2 + at], sizes[at], bool(args[2]), scale
        )
        shape = [1] * (rank + 2)
        shape[2 + at] = -1
        total: Any = None
        for column in range(places.shape[1]):
            found = w.ops.gather(value, w.ints(places[:, column].tolist()), w.ints(2 + at))
            part = w.ops.multiply(found, w.ops.constant(weights[:, column].reshape(shape).numpy().copy()))
            total = part if total is None else w.ops.add(total, part)
        value = total.output(0)
    return value


@rule(
    aten.adaptive_avg_pool2d.default,
    check=lambda n: "" if list(val(n).shape[-2:]) == [1, 1] else "to other than one value",
)
def _adaptive(w: Writer, node: fx.Node) -> Any:
    rank = val(node).dim()
    return w.ops.reduce_mean(w.value(node.args[0]), w.ints([rank - 2, rank - 1]), True)
