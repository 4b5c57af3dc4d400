"""Operators PyTorch chooses for accelerators and the CPU does not have, in terms of operators every engine knows.

Each is written on tensors, as in ``torch._decomp``; shape inference runs it on fake tensors and the graph gets its ops.
Formulas follow ``aten/src/ATen/native/cuda/RNN.cu``. ``OTHERWISE`` are operators of the CPU, for backends that do not
have them: attention, of which PyTorch's own decomposition has no backward and another second result, products of
three tensors, of which it has none, the gradient of SiLU, which it writes without ``sigmoid``, ``addcmul``, which it
multiplies by 1, and batch normalisation (:mod:`.batch_norm`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from .batch_norm import BATCH_NORM, BATCH_NORM_BACKWARD

__all__ = ["DECOMPOSE", "OTHERWISE"]

aten = torch.ops.aten


def _gates(gates: Tensor, *biases: Tensor | None) -> Tensor:
    for bias in biases:
        if bias is not None:
            gates = gates + bias
    return gates


def _lstm_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    cx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    i, f, g, o = _gates(input_gates + hidden_gates, input_bias, hidden_bias).chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)


def _lstm_cell_backward(
    grad_hy: Tensor | None, grad_cy: Tensor | None, cx: Tensor, cy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    i, f, g, o = workspace.chunk(4, 1)
    tanh_cy = cy.tanh()
    grad_hy = torch.zeros_like(cx) if grad_hy is None else grad_hy
    grad_o = grad_hy * tanh_cy * o * (1 - o)
    grad_c = grad_hy * o * (1 - tanh_cy * tanh_cy)
    if grad_cy is not None:
        grad_c = grad_c + grad_cy
    grad_i, grad_f, grad_g = grad_c * g * i * (1 - i), grad_c * cx * f * (1 - f), grad_c * i * (1 - g * g)
    grad_gates = torch.cat([grad_i, grad_f, grad_g, grad_o], 1)
    return grad_gates, grad_c * f, grad_gates.sum(0) if has_bias else None


def _gru_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    hx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    ir, iz, inew = _gates(input_gates, input_bias).chunk(3, 1)
    hr, hz, hnew = _gates(hidden_gates, hidden_bias).chunk(3, 1)
    reset, update = (ir + hr).sigmoid(), (iz + hz).sigmoid()
    new = (inew + reset * hnew).tanh()
    return new + update * (hx - new), torch.cat([reset, update, new, hx, hnew], 1)


def _gru_cell_backward(
    grad_hy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    reset, update, new, hx, hnew = workspace.chunk(5, 1)
    grad_update = grad_hy * (hx - new) * (1 - update) * update
    grad_new = grad_hy * (1 - update) * (1 - new * new)
    grad_reset = grad_new * hnew * (1 - reset) * reset
    grad_input = torch.cat([grad_reset, grad_update, grad_new], 1)
    grad_hidden = torch.cat([grad_reset, grad_update, grad_new * reset], 1)
    input_bias = grad_input.sum(0) if has_bias else None
    hidden_bias = grad_hidden.sum(0) if has_bias else None
    return grad_input, grad_hidden, grad_hy * update, input_bias, hidden_bias


def _histc(x: Tensor, bins: int = 100, low: Any = 0, high: Any = 0) -> Tensor:
    """CUDA's ``histc`` takes integers, CPU's does not; programs ask for the former on any accelerator."""
    if x.is_floating_point():
        return aten.histc.default(x, bins, low, high)
    return aten.histc.default(x.to(torch.float64), bins, low, high).to(x.dtype)


def _grouped_mm(
    a: Tensor, b: Tensor, offsets: Tensor | None = None, bias: Tensor | None = None, out_dtype: Any = None
) -> Tensor:
    """One matrix product per group of rows (or columns); where groups end is data, so every group sees all rows.

    A graph of static shapes pays for every group in full; rows of other groups are masked to zero.
    """
    if a.dim() == 3 and b.dim() == 3:
        return torch.bmm(a, b)
    assert offsets is not None
    ragged = a.shape[0] if b.dim() == 3 else a.shape[1] if a.dim() == 2 else b.shape[1]
    position = torch.arange(ragged, device=offsets.device, dtype=offsets.dtype)
    ends = offsets.unsqueeze(1)
    starts = torch.cat([torch.zeros_like(ends[:1]), ends[:-1]])
    member = ((position >= starts) & (position < ends)).to(a.dtype)  # [groups, ragged]
    if a.dim() == 2 and b.dim() == 3:  # rows of a in groups: [rows, k] x [groups, k, n] -> [rows, n]
        return (torch.matmul(a.unsqueeze(0), b) * member.unsqueeze(2)).sum(0)
    if a.dim() == 2:  # the inner dimension in groups: [m, inner] x [inner, n] -> [groups, m, n]
        return torch.matmul(a.unsqueeze(0) * member.unsqueeze(1), b.unsqueeze(0))
    # columns of b in groups: [groups, m, k] x [k, columns] -> [m, columns]
    return (torch.matmul(a, b.unsqueeze(0)) * member.unsqueeze(1)).sum(0)


DECOMPOSE: Final[dict[Any, Callable[..., Any]]] = {
    aten._thnn_fused_lstm_cell.default: _lstm_cell,
    aten._thnn_fused_lstm_cell_backward_impl.default: _lstm_cell_backward,
    aten._thnn_fused_gru_cell.default: _gru_cell,
    aten._thnn_fused_gru_cell_backward.default: _gru_cell_backward,
    aten.histc.default: _histc,
    aten._grouped_mm.default: _grouped_mm,
}


# -- attention --------------------------------------------------------------------------------------------------------
def _scores(query: Tensor, key: Tensor, causal: bool, mask: Tensor | None, scale: float | None) -> Tensor:
    """What softmax is taken of, in float32 at least; ``key`` has the query's heads."""
    factor: Any = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query @ key.transpose(-2, -1) * factor
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(seen.logical_not(), -torch.inf)
    if mask is None:
        return scores
    return scores.masked_fill(mask.logical_not(), -torch.inf) if mask.dtype == torch.bool else scores + mask


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _with_heads(tensor: Tensor, heads: int) -> Tensor:
    """Keys or values of groups of heads, for each head."""
    groups = heads // tensor.shape[1]
    return tensor if groups == 1 else tensor.repeat_interleave(groups, 1)


