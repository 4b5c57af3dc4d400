"""Results of operators at once that Python has not seen: C++ holds their values, until somebody asks (native/unseen.h).

Each way to ask is the first thing that is done with a new result.
"""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from native_support import compiles, said_without_and_with, with_libraries
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import torchport
from torchport.core import metrics
from torchport.trace.handle import LazyTensor
from torchport.trace.wrapping import inner_of, unwrap

pytestmark = compiles


@pytest.fixture(autouse=True)
def _interpreted() -> Iterator[None]:
    with with_libraries(compile_after=1e9):  # nothing is recorded
        yield


def _new(device: str) -> torch.Tensor:
    """A result that nothing has been done with."""
    x = torch.sin(torch.arange(12.0)).reshape(3, 4).to(device)
    for _ in range(3):  # the first operator of a round goes to Python
        y = (x + 1) * 2
    return y


def _is_unseen(tensor: torch.Tensor) -> bool:
    """Whether Python has not seen a wrapper's handle. From now on there is a Python object of it."""
    return type(torch._from_functional_tensor(tensor)) is torch.Tensor


def _doubled(x: torch.Tensor) -> torch.Tensor:
    return x.cpu().mul(2).to(x.device)


@torch.library.custom_op("torchport_unseen::doubled", mutates_args=())
def _custom(x: torch.Tensor) -> torch.Tensor:
    return _doubled(x)


@torch.library.custom_op("torchport_unseen::written", mutates_args=("x",))
def _writing(x: torch.Tensor) -> None:
    x.add_(1)


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return 2 * ctx.saved_tensors[0] * grad


def _gradient(of: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    leaf = x.requires_grad_()
    of(leaf).sum().backward()
    assert leaf.grad is not None
    return leaf.grad


class _Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for one in args:
            if isinstance(one, torch.Tensor) and one.device.type == "port":
                self.names.append(type(unwrap(one)).__name__)
        return func(*args, **(kwargs or {}))


def _under_a_mode(x: torch.Tensor) -> torch.Tensor:
    with _Names() as mode:
        y = x.exp() + 1
    if x.device.type == "port":
        assert set(mode.names) == {LazyTensor.__name__}
    return y


def _written_below(x: torch.Tensor) -> torch.Tensor:
    _writing(x)
    return x


def _saved(x: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file)


def _through_list(x: torch.Tensor) -> torch.Tensor:
    return torch._foreach_add([x, x], 1.0)[1]


def _as_out(x: torch.Tensor) -> torch.Tensor:
    torch.add(x, 1, out=x)
    return x


def _indexed(x: torch.Tensor) -> torch.Tensor:
    return x[torch.tensor([2, 0], device=x.device)]


def _elsewhere(x: torch.Tensor) -> torch.Tensor:
    made: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: made.append((x - 1).cpu()))
    thread.start()
    thread.join()
    return made[0]


def _with_numbers(x: torch.Tensor) -> torch.Tensor:
    return torch.tensor([float(x.sum()), float(x[1, 2]), *x.flatten().tolist()])


