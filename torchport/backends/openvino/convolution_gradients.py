"""Gradients of convolutions: the opset has that of the input, and none of the kernel.

A kernel's gradient is a product of matrices: what the convolution saw at each place (``extract_image_patches``), times
the result's gradient there. The number of images may be a symbol; as a convolution, whose kernel would have it in its
shape, that could not be.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx

from .images import pair
from .sizes import is_symbolic
from .writer import Writer, rule, val

aten = torch.ops.aten

_MANY: Final = 1 << 25
"""Elements of patches (128 MB) from which on they are made for one row of the kernel at a time."""
_MOST: Final = 1 << 27
"""Elements of patches, of one row of the kernel, which the host's kernel does without."""

_NARROW: Final = 12
"""Widths of a kernel in a row up to which the row is narrow (measured: 10 to 14)."""


@dataclass(frozen=True)
class _Window:
    """Where a convolution looks, per spatial dimension."""

    kernel: list[int]
    strides: list[int]
    padding: list[int]
    dilations: list[int]

    @property
    def is_point(self) -> bool:
        """Whether each place sees one element, and each element is seen once."""
        ones = [1] * len(self.kernel)
        return self.kernel == ones == self.strides and not any(self.padding)

    def reach(self, at: int, count: Any) -> Any:
        """Elements from the first to the last that ``count`` places look at in a dimension."""
        return (count - 1) * self.strides[at] + self.dilations[at] * (self.kernel[at] - 1) + 1


def _window(node: fx.Node) -> _Window:
    rank = val(node.args[2]).dim() - 2
    settings = (pair(node.args[at], rank) for at in (4, 5, 6))
    return _Window([int(size) for size in val(node.args[2]).shape[2:]], *settings)


def _looks(node: fx.Node) -> tuple[Any, Any]:
    """What the kernel looks at, and what there is once for each place where it looks."""
    return (node.args[0], node.args[1]) if node.args[7] else (node.args[1], node.args[0])


def _patches(node: fx.Node, kernel: Sequence[int]) -> Any:
    """Elements that a kernel of these sizes sees at all places."""
    image, places = map(val, _looks(node))
    return image.shape[1] * math.prod(kernel) * places.shape[0] * math.prod(places.shape[2:])


def _check(node: fx.Node) -> str:
    if val(node.args[1]).dim() != val(node.args[2]).dim():
        return "without a batch"
    mask: Any = node.args[10]
    return "of so many elements" if mask[1] and _patches(node, _window(node).kernel[-1:]) > _MOST else ""


@rule(aten.convolution_backward.default, check=_check)
def _convolution_backward(w: Writer, node: fx.Node) -> Any:
    """Gradients of input, kernel and bias, as far as the mask wants them."""
    mask: Any = node.args[10]
    window = _window(node)
    of_input = _seen if node.args[7] else _spread
    rest = w.ints([0, *range(2, val(node.args[0]).dim())])
    return [
        of_input(w, node, window) if mask[0] else None,
        _of_kernel(w, node, window) if mask[1] else None,
        w.ops.reduce_sum(w.value(node.args[0]), rest, False).output(0) if mask[2] else None,
    ]


def _is_longer(node: fx.Node) -> bool:
    """Whether the result has a whole step more than the convolution gives, by the padding of a transposed one's."""
    window = _window(node)
    extra = pair(node.args[8], len(window.kernel))
    return bool(node.args[7]) and any(more >= step for more, step in zip(extra, window.strides, strict=True))