def _without_heads(grad: Tensor, heads: int) -> Tensor:
    groups = grad.shape[1] // heads
    return grad if groups == 1 else grad.unflatten(1, (heads, groups)).sum(2)


def _weights(scores: Tensor, logsumexp: Tensor) -> Tensor:
    """Softmax; nothing where a query sees no key."""
    return (scores - logsumexp.masked_fill(logsumexp == -torch.inf, 0.0).unsqueeze(-1)).exp()


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    heads = query.shape[1]
    q, k, v = _wide(query), _with_heads(_wide(key), heads), _with_heads(_wide(value), heads)
    scores = _scores(q, k, is_causal, attn_mask, scale)
    logsumexp = scores.logsumexp(-1)
    # Not by the second result, which is seldom used; engines know a softmax when they see one.
    weights = scores.softmax(-1) if attn_mask is None else aten._safe_softmax(scores, -1)
    result = (weights @ v).to(query.dtype)
    # As the CPU's kernel lays them out, since views of the results rely on that.
    order = sorted(range(4), key=lambda d: (-query.stride(d), d))
    result = result.permute(order).contiguous().permute([order.index(d) for d in range(4)])
    return result, logsumexp.transpose(1, 2).contiguous().transpose(1, 2)


def _attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    heads, factor = query.shape[1], query.shape[-1] ** -0.5 if scale is None else scale
    q, k, v = _wide(query), _with_heads(_wide(key), heads), _with_heads(_wide(value), heads)
    grad = _wide(grad_out)
    weights = _weights(_scores(q, k, is_causal, attn_mask, scale), logsumexp)
    grad_weights = grad @ v.transpose(-2, -1) - (grad * _wide(out)).sum(-1, keepdim=True)
    grad_scores = weights * grad_weights * factor
    grads = (
        grad_scores @ k,
        _without_heads(grad_scores.transpose(-2, -1) @ q, key.shape[1]),
        _without_heads(weights.transpose(-2, -1) @ grad, value.shape[1]),
    )
    first, second, third = (one.to(query.dtype).transpose(1, 2).contiguous().transpose(1, 2) for one in grads)
    return first, second, third


def _trilinear(
    one: Tensor,
    two: Tensor,
    three: Tensor,
    expand_one: Sequence[int],
    expand_two: Sequence[int],
    expand_three: Sequence[int],
    summed: Sequence[int],
    unroll: int = 1,
) -> Tensor:
    """The sum, over some dimensions, of the product of three tensors that get dimensions of 1 where they lack them."""
    parts: list[Tensor] = []
    for tensor, places in zip((one, two, three), (expand_one, expand_two, expand_three), strict=True):
        part = tensor
        for place in sorted(places):
            part = part.unsqueeze(place)
        parts.append(part)
    return (parts[0] * parts[1] * parts[2]).sum(list(summed))


def _silu_backward(grad: Tensor, x: Tensor) -> Tensor:
    wide = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
    given, y = grad.to(wide), x.to(wide)
    share = y.sigmoid()
    return (given * share * (1 + y * (1 - share))).to(x.dtype)


def _addcmul(x: Tensor, y: Tensor, z: Tensor, value: Any = 1) -> Tensor:
    return x + (y if value == 1 else value * y) * z


OTHERWISE: Final[dict[Any, Callable[..., Any]]] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
    aten._trilinear.default: _trilinear,
    aten.silu_backward.default: _silu_backward,
    aten.addcmul.default: _addcmul,
    **BATCH_NORM,
    **BATCH_NORM_BACKWARD,
}
"""Instead of PyTorch's core ATen decompositions, for what a backend does not support."""
