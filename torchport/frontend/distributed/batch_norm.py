"""What ``SyncBatchNorm`` is written with: operators that PyTorch has kernels of for CUDA alone.

Each is made of what every backend has. They are taken apart above functionalization, since one of them writes to the
running statistics, which it does not return.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from ..device.opaque import opaque
from .kernels import for_ours

__all__ = ["install"]

Maybe = torch.Tensor | None


def batch_norm_stats(input: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Each channel's mean, and one over its standard deviation."""
    values = _wide(input)
    variance, mean = torch.var_mean(values, _others(input), correction=0)
    return mean, torch.rsqrt(variance + eps)


def batch_norm_gather_stats_with_counts(
    input: torch.Tensor,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    running_mean: Maybe,
    running_var: Maybe,
    momentum: float,
    eps: float,
    counts: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of all ranks' values together: ``mean`` and ``invstd`` have a row per rank, with ``counts`` values."""
    weights = counts.to(mean.dtype).unsqueeze(1)
    total = weights.sum()
    whole = (mean * weights).sum(0) / total
    squares = ((1 / (invstd * invstd) - eps + (mean - whole) ** 2) * weights).sum(0)
    if running_mean is not None:
        running_mean.mul_(1 - momentum).add_((momentum * whole).to(running_mean.dtype))
    if running_var is not None:
        running_var.mul_(1 - momentum).add_((momentum * squares / (total - 1)).to(running_var.dtype))
    return whole, torch.rsqrt(squares / total + eps)


def batch_norm_elemt(
    input: torch.Tensor, weight: Maybe, bias: Maybe, mean: torch.Tensor, invstd: torch.Tensor, eps: float
) -> torch.Tensor:
    """The input, normalized."""
    result = (_wide(input) - _along(mean, input)) * _along(invstd, input)
    if weight is not None:
        result = result * _along(weight, input)
    if bias is not None:
        result = result + _along(bias, input)
    return result.to(input.dtype)


def batch_norm_backward_reduce(
    grad_out: torch.Tensor,
    input: torch.Tensor,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    weight: Maybe,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sums over this rank's values: of the gradient, of it times what the input is off the mean; and two gradients."""
    gradient = _wide(grad_out)
    sums = gradient.sum(_others(input))
    products = (gradient * (_wide(input) - _along(mean, input))).sum(_others(input))
    kind = mean.dtype if weight is None else weight.dtype
    return sums, products, (products * invstd).to(kind), sums.to(kind)


def batch_norm_backward_elemt(
    grad_out: torch.Tensor,
    input: torch.Tensor,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    weight: Maybe,
    sum_dy: torch.Tensor,
    sum_dy_xmu: torch.Tensor,
    count: torch.Tensor,
) -> torch.Tensor:
    """The input's gradient, from the sums over all ranks."""
    total = count.sum().to(mean.dtype)
    slope = _along(sum_dy_xmu / total * invstd * invstd, input)
    result = _wide(grad_out) - _along(sum_dy / total, input) - (_wide(input) - _along(mean, input)) * slope
    result = result * _along(invstd if weight is None else invstd * weight, input)
    return result.to(input.dtype)


def _others(input: torch.Tensor) -> list[int]:
    """Every dimension but the channels'."""
    return [dim for dim in range(input.dim()) if dim != 1]


def _along(channels: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    """A number per channel, as it is combined with the input."""
    return channels.reshape(1, -1, *[1] * (input.dim() - 2))


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """Statistics of half precision are computed in float32, as CUDA's are."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


_OPERATORS: Final[tuple[Callable[..., Any], ...]] = (
    batch_norm_stats,
    batch_norm_gather_stats_with_counts,
    batch_norm_elemt,
    batch_norm_backward_reduce,
    batch_norm_backward_elemt,
)
_library: Final[list[torch.library.Library]] = []


def install() -> None:
    """Register them, once in a process."""
    if _library:
        return
    library = torch.library.Library("aten", "IMPL")
    _library.append(library)
    for body in _OPERATORS:
        stock = torch.library.get_kernel(f"aten::{body.__name__}", "Functionalize")
        library.impl(body.__name__, opaque(for_ours(body, stock)), "Functionalize", with_keyset=True)