def _kernel(w: Writer, node: fx.Node) -> tuple[Any, bool]:
    """The kernel as a convolution takes it, and whether in groups."""
    groups, kernel = int(node.args[9]), val(node.args[2])  # type: ignore[call-overload]
    value = w.value(node.args[2])
    if groups == 1:
        return value, False
    return w.reshape(value, [groups, kernel.shape[0] // groups, *kernel.shape[1:]]), True


def _seen(w: Writer, node: fx.Node, window: _Window) -> Any:
    """The input's gradient where the convolution is transposed: a convolution."""
    kernel, grouped = _kernel(w, node)
    convolve = w.ops.group_convolution if grouped else w.ops.convolution
    pads = window.padding
    made = convolve(w.value(node.args[0]), kernel, window.strides, pads, pads, window.dilations).output(0)
    return _first(w, made, list(val(node.args[1]).shape[2:])) if _is_longer(node) else made


def _spread(w: Writer, node: fx.Node, window: _Window) -> Any:
    """The input's gradient: each element of the result's goes to all that was looked at."""
    if window.is_point:
        return _by_product(w, node)
    kernel, grouped = _kernel(w, node)
    convolve = w.ops.group_convolution_backprop_data if grouped else w.ops.convolution_backprop_data
    grad, source = w.value(node.args[0]), val(node.args[1])
    sizes, places = source.shape[2:], val(node.args[0]).shape[2:]
    pads, steps = window.padding, window.strides
    how = {"strides": steps, "dilations": window.dilations}
    if not any(is_symbolic(size) and step > 1 for size, step in zip(sizes, steps, strict=True)):
        # What no window reaches at the end is less than a step.
        extra = [
            0 if step == 1 else int(size) + 2 * pad - int(window.reach(at, count))
            for at, (size, step, pad, count) in enumerate(zip(sizes, steps, pads, places, strict=True))
        ]
        return convolve(grad, kernel, pads_begin=pads, pads_end=pads, output_padding=extra, **how).output(0)
    # How much that is depends on the size: all that is reached is made, and cut.
    rank = len(pads)
    none = [0] * rank
    full = convolve(grad, kernel, pads_begin=none, pads_end=none, **how).output(0)
    after = w.ints([0, 0, *(step - 1 for step in steps)])
    full = w.ops.pad(full, w.ints([0, 0, *none]), after, "constant", w.value(0.0)).output(0)
    ends = [pad + size for pad, size in zip(pads, sizes, strict=True)]
    return _cut(w, full, pads, ends, [1] * rank, list(range(2, rank + 2)))


def _by_product(w: Writer, node: fx.Node) -> Any:
    """What sees single elements is a product of matrices for each image, and group."""
    groups, kernel, source = int(node.args[9]), val(node.args[2]).shape, val(node.args[1])  # type: ignore[call-overload]
    lead = [groups] if groups > 1 else []
    grad = w.reshape(w.value(node.args[0]), [source.shape[0], *lead, kernel[0] // groups, math.prod(source.shape[2:])])
    matrix = w.reshape(w.value(node.args[2]), [*lead, kernel[0] // groups, kernel[1]])
    return w.reshape(w.ops.matmul(matrix, grad, True, False).output(0), list(source.shape))


def _cut(w: Writer, value: Any, start: list[Any], stop: list[Any], step: list[int], axes: list[int]) -> Any:
    return w.ops.slice(value, *(w.ints(numbers) for numbers in (start, stop, step, axes))).output(0)


def _first(w: Writer, value: Any, sizes: list[Any]) -> Any:
    """The first elements of the spatial dimensions."""
    rank = len(sizes)
    return _cut(w, value, [0] * rank, sizes, [1] * rank, list(range(2, rank + 2)))


def _of_kernel(w: Writer, node: fx.Node, window: _Window) -> Any:
    """The kernel's gradient: a product for each of its slices, or of its rows where there is much to see."""
    image, places = (_in_space(val(one).shape) for one in _looks(node))
    values = [w.reshape(w.value(one), shape) for one, shape in zip(_looks(node), (image, places), strict=True)]
    space = _Window(*(_filled(one, other) for one, other in zip(_settings(window), (1, 1, 0, 1), strict=True)))
    groups, shape = int(node.args[9]), list(val(node.args[2]).shape)  # type: ignore[call-overload]
    if any(space.padding):
        around = w.ints([0, 0, *space.padding])
        values[0] = w.ops.pad(values[0], around, around, "constant", w.value(0.0)).output(0)
        image = [*image[:2], *(size + 2 * pad for size, pad in zip(image[2:], space.padding, strict=True))]
    if _is_longer(node):
        image = [*image[:2], *(space.reach(at, count) for at, count in enumerate(places[2:]))]
        values[0] = _first(w, values[0], image[2:])
    if _is_narrow(shape, image, places):
        return w.reshape(_of_channels(w, values, space, image, places), shape)
    by_image = _is_small(shape, image, places)
    if not by_image:  # one product over all images, whose number is no longer a dimension of its own
        values = [_channels_first(w, one) for one in values]
    images, channels = image[:2]
    # Matrices of the product: one per image, unless they are joined, and per group.
    batch = [*([images] if by_image else []), *([groups] if groups > 1 else [])]
    seen = math.prod(places[2:]) * (1 if by_image else images)
    others = w.reshape(values[1], [*batch, places[1] // groups, seen])
    slices: list[Any] = []
    looped = [0] if _patches(node, space.kernel[1:]) <= _MANY else [0, 1]
    flat = [1 if at in looped else size for at, size in enumerate(space.kernel)]
    for offsets in itertools.product(*(range(space.kernel[at]) for at in looped)):
        part, sizes = _from(w, values[0], space, offsets, image[2:], places[2:])
        planes = [images * channels, sizes[0]] if by_image else [channels, images * sizes[0]]
        part = w.reshape(part, [*planes, *sizes[1:]])
        steps = [1 if at in looped else step for at, step in enumerate(space.strides)]
        if flat[1:] != [1, 1] or steps[1:] != [1, 1]:
            part = w.ops.extract_image_patches(part, flat[1:], steps[1:], space.dilations[1:], "valid")
        part = w.reshape(part, [*batch, channels // groups * math.prod(flat), seen])
        made = w.ops.matmul(others, part, False, True).output(0)
        made = w.ops.reduce_sum(made, w.ints([0]), False).output(0) if by_image else made
        slices.append(w.reshape(made, [*shape[:2], 1, math.prod(flat)]))
    joined = slices[0] if len(slices) == 1 else w.ops.concat(slices, 2).output(0)
    return w.reshape(joined, shape)


def _channels_first(w: Writer, value: Any) -> Any:
    return w.ops.transpose(value, w.ints([1, 0, 2, 3, 4])).output(0)


def _is_narrow(kernel: Sequence[Any], image: Sequence[Any], places: Sequence[Any]) -> bool:
    """Whether each channel has a kernel of its own, and rows are short, so that whole rows are multiplied faster than
    patches are written."""
    alone = kernel[1] == 1 and image[1] == places[1]
    return alone and not is_symbolic([image[-1], places[-1]]) and image[-1] <= _NARROW * kernel[-1]


def _of_channels(w: Writer, values: list[Any], space: _Window, image: list[Any], places: list[Any]) -> Any:
    """The gradients of one kernel per channel: each element of the image's rows times each of the places' rows, summed
    over the rows. Of that matrix an element of the kernel is the sum of a diagonal."""
    channels, width, across = image[1], int(image[-1]), int(places[-1])
    seen, others = (_channels_first(w, one) for one in values)
    rows = math.prod(places[2:4]) * image[0]
    others = w.reshape(others, [channels, rows, across])
    step, apart, size = space.strides[-1], space.dilations[-1], space.kernel[-1]
    diagonals = [(at * step + offset * apart) * across + at for offset in range(size) for at in range(across)]
    slices: list[Any] = []
    for offsets in itertools.product(*map(range, space.kernel[:2])):
        part, _ = _from(w, seen, space, offsets, image[2:], places[2:])
        made = w.ops.matmul(w.reshape(part, [channels, rows, width]), others, True, False).output(0)
        made = w.ops.gather(w.reshape(made, [channels, width * across]), w.ints(diagonals), w.ints(1)).output(0)
        slices.append(w.ops.reduce_sum(w.reshape(made, [channels, size, across]), w.ints([2]), False).output(0))
    return slices[0] if len(slices) == 1 else w.ops.concat(slices, 1).output(0)


def _settings(window: _Window) -> list[list[int]]:
    return [window.kernel, window.strides, window.padding, window.dilations]


def _filled(numbers: Sequence[Any], other: Any) -> list[Any]:
    """Three numbers, the last of which are these."""
    return [*[other] * (3 - len(numbers)), *numbers]


def _in_space(shape: Sequence[Any]) -> list[Any]:
    """The shape of images as one of volumes."""
    return [*shape[:2], *_filled(shape[2:], 1)]


def _is_small(kernel: Sequence[Any], image: Sequence[Any], places: Sequence[Any]) -> bool:
    """Whether a kernel per image is less to write than the image and its places are, in another order."""
    if is_symbolic([*image[1:], *places[1:]]):
        return False
    return math.prod(kernel) <= math.prod(image[1:]) + math.prod(places[1:])


def _from(
    w: Writer, value: Any, window: _Window, offsets: Sequence[int], sizes: Sequence[Any], counts: Sequence[Any]
) -> tuple[Any, list[Any]]:
    """What the kernel's element at these offsets, in the first dimensions, sees, and its sizes."""
    found = list(sizes)
    axes = [at for at in range(len(offsets)) if window.kernel[at] > 1 or window.strides[at] > 1]
    if not axes:
        return value, found
    start = [offsets[at] * window.dilations[at] for at in axes]
    stop = [one + (counts[at] - 1) * window.strides[at] + 1 for one, at in zip(start, axes, strict=True)]
    for at in axes:
        found[at] = counts[at]
    return _cut(w, value, start, stop, [window.strides[at] for at in axes], [at + 2 for at in axes]), found