WAYS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cpu": lambda x: x.cpu(),
    "numbers": _with_numbers,
    "numpy": lambda x: torch.from_numpy(np.asarray(x.cpu())),
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "save": _saved,
    "data": lambda x: x.data,
    "detach": lambda x: x.detach(),
    "clone": lambda x: x.clone(),
    "parameter": lambda x: torch.nn.Parameter(x).detach(),
    "half": lambda x: x.half(),
    "sparse": lambda x: x.to_sparse().to_dense(),
    "foreach": _through_list,
    "out": _as_out,
    "index": _indexed,
    "custom": _custom,
    "custom that writes": _written_below,
    "autograd function": lambda x: _gradient(_Square.apply, x),
    "vmap": lambda x: torch.vmap(lambda row: row.sum() + row)(x),
    "grad": lambda x: torch.func.grad(lambda y: (y * y).sum())(x),
    "jvp": lambda x: torch.func.jvp(torch.sin, (x,), (x,))[1],
    "mode": _under_a_mode,
    "thread": _elsewhere,
    "checkpoint": lambda x: _gradient(lambda y: checkpoint(torch.exp, y, use_reentrant=False), x),
    "as_strided": lambda x: x.as_strided((2, 2), (4, 1), 1),
    "write through a view": lambda x: x.t()[1:].mul_(3)._base,  # type: ignore[return-value, dict-item]
    "set_": lambda x: torch.empty(0, device=x.device).set_(x),
    "inference": torch.inference_mode()(lambda x: x.view(-1)[1:] + 1),
    "sort": lambda x: torch.sort(x, dim=1).values,
    "svd": lambda x: torch.linalg.svdvals(x),
    "where": lambda x: torch.where(x > 0, x, -x),
    "empty like": lambda x: torch.zeros_like(x) + x.new_ones(x.shape),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_whoever_asks_first_gets_the_value(way: str) -> None:
    assert _is_unseen(_new("port"))
    new = _new("port")
    got, expected = WAYS[way](new), WAYS[way](_new("cpu"))
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    assert got.stride() == expected.stride()
    torch.testing.assert_close(got.cpu(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(WAYS[way](_new("port")).cpu(), expected, rtol=1e-6, atol=1e-6)


def test_python_sees_a_handle_with_its_value_and_sees_the_same_one_again() -> None:
    new = _new("port")
    assert _is_unseen(new)
    handle: Any = inner_of(new)
    assert type(handle) is LazyTensor
    assert inner_of(new) is handle
    assert handle.value.spec.shape == (3, 4)
    assert torch._C._dispatch_keys(handle) == torch._C._dispatch_keys(unwrap(torch.ones(2, device="port")))
    torch.testing.assert_close(handle.value.tensor, _new("cpu"))


def test_draws_see_it() -> None:
    for of in (lambda x: torch.bernoulli(x), lambda x: torch.nn.functional.dropout(x, 0.5), torch.rand_like):
        made = []
        for _ in range(4):
            torch.manual_seed(3)
            p = torch.sigmoid(_new("port"))
            made.append(of(p).cpu())  # type: ignore[operator]
        assert all(torch.equal(one, made[0]) for one in made)
        assert made[0].shape == (3, 4)


def test_values_outlive_a_change_of_the_backend() -> None:
    new, expected = _new("port"), _new("cpu")
    torchport.use("inductor")
    try:
        torch.testing.assert_close((new + 1).cpu(), expected + 1)
        torch.testing.assert_close(new.cpu(), expected)
    finally:
        torchport.use("reference")
    torch.testing.assert_close(new.cpu(), expected)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_has_the_values() -> None:
    new, expected = _new("port"), _new("cpu")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if torch.allclose((new + 1).cpu(), expected + 1) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    torch.testing.assert_close(new.cpu(), expected)


def test_nothing_is_kept_of_what_nobody_holds() -> None:
    x = torch.ones(3, device="port") + 1
    gc.collect()
    before = sum(type(one) is LazyTensor for one in gc.get_objects())
    held = [x + k for k in range(50)]
    assert sum(type(one) is LazyTensor for one in gc.get_objects()) <= before + 3  # the first calls' are Python's
    assert [one.cpu()[0].item() for one in held] == [2.0 + k for k in range(50)]
    assert sum(type(one) is LazyTensor for one in gc.get_objects()) <= before + 3  # small copies see none either
    del held
    assert sum(type(one) is LazyTensor for one in gc.get_objects()) <= before


def test_a_write_in_place_finds_that_nobody_else_sees_the_memory() -> None:
    def address(tensor: torch.Tensor) -> int:
        value: Any = inner_of(tensor)
        return value.value.tensor.data_ptr()

    for _ in range(3):
        y = _new("port")
        y.mul_(2)
    before = metrics.counter("InterpretedOps")
    y = _new("port")
    view = y.view(-1)
    y.add_(1)  # somebody sees the memory: a view
    torch.testing.assert_close(view.cpu(), _new("cpu").add_(1).view(-1))
    z = _new("port")
    kept = z.detach()  # another handle of the value
    z.add_(1)
    torch.testing.assert_close(kept.cpu(), _new("cpu").add_(1))
    assert metrics.counter("InterpretedOps") > before
    w = _new("port")
    at = address(w)
    w.add_(1)
    assert address(w) == at  # Python has seen it, and has let it go
    torch.testing.assert_close(w.cpu(), _new("cpu").add_(1))


def test_what_is_called_below_functionalization_gives_wrappers() -> None:
    """PyTorch's C++ calls operators so on what is in a ``DTensor``, and leaves all keys up to ``Functionalize`` out."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize).add(
        torch._C._dispatch_key_parse("DeferredInit")
    ).add(torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode)  # fmt: skip
    for of in (lambda x: x * 2, torch.relu, lambda x: x.t(), lambda x: x[1:], lambda x: x.unsqueeze(0)):
        for _ in range(4):
            x = _new("port")
            with torch._C._ExcludeDispatchKeyGuard(keys):
                made = of(x)
            assert torch._is_functional_tensor(made)
            torch.testing.assert_close((made + 1).cpu(), of(_new("cpu")) + 1)


BESIDE_ANOTHER_LIBRARY = """
import torch, torchport
library = torch._C._dispatch_library("IMPL", "_", "DeferredInit")
library.fallback_fallthrough()
torchport.use("reference")
torchport.config.tiers, torchport.config.compile_after = "auto", 1e9
for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
    with mode():
        x = torch.arange(12.0, device="port").view(3, 4)
        for _ in range(4):
            y = (x + 1).t()[1:].mul_(2).split(2, dim=1)[0] + torch.ones(3, 2, device="port")
            print(type(torch._from_functional_tensor(y)).__name__, y.tolist())
"""


def test_another_library_may_have_the_key() -> None:
    """In a process of its own, before the device is used: then Python sees every handle."""
    without, with_them = said_without_and_with(BESIDE_ANOTHER_LIBRARY)
    assert without == with_them
    assert {line.split()[0] for line in with_them} == {LazyTensor.__name__}


class _Finalizer:
    """Runs an operator on a tensor when it is collected as garbage."""

    def __init__(self, of: Callable[[torch.Tensor], Any], victim: torch.Tensor, said: list[str]) -> None:
        self.me = self
        self.of, self.victim, self.said = of, victim, said

    def __del__(self) -> None:
        try:
            self.of(self.victim)
        except BaseException as error:
            self.said.append(str(error))


@pytest.mark.parametrize("of", [torch.bernoulli, lambda x: x.to(torch.float64)])
def test_a_finalizer_may_see_a_handle_that_is_being_shown(of: Callable[[torch.Tensor], Any]) -> None:
    x = torch.ones(2, device="port")
    for _ in range(4):
        (x - 1).cpu()
        torch.bernoulli(x * 0)
    said: list[str] = []
    gc.collect()
    before = gc.get_threshold()
    gc.disable()
    gc.freeze()
    try:
        for size in range(3, 30):
            x = torch.ones(size, device="port")
            for later in range(1, 10):
                y = x - 1
                _Finalizer(of, y, said)
                gc.set_threshold(gc.get_count()[0] + later, 1_000, 1_000)
                gc.enable()
                drawn = torch.bernoulli(y)
                gc.disable()
                assert drawn.cpu().tolist() == y.cpu().tolist() == [0.0] * size
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
        gc.enable()
    assert said == []
