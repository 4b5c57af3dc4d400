"""Bad input on the device: an exception names the operator, the reason and the user's line; all else stays usable."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from typing import Any

import fakes
import pytest
import torch
from everyday_support import ON_PORT, ramp, same

pytestmark = pytest.mark.skipif(not ON_PORT, reason="these errors are the port device's; this run is on the CPU")
THIS_FILE = "test_errors.py"


def caught(action: Callable[[], Any], kind: Any = RuntimeError) -> BaseException:
    with pytest.raises(kind) as info:
        action()
    return info.value


def chain(error: BaseException | None) -> list[BaseException]:
    """The error and everything it was raised from."""
    errors: list[BaseException] = []
    while error is not None:
        errors.append(error)
        error = error.__cause__
    return errors


def says(error: BaseException, *parts: str) -> None:
    """The message holds each part; on failure the whole message is shown."""
    text = "".join(traceback.format_exception_only(error))
    for part in parts:
        assert part in text, f"{part!r} is not in:\n{text}"


def usable(device: torch.device, *others: tuple[torch.Tensor, list[float]]) -> None:
    """New work runs on the device, and older tensors have their values."""
    assert (ramp(3, device=device) + 1).tolist() == [1.0, 2.0, 3.0]
    for tensor, values in others:
        assert tensor.tolist() == values


# -- devices -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "write",
    [
        lambda host, ours: host.add_(ours),
        lambda host, ours: host.masked_fill_(ours.bool(), 3.0),
        lambda host, ours: host.scatter_(0, ours.long(), 1.0),
        lambda host, ours: torch._foreach_add_([host], [ours]),
        lambda host, ours: torch._foreach_addcdiv_([host], [ours], [ours]),
        lambda host, ours: torch.add(ours, ours, out=host),
    ],
    ids=["add_", "masked_fill_", "scatter_", "foreach_add_", "foreach_addcdiv_", "add.out"],
)
def test_writing_to_a_tensor_of_the_cpu(device: torch.device, write: Callable[..., Any]) -> None:
    """PyTorch's functionalization fails an internal assertion here, and asks for a report."""
    host = torch.zeros(3)
    error = caught(lambda: write(host, ramp(3, device=device)))
    says(error, "cpu, which is written to, and port;", ".to('cpu')", THIS_FILE)
    assert host.tolist() == [0.0] * 3
    usable(device)


@pytest.mark.parametrize(
    "action",
    [
        lambda a, b: a + b,
        lambda a, b: torch.matmul(a, b),
        lambda a, b: torch.cat([a, b]),
        lambda a, b: a.add_(b),
        lambda a, b: torch.where(a > 0, a, b),
        lambda a, b: torch.stack([b, a]),
    ],
    ids=["add", "matmul", "cat", "add_", "where", "stack"],
)
@pytest.mark.parametrize("other", ["cpu", "another backend"])
def test_tensors_of_two_devices(device: torch.device, other: str, action: Callable[..., Any]) -> None:
    there = torch.device("cpu") if other == "cpu" else fakes.Fake.install().device
    a, b = ramp(2, device=device) + 1, ramp(2, device=there) + 1
    error = caught(lambda: action(a, b))
    says(error, "device", str(a.device), str(b.device))
    usable(device, (a, [1.0, 2.0]), (b, [1.0, 2.0]))


def test_a_device_error_names_the_operator_and_the_line(device: torch.device) -> None:
    import torchport

    other = fakes.Fake.install().device
    error = caught(lambda: ramp(2, device=device) * ramp(2, device=other), torchport.DeviceMismatch)
    says(error, "aten.mul", THIS_FILE, "same device")


def test_a_copy_between_backends_is_explicit_and_works(device: torch.device) -> None:
    other = fakes.Fake.install().device
    a = ramp(2, device=device) + 1
    b = a.to(other)
    assert b.device == other
    assert (b * 2).tolist() == [2.0, 4.0]
    c = torch.zeros(2, device=device)
    c.copy_(b)
    assert c.tolist() == [1.0, 2.0]
    with torch.autograd.set_multithreading_enabled(False):
        x = ramp(2, device=other).requires_grad_()
        (x.to(device) * 3).sum().backward()
    assert x.grad is not None
    assert x.grad.device == other
    assert x.grad.tolist() == [3.0, 3.0]


