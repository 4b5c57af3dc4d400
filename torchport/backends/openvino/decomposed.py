"""Operators that are rewritten before the translation: PyTorch's own decompositions, and some of this package."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch._decomp import decomposition_table

__all__ = ["decompositions"]

aten = torch.ops.aten

_OF_PYTORCH: Final = (
    aten._batch_norm_with_update_functional.default, aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit.no_stats,
    aten.block_diag.default, aten.isin.Tensor_Tensor, aten.multilabel_margin_loss_forward.default,
    aten.mvlgamma.default, aten.native_batch_norm.default, aten.special_spherical_bessel_j0.default,
    aten.log_sigmoid_forward.default,
)  # fmt: skip


def _trilinear(
    one: torch.Tensor,
    two: torch.Tensor,
    three: torch.Tensor,
    expand_one: Sequence[int],
    expand_two: Sequence[int],
    expand_three: Sequence[int],
    summed: Sequence[int],
    unroll: int = 1,
) -> torch.Tensor:
    """The sum, over some dimensions, of the product of three tensors that get dimensions of 1 where they lack them."""
    parts: list[torch.Tensor] = []
    for tensor, places in zip((one, two, three), (expand_one, expand_two, expand_three), strict=True):
        part = tensor
        for place in sorted(places):
            part = part.unsqueeze(place)
        parts.append(part)
    return (parts[0] * parts[1] * parts[2]).sum(list(summed))


@functools.cache
def decompositions() -> Mapping[torch._ops.OpOverload, Callable[..., Any]]:
    """Operator → a function of tensors that does the same."""
    return {**{op: decomposition_table[op] for op in _OF_PYTORCH}, aten._trilinear.default: _trilinear}
