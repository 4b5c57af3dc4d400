"""Operators called on what the program holds while functionalization is switched off, as inside of a ``DTensor``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import torchport

_exclude = torch._C._dispatch_tls_set_dispatch_key_excluded
_KEY = torch._C.DispatchKey.Functionalize


@contextmanager
def _without_functionalization() -> Iterator[None]:
    _exclude(_KEY, True)
    try:
        yield
    finally:
        _exclude(_KEY, False)


def _called(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    aten = torch.ops.aten
    return [
        aten.add.Tensor(x, y),
        aten.add.Tensor(x, 1.5),
        aten.cat.default([x, y]),
        aten.addmm.default(x, x, y, beta=0.5, alpha=2.5),
        aten.pow.Scalar(3.0, x),  # a scalar input before the tensor
    ]


@pytest.mark.parametrize("tiers", ["off", "auto"])
@pytest.mark.parametrize("mode", ["lazy", "eager"])
def test_operators_below_functionalization(mode: str, tiers: str) -> None:
    torchport.use("reference")
    x, y = torch.rand(3, 3), torch.full((3, 3), 2.0)
    expected = _called(x, y)
    with torchport.config.override(tiers=tiers), torchport.mode(mode):
        there = x.to("port"), y.to("port")
        for _ in range(4):  # new, known, remembered, followed
            with _without_functionalization():
                found = _called(*there)
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one.cpu(), other)
            torch.testing.assert_close(
                (there[0] * 2.5 + there[1]).cpu(), x * 2.5 + y
            )  # no scalar input was left behind
