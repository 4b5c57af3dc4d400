"""Operators in place that are interpreted write to memory that nobody else sees, and to no other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from native_support import COMPILER, compiles
from test_property_aliasing import Program, examples, programs, run_often
from torch import nn

import torchport
from torchport import metrics, native
from torchport.core.config import config
from torchport.run import device_runtime, interpreted, worth
from torchport.trace.threads import threads
from torchport.trace.wrapping import unwrap


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All is interpreted, by the C++ libraries where there is a compiler; nothing is known of the program.

    Nothing is worth compiling, so that no operator is recorded because the machine was busy with something else.
    """
    monkeypatch.setattr(worth.costs, "expected", lambda backend, operators: float("inf"))
    torchport.use("reference")
    torch.ones(1, device="port")
    if COMPILER is not None:
        native.build_all([COMPILER])
    with config.override(tiers="auto", compile_workers=0):
        _forget()
        yield
    _forget()


def _forget() -> None:
    torchport.sync()
    runtime: Any = threads.of(0).runtime
    runtime.forget_decisions()


def _address(tensor: torch.Tensor) -> int:
    """Where a value is."""
    return unwrap(tensor).value.tensor.data_ptr()  # type: ignore[union-attr]


def _new(size: int = 300) -> torch.Tensor:
    """A value that an operator has made."""
    return torch.arange(float(size)).to("port") * 2


IN_PLACE: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "number": lambda x, y: x.mul_(3.0),
    "tensor": lambda x, y: x.add_(y),
    "one argument": lambda x, y: x.sqrt_(),
    "list": lambda x, y: torch._foreach_mul_([x], 0.5),
    "list of numbers": lambda x, y: torch._foreach_div_([x], [3.0]),
    "interpolation": lambda x, y: torch._foreach_lerp_([x], [y], 0.1),
    "quotient": lambda x, y: torch._foreach_addcdiv_([x], [y], [y + 1], [0.3]),
}


@compiles
@pytest.mark.parametrize("write", IN_PLACE.values(), ids=IN_PLACE)
def test_a_value_that_nobody_else_has_is_written_to(write: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
    for _ in range(2):  # the first call of an operator is Python's
        write(_new(), _new())
    x = _new()
    at = _address(x)
    write(x, _new())
    assert _address(x) == at
    want, other = torch.arange(300.0) * 2, torch.arange(300.0) * 2
    write(want, other)
    assert torch.equal(x.cpu(), want)


def test_memory_that_is_not_pytorch_s_is_not_written_to() -> None:
    """An engine may hand out the same memory twice, such as a constant's."""
    for _ in range(3):
        array = np.arange(4, dtype=np.float32)
        x = _new(4)
        unwrap(x).value.tensor = torch.from_numpy(array)  # type: ignore[union-attr]
        x.mul_(3.0)
        assert x.tolist() == [0.0, 3.0, 6.0, 9.0]
        assert array.tolist() == [0.0, 1.0, 2.0, 3.0]


def _shared_with_numpy() -> tuple[torch.Tensor, Callable[[], Any]]:
    array = np.arange(300, dtype=np.float32)
    x = torch.from_numpy(array).to("port")
    return x, array.tolist


def _view_of_what_numpy_shares() -> tuple[torch.Tensor, Callable[[], Any]]:
    array = np.arange(300, dtype=np.float32).reshape(10, 30)
    x = torch.from_numpy(array).to("port").t()
    return x, array.tolist


def _read_by_the_host() -> tuple[torch.Tensor, Callable[[], Any]]:
    x = _new()
    host = x.cpu()
    return x, host.tolist


def _array_of_the_host() -> tuple[torch.Tensor, Callable[[], Any]]:
    x = _new()
    array = x.cpu().numpy()
    return x, array.tolist


def _copied() -> tuple[torch.Tensor, Callable[[], Any]]:
    x = _new()
    other = x.clone()
    return x, other.tolist


def _dlpack() -> tuple[torch.Tensor, Callable[[], Any]]:
    x = _new()
    other = torch.from_dlpack(x.cpu())
    return x, other.tolist


SEEN = [_shared_with_numpy, _view_of_what_numpy_shares, _read_by_the_host, _array_of_the_host, _copied, _dlpack]


@pytest.mark.parametrize("make", SEEN)
@pytest.mark.parametrize("write", [lambda x: x.mul_(3.0), lambda x: torch._foreach_mul_([x], 3.0)], ids=["one", "list"])
def test_what_somebody_else_sees_stays(make: Callable[[], Any], write: Callable[[torch.Tensor], Any]) -> None:
    for _ in range(3):
        x, seen = make()
        before, was = seen(), x.cpu()
        write(x)
        assert seen() == before
        assert torch.equal(x.cpu(), was * 3)


def test_what_another_thread_has_pending_keeps_the_value_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_runtime, "is_worth_recording", lambda backend, sights: True)
    with torchport.mode("eager"):
        for _ in range(2):  # the first call of an operator is Python's
            _new(4).mul_(3.0)
    x = _new(4)
    is_pending, is_written = threading.Event(), threading.Event()
    found: list[Any] = []

    def other() -> None:
        for _ in range(4):  # the path becomes one that is recorded
            ((x + 1) * 2).tolist()
        y = (x + 1) * 2
        found.append(unwrap(y).value)  # type: ignore[union-attr]
        is_pending.set()
        assert is_written.wait(60)
        found.append(y.tolist())

    thread = threading.Thread(target=other)
    thread.start()
    assert is_pending.wait(60)
    try:
        with torchport.mode("eager"):
            x.mul_(3.0)
    finally:
        is_written.set()
        thread.join(60)
    assert found == [None, [2.0, 6.0, 10.0, 14.0]]
    assert x.tolist() == [0.0, 6.0, 12.0, 18.0]


