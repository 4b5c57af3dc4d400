"""Gated recurrent units on CPU tensors with one product of matrices per step, forward and backward.

PyTorch's kernel for the CPU calls a dozen operators per step, and its backward pass as many again, of which one adds to
the whole gradient of the weights. Here whatever does not depend on the step before is computed for all steps at once.
Values are PyTorch's but for the order of sums. Notation as in :class:`torch.nn.GRU`: gates ``r``, ``z`` and ``n``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

__all__ = ["gated_layers", "takes_gated"]

_DTYPES: Final = (torch.float32, torch.float64)


def takes_gated(args: Sequence[Any]) -> bool:
    """Whether these arguments of ``aten.gru.input`` are taken: batches of sequences, one dtype, fitting shapes."""
    sequence, states, weights, has_biases, layers, _, _, bidirectional, batch_first = args
    if sequence.dim() != 3 or not sequence.numel() or sequence.dtype not in _DTYPES:
        return False
    directions, per_direction = 1 + bidirectional, 4 if has_biases else 2
    if states.dim() != 3 or len(weights) != layers * directions * per_direction:
        return False
    width, size = states.shape[2], sequence.shape[2]
    shapes = [(layers * directions, sequence.shape[0 if batch_first else 1], width)]
    for at in range(layers * directions):
        takes = size if at < directions else directions * width
        shapes += [(3 * width, takes), (3 * width, width), (3 * width,), (3 * width,)][:per_direction]
    given = [states, *weights]
    return all(one.dtype is sequence.dtype and one.shape == shape for one, shape in zip(given, shapes, strict=True))


def gated_layers(
    sequence: torch.Tensor,
    states: torch.Tensor,
    weights: Sequence[torch.Tensor],
    has_biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``aten.gru.input`` where nothing is dropped out: the output and each layer's last state.

    Shapes as in :class:`torch.nn.GRU`. May be differentiated once.
    """
    directions, per_direction = 1 + bidirectional, 4 if has_biases else 2
    data = sequence.transpose(0, 1) if batch_first else sequence
    last: list[torch.Tensor] = []
    for layer in range(layers):
        parts: list[torch.Tensor] = []
        for direction in range(directions):
            at = layer * directions + direction
            own = list(weights[at * per_direction : (at + 1) * per_direction])
            own += [] if has_biases else [own[0].new_zeros(own[0].shape[0]) for _ in range(2)]
            given = data.flip(0) if direction else data
            states_of_all: Any = _Direction.apply(given, states[at], *own)
            last.append(states_of_all[-1])
            parts.append(states_of_all.flip(0) if direction else states_of_all)
        data = parts[0] if directions == 1 else torch.cat(parts, 2)
    return data.transpose(0, 1) if batch_first else data, torch.stack(last)


class _Direction(torch.autograd.Function):
    """One layer in one direction: the states after each step, ``[steps, batch, width]``."""

    @staticmethod
    def forward(
        ctx: Any,
        sequence: torch.Tensor,
        first: torch.Tensor,
        of_input: torch.Tensor,
        of_state: torch.Tensor,
        bias: torch.Tensor,
        bias_of_state: torch.Tensor,
    ) -> torch.Tensor:
        steps, batch, _ = sequence.shape
        width = of_state.shape[1]
        projected = functional.linear(sequence, of_input, bias)
        # ``r`` and ``z``, then ``n``, then what the state adds to ``n`` before ``r`` is multiplied with it.
        gates, news, adds = (sequence.new_empty(steps, batch, size) for size in (2 * width, width, width))
        states = sequence.new_empty(steps + 1, batch, width)
        states[0] = first
        transposed = of_state.t()
        both, before = sequence.new_empty(batch, 3 * width), states[0]
        from_gates, from_new = both.split([2 * width, width], 1)
        for given_gates, given_new, gate, reset, update, new, add, after in zip(
            projected[:, :, : 2 * width].unbind(), projected[:, :, 2 * width :].unbind(), gates.unbind(),
            gates[:, :, :width].unbind(), gates[:, :, width:].unbind(), news.unbind(), adds.unbind(),
            states[1:].unbind(), strict=True,
        ):  # fmt: skip
            torch.addmm(bias_of_state, before, transposed, out=both)
            torch.add(given_gates, from_gates, out=gate).sigmoid_()
            add.copy_(from_new)
            torch.addcmul(given_new, reset, add, out=new).tanh_()
            torch.lerp(new, before, update, out=after)
            before = after
        ctx.save_for_backward(sequence, of_input, of_state, gates, news, adds, states)
        return states[1:]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        sequence, of_input, of_state, gates, news, adds, states = ctx.saved_tensors
        steps, batch, width = news.shape
        reset, update = gates[:, :, :width], gates[:, :, width:]
        rest = 1 - update
        # What the gradient of a step's state is multiplied with, to give those of the sums that the gates are of.
        of_new = rest.addcmul(rest * news, news, value=-1)
        factors = news.new_empty(steps, batch, 3, width)
        torch.mul(of_new * adds, reset * (1 - reset), out=factors[:, :, 0])
        torch.mul(states[:-1] - news, update * rest, out=factors[:, :, 1])
        torch.mul(of_new, reset, out=factors[:, :, 2])
        of_states, sums = torch.empty_like(news), torch.empty_like(factors)
        carried = news.new_zeros(batch, width)
        for given, kept, factor, total, summed in zip(
            gradients[0].flip(0).unbind(), update.flip(0).unbind(), factors.unbind()[::-1], of_states.unbind()[::-1],
            sums.unbind()[::-1], strict=True,
        ):  # fmt: skip
            torch.add(given, carried, out=total)
            torch.mul(factor, total.unsqueeze(1), out=summed)
            carried = torch.addmm(total * kept, summed.view(batch, 3 * width), of_state)
        flat = sums.view(steps * batch, 3 * width)
        weights_of_state, bias_of_state = flat.t() @ states[:-1].reshape(steps * batch, width), flat.sum(0)
        torch.mul(of_new, of_states, out=sums[:, :, 2])
        inputs = sequence.reshape(steps * batch, -1)
        needs = ctx.needs_input_grad
        return (
            (flat @ of_input).view_as(sequence) if needs[0] else None,
            carried,
            flat.t() @ inputs if needs[2] else None,
            weights_of_state,
            flat.sum(0),
            bias_of_state,
        )
