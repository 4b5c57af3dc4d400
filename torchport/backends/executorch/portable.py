"""What ExecuTorch's portable kernels run inside a ``.pte``: operators that XNNPACK does not take, on small tensors.

A portable kernel is a plain loop. For few elements that costs less than a border of a segment, for many it would cost
more than PyTorch's kernel on the host: so operators are taken up to a number of elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import fx
from torch._decomp import decomposition_table

__all__ = ["DTYPES", "OF_EACH", "PORTABLE", "decompositions", "why_not_portable"]

aten = torch.ops.aten

MOST: Final = 1 << 12
"""Elements of the largest tensor up to which an operator is taken. A kernel was seen to take 1 to 30 ns for each (flip
the most), and PyTorch's as much or a tenth."""
MOST_PRODUCTS: Final = 1 << 17
"""Multiplications up to which a convolution, or distances, are taken."""
DTYPES: Final = frozenset(
    {
        torch.float32, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    }
)  # fmt: skip
"""Dtypes that portable kernels compute in as PyTorch does."""

OF_EACH: Final = frozenset({
    aten.acos.default, aten.acosh.default, aten.asin.default, aten.asinh.default, aten.atan.default,
    aten.atanh.default, aten.cos.default, aten.cosh.default, aten.erf.default, aten.expm1.default, aten.log.default,
    aten.log10.default, aten.log1p.default, aten.log2.default, aten.logical_not.default, aten.reciprocal.default,
    aten.round.default, aten.sign.default, aten.sin.default, aten.sinh.default, aten.tan.default, aten.trunc.default,
    aten.isinf.default, aten.isnan.default, aten.bitwise_not.default, aten.atan2.default,
    aten.eq.Tensor, aten.eq.Scalar, aten.ne.Tensor, aten.ne.Scalar, aten.lt.Tensor, aten.lt.Scalar, aten.le.Tensor,
    aten.le.Scalar, aten.gt.Tensor, aten.gt.Scalar, aten.ge.Tensor, aten.ge.Scalar, aten.fmod.Tensor,
    aten.fmod.Scalar, aten.floor_divide.default, aten.div.Tensor_mode,
    aten.pow.Tensor_Tensor, aten.pow.Tensor_Scalar, aten.pow.Scalar, aten.logical_and.default,
    aten.logical_or.default, aten.logical_xor.default, aten.bitwise_and.Tensor, aten.bitwise_or.Tensor,
    aten.bitwise_xor.Tensor, aten.rsub.Scalar, aten.clamp.Tensor, aten.where.self, aten.masked_fill.Scalar,
    aten.glu.default, aten.logit.default, aten._to_copy.default,
    aten.full.default, aten.full_like.default, aten.scalar_tensor.default, aten.arange.start_step,
    aten.zeros.default, aten.ones.default, aten.zeros_like.default, aten.ones_like.default,
})  # fmt: skip
"""Operators on each element, and tensors made of a number."""
_OF_DIMENSIONS: Final = frozenset({
    aten.sum.dim_IntList, aten.sum.default, aten.mean.default, aten.amax.default, aten.amin.default,
    aten.any.default, aten.any.dim, aten.any.dims, aten.all.default, aten.all.dim, aten.argmax.default,
    aten.argmin.default, aten.max.default, aten.max.dim, aten.min.default, aten.min.dim, aten.prod.default,
    aten.prod.dim_int, aten.var.correction, aten.var_mean.correction, aten.cumsum.default, aten._log_softmax.default,
    aten.native_layer_norm.default, aten.native_group_norm.default, aten.topk.default,
    aten._cdist_forward.default, aten._pdist_forward.default,
    aten.constant_pad_nd.default, aten.flip.default, aten.roll.default, aten.repeat.default, aten.gather.default,
    aten.index_select.default, aten.index.Tensor, aten.index_put.default, aten.scatter.src, aten.scatter.value,
    aten.scatter_add.default, aten.slice_scatter.default, aten.select_scatter.default, aten.split.Tensor,
    aten.split_with_sizes.default, aten.unbind.int, aten.unfold.default, aten.diagonal.default,
    aten.as_strided.default, aten.stack.default, aten.tril.default, aten.triu.default, aten.embedding.default,
    aten.pixel_shuffle.default, aten.pixel_unshuffle.default, aten.reflection_pad1d.default,
    aten.reflection_pad2d.default, aten.reflection_pad3d.default, aten.replication_pad1d.default,
    aten.replication_pad2d.default, aten.replication_pad3d.default, aten.upsample_bilinear2d.vec,
    aten.upsample_nearest2d.vec, aten.masked_scatter.default, aten.grid_sampler_2d.default, aten.alias.default,
    aten.convolution.default, aten._adaptive_avg_pool2d.default, aten.max_pool2d_with_indices.default,
})  # fmt: skip
"""Operators along dimensions. Their kernels end the process for a tensor without dimensions."""
PORTABLE: Final = OF_EACH | _OF_DIMENSIONS
"""Operators for which the runtime has a portable kernel, or ExecuTorch's lowering a way to such."""