def test_training_on_another_index() -> None:
    other = fakes.Fake.install().device
    net = torch.nn.Linear(2, 1).to(other)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        opt.zero_grad()
        loss = net(torch.ones(4, 2, device=other)).square().mean()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert net.weight.device == other


# -- unknown names -----------------------------------------------------------------------------------------------------
def test_unknown_backends_and_ordinals(device: torch.device) -> None:
    import torchport

    for action in (torchport.use, torchport.device, torchport.get_backend):
        error = caught(lambda action=action: action("nosuch"), torchport.BackendNotFound)
        says(error, "nosuch", "reference")
    error = caught(lambda: torchport.device("reference", 9), torchport.TorchportError)
    says(error, "9")
    usable(device)


def test_an_index_nobody_has_asked_for(device: torch.device) -> None:
    error = caught(lambda: torch.ones(2, device="port:77"))
    says(error, "77")
    usable(device)


def test_an_unavailable_backend(device: torch.device) -> None:
    import torchport

    class Absent(fakes.Fake):
        name = f"absent_engine_{device.index}_{id(device)}"

        def is_available(self) -> bool:
            return False

        def unavailable_reason(self) -> str:
            return "install absent-engine"

    torchport.register(Absent)
    for action in (torchport.use, torchport.device, torchport.get_backend):
        error = caught(lambda action=action: action(Absent.name), torchport.BackendUnavailable)
        says(error, "absent_engine", "install absent-engine")
    usable(device)


# -- a backend that fails ----------------------------------------------------------------------------------------------
@pytest.mark.compiled
@pytest.mark.parametrize("where", ["preprocess", "init", "execute"])
def test_a_backend_that_raises(device: torch.device, where: str) -> None:
    import torchport

    backend = fakes.Failing.install(where=where)
    kept = ramp(2, device=backend.device) + 1
    bystander = ramp(2, device=device) + 5
    broken = kept.sin()
    kind = torchport.ExecutionError if where == "execute" else torchport.CompileError
    error = caught(broken.tolist, kind)
    says(error, backend.name, f"the engine broke in {where}")
    assert any(str(e) == f"the engine broke in {where}" for e in chain(error)[1:]), "the engine's error is chained"
    usable(device, (bystander, [5.0, 6.0]))
    del broken
    usable(backend.device, (kept, [1.0, 2.0]))


@pytest.mark.compiled
@pytest.mark.parametrize("where", ["preprocess", "init", "execute"])
def test_an_error_names_the_users_line(where: str) -> None:
    backend = fakes.Failing.install(where=where)
    x = ramp(2, device=backend.device)
    y = x.sin()
    error = caught(y.tolist)
    says(error, THIS_FILE)


@pytest.mark.compiled
@pytest.mark.parametrize("where", ["preprocess", "execute"])
def test_the_value_that_failed_keeps_failing_and_others_do_not(where: str) -> None:
    import torchport

    backend = fakes.Failing.install(where=where)
    x = ramp(2, device=backend.device)
    good, bad = x + 1, x.sin() + 1
    for _ in range(2):
        caught(bad.tolist, torchport.TorchportError)
    del bad
    assert good.tolist() == [1.0, 2.0]
    assert x.tolist() == [0.0, 1.0]


@pytest.mark.compiled
def test_a_failure_in_backward_reaches_the_caller() -> None:
    import torchport

    backend = fakes.Failing.install(where="execute", op="aten.cos")
    x = ramp(2, device=backend.device).requires_grad_()

    def use() -> list[float]:
        x.sin().sum().backward()
        assert x.grad is not None
        return x.grad.tolist()

    caught(use, torchport.TorchportError)
    x.grad = None
    usable(backend.device)


@pytest.mark.compiled
@pytest.mark.parametrize("how", ["count", "dtype", "shape"])
def test_a_backend_that_returns_something_else(device: torch.device, how: str) -> None:
    import torchport

    backend = fakes.WrongResults.install(how=how)
    x = ramp(3, device=backend.device)
    error = caught((x + 1).tolist, torchport.TorchportError)
    says(error, backend.name)
    usable(device)


