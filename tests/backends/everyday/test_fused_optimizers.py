"""``fused=True``: one operator that writes several lists of tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torchport

CASES: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.AdamW, {}),
    (torch.optim.Adam, {"amsgrad": True}),
    (torch.optim.Adam, {"lr": torch.tensor(0.01)}),
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (torch.optim.Adagrad, {}),
]


def trained(kind: Any, options: dict[str, Any], device: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2).to(device)
    optimizer = kind(model.parameters(), fused=True, **options)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.arange(6.0).reshape(2, 3).to(device)).square().sum().backward()
        optimizer.step()
    return [parameter.detach().cpu() for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("kind", "options"), CASES, ids=lambda value: value.__name__ if isinstance(value, type) else ",".join(value)
)
def test_fused_optimizers_do_the_same_as_on_the_cpu(kind: Any, options: dict[str, Any]) -> None:
    expected = trained(kind, options, "cpu")
    for at in (torch.device("port"), torchport.device("reference")):
        torch.testing.assert_close(trained(kind, options, at), expected)


def test_a_fused_step_writes_what_autograd_saved() -> None:
    weight = torch.ones(2, device="port", requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1, fused=True)
    kept = (weight * weight).sum()
    weight.grad = torch.ones(2, device="port")
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.backward()
