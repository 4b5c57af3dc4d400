"""LSTM, GRU and RNN layers on the device: CPU's values and gradients, as one operator on backends of host memory."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from everyday_support import ON_PORT, counted, everywhere, needs_counters
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

KINDS = ("LSTM", "GRU", "RNN")


def _pair(kind: str, device: torch.device, **options: Any) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    on_cpu = getattr(nn, kind)(5, 7, 2, **options)
    other = getattr(nn, kind)(5, 7, 2, **options)
    other.load_state_dict(on_cpu.state_dict())
    return on_cpu, other.to(device)


def _states(hidden: Any) -> list[torch.Tensor]:
    return list(hidden) if isinstance(hidden, tuple) else [hidden]


def _trained(layer: nn.Module, x: torch.Tensor, lengths: list[int] | None) -> list[torch.Tensor]:
    """Results, and the gradients of the input and of every parameter."""
    x = x.detach().requires_grad_()
    given: Any = x
    if lengths is not None:
        given = pack_padded_sequence(x, torch.tensor(lengths), batch_first=True)
    out, hidden = layer(given)
    if lengths is not None:
        out, _ = pad_packed_sequence(out, batch_first=True)
    states = _states(hidden)
    (out.sin().sum() + sum((2 * state).cos().sum() for state in states)).backward()
    assert x.grad is not None
    return [out, *states, x.grad, *(parameter.grad for parameter in layer.parameters())]  # type: ignore[list-item]


def _assert_equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_layer_has_the_values_and_gradients_of_the_cpu(
    device: torch.device, backend: str, kind: str
) -> None:
    # On the first backend every kind; each of the others compiles each one, which takes long.
    several = itertools.product([False, True], repeat=3) if backend == "reference" else [(True, True, True)]
    x = torch.randn(4, 6, 5, generator=torch.Generator().manual_seed(0))
    for bidirectional, bias, packed in several:
        on_cpu, ours = _pair(kind, device, bidirectional=bidirectional, bias=bias, batch_first=True)
        lengths = [6, 4, 3, 1] if packed else None
        _assert_equal(_trained(ours, x.to(device), lengths), _trained(on_cpu, x, lengths))


@pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")
def test_an_lstm_with_projections_and_the_sequence_first(device: torch.device, backend: str) -> None:
    on_cpu, ours = _pair("LSTM", device, proj_size=3)
    x = torch.randn(6, 4, 5)
    _assert_equal(_trained(ours, x.to(device), None), _trained(on_cpu, x, None))


@everywhere
@pytest.mark.parametrize("kind", KINDS)
def test_inference_with_states_from_before(device: torch.device, kind: str) -> None:
    on_cpu, ours = _pair(kind, device, batch_first=True)
    first, second = torch.randn(2, 3, 5), torch.randn(2, 3, 5)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            _, expected = on_cpu(first)
            _, states = ours(first.to(device))
            out, last = ours(second.to(device), states)
            wanted, wanted_last = on_cpu(second, expected)
            _assert_equal([out, *_states(last)], [wanted, *_states(wanted_last)])


def test_gradients_of_gradients(device: torch.device, backend: str) -> None:
    on_cpu, ours = _pair("GRU", device, batch_first=True)

    def penalised(layer: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
        x = x.detach().requires_grad_()
        out, _ = layer(x)
        (slope,) = torch.autograd.grad(out.sin().sum(), x, create_graph=True)
        slope.square().sum().backward()
        return [parameter.grad for parameter in layer.parameters() if parameter.grad is not None]

    x = torch.randn(2, 3, 5)
    _assert_equal(penalised(ours, x.to(device)), penalised(on_cpu, x))


def test_dropout_between_layers_draws_the_devices_numbers(device: torch.device, backend: str) -> None:
    torch.manual_seed(0)
    layer = nn.LSTM(3, 4, 3, dropout=0.5).to(device)
    x = torch.ones(5, 2, 3, device=device)

    def run(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return layer(x)[0].detach().cpu()

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))
    layer.eval()
    assert torch.equal(run(1), run(2))


def test_a_weight_that_was_written_to_after_the_forward_is_an_error_of_the_backward(
    device: torch.device, backend: str
) -> None:
    for layer, where in zip(_pair("GRU", device, batch_first=True), ("cpu", device), strict=True):
        out, _ = layer(torch.ones(2, 3, 5, device=where))
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


@needs_counters
@pytest.mark.skipif(not ON_PORT, reason="counts computations of the device")
def test_a_layer_is_one_operator_whatever_its_length(device: torch.device, backend: str) -> None:
    layer = nn.LSTM(3, 4, 2, batch_first=True).to(device)
    traced: list[int] = []
    for steps in (4, 40):
        x = torch.ones(2, steps, 3, device=device)
        with counted() as counts, torch.no_grad():
            layer(x)[0].sum().item()
        traced.append(counts["TracedOps"])
    assert traced[0] == traced[1] < 10


def test_states_on_another_device_are_refused(device: torch.device, backend: str) -> None:
    layer = nn.GRU(3, 4).to(device)
    with pytest.raises(RuntimeError, match="device"):
        layer(torch.ones(5, 2, 3, device=device), torch.zeros(1, 2, 4))