# -- operators nobody takes --------------------------------------------------------------------------------------------
@pytest.mark.compiled
def test_an_unsupported_operator_falls_back_and_is_counted() -> None:
    import torchport

    backend = fakes.Refusing.install()
    before = torchport.metrics.counter("aten::sin")
    x = ramp(3, device=backend.device)
    with torchport.config.override(fallback="allow"):
        same((x * 2).sin() + 1, (torch.arange(3.0) * 2).sin() + 1)
    assert torchport.metrics.counter("aten::sin") > before
    assert torchport.metrics.counter("Fallback") > 0


def test_an_unsupported_operator_with_fallback_warn() -> None:
    import torchport

    backend = fakes.Refusing.install(op="aten.cos.default")
    x = ramp(3, device=backend.device)
    with torchport.config.override(fallback="warn"), pytest.warns(UserWarning, match="cos"):
        assert x.cos()[0].item() == 1.0


def test_an_unsupported_operator_with_fallback_error() -> None:
    import torchport

    backend = fakes.Refusing.install()
    x = ramp(3, device=backend.device) + 1
    with torchport.config.override(fallback="error"):
        error = caught(lambda: x.sin().tolist(), torchport.UnsupportedOp)
    says(error, "aten.sin", backend.name, "no trigonometry", THIS_FILE)
    usable(backend.device, (x, [1.0, 2.0, 3.0]))


