"""Operators PyTorch chooses for accelerators and the CPU does not have, in terms of operators every engine knows.

Each is written on tensors, as in ``torch._decomp``; shape inference runs it on fake tensors and the graph gets its ops.
Formulas follow ``aten/src/ATen/native/cuda/RNN.cu``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

__all__ = ["DECOMPOSE"]

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
