"""Batch normalisation in training as operators every engine knows, without a number that is computed from a size.

PyTorch's own decompositions divide by the number of elements, and by one less, as Python numbers: graphs for two batch
sizes then differ in more than sizes. Here the graph counts its elements. Formulas follow
``torch._decomp.decompositions`` and ``aten/src/ATen/native/Normalization.cpp``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch._decomp import decomposition_table

__all__ = ["BATCH_NORM", "BATCH_NORM_BACKWARD"]

aten = torch.ops.aten


def _plain(x: Tensor, *others: Tensor | None) -> bool:
    """Whether everything is computed, and kept, in the input's dtype."""
    return x.dtype in (torch.float32, torch.float64) and all(one is None or one.dtype == x.dtype for one in others)


def _per_channel(tensor: Tensor, like: Tensor) -> Tensor:
    """One number per channel, to be broadcast over all other dimensions."""
    return tensor.reshape(1, -1, *[1] * (like.dim() - 2))


def _others(x: Tensor) -> list[int]:
    """All dimensions but the channels'."""
    return [dim for dim in range(x.dim()) if dim != 1]


def _trained(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Any, Any]:
    """The result, mean and inverse deviation per channel, and the running statistics as they are afterwards."""
    dims = _others(x)
    mean = x.mean(dims, keepdim=True)
    centred = x - mean
    squares = centred * centred
    inverse = (squares.mean(dims, keepdim=True) + eps).rsqrt()
    result = centred * inverse
    if weight is not None:
        result = result * _per_channel(weight, x)
    if bias is not None:
        result = result + _per_channel(bias, x)
    mean, inverse = mean.reshape(-1), inverse.reshape(-1)
    new_mean, new_var = None, None
    if running_mean is not None:
        new_mean = momentum * mean + (1 - momentum) * running_mean
    if running_var is not None:
        count = torch.ones((x.shape[0], 1, *x.shape[2:]), dtype=x.dtype, device=x.device).sum()
        new_var = momentum * (squares.sum(dims) / (count - 1)) + (1 - momentum) * running_var
    return result, mean, inverse, new_mean, new_var


_FUNCTIONAL: Final = aten._native_batch_norm_legit_functional.default
_WITH_UPDATE: Final = aten._batch_norm_with_update_functional.default
_NATIVE: Final = aten.native_batch_norm.default
_NO_STATS: Final = aten._native_batch_norm_legit.no_stats
_BACKWARD: Final = aten.native_batch_norm_backward.default


def _functional(
    x: Tensor, weight: Any, bias: Any, mean: Tensor, var: Tensor, training: bool, momentum: float, eps: float
) -> Any:
    if not training or not _plain(x, weight, bias, mean, var):
        return decomposition_table[_FUNCTIONAL](x, weight, bias, mean, var, training, momentum, eps)
    return _trained(x, weight, bias, mean, var, momentum, eps)


def _with_update(x: Tensor, weight: Any, bias: Any, mean: Tensor, var: Tensor, momentum: float, eps: float) -> Any:
    if not _plain(x, weight, bias, mean, var):
        return decomposition_table[_WITH_UPDATE](x, weight, bias, mean, var, momentum, eps)
    result, of_mean, inverse, *running = _trained(x, weight, bias, mean, var, momentum, eps)
    return result, of_mean, inverse, x.new_empty((0,), dtype=torch.uint8), *running


def _no_stats(x: Tensor, weight: Any, bias: Any, training: bool, momentum: float, eps: float) -> Any:
    if not training or not _plain(x, weight, bias):
        return decomposition_table[_NO_STATS](x, weight, bias, training, momentum, eps)
    return _trained(x, weight, bias, None, None, momentum, eps)[:3]


def _native(x: Tensor, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float) -> Any:
    if not training or mean is not None or var is not None or not _plain(x, weight, bias):
        return decomposition_table[_NATIVE](x, weight, bias, mean, var, training, momentum, eps)
    return _trained(x, weight, bias, None, None, momentum, eps)[:3]


def _backward(
    grad: Tensor,
    x: Tensor,
    weight: Any,
    running_mean: Any,
    running_var: Any,
    mean: Any,
    inverse: Any,
    train: bool,
    eps: float,
    output_mask: Sequence[bool],
) -> Any:
    if not train or not _plain(x, grad, weight, mean, inverse):
        given = (grad, x, weight, running_mean, running_var, mean, inverse, train, eps, output_mask)
        return decomposition_table[_BACKWARD](*given)
    dims = _others(x)
    normal = (x - _per_channel(mean, x)) * _per_channel(inverse, x)
    of_input = None
    if output_mask[0]:
        scale = inverse if weight is None else inverse * weight
        rest = grad - grad.mean(dims, keepdim=True) - normal * (grad * normal).mean(dims, keepdim=True)
        of_input = rest * _per_channel(scale, x)
    of_weight = (grad * normal).sum(dims) if output_mask[1] else None
    return of_input, of_weight, grad.sum(dims) if output_mask[2] else None


BATCH_NORM: Final[Mapping[Any, Callable[..., Any]]] = {
    _FUNCTIONAL: _functional, _WITH_UPDATE: _with_update, _NO_STATS: _no_stats,
    _NATIVE: _native,
}  # fmt: skip
"""Operators of the forward pass. ``native_batch_norm`` alone writes to running statistics, where it has them."""
BATCH_NORM_BACKWARD: Final[Mapping[Any, Callable[..., Any]]] = {_BACKWARD: _backward}
