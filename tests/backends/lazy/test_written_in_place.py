"""Where operators at once write to the memory that is there, and what the first call of an operator is.

``detach``, ``alias`` and ``Module.to`` give another tensor of the same handle: what an optimizer writes has one holder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from native_support import compiles, said_without_and_with, with_libraries
from torch import nn

import torchport
from torchport.core.config import config
from torchport.core.errors import UnsupportedOp
from torchport.trace.wrapping import inner_of

pytestmark = compiles


@pytest.fixture(params=[True, False], ids=["at once", "recorded"])
def at_once(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether what is new to the program is computed at once, or recorded."""
    with with_libraries(compile_after=1e9), config.override(tiers="auto" if request.param else "off"):
        yield request.param


def _value(tensor: torch.Tensor) -> torch.Tensor:
    handle: Any = inner_of(tensor)
    return handle.value.tensor


def _address(tensor: torch.Tensor) -> int:
    return _value(tensor).data_ptr()


def _program(device: str, changed: Callable[[torch.Tensor], torch.Tensor]) -> list[Any]:
    x = torch.arange(12.0).reshape(3, 4).to(device)
    y = changed(x)
    said: list[Any] = [x._version, y._version, y.requires_grad]
    y.mul_(2)
    said += [x.tolist(), y.tolist(), x._version, y._version]
    x[1].add_(1)
    said += [x.tolist(), y.tolist()]
    y[:, 1:].sub_(3)
    torch._foreach_add_([y], 1)
    said += [x.tolist(), y.tolist()]
    z = changed(x)
    z.t().copy_(torch.ones(4, 3).to(device))
    said += [x.tolist(), y.tolist(), z.tolist()]
    del x, y
    z.neg_()
    return [*said, z.tolist()]


_WAYS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "detach": lambda x: x.detach(),
    "alias": torch.ops.aten.alias.default,
    "data": lambda x: x.data,
    "detach twice": lambda x: x.detach().detach(),
    "parameter": lambda x: nn.Parameter(x).data,
    "as_strided": lambda x: x.detach().as_strided(x.shape, x.stride(), 0),
}


@pytest.mark.parametrize("way", _WAYS)
def test_another_tensor_of_the_same_values(at_once: bool, way: str) -> None:
    assert _program("port", _WAYS[way]) == _program("cpu", _WAYS[way])


def test_autograd_goes_by_the_tensor_that_was_detached(at_once: bool) -> None:
    def program(device: str) -> list[Any]:
        w = torch.arange(1.0, 4.0).to(device).requires_grad_()
        y = w * w
        y.detach().mul_(1)  # saved for its gradient is w, not y
        y.sum().backward()
        assert w.grad is not None
        said = [w.grad.tolist(), y.detach().requires_grad, y.detach().grad_fn]
        z = torch.exp(w)
        z.detach().add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.sum().backward()
        return said

    assert program("port") == program("cpu")


def test_tensors_are_detached_in_inference_mode(at_once: bool) -> None:
    with torch.inference_mode():
        x = torch.ones(2, 2, device="port")
        y = x.detach()
        y.add_(1)
        assert (x.tolist(), y.tolist()) == ([[2, 2], [2, 2]], [[2, 2], [2, 2]])


def _trained(device: str, steps: int = 3) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    _step(model, optimizer, steps)
    return model, optimizer


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    place = next(model.parameters()).device
    for at in range(steps):
        optimizer.zero_grad()
        batch = torch.arange(15.0).reshape(3, 5).sin().add(at).to(place)
        model(batch).square().mean().backward()
        optimizer.step()


def test_an_optimizer_writes_to_the_memory_of_parameters_that_to_has_made() -> None:
    with with_libraries(compile_after=1e9):
        model, optimizer = _trained("port")
        expected, of_cpu = _trained("cpu")
        before = [_address(one) for one in model.parameters()]  # which makes Python's objects of each value
        for _ in range(2):
            _step(model, optimizer)
            _step(expected, of_cpu)
            assert [_address(one) for one in model.parameters()] == before
        for one, other in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(one.cpu(), other)


def _copied(parameter: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(parameter).detach().copy_(parameter.detach())  # the very same value, not copied


_HELD: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "value": _value, "numpy": lambda one: torch.from_numpy(_value(one).numpy()), "copy": _copied,
}  # fmt: skip


@pytest.mark.parametrize("held", _HELD)
def test_a_value_that_somebody_else_holds_is_not_written(held: str) -> None:
    with with_libraries(compile_after=1e9):
        model, optimizer = _trained("port")
        parameter = next(model.parameters())
        expected = parameter.detach().cpu().clone()
        keep = _HELD[held](parameter)
        _step(model, optimizer)
        assert torch.equal(keep.cpu(), expected)
        assert not torch.equal(parameter.detach().cpu(), expected)


def test_views_of_a_parameter_see_what_an_optimizer_writes() -> None:
    with with_libraries(compile_after=1e9):
        model, optimizer = _trained("port")
        parameter = next(model.parameters())
        views = [parameter.detach(), parameter.data, parameter.detach()[1:], parameter.detach().t()]
        _step(model, optimizer)
        now = parameter.detach().cpu()
        for view, expected in zip(views, (now, now, now[1:], now.t()), strict=True):
            assert torch.equal(view.cpu(), expected)


