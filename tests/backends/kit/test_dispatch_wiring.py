"""Backends' own kernels on the device: through the dispatcher, each for its own component only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import fakes
import pytest
import torch

import torchport
from torchport import dispatch
from torchport.backend.interface import TensorData
from torchport.backend.registrar import registrar_of
from torchport.core.specs import TensorSpec

aten = torch.ops.aten


def _data(value: torch.Tensor, like: TensorData) -> TensorData:
    return TensorData(like.device, TensorSpec.of(value), value)


def _backend(register: Callable[[Any], None]) -> tuple[Any, torch.device]:
    """A fake backend with the given kernels, and its device."""

    class WithKernels(fakes.Fake):
        def register_kernels(self, registrar: Any) -> None:
            register(registrar)

    backend = WithKernels.install()
    return backend, backend.device


@pytest.fixture
def two() -> Iterator[tuple[torch.device, torch.device]]:
    """Two backends with different Dense kernels for ``sin``: one adds 1, the other 2."""

    def adds(amount: float) -> Callable[[Any], None]:
        def register(registrar: Any) -> None:
            registrar.impl("aten::sin", "Dense", lambda x: _data(x.tensor.sin() + amount, x))

        return register

    (a, first), (b, second) = _backend(adds(1)), _backend(adds(2))
    yield first, second
    registrar_of(a).remove_all()
    registrar_of(b).remove_all()


def test_two_backends_have_different_kernels_for_one_operator(two: tuple[torch.device, torch.device]) -> None:
    first, second = two
    x = torch.tensor([0.0, 0.5])
    torch.testing.assert_close(x.to(first).sin().cpu(), x.sin() + 1)
    torch.testing.assert_close(x.to(second).sin().cpu(), x.sin() + 2)
    torch.testing.assert_close(x.to(torchport.device("reference")).sin().cpu(), x.sin())


def test_a_kernel_is_asked_once_and_remembered(two: tuple[torch.device, torch.device]) -> None:
    first, _ = two
    x = torch.tensor([0.0, 0.5]).to(first)
    x.sin().cpu()
    before = dispatch.default.lookup
    asked: list[Any] = []

    def counting(*args: Any, **kwargs: Any) -> Any:
        asked.append(args)
        return before(*args, **kwargs)

    dispatch.default.lookup = counting  # type: ignore[method-assign]
    try:
        for _ in range(3):
            x.sin().cpu()
    finally:
        del dispatch.default.lookup
    assert asked == []


def test_a_removed_kernel_gives_way_to_the_graph() -> None:
    handles: list[Any] = []
    backend, device = _backend(lambda r: handles.append(r.impl("aten::cos", "Dense", lambda x: _data(x.tensor * 0, x))))
    x = torch.ones(3, device=device)
    assert x.cos().sum().item() == 0
    handles[0].remove()
    torch.testing.assert_close(x.cos().cpu(), torch.ones(3).cos())
    with pytest.raises(torchport.DispatchError):
        handles[0].remove()
    registrar_of(backend).impl(aten.cos.default, "Dense", lambda x: _data(x.tensor * 0 + 7, x))
    assert x.cos().tolist() == [7.0, 7.0, 7.0]


def test_an_autograd_kernel_overrides_the_formula_of_its_backend_alone() -> None:
    class TripleGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.exp()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * 3

    _, own = _backend(lambda r: r.impl("aten::exp", "Autograd", TripleGradient.apply))
    _, other = _backend(lambda r: None)
    for device, expected in ((own, [3.0, 3.0]), (other, torch.ones(2).exp().tolist())):
        x = torch.ones(2, device=device, requires_grad=True)
        y = x.exp()
        torch.testing.assert_close(y.detach().cpu(), torch.ones(2).exp())
        y.sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == pytest.approx(expected)
    y = torch.ones(2, requires_grad=True)
    y.exp().sum().backward()
    assert y.grad is not None
    assert y.grad.tolist() == pytest.approx(torch.ones(2).exp().tolist())


def test_an_autograd_kernel_of_a_composite() -> None:
    class Half(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, *rest: Any) -> torch.Tensor:
            return x * 0.5

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
            return grad * 5, None

    _, own = _backend(lambda r: r.impl("aten::square", "Autograd", Half.apply))
    _, other = _backend(lambda r: None)
    x = torch.full((2,), 4.0, device=own, requires_grad=True)
    y = x.square()
    y.sum().backward()
    assert x.grad is not None
    assert (y.tolist(), x.grad.tolist()) == ([2.0, 2.0], [5.0, 5.0])
    assert torch.full((2,), 4.0, device=other).square().tolist() == [16.0, 16.0]


def test_sparse_kernels_are_each_backends_own() -> None:
    _, first = _backend(lambda r: r.impl("aten::neg", "Sparse", lambda x: ("first", x.device.index)))
    _, second = _backend(lambda r: None)
    router = aten.neg.default
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.SparsePrivateUse1)
    x, y = torch.ones(2, device=first), torch.ones(2, device=second)
    with pytest.raises((RuntimeError, TypeError)):  # the kernel's result is no tensor, so PyTorch refuses it
        router.redispatch(keys, x)
    with pytest.raises(torchport.MissingKernel, match="has no Sparse kernel"):
        router.redispatch(keys, y)


@pytest.mark.parametrize("functionality", ["Sparse", "SparseCsr", "Quantized", "NestedTensor"])
def test_kernels_beside_dense_are_routed_by_device(functionality: str) -> None:
    def adds(amount: float) -> Callable[[Any], Any]:
        return lambda r: r.impl("aten::tan", functionality, lambda x: torch.full_like(x, amount))

    (_, first), (_, second), (_, third) = _backend(adds(1)), _backend(adds(2)), _backend(lambda r: None)
    keys = torch._C.DispatchKeySet(torch._C._dispatch_key_parse(f"{functionality}PrivateUse1"))
    results = [aten.tan.default.redispatch(keys, torch.zeros(2, device=d)).tolist() for d in (first, second)]
    assert results == [[1.0, 1.0], [2.0, 2.0]]
    with pytest.raises(torchport.MissingKernel, match=functionality):
        aten.tan.default.redispatch(keys, torch.zeros(2, device=third))


def test_bad_registrations_leave_everything_as_it_was() -> None:
    errors: list[BaseException] = []

    def register(registrar: Any) -> None:
        bad = [
            ("aten::no_such_op", "Dense", lambda x: x),
            ("aten::sin", "CompositeImplicitAutograd", lambda x: x),
            ("aten::sin", "Nonsense", lambda x: x),
            ("aten::sin", "Dense", lambda: None),
        ]
        for op, key, fn in bad:
            with pytest.raises(torchport.DispatchError) as caught:
                registrar.impl(op, key, fn)
            errors.append(caught.value)
        with pytest.raises(torchport.DispatchError):
            registrar.fallback("Sparse", lambda op, args, kwargs: None)

    _, device = _backend(register)
    torch.testing.assert_close(torch.ones(2, device=device).sin().cpu(), torch.ones(2).sin())
    assert len(errors) == 4


def test_explain_tells_what_the_device_does() -> None:
    text = str(torchport.explain("aten::sin", "port:0"))
    assert "port:0" in text
    assert "capture" in text
