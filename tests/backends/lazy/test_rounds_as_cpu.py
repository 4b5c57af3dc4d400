"""Where an operator takes a number, ``reference`` rounds as the CPU's kernel does, interpreted and as a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest
import torch

import torchport

OPTIMIZERS: Final[dict[str, dict[str, Any]]] = {
    "AdamW": {},
    "Adam": {"weight_decay": 0.1},
    "SGD": {"momentum": 0.9, "weight_decay": 0.1},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Adadelta": {"weight_decay": 0.1},
    "NAdam": {},
    "RAdam": {},
}
CALLS: Final[dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]]] = {
    "add": lambda x, y, z: torch.add(x, y, alpha=0.3),
    "sub": lambda x, y, z: torch.sub(x, y, alpha=0.3),
    "rsub": lambda x, y, z: torch.rsub(x, y, alpha=0.3),
    "addcmul": lambda x, y, z: torch.addcmul(x, y, z, value=0.3),
    "addcdiv": lambda x, y, z: torch.addcdiv(x, y, z, value=0.3),
    "lerp": lambda x, y, z: torch.lerp(x, y, 0.3),
    "broadcast": lambda x, y, z: torch.addcmul(x[:1], y[:, None], z, value=0.3),
    "no dimensions": lambda x, y, z: (torch.add(x, y[0], alpha=0.3), torch.add(x, y.double()[0], alpha=0.3)),
    "two dtypes": lambda x, y, z: (torch.add(x, y.double(), alpha=0.3), torch.addcmul(x.double(), y, z, value=0.3)),
    "two dtypes divided": lambda x, y, z: torch.addcdiv(x.double(), y, z, value=0.3),
    "one element": lambda x, y, z: (torch.add(x, y[:1], alpha=0.3), torch.sub(y[:1], x, alpha=0.3)),
    "one per row": lambda x, y, z: torch.add(x[:1000].view(50, 20), y[:50, None], alpha=0.3),
    "expanded": lambda x, y, z: torch.sub(x[:1000].view(50, 20), y[:50, None].expand(50, 20), alpha=0.3),
    "a number": lambda x, y, z: (torch.add(x, 0.7, alpha=-1.7), torch.add(x, 3, alpha=-1.7)),
    "a number first": lambda x, y, z: torch.add(True, x, alpha=-1.7),  # type: ignore[call-overload]
    "integers": lambda x, y, z: torch.add(x, y.mul(9).int(), alpha=0.3),
    "all without dimensions": lambda x, y, z: torch.addcmul(x[0], y[1], z[2], value=0.3),
    "lists without dimensions": lambda x, y, z: torch._foreach_add([x, y[0]], [y[0], z[0]], alpha=0.3),
    "large": lambda x, y, z: torch.add(x * 1e30, y * 1e20, alpha=1e15),
    "a transposed matrix": lambda x, y, z: torch.add(x[:30].view(5, 6), y[:30].view(6, 5).t(), alpha=0.3),
    "lists": lambda x, y, z: torch._foreach_add([x, z], [y, x], alpha=0.3),
    "lists of numbers": lambda x, y, z: torch._foreach_addcmul([x, y], [y, z], [z, x], [0.3, -0.7]),
}


ON_ITS_OWN: Final = {
    "no dimensions", "one element", "one per row", "expanded", "a number", "a number first", "integers",
    "lists without dimensions",
}  # fmt: skip
"""Where the CPU does not round the last elements of a tensor as it does the others, or the first product."""


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    torchport.use("reference")
    yield
    torchport.sync()


def with_tiers(run: Callable[[str], list[torch.Tensor]]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What a program gives where it is interpreted, and as a graph."""
    found = []
    for tiers in ("auto", "off"):
        with torchport.config.override(tiers=tiers):
            found.append([one.cpu() for one in run("port")])
    return found[0], found[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", CALLS)
def test_numbers(name: str, dtype: torch.dtype) -> None:
    def run(device: str) -> list[torch.Tensor]:
        given = [
            torch.randn(1003, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device) for seed in range(3)
        ]
        made = CALLS[name](*given)
        return [made] if isinstance(made, torch.Tensor) else list(made)

    interpreted, recorded = with_tiers(run)
    as_cpu = dtype is not torch.bfloat16 and name not in ON_ITS_OWN
    for one, other, expected in zip(interpreted, recorded, run("cpu"), strict=True):
        assert one.dtype is expected.dtype
        assert torch.equal(one, other)
        if as_cpu:
            assert torch.equal(one, expected)
        else:
            torch.testing.assert_close(one, expected, rtol=0.02, atol=0.02)  # the CPU's sums round alpha to bfloat16


@pytest.mark.parametrize("tiers", ["auto", "off"])
@pytest.mark.parametrize("name", ["add", "sub", "rsub"])
def test_a_fraction_of_integers_is_refused_as_on_the_cpu(tiers: str, name: str) -> None:
    with torchport.config.override(tiers=tiers):
        for given in (torch.arange(3, device="port"), torch.ones(3, dtype=torch.bool, device="port")):
            with pytest.raises(RuntimeError):
                getattr(torch, name)(given, given, alpha=0.3)


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str, foreach: bool) -> None:
    def trained(device: str) -> list[torch.Tensor]:
        numbers = torch.Generator().manual_seed(0)
        parameters = [torch.randn(37, 13, generator=numbers), torch.randn(13, generator=numbers)]
        parameters = [parameter.to(device).requires_grad_() for parameter in parameters]
        optimizer = getattr(torch.optim, name)(parameters, lr=0.01, foreach=foreach, **OPTIMIZERS[name])
        for _ in range(5):
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape, generator=numbers).to(device)
            optimizer.step()
        return [parameter.detach() for parameter in parameters]

    for found in with_tiers(trained):
        for got, expected in zip(found, trained("cpu"), strict=True):
            assert torch.equal(got, expected)