# -- wrong shapes, dtypes and values: PyTorch's own errors -------------------------------------------------------------
def _inverse(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.inv(torch.zeros(2, 2, device=x.device))


def _class_out_of_range(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.nll_loss(x, torch.tensor([0, 9], device=x.device))


WRONG: dict[str, tuple[Callable[[torch.Tensor], Any], Any, str]] = {
    "shapes of add": (lambda x: x + torch.ones(5, device=x.device), RuntimeError, "size"),
    "shapes of matmul": (lambda x: x @ torch.ones(5, 5, device=x.device), RuntimeError, "shape|reduction dim"),
    "shapes of cat": (lambda x: torch.cat([x, torch.ones(2, 9, device=x.device)]), RuntimeError, "size"),
    "view": (lambda x: x.view(7), RuntimeError, "shape"),
    "view of a transposed": (lambda x: x.t().view(6), RuntimeError, "view"),
    "dtype of matmul": (
        lambda x: (x @ torch.ones(3, 2, dtype=torch.int64, device=x.device)).tolist(),
        RuntimeError,
        "dtype",
    ),
    "dtype of index": (lambda x: x[torch.ones(2, device=x.device)], (IndexError, RuntimeError), "long"),
    "dtype of embedding": (lambda x: torch.nn.functional.embedding(x, x), RuntimeError, "indices"),
    "dim": (lambda x: x.sum(dim=5), IndexError, "dimension"),
    "in-place promotion": (lambda x: x.int().add_(0.5), RuntimeError, "can't be cast|promotion"),
    "in-place broadcast": (lambda x: x.add_(torch.ones(4, 2, 3, device=x.device)), RuntimeError, "broadcast"),
    "item of many": (lambda x: x.item(), RuntimeError, "converted to Scalar"),
    "bool of many": (lambda x: bool(x), RuntimeError, "ambiguous"),
    "gradient of integers": (lambda x: x.int().requires_grad_(), RuntimeError, "floating"),
    "gradient of many": (lambda x: x.requires_grad_().mul(2).backward(), RuntimeError, "scalar"),
    "singular matrix": (lambda x: _inverse(x).tolist(), RuntimeError, "singular"),
    "cholesky": (lambda x: torch.linalg.cholesky(-torch.eye(2, device=x.device)).tolist(), RuntimeError, "positive"),
    "bits of floats": (lambda x: torch.bitwise_and(x, x).tolist(), (RuntimeError, NotImplementedError), "bitwise_and"),
    "class out of range": (lambda x: _class_out_of_range(x).item(), (RuntimeError, IndexError), "9|out of bounds"),
    "conv channels": (lambda x: torch.nn.functional.conv1d(x[None], x[None].repeat(1, 2, 1)), RuntimeError, "chan"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_raise_pytorchs_error(device: torch.device, backend: str, name: str) -> None:
    action, kind, part = WRONG[name]
    x = ramp(2, 3, device=device)
    if backend == "xla" and name == "class out of range":  # XLA cannot raise from inside a computation (docs/xla.md)
        assert action(x) != action(x), "the loss is NaN"
        return
    kept = x + 1
    error = caught(lambda: action(x), kind)
    assert re.search(part, str(error), re.IGNORECASE), str(error)
    usable(device, (kept.flatten(), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]))


def test_pytorchs_error_says_what_was_traced_and_where(device: torch.device) -> None:
    x = ramp(2, 3, device=device)
    error = caught(lambda: x + torch.ones(5, device=device))
    text = "\n".join([str(error), *getattr(error, "__notes__", [])])
    assert "aten.add" in text
    assert THIS_FILE in text


def test_wrong_settings_are_refused() -> None:
    import torchport

    error = caught(lambda: setattr(torchport.config, "fallback", "maybe"), torchport.ConfigError)
    says(error, "maybe", "allow")
    assert torchport.config.fallback in {"allow", "warn", "error"}


def test_registering_a_name_twice_is_refused(device: torch.device) -> None:
    import torchport

    class Again(fakes.Fake):
        name = "reference"

    says(caught(lambda: torchport.register(Again), torchport.TorchportError), "reference", "registered already")
    usable(device)


def test_two_handles_of_one_value_survive_an_operator_that_is_refused(device: torch.device) -> None:
    x = torch.rand(2, 3).to(device)
    y = x.detach()
    with pytest.raises(RuntimeError):
        x.matmul(y)
    torch.testing.assert_close(y.cumsum(-1).cpu(), x.cpu().cumsum(-1))


def ints(d: Any) -> torch.Tensor:
    return torch.ones(2, dtype=torch.int64, device=d)


def floats(d: Any) -> torch.Tensor:
    return torch.ones(2, device=d)


CASTS: dict[str, Callable[[Any], Any]] = {
    "int add_ float": lambda d: ints(d).add_(1.5),
    "int mul_ float tensor": lambda d: ints(d).mul_(floats(d)),
    "int div_": lambda d: ints(d).div_(2),
    "int div_ floor": lambda d: ints(d).div_(2, rounding_mode="floor"),
    "int sqrt_": lambda d: ints(d).sqrt_(),
    "int copy_ float": lambda d: ints(d).copy_(floats(d) * 2.5),
    "int32 add_ int64": lambda d: ints(d).int().add_(ints(d)),
    "bool add_ int": lambda d: (ints(d) > 0).add_(1),
    "bool logical_or_ float": lambda d: (ints(d) > 0).logical_or_(floats(d)),
    "float add_ double": lambda d: floats(d).add_(floats(d).double()),
    "half mul_ float": lambda d: floats(d).half().mul_(floats(d)),
    "float lt_": lambda d: floats(d).lt_(3),
    "float add_ complex tensor": lambda d: floats(d).add_(floats(d).to(torch.complex64)),
    "float mul_ complex": lambda d: floats(d).mul_(1j),
    "float pow_ complex": lambda d: floats(d).pow_(1j),
    "float fill_ complex": lambda d: floats(d).fill_(1j),
    "float full_like complex": lambda d: torch.full_like(floats(d), 1j),
    "float eq complex": lambda d: floats(d) == 1j,
    "float add complex": lambda d: floats(d) + 1j,
}


@pytest.mark.parametrize("name", CASTS)
@pytest.mark.parametrize("index", [0, 1])
def test_results_that_do_not_fit_are_refused_where_the_cpu_refuses_them(
    device: torch.device, name: str, index: int
) -> None:
    """At the call, not when the value is read, and never by cutting something off."""
    place = fakes.Fake.install().device if index else device
    try:
        expected = CASTS[name]("cpu")
    except RuntimeError:
        with pytest.raises(
            RuntimeError, match=r"can't be cast|cannot be converted|not supported|Attempting to cast|not p"
        ):
            CASTS[name](place)
    else:
        same(CASTS[name](place), expected)


@pytest.mark.parametrize("write", [torch._foreach_add_, torch._foreach_mul_])
def test_lists_of_results_that_do_not_fit_are_refused(device: torch.device, write: Any) -> None:
    x = ints(device)
    with pytest.raises(RuntimeError, match="can't be cast"):
        write([x, ints(device)], 1.5)
    assert x.tolist() == [1, 1]
