"""Everyday PyTorch on the device: what reads values while a dispatch mode is on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import torchport


class Names(TorchDispatchMode):
    """Notes which operators it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        self.seen.append(str(op))
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("read", "seen"),
    [
        (lambda x: torchport.sync(), []),
        (lambda x: x.sum().item(), ["aten.sum.default", "aten._local_scalar_dense.default"]),
    ],
)
def test_a_mode_sees_nothing_of_a_flush(read: Callable[[torch.Tensor], object], seen: list[str]) -> None:
    for _ in range(3):  # recorded, then followed
        x = torch.arange(3.0, device="port") * 2 + 1
        held = x - 1
        with Names() as names:
            read(x)
        assert names.seen == seen
        assert x.tolist() == [1, 3, 5]
        assert held.tolist() == [0, 2, 4]


def test_aotautograd_watches_the_first_call_with_a_mode() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return (x.to("port") * 2 + 1).sum().cpu()

    assert torch.compile(fn, backend="aot_eager")(torch.ones(3)).item() == 9


class Held(torch.Tensor):
    """A subclass that holds a tensor and calls operators on it."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Held:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)  # type: ignore[attr-defined]
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        return op(*(arg.inner if isinstance(arg, Held) else arg for arg in args), **(kwargs or {}))


@pytest.mark.parametrize("op", [torch.ops.aten.silu_backward.default, torch.ops.aten.mish_backward.default])
def test_operators_on_a_subclass_and_a_tensor_come_to_the_subclass(op: Any) -> None:
    """Also of those that PyTorch would take apart into others and the device does not."""
    x, y = torch.tensor([1.0, -2.0]), torch.tensor([0.5, 3.0])
    expected = op(x, y).tolist()
    x, y = x.to("port"), y.to("port")
    for given in ((Held(x), y), (x, Held(y)), (Held(x), Held(y))):
        assert op(*given).tolist() == pytest.approx(expected, rel=1e-6)


def test_what_a_subclass_of_another_device_makes_here_can_be_used() -> None:
    """As ``to_empty`` makes memory for a sharded module of ``meta``."""
    made = torch.zeros_like(Held(torch.empty(2, 3, device="meta")), device="port")
    flat = made.view(-1)
    flat += 1
    assert (made * 2).tolist() == [[2.0] * 3] * 2
