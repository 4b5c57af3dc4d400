"""For backends whose data is host memory: run a single operator at once with PyTorch's CPU kernels, without copies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch.utils._pytree import tree_map

from ..core.errors import UnsupportedOp
from ..core.specs import TensorSpec
from .interface import BackendData, BackendDevice, KernelRegistrar, TensorData
from .recurrent import register_recurrent_layers

__all__ = ["computes_at_once", "cpu_attention", "cpu_fallback", "register_attention_at_once", "register_host_kernels"]

aten = torch.ops.aten


def register_host_kernels(registrar: KernelRegistrar) -> None:
    """What a backend gains whose values are :class:`TensorData` and whose compiler knows CPU's own operators."""
    registrar.fallback("Dense", cpu_fallback)
    registrar.impl("aten::scaled_dot_product_attention", "Autograd", cpu_attention)
    register_recurrent_layers(registrar)


def register_attention_at_once(registrar: KernelRegistrar) -> None:
    """What a backend gains whose values share memory with CPU tensors: CPU's attention where it is interpreted at once.

    Written out in full, as in what is compiled, attention is 15 operators more.
    """
    registrar.impl("aten::scaled_dot_product_attention", "Autograd", attention_at_once)


computes_at_once: Final[list[Callable[[int], bool]]] = []
"""Whether the calling thread's operators on a device index are interpreted at once, and nobody notes what they give."""


def attention_at_once(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Attention by CPU's fused operator where it is interpreted at once, not differentiated; else as PyTorch does."""
    differentiated = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    index = query.get_device()
    if not differentiated and any(asked(index) for asked in computes_at_once):
        return cpu_attention(query, key, value, *args, **kwargs)
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, *args, **kwargs)


def cpu_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Attention by CPU's fused operator where CPU eager would take it (``sdp_utils_cpp.cpp``), else as PyTorch does.

    PyTorch chooses attention kernels in C++ for the devices it knows, and writes it out in full for all others.
    """
    shape, of_keys = query.shape, key.shape
    fused = (
        torch.backends.cuda.flash_sdp_enabled()  # ``sdpa_kernel``, on all devices
        and len(shape) == 4
        and query.dtype in _FUSED
        and of_keys == value.shape
        and of_keys[-1] == shape[-1]
        and of_keys[:2] == shape[:2]
        and dropout_p == 0.0
        and not enable_gqa
        and 0 not in shape
        and of_keys[2] > 0
    )
    if attn_mask is not None:
        fused = fused and not is_causal and attn_mask.dim() in (2, 4) and not attn_mask.requires_grad
        fused = fused and attn_mask.dtype in (torch.bool, query.dtype)
    if not fused:
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        zeros = torch.zeros(attn_mask.shape, dtype=query.dtype, device=query.device)
        attn_mask = zeros.masked_fill(~attn_mask, -torch.inf)
    # The kernel steps through memory as if the last dimension were contiguous, and does not check.
    query, key, value = [t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value)]
    if attn_mask is not None and attn_mask.stride(-1) not in (0, 1):
        attn_mask = attn_mask.contiguous()
    out, _ = aten._scaled_dot_product_flash_attention_for_cpu.default(
        query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale
    )
    return out


_FUSED: Final = frozenset({torch.float32, torch.float64, torch.bfloat16})


def cpu_fallback(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A boxed kernel: the operator on CPU, for values that are :class:`TensorData`.

    Give it to ``registrar.fallback("Dense", cpu_fallback)``: it then runs what a graph of static shapes cannot hold,
    such as ``nonzero`` or indexing with a mask. Raises what the CPU kernel raises.
    """
    device = BackendDevice("cpu")

    def to_tensor(value: Any) -> Any:
        if isinstance(value, TensorData):
            return value.tensor
        return torch.device("cpu") if isinstance(value, torch.device) else value

    def to_data(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if value.layout is not torch.strided:
            raise UnsupportedOp(
                f"the result has layout {value.layout}; the device holds strided tensors only", op=str(op)
            )
        return TensorData(device, TensorSpec.of(value), value)

    call_args, call_kwargs = tree_map(
        to_tensor, (list(args), dict(kwargs)), is_leaf=lambda value: isinstance(value, BackendData)
    )
    with torch.no_grad():
        return tree_map(to_data, op(*call_args, **call_kwargs))
