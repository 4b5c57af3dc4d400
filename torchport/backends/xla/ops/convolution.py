"""Convolutions of any rank, transposed and grouped; gradients by JAX's transposition of the same convolution."""

from __future__ import annotations

import torch

from .support import Any, Array, Call, Sequence, cast, compute_dtype, jax, jnp, lax, lowers, math, wide

aten = torch.ops.aten


def _spread(values: Sequence[int], rank: int) -> tuple[int, ...]:
    return tuple(values) * rank if len(values) == 1 else tuple(values)


def convolve(
    x: Array,
    weight: Array,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Array:
    """``x`` ``[N, C, …]`` with ``weight`` ``[O, C/groups, …]``, or ``[C, O/groups, …]`` where it is transposed."""
    rank = x.ndim - 2
    stride, padding, dilation = _spread(stride, rank), _spread(padding, rank), _spread(dilation, rank)
    spatial = "DHW"[3 - rank :]
    if not transposed:
        return lax.conv_general_dilated(
            x, weight, stride, [(p, p) for p in padding], rhs_dilation=dilation,
            dimension_numbers=("NC" + spatial, "OI" + spatial, "NC" + spatial), feature_group_count=groups,
        )  # fmt: skip
    extra = _spread(output_padding, rank)
    reach = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
    pads = [(r - p, r - p + e) for r, p, e in zip(reach, padding, extra, strict=True)]
    return lax.conv_general_dilated(
        x, _turned(weight, groups), [1] * rank, pads, lhs_dilation=stride, rhs_dilation=dilation,
        dimension_numbers=("NC" + spatial, "OI" + spatial, "NC" + spatial), feature_group_count=groups,
    )  # fmt: skip


def _turned(weight: Array, groups: int) -> Array:
    """A transposed convolution's weight as that of the convolution it amounts to: flipped, channels exchanged."""
    flipped = lax.rev(weight, tuple(range(2, weight.ndim)))
    channels, out = weight.shape[:2]
    grouped = lax.reshape(flipped, (groups, channels // groups, out, *weight.shape[2:]))
    return lax.reshape(jnp.swapaxes(grouped, 1, 2), (groups * out, channels // groups, *weight.shape[2:]))


def _is_empty(x: Array, weight: Array) -> bool:
    return not x.size or not weight.size


@lowers(aten.convolution.default)
def convolution(
    call: Call,
    x: Array,
    weight: Array,
    bias: Array | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Array:
    dtype = compute_dtype(call)
    shape = tuple(call.val.shape)
    if _is_empty(x, weight) or not math.prod(shape):
        result = jnp.zeros(shape, dtype)
    else:
        unbatched = x.ndim == weight.ndim - 1
        value = x[None] if unbatched else x
        result = convolve(value, weight, stride, padding, dilation, transposed, output_padding, groups)
        result = result[0] if unbatched else result
    if bias is None:
        return result
    spatial = weight.ndim - 2
    return cast(result, dtype) + lax.reshape(wide(bias), (bias.shape[0], *([1] * spatial)))


@lowers(aten.convolution_backward.default)
def convolution_backward(
    call: Call,
    grad: Array,
    x: Array,
    weight: Array,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    mask: Sequence[bool],
) -> tuple[Array | None, Array | None, Array | None]:
    settings = (stride, padding, dilation, transposed, output_padding, groups)
    gx = gw = gb = None
    if _is_empty(x, weight) or not grad.size:
        gx = jnp.zeros_like(x) if mask[0] else None
        gw = jnp.zeros_like(weight) if mask[1] else None
    else:
        if mask[0]:
            (gx,) = _pull_back(lambda a: convolve(a, weight, *settings), x, grad)
        if mask[1]:
            (gw,) = _pull_back(lambda w: convolve(x, w, *settings), weight, grad)
    if mask[2]:
        gb = jnp.sum(wide(grad), axis=(0, *range(2, grad.ndim)))
    return gx, gw, gb


def _pull_back(fn: Any, primal: Array, grad: Array) -> tuple[Array]:
    """Gradient of a linear function at any point."""
    transposed = jax.linear_transpose(fn, jax.ShapeDtypeStruct(primal.shape, primal.dtype))
    return transposed(grad)
