"""Operators that are rewritten before the translation, by PyTorch's own decompositions where they serve."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch._decomp import decomposition_table

from torchport.backend.batch_norm import BATCH_NORM

__all__ = ["decompositions"]

aten = torch.ops.aten

_OF_PYTORCH: Final = (
    aten.block_diag.default, aten.isin.Tensor_Tensor, aten.multilabel_margin_loss_forward.default,
    aten.mvlgamma.default, aten.special_spherical_bessel_j0.default,
    aten.log_sigmoid_forward.default,
)  # fmt: skip


@functools.cache
def decompositions() -> Mapping[torch._ops.OpOverload, Callable[..., Any]]:
    """Operator → a function of tensors that does the same."""
    return {op: decomposition_table[op] for op in _OF_PYTORCH} | dict(BATCH_NORM)