_PLACES: Final = {aten.gather.default, aten.scatter.src, aten.scatter.value, aten.scatter_add.default}
"""Their third argument says where."""
_INTEGER_NUMBERS: Final = {aten.arange.start_step, aten.constant_pad_nd.default}
_POWERS: Final = {aten.pow.Tensor_Tensor, aten.pow.Tensor_Scalar, aten.pow.Scalar}

_OF_PYTORCH: Final = (
    aten._batch_norm_with_update_functional.default, aten._native_batch_norm_legit_functional.default,
    aten.native_batch_norm.default, aten.block_diag.default, aten.isin.Tensor_Tensor,
    aten.multilabel_margin_loss_forward.default, aten.linalg_vector_norm.default, aten._safe_softmax.default,
    aten.linalg_cross.default, aten.hypot.default, aten.lerp.Tensor, aten.lerp.Scalar, aten.copysign.Tensor,
    aten.nll_loss_forward.default, aten.nll_loss2d_forward.default, aten.diag_embed.default, aten.linspace.default,
    aten.logspace.default, aten.std.correction, aten.std_mean.correction, aten.ldexp.Tensor, aten.gelu.default,
    aten.mse_loss.default, aten.log_sigmoid_forward.default, aten.norm.ScalarOpt_dim,
    aten.diagonal_scatter.default, aten.heaviside.default, aten.fmax.default, aten.fmin.default, aten.mv.default,
    aten.addmv.default, aten.dot.default, aten.vdot.default, aten.addbmm.default, aten.baddbmm.default,
    aten.count_nonzero.dim_IntList, aten.frac.default, aten.aminmax.default,
    aten.signbit.default, aten._unsafe_masked_index.default, aten._prelu_kernel.default, aten.celu.default,
    aten.softplus.default, aten.softshrink.default, aten.hardshrink.default, aten.threshold.default,
    aten.multi_margin_loss.default, aten.huber_loss.default, aten.smooth_l1_loss.default, aten.mish.default,
    aten.soft_margin_loss.default, aten.binary_cross_entropy.default, aten.binary_cross_entropy_with_logits.default,
    aten.logaddexp.default, aten.xlogy.Tensor, aten.nansum.default, aten.nan_to_num.default, aten.sinc.default,
    aten._thnn_fused_lstm_cell.default, aten._thnn_fused_gru_cell.default, aten.unsafe_split.Tensor,
    aten.im2col.default, aten.special_xlog1py.default, aten.index_add.default, aten.logsumexp.default,
    aten.cumprod.default, aten.dist.default, aten.renorm.default, aten.upsample_linear1d.default,
    aten.upsample_nearest1d.default, aten.upsample_nearest3d.default, aten.upsample_bilinear2d.default,
    aten.upsample_nearest2d.default, aten.upsample_trilinear3d.default, aten.fill.Scalar, aten.bucketize.Tensor,
    aten.empty_like.default, aten.new_zeros.default, aten.new_ones.default, aten.new_empty.default,
    aten.new_full.default, aten.arange.default, aten.arange.start, aten.eye.default, aten.eye.m,
)  # fmt: skip


def _why_not_of_integers(node: fx.Node) -> str:
    """What keeps the portable kernels from an operator on integers."""
    result = node.meta["val"]
    if not isinstance(result, torch.Tensor) or result.dtype.is_floating_point:
        return ""
    numbers = [arg for arg in node.args if isinstance(arg, (int, float))]
    if result.dtype is torch.uint8 and any(number < 0 for number in numbers):
        return "ExecuTorch's portable kernels take a negative number beside torch.uint8 for another"
    if node.target in _INTEGER_NUMBERS and any(isinstance(number, float) for number in numbers):
        return "ExecuTorch's portable kernel does not cut fractions off as PyTorch does"
    if node.target in _POWERS:
        return "ExecuTorch's portable kernel raises integers to powers in floating point"
    return ""


