"""Kernels for operators of others' libraries: in a backend's graphs (``torchport.kernel``), and at once (``Dense``)."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import Fake
from torch import Tensor

import torchport
from torchport import metrics
from torchport.backend.interface import BackendData, KernelRegistrar
from torchport.backend.own_kernels import resolve_operator
from torchport.backend.registrar import registrar_of

_library = torch.library.Library("torchport_kernels", "DEF")
_library.define("axpy(Tensor x, Tensor y, float a=2.0) -> Tensor")
_library.impl("axpy", lambda x, y, a=2.0: x * a + y, "CPU")
torch.library.register_fake("torchport_kernels::axpy", lambda x, y, a=2.0: torch.empty_like(x))
_library.define("halves(Tensor x) -> (Tensor, Tensor)")
_library.impl("halves", lambda x: (x / 2, x / 4), "CompositeExplicitAutograd")
_library.define("apart(Tensor x) -> Tensor")
_library.impl("apart", lambda x: x + 1, "CompositeImplicitAutograd")
_library.define("write(Tensor(a!) x) -> ()")
_library.define("shapeless(Tensor x) -> Tensor")
_library.impl("shapeless", lambda x: x[x > 0], "CPU")


@torch.library.custom_op("torchport_kernels::square", mutates_args=())
def square(x: Tensor) -> Tensor:
    return x * x


@square.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


square.register_autograd(
    lambda ctx, grad: 2 * ctx.saved_tensors[0] * grad,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)

axpy = torch.ops.torchport_kernels.axpy


def _counted(*names: str) -> list[int]:
    return [int(metrics.counter(name)) for name in names]


# -- at Dense ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["axpy", "halves", "square"])
def test_a_dense_kernel_of_a_library_operator_is_called(name: str) -> None:
    """Whether the operator has a kernel for the CPU, a composite's body, or Python code of ``custom_op``."""
    called: list[str] = []

    def kernel(x: BackendData, *args: Any) -> Any:
        called.append(name)
        result = fake.to_device(fake.from_device(x) + 100, x.device)
        return (result, fake.to_device(fake.from_device(x) + 200, x.device)) if name == "halves" else result

    def register(self: Any, registrar: KernelRegistrar) -> None:
        registrar.impl(f"torchport_kernels::{name}", "Dense", kernel)

    fake = Fake.install(register_kernels=register)
    other = Fake.install()
    op = getattr(torch.ops.torchport_kernels, name)

    def call(device: torch.device) -> Tensor:
        x = torch.ones(2, device=device)
        made = op(x, x) if name == "axpy" else op(x)
        return (made[0] if name == "halves" else made).cpu()

    assert call(fake.device).tolist() == [101.0, 101.0]
    assert called == [name]
    expected = call(torch.device("cpu"))
    assert torch.equal(call(other.device), expected), "another backend's tensors go where they went before"
    assert called == [name]


@pytest.mark.parametrize(
    ("op", "says"),
    [
        ("torchport_kernels::apart", "register it at 'Autograd'"),
        ("torchport_kernels::write", "it writes"),
        ("aten::add_.Tensor", "it writes"),
        ("aten::transpose.int", "_copy form"),
        ("aten::linear", "register it at 'Autograd'"),
        ("aten::equal", "which the device does itself"),
    ],
)
def test_a_dense_kernel_that_would_never_be_called_is_refused(op: str, says: str) -> None:
    registrar = registrar_of(Fake.install())
    with pytest.raises(torchport.DispatchError, match=f"(?s)would never be called.*{says}"):
        registrar.impl(op, "Dense", lambda *args, **kwargs: args[0])
    assert registrar.kernel(resolve_operator(op)) is None


# -- in the graph ------------------------------------------------------------------------------------------------------
def _program(x: Tensor) -> Tensor:
    return axpy(torch.sin(x), x, 3.0) * 2


def _expected(x: Tensor, more: float) -> Tensor:
    return (torch.sin(x) * 3 + x + more) * 2


def test_a_kernel_is_part_of_the_graph() -> None:
    fake, other = Fake.install(), Fake.install()

    @torchport.kernel(axpy, backend=fake.name)
    def kernel(x: Tensor, y: Tensor, a: float = 2.0) -> Tensor:
        return x * a + y + 1000

    x = torch.arange(3.0)
    for mode in ("lazy", "eager"):
        with torchport.mode(mode):
            metrics.reset()
            assert torch.allclose(_program(x.to(fake.device)).cpu(), _expected(x, 1000))
            assert _counted("Fallback", "KernelCall") == [0, 0]
            if mode == "lazy":
                assert _counted("Execute") == [1]
    assert torch.allclose(_program(x.to(other.device)).cpu(), _expected(x, 0))