@pytest.mark.parametrize("way", ["detach", "alias", "data", "view"])
def test_a_result_of_another_shape_is_not_given_to_one_of_two_tensors(at_once: bool, way: str) -> None:
    make = {**_WAYS, "view": lambda x: x[1]}[way]
    for begins_with in (torch.arange(12.0).reshape(3, 4), torch.zeros(2, 0)):
        x = begins_with.to("port")
        y = make(x)
        for out in (x, y):
            with pytest.raises(UnsupportedOp, match=r"is a view of shape|shares its memory with another"):
                torch.add(torch.ones(5, device="port"), 1, out=out)
        assert x.tolist() == begins_with.tolist()
        del y, out
        torch.add(torch.ones(5, device="port"), 1, out=x)
        assert x.tolist() == [2.0] * 5


def test_a_result_of_another_layout_is_refused_each_time(at_once: bool) -> None:
    x = torch.ones(3, 4, device="port")
    (x + 1).sum().item()
    y = x * 1
    for _ in range(3):
        with pytest.raises(UnsupportedOp, match="strided"):
            torch.zeros_like(y, layout=torch.sparse_coo)
        with pytest.raises(UnsupportedOp, match="strided"):
            y.new_zeros((2, 2), layout=torch.sparse_csr)
    assert (y + 1).tolist() == [[2.0] * 4] * 3


_INTERRUPTED = """
import warnings; warnings.simplefilter("ignore")
import torch, torchport
from torchport.run import direct
torchport.use("reference")
torchport.config.tiers, torchport.config.compile_after = "auto", 1e9
class Alarm(Exception): pass
x = torch.tensor([0.5, 1.0]).to("port")
(x + 1).sum().item()
y = x * 2
decided = direct._manner
def ring(*_):  # as a signal's handler, which runs wherever Python is
    direct._manner = decided
    raise Alarm
made = []
for call in (torch.erf, torch.neg, lambda z: z.t(), lambda z: z.clone().add_(z), torch.zeros_like):
    direct._manner = ring
    try:
        call(y)
        print("lost")
    except Alarm:
        made.append(call(y))
        print("arrived")
print(*(one.tolist() for one in made))
"""


def test_an_exception_of_a_signal_during_a_first_call_arrives() -> None:
    in_python, in_cpp = said_without_and_with(_INTERRUPTED)
    assert in_python == in_cpp
    assert in_cpp[:-1] == ["arrived"] * 5


_FIRST_CALLS = """
import warnings; warnings.simplefilter("ignore")
import torch, torchport
torchport.use("reference")
torchport.config.tiers, torchport.config.compile_after = "auto", 1e9
x = torch.arange(6.0).reshape(2, 3).to("port")
(x + 1).sum().item()
y = x * 2  # a new round: what follows is computed at once
for call in (
    lambda: torch.zeros_like(y), lambda: torch.ones_like(y, dtype=torch.int64), lambda: torch.full_like(y, 2.5),
    lambda: torch.empty_like(y), lambda: y.new_zeros(2), lambda: y.new_empty_strided((2, 2), (1, 2)),
    lambda: torch.zeros_like(y, device="cpu"), lambda: torch.ones_like(y, device="port:0"),
    lambda: y.t(), lambda: y.unbind(1)[1], lambda: torch._foreach_sqrt([y, y])[1], lambda: y.to(torch.float64),
    lambda: torch.ops.aten.mul.Scalar(y, 1 / 3), lambda: torch.ops.aten.div.Scalar(y, 3.7),
    lambda: torch.cumsum(y, 1), lambda: y.clone().add_(y), lambda: y.argmax(), lambda: torch.where(y > 2, y, x),
):
    made = call()
    print(made.device, made.dtype, tuple(made.shape), made.stride(), made.tolist())
for wrong in (
    lambda: y @ y, lambda: torch.stack([y, y.t()]), lambda: torch.zeros_like(y, dtype="x"), lambda: y.view(5)
):
    for _ in range(2):
        try:
            wrong()
        except Exception as error:
            print(type(error).__name__, str(error).splitlines()[0], len(getattr(error, "__notes__", ())))
"""


def test_the_first_call_of_an_operator_in_a_process() -> None:
    in_python, in_cpp = said_without_and_with(_FIRST_CALLS)
    assert in_python == in_cpp
    assert len(in_cpp) == 18 + 8
    host = _FIRST_CALLS.replace('"port', '"cpu').replace("cpu:0", "cpu").replace('torchport.use("reference")', "")
    (on_cpu, _) = said_without_and_with(host.replace("torch.empty_like(y)", "torch.zeros_like(y)").replace(
        "y.new_empty_strided((2, 2), (1, 2))", "y.new_zeros(2, 2).t()"))  # fmt: skip
    assert [line.replace("port:0", "cpu") for line in in_cpp[:18]] == on_cpu[:18]


def test_numbers_of_derivatives_round_as_in_a_graph() -> None:
    """``mul.Scalar`` and ``div.Scalar``, which programs reach through derivatives of powers only."""
    values = torch.linspace(-3, 3, 1001)
    for op in (torch.ops.aten.mul.Scalar, torch.ops.aten.div.Scalar):
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int32):
            for number in (1 / 3, 3.7, 1e-30, 7):
                x = values.to(dtype).to("port")
                with with_libraries(compile_after=1e9):
                    at_once = op(x, number).cpu()
                with with_libraries(tiers="off"):
                    compiled = op(x, number).cpu()
                assert torch.equal(at_once, compiled), (op, dtype, number)
    torchport.sync()
