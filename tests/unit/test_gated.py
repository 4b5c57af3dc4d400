"""Gated recurrent units with one product of matrices per step, against PyTorch's kernel for the CPU."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from torchport.backend.gated import gated_layers, takes_gated

BOOLS = (False, True)


def _arguments(bidirectional: bool, bias: bool, batch_first: bool, dtype: torch.dtype = torch.float64) -> list[Any]:
    torch.manual_seed(0)
    layer = torch.nn.GRU(5, 4, 2, bias=bias, batch_first=batch_first, bidirectional=bidirectional).to(dtype)
    sequence = torch.randn(*((3, 7) if batch_first else (7, 3)), 5, dtype=dtype)
    states = torch.randn(2 * (1 + bidirectional), 3, 4, dtype=dtype)
    weights = [weight.detach() for weight in layer._flat_weights if weight is not None]
    return [sequence, states, weights, bias, 2, 0.0, True, bidirectional, batch_first]


def _results(function: Any, arguments: list[Any]) -> list[torch.Tensor]:
    """Both results, and the gradients of input, states and weights."""
    sequence, states, weights, *rest = arguments
    leaves = [one.clone().requires_grad_() for one in (sequence, states, *weights)]
    out, last = function(leaves[0], leaves[1], leaves[2:], *rest)
    return [out, last, *torch.autograd.grad(out.sin().sum() + (2 * last).cos().sum(), leaves)]


@pytest.mark.parametrize("options", list(itertools.product(BOOLS, BOOLS, BOOLS)), ids=str)
def test_values_and_gradients_are_pytorchs(options: tuple[bool, bool, bool]) -> None:
    arguments = _arguments(*options)
    assert takes_gated(arguments)
    wanted = _results(torch.ops.aten.gru.input, arguments)
    for one, other in zip(_results(gated_layers, arguments), wanted, strict=True):
        torch.testing.assert_close(one, other)
        assert one.shape == other.shape


def test_gradients_by_finite_differences() -> None:
    sequence, states, weights, *rest = _arguments(True, True, True)
    leaves = [one.clone().requires_grad_() for one in (sequence, states, *weights)]
    assert torch.autograd.gradcheck(lambda x, h, *w: gated_layers(x, h, w, *rest), leaves, fast_mode=True)


def test_one_gradient_of_two_and_a_backward_twice() -> None:
    sequence, states, weights, *rest = _arguments(False, True, True)
    sequence.requires_grad_()
    out, _ = gated_layers(sequence, states, weights, *rest)
    first, second = (torch.autograd.grad(out.sum(), sequence, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (0, torch.ones(7, 5, dtype=torch.float64)),
        (0, torch.ones(3, 0, 5, dtype=torch.float64)),
        (0, torch.ones(3, 7, 6, dtype=torch.float64)),
        (1, torch.ones(2, 1, 4, dtype=torch.float64)),
        (1, torch.ones(2, 3, 4)),
        (4, 1),
    ],
)
def test_other_arguments_are_left_to_pytorch(at: int, value: Any) -> None:
    """One sequence without a batch, none at all, sizes or dtypes that do not fit: PyTorch has its errors."""
    arguments = _arguments(False, True, True)
    assert takes_gated(arguments)
    arguments[at] = value
    assert not takes_gated(arguments)
