"""``torchport.mode``: eager computes each op at once and gives the numbers that lazy gives."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import fakes
import pytest
import torch
from everyday_support import counted, needs_counters, ramp, randn, same
from torch import nn

import torchport

pytestmark = needs_counters


@pytest.fixture(autouse=True)
def lazy_again() -> Iterator[None]:
    yield
    torchport.mode("lazy")


def test_each_op_is_computed_at_once_and_nothing_is_pending(device: torch.device) -> None:
    x = ramp(4, device=device)
    with counted() as counts, torchport.mode("eager"):
        y = (x + 1).exp()
        assert torchport.metrics.counter("Flush: eager") >= 2
    assert counts["Execute"] == 2
    assert counts["Flush: sync"] == 0
    with counted() as reading:
        assert y[0].item() == pytest.approx(2.7182817)
    assert reading["Flush"] == 1, "the index of the read"


def test_context_manager_decorator_and_setter(device: torch.device) -> None:
    @torchport.mode("eager")
    def inside() -> str:
        return torchport.mode.current()

    assert torchport.mode.current() == "lazy"
    assert inside() == "eager"
    with torchport.mode("eager"):
        with torchport.mode("lazy"):
            assert torchport.mode.current() == "lazy"
        assert torchport.mode.current() == "eager"
    assert torchport.mode.current() == "lazy"
    torchport.mode("eager")
    assert torchport.mode.current() == "eager"
    with pytest.raises(ZeroDivisionError), torchport.mode("lazy"):
        _ = 1 / 0
    assert torchport.mode.current() == "eager"


def test_an_unknown_mode(device: torch.device) -> None:
    with pytest.raises(torchport.ConfigError, match="'lazy'"):
        torchport.mode("graph")
    assert torchport.mode.current() == "lazy"


def test_the_mode_is_the_threads_own(device: torch.device) -> None:
    seen: list[str] = []
    with torchport.mode("eager"):
        thread = threading.Thread(target=lambda: seen.append(torchport.mode.current()))
        thread.start()
        thread.join()
    assert seen == ["lazy"]


def test_a_configured_mode_is_what_threads_start_in(device: torch.device) -> None:
    seen: list[str] = []
    with torchport.config.override(mode="eager"):
        thread = threading.Thread(target=lambda: seen.append(torchport.mode.current()))
        thread.start()
        thread.join()
    assert seen == ["eager"]


def test_what_is_pending_when_the_mode_changes_is_computed_once(device: torch.device) -> None:
    x = ramp(4, device=device)
    with counted() as counts:
        y = x * 3
        with torchport.mode("eager"):
            z = y + 1
        w = (z + y).sum()
        assert w.item() == 40
    assert counts["Flush: mode"] == 1
    assert counts["Execute"] == 3


def test_the_error_is_raised_by_the_line_that_made_it() -> None:
    failing = fakes.Failing.install(where="execute", op="aten.sin", register_kernels=lambda *_: None)
    x = torch.ones(3).to(failing.device)
    with torchport.mode("eager"):
        y = x.cos()
        with pytest.raises(torchport.ExecutionError) as caught:
            x.sin()
        assert "aten.sin" in str(caught.value)
        assert "test_lazy_mode.py" in str(caught.value)
        assert (y + 1).tolist() == pytest.approx([1.5403023] * 3)


def program(device: torch.device) -> list[Any]:
    torch.manual_seed(7)
    # No bias before the batch norm: its gradient is 0 but for rounding, which AdamW makes a whole step of.
    net = nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.GELU(), nn.Dropout(0.5), nn.Linear(8, 3)).to(
        device
    )
    opt = torch.optim.AdamW(net.parameters(), lr=0.05)
    losses = []
    for step in range(3):
        x = randn(6, 4, device=device, seed=step)
        opt.zero_grad()
        loss = nn.functional.cross_entropy(net(x), torch.arange(6, device=device) % 3)
        loss.backward()
        opt.step()
        x[::2] += torch.rand(4, device=device)
        losses += [loss.detach(), x.sum(), torch.randperm(5, device=device)]
    return [*losses, *net.state_dict().values()]


@pytest.mark.parametrize("how", ["eager", "alternating"])
def test_the_same_numbers_as_lazy(device: torch.device, how: str) -> None:
    expected = program(device)
    if how == "eager":
        with torchport.mode("eager"):
            actual = program(device)
    else:
        names = iter(["eager", "lazy"] * 500)
        hooked = torch.nn.modules.module.register_module_forward_pre_hook(
            lambda *_: torchport.mode(next(names)) and None
        )
        try:
            actual = program(device)
        finally:
            hooked.remove()
    same(actual, expected, rtol=1e-5)


class OwnKernels(fakes.CountingBackend):
    """Has a Dense kernel for ``sin`` and boxed kernels for everything."""

    name = "own_kernels"

    def register_kernels(self, registrar: Any) -> None:
        super().register_kernels(registrar)
        self.calls: list[str] = []

        def sin(x: torchport.TensorData) -> torchport.TensorData:
            self.calls.append("sin")
            assert x.tensor is not None
            return torchport.TensorData(x.device, x.spec, x.tensor.sin())

        registrar.impl("aten::sin", "Dense", sin)


def test_ops_run_through_the_backends_own_kernels_without_compiling() -> None:
    backend = OwnKernels.install()
    with torchport.mode("eager"):
        x = torch.ones(3).to(backend.device)
        with counted() as counts:
            y = (x.sin() * 2).sum()
        assert y.item() == pytest.approx(5.0488, rel=1e-4)
    assert backend.calls == ["sin"]
    assert counts["KernelCall"] == 1
    assert counts["UncachedCompile"] == 0
    assert not backend.executed


class WithoutKernels(fakes.Fake):
    """Has no kernels at all."""

    name = "without_kernels"

    def register_kernels(self, registrar: Any) -> None:
        """None."""


def test_without_kernels_each_op_is_a_cached_computation() -> None:
    backend = WithoutKernels.install()
    with torchport.mode("eager"):
        x = torch.ones(3).to(backend.device)

        def step() -> float:
            return ((x * 1.5) + x).relu().sum().item()

        with counted() as first:
            assert step() == 7.5
        with counted() as again:
            assert step() == 7.5
    assert first["UncachedCompile"] == 4
    assert again["UncachedCompile"] == 0
    assert again["Execute"] == 4


def test_views_and_writes(device: torch.device) -> None:
    def run(use: Callable[[], Any]) -> list[float]:
        with use():
            x = ramp(3, 4, device=device)
            view = x.t()[1:]
            view += 10
            x[0].mul_(2)
            x.data[2, 3] = -1
            return x.flatten().tolist()

    assert run(lambda: torchport.mode("eager")) == run(lambda: torchport.mode("lazy"))


def test_an_index_above_zero() -> None:
    backend = fakes.Fake.install()
    with torchport.mode("eager"):
        x = torch.ones(2, 2, device=backend.device)
        with counted() as counts:
            y = x @ x
        assert counts["Execute"] == 1
    assert (y + 1).sum().item() == 12