def _products(node: fx.Node) -> int:
    """Multiplications of an operator that makes each element of many."""
    result = node.meta["val"]
    if node.target is aten.convolution.default:
        weight: Any = node.args[1]
        return result.numel() * math.prod(weight.meta["val"].shape[1:])
    if node.target in (aten._cdist_forward.default, aten._pdist_forward.default):
        source: Any = node.args[0]
        return result.numel() * source.meta["val"].shape[-1]
    return 0


def why_not_portable(node: fx.Node) -> str:
    """What keeps the portable kernels from an operator of the table, in words, or nothing."""
    for value in (node, *node.all_input_nodes):
        found = value.meta["val"]
        for tensor in found if isinstance(found, (list, tuple)) else [found]:
            if tensor is None:
                continue
            if not tensor.dim() and value is not node and node.target not in OF_EACH:
                return "ExecuTorch's portable kernel ends the process for a tensor without dimensions"
            if tensor.dtype not in DTYPES:
                return f"ExecuTorch's portable kernels do not compute {tensor.dtype}"
            if not tensor.numel():
                return "ExecuTorch's orders of dimensions have no room for tensors without elements"
            if tensor.numel() > MOST:
                return f"XNNPACK does not have it, and a portable kernel is slow for {tensor.numel()} elements"
    if why := _why_not_of_integers(node):
        return why
    if node.target is aten.constant_pad_nd.default and any(size < 0 for size in node.args[1]):  # type: ignore[union-attr]
        return "ExecuTorch's portable kernel does not cut off"
    if node.target in _PLACES and node.args[2].meta["val"].dtype is not torch.int64:  # type: ignore[union-attr]
        return "ExecuTorch's portable kernel takes places of 64 bits alone"
    if _products(node) > MOST_PRODUCTS:
        return "XNNPACK takes it with constant weights only, and the portable kernel is slow for so many products"
    if node.target is aten.convolution.default and node.meta["val"].dim() > 4:
        return "ExecuTorch's portable kernel has no convolution of volumes"
    if node.target is aten.as_strided.default:
        source: Any = node.args[0]
        if not source.meta["val"].is_contiguous():
            return "ExecuTorch's tensors are contiguous, and these strides are of one that is not"
    return ""


def _round_decimals(tensor: torch.Tensor, *, decimals: int) -> torch.Tensor:
    """Half to even, at a decimal place."""
    scale = 10.0 ** abs(decimals)
    return (tensor * scale).round() / scale if decimals >= 0 else (tensor / scale).round() * scale


def _remainder(dividend: torch.Tensor, divisor: Any) -> torch.Tensor:
    """With the sign of the divisor: that of ExecuTorch's kernel has the dividend's for integers."""
    rest = torch.fmod(dividend, divisor)
    if isinstance(divisor, torch.Tensor):
        other = (rest < 0).logical_xor(divisor < 0)
    else:
        other = rest > 0 if divisor < 0 else rest < 0
    return torch.where((rest != 0) & other, rest + divisor, rest)


def _not_of_bytes(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Images of bytes are interpolated in fewer bits by PyTorch's kernel, and not by its decomposition."""

    def checked(image: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return NotImplemented if image.dtype is torch.uint8 else fn(image, *args, **kwargs)

    return checked


def _of_floats(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Steps between integers end above or below one by rounding, and that is cut off."""

    def checked(*args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
        return fn(*args, dtype=dtype, **kwargs) if dtype is None or dtype.is_floating_point else NotImplemented

    return checked


def decompositions() -> Mapping[torch._ops.OpOverload, Callable[..., Any]]:
    """Operator → PyTorch's function of tensors that does the same."""
    known = {op: decomposition_table[op] for op in _OF_PYTORCH if op in decomposition_table}
    known.update({op: _not_of_bytes(fn) for op, fn in known.items() if "upsample" in str(op)})
    known.update({op: _of_floats(known[op]) for op in (aten.linspace.default, aten.logspace.default)})
    return {
        **known,
        aten.clamp_min.Tensor: torch.maximum,
        aten.clamp_max.Tensor: torch.minimum,
        aten.remainder.Scalar: _remainder,
        aten.remainder.Tensor: _remainder,
        aten.round.decimals: _round_decimals,
        aten.take.default: lambda tensor, places: (
            tensor.reshape(-1).index_select(0, places.reshape(-1)).reshape(places.shape)
        ),
    }