def test_another_kernel_is_another_computation() -> None:
    fake = Fake.install()
    x = torch.arange(3.0, device=fake.device)
    for more in (1.0, 2.0):

        @torchport.kernel(axpy, backend=fake.name)
        def kernel(x: Tensor, y: Tensor, a: float = 2.0, more: float = more) -> Tensor:
            return x * a + y + more

        metrics.reset()
        assert torch.allclose(_program(x).cpu(), _expected(x.cpu(), more))
        assert _counted("UncachedCompile") == [1]


def test_gradients_of_the_operator_hold() -> None:
    fake = Fake.install()

    @torchport.kernel(square, backend=fake.name)
    def kernel(x: Tensor) -> Tensor:
        return x * x + 1

    x = torch.arange(3.0, device=fake.device).requires_grad_()
    metrics.reset()
    result = square(x)
    result.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0.0, 2.0, 4.0]
    assert result.tolist() == [1.0, 2.0, 5.0]
    assert _counted("Fallback", "KernelCall") == [0, 0]


def test_a_kernel_in_torch_compile(fresh_compiler: None) -> None:
    fake = Fake.install()

    @torchport.kernel(axpy, backend=fake.name)
    def kernel(x: Tensor, y: Tensor, a: float = 2.0) -> Tensor:
        return x * a + y + 1000

    x = torch.arange(3.0)
    compiled = torch.compile(_program, backend="torchport", options={"backend": fake.name})
    assert torch.allclose(compiled(x), _expected(x, 1000))
    assert torch.allclose(compiled(x.to(fake.device)).cpu(), _expected(x, 1000))


class _Model(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return _program(x)


def test_a_kernel_in_a_program_file(tmp_path: Path) -> None:
    fake = Fake.install()

    @torchport.kernel(axpy, backend=fake.name)
    def kernel(x: Tensor, y: Tensor, a: float = 2.0) -> Tensor:
        return x * a + y + 1000

    x = torch.arange(3.0)
    lowered = torchport.aot.lower(_Model(), (x,), backend=fake.name)
    lowered.save(tmp_path / "model.pt2")
    (result,) = torchport.runtime.load(tmp_path / "model.pt2").load_method()(x)
    assert torch.allclose(result, _expected(x, 1000))


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="JAX is not installed")
def test_pallas_on_xla(tmp_path: Path) -> None:
    """A Pallas kernel is traced into the graph's StableHLO: the file holds it, and no kernel is needed to load it."""
    import jax
    from jax.experimental import pallas

    @torchport.kernel(axpy, backend="xla")
    def kernel(x: Any, y: Any, a: float = 2.0) -> Any:
        def body(x_ref: Any, y_ref: Any, out: Any) -> None:
            out[...] = x_ref[...] * a + y_ref[...] + 100

        return pallas.pallas_call(body, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x, y)

    x = torch.arange(3.0)
    device = torchport.device("xla")
    metrics.reset()
    assert torch.allclose(_program(x.to(device)).cpu(), _expected(x, 100))
    assert _counted("Execute", "Fallback", "KernelCall") == [1, 0, 0]
    lowered = torchport.aot.lower(_Model(), (x,), backend="xla")
    lowered.save(tmp_path / "model.pt2")
    (result,) = torchport.runtime.load(tmp_path / "model.pt2").load_method()(x)
    assert torch.allclose(result, _expected(x, 100))


def test_a_backend_whose_graphs_hold_no_kernels_runs_it_at_once() -> None:
    fake = Fake.install(holds_kernels=False)
    seen: list[type] = []

    @torchport.kernel(axpy, backend=fake.name)
    def kernel(x: Tensor, y: Tensor, a: float = 2.0) -> Tensor:
        seen.append(type(x))
        return x * a + y + 10

    x = torch.arange(3.0)
    metrics.reset()
    assert torch.allclose(_program(x.to(fake.device)).cpu(), _expected(x, 10))
    assert seen == [Tensor]
    assert _counted("KernelCall", "Fallback") == [1, 0]


def test_a_kernel_needs_a_shape_rule() -> None:
    fake = Fake.install()
    op = torch.ops.torchport_kernels.shapeless
    torchport.kernel(op, backend=fake.name)(lambda x: x)
    with pytest.raises(torchport.UnsupportedOp, match="register_fake"):
        op(torch.ones(2, device=fake.device))


@pytest.mark.parametrize(
    ("op", "says"),
    [
        ("aten::add.Tensor", "PyTorch's own operator"),
        ("torchport_kernels::write", "functional operators only"),
        ("torchport_kernels::missing", "no operator"),
    ],
)
def test_operators_that_cannot_have_a_kernel(op: str, says: str) -> None:
    with pytest.raises(torchport.DispatchError, match=says):
        torchport.kernel(op, backend="reference")
