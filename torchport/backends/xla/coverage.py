"""Which operators the backend takes: those in the table, on dense tensors of dtypes that XLA has."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from torchport.backend.interface import Support

from .dtypes import JAX_DTYPES
from .ops import TABLE

__all__ = ["decompositions", "supports"]


def _refused_value(value: Any) -> str | None:
    """Why a fake tensor cannot be a value of the backend."""
    if not isinstance(value, torch.Tensor):
        return None
    if value.layout is not torch.strided or value.is_quantized or value.is_nested:
        return f"a tensor is not a plain dense one ({value.layout}, {value.dtype})"
    if value.dtype not in JAX_DTYPES:
        return f"XLA has no dtype {value.dtype}"
    return None


def supports(node: fx.Node) -> Support:
    """Whether a node can be lowered, or why not."""
    answer = TABLE.supports(node)
    if not answer:
        return answer
    for value in (node.meta.get("val"), *(source.meta.get("val") for source in node.all_input_nodes)):
        for leaf in value if isinstance(value, (list, tuple)) else (value,):
            reason = _refused_value(leaf)
            if reason is not None:
                return Support.no(reason)
    return answer


@functools.cache
def decompositions() -> Mapping[Any, Callable[..., Any]]:
    """Operators that are rewritten before they reach the table."""
    from torch._decomp import decomposition_table

    chosen = [torch.ops.aten.grid_sampler_2d.default, torch.ops.aten.upsample_bilinear2d.vec]
    return {op: decomposition_table[op] for op in chosen}