def test_views_see_the_write_and_detached_values_do_too() -> None:
    for _ in range(3):
        x = _new(12)
        view, alias = x.view(3, 4).t(), x.detach()
        x.mul_(2.0)
        want = torch.arange(12.0) * 4
        assert torch.equal(alias.cpu(), want)
        assert torch.equal(view.cpu(), want.view(3, 4).t())
        view.add_(1.0)
        assert torch.equal(x.cpu(), want + 1)


def test_a_tensor_saved_for_backward_and_written_to_is_refused_as_on_the_cpu() -> None:
    for _ in range(3):
        leaf = _new(12).requires_grad_()
        x = leaf.exp()
        with torch.no_grad():
            x.mul_(2.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            x.sum().backward()


def test_a_list_that_is_refused_half_way_leaves_every_value() -> None:
    for _ in range(3):
        xs = [_new(4), _new(4)]
        before = [x.tolist() for x in xs]
        with pytest.raises(RuntimeError):
            torch._foreach_add_(xs, [_new(4), _new(3)])
        assert [x.tolist() for x in xs] == before


@given(program=programs, grad=st.booleans())
@examples(60)
def test_interpreted_programs_agree_with_the_cpu(program: Program, grad: bool) -> None:
    run_often(program, grad)


@pytest.mark.slow
@given(program=programs, grad=st.booleans())
@examples(1500)
def test_many_interpreted_programs_agree_with_the_cpu(program: Program, grad: bool) -> None:
    run_often(program, grad)


# -- paths -------------------------------------------------------------------------------------------------------------
def _train(device: str, optimizer: Callable[..., torch.optim.Optimizer], steps: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Linear(8, 2))
    net.to(device)
    made = optimizer(net.parameters())
    for step in range(steps):
        x = (torch.arange(20.0).reshape(4, 5) * 0.1 + step).to(device)
        made.zero_grad()
        net(x).square().mean().backward()
        made.step()
    state = [value for one in made.state.values() for value in one.values() if isinstance(value, torch.Tensor)]
    return [one.detach().cpu() for one in [*net.parameters(), *net.buffers(), *state]]


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "Adam, amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True, weight_decay=0.1),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9, centered=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "one by one": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_interpreted_training_is_that_of_the_compiled_bit_for_bit(
    optimizer: Callable[..., torch.optim.Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    with config.override(tiers="off"):
        want = _train("port", optimizer, 6)
    _forget()
    at_once = _train("port", optimizer, 6)
    monkeypatch.setattr(device_runtime, "is_worth_recording", lambda backend, sights: True)
    _forget()
    before = metrics.counter("InterpretedRun")
    from_paths = _train("port", optimizer, 6)
    assert metrics.counter("InterpretedRun") > before
    for one, other, third in zip(want, at_once, from_paths, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, third)


def test_a_path_writes_to_what_it_made_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    programs_made: list[Any] = []
    make = interpreted.overwriting

    def noted(*args: Any) -> list[Any]:
        programs_made.append(make(*args))
        return programs_made[-1]

    monkeypatch.setattr(interpreted, "overwriting", noted)
    monkeypatch.setattr(device_runtime, "is_worth_recording", lambda backend, sights: True)
    _train("port", OPTIMIZERS["AdamW"], 4)
    names = {form._schema.name for forms in programs_made for form in forms if form is not None}
    assert {"aten::_foreach_addcdiv_", "aten::_foreach_div_", "aten::_foreach_add_"} <= names


def test_after_an_error_a_path_is_run_again_from_its_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was overwritten before the error is made again: values that do not depend on the error are right."""
    monkeypatch.setattr(device_runtime, "is_worth_recording", lambda backend, sights: True)
    table = torch.arange(6.0).reshape(3, 2).to("port")
    for index in (1, 1, 1, 7):
        x = _new(4)
        torchport.sync()
        y = x + 1
        y.mul_(2.0)
        y.add_(1.0)
        z = table.index_select(0, torch.tensor([index]).to("port"))
        y.sub_(3.0)
        if index == 7:
            with pytest.raises((IndexError, RuntimeError)):
                z.tolist()
        else:
            assert z.tolist() == [[2.0, 3.0]]
        assert y.tolist() == [0.0, 4.0, 8.0, 12.0]
