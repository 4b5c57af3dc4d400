"""Views in C++ (native/views.h): steps of earlier views serve again, and where gradients are off autograd notes less.

Each program runs where operators are interpreted at once and where a path is recorded, and is compared with the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_support import compiles, with_libraries
from torch._subclasses.fake_tensor import FakeTensorMode

pytestmark = compiles

ROUNDS = 4  # a step is learned, then found; a path is recorded, then followed
MODES = [torch.enable_grad, torch.no_grad, torch.inference_mode]


@pytest.fixture(params=["at once", "recorded"], autouse=True)
def _tier(request: pytest.FixtureRequest) -> Iterator[None]:
    with with_libraries(tiers="auto" if request.param == "at once" else "off", compile_after=1e9):
        yield


def _image(device: str) -> torch.Tensor:
    return torch.sin(torch.arange(24.0)).reshape(2, 3, 4).to(device)


VIEWS: dict[str, Callable[[torch.Tensor], Any]] = {
    "view": lambda x: x.view(6, -1),
    "transpose": lambda x: x.transpose(0, -1),
    "split": lambda x: x.split(3, dim=2),
    "split evenly": lambda x: x.split(2, dim=-1),
    "split with sizes": lambda x: x.split([1, 3], dim=2),
    "chunk": lambda x: x.chunk(2, dim=2),
    "slice": lambda x: x[:, 1:, ::2],
    "select": lambda x: x[1],
    "unsqueeze": lambda x: x.unsqueeze(1),
    "squeeze": lambda x: x[:, :1].squeeze(1),
    "permute": lambda x: x.permute(2, 0, 1),
    "expand": lambda x: x[:, :1].expand(2, 5, 4),
    "t": lambda x: x[0].t(),
    "unbind": lambda x: x.unbind(1),
    "reshape": lambda x: x.transpose(1, 2)[:, :, :2].reshape(2, 8),
    "of a view": lambda x: x.view(6, 4)[1:5].t().unsqueeze(0),
}


def _all(views: Any) -> list[torch.Tensor]:
    return list(views) if isinstance(views, (tuple, list)) else [views]


def _same(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.shape == expected.shape
    assert got.stride() == expected.stride()
    torch.testing.assert_close(got.cpu(), expected.clone(), rtol=0, atol=0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", VIEWS)
def test_a_view_shows_what_the_cpus_does(name: str, mode: Any) -> None:
    with mode():
        for _ in range(ROUNDS):
            x, y = _image("port"), _image("cpu")
            x, y = x * 2, y * 2
            views = list(zip(_all(VIEWS[name](x)), _all(VIEWS[name](y)), strict=True))
            for got, expected in views:
                _same(got, expected)
                if mode is not torch.inference_mode:
                    assert got._is_view() == expected._is_view()
                    assert got._version == expected._version
                    assert (got._base is x) == (expected._base is y)
                assert got.storage_offset() == expected.storage_offset()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [name for name in VIEWS if name not in ("expand", "reshape")])
def test_a_write_through_a_view_arrives(name: str, mode: Any) -> None:
    with mode():
        for _ in range(ROUNDS):
            x, y = _image("port") * 2, _image("cpu") * 2
            before = None if mode is torch.inference_mode else x._version - y._version  # a new tensor's may not be 0
            for got, expected in zip(_all(VIEWS[name](x)), _all(VIEWS[name](y)), strict=True):
                if torch.is_grad_enabled() and len(_all(VIEWS[name](y))) > 1:
                    got, expected = got.detach(), expected.detach()  # autograd refuses to write one of several views
                got.mul_(3).add_(1)
                expected.mul_(3).add_(1)
            _same(x, y)
            if before is not None:
                assert x._version - y._version == before
            x.add_(1)
            y.add_(1)
            for got, expected in zip(_all(VIEWS[name](x)), _all(VIEWS[name](y)), strict=True):
                _same(got, expected)


@pytest.mark.parametrize("size", [6, 4, 2, 5])
def test_the_same_arguments_give_another_number_of_views(size: int) -> None:
    with torch.no_grad():
        for _ in range(2):
            for n in (size, 9, 3):
                x, y = torch.arange(float(n)).to("port") + 1, torch.arange(float(n)) + 1
                for got, expected in zip(x.split(2), y.split(2), strict=True):
                    _same(got, expected)
                x.split(2)[-1].zero_()
                y.split(2)[-1].zero_()
                _same(x, y)


def test_what_the_cpu_refuses_is_refused_though_the_arguments_are_known() -> None:
    with torch.no_grad():
        for _ in range(ROUNDS):
            _image("port").view(6, 4)
        with pytest.raises(RuntimeError, match=r"shape '\[6, 4\]' is invalid for input of size 5"):
            torch.ones(5, device="port").view(6, 4)
        for _ in range(ROUNDS):
            torch.ones(2, 3, 4, device="port").select(0, 1)
        with pytest.raises(IndexError):
            torch.ones(1, 3, device="port").select(0, 1)


def test_writes_with_gradients_to_a_view_without_are_refused_as_on_the_cpu() -> None:
    said = []
    for device in ("cpu", "port"):
        for _ in range(ROUNDS):
            weight = torch.ones(4, device=device, requires_grad=True)
            x = _image(device) * 2
            with torch.no_grad():
                view = x.view(6, 4)
            with pytest.raises(RuntimeError) as refused:
                view.mul_(weight)
        said.append(str(refused.value).split(".")[0])
    assert said[0] == said[1]


def test_gradients_go_through_views_that_were_learned_without() -> None:
    def gradient(device: str) -> torch.Tensor:
        x = _image(device)
        with torch.no_grad():
            x.view(6, 4).t()
        x.requires_grad_()
        y = x * 1
        y.view(6, 4).t()[1:].mul_(y.detach().clone().view(6, 4).t()[1:])
        (y.transpose(0, 1)[1] * y.split(2, dim=2)[1].sum()).sum().backward()
        assert x.grad is not None
        return x.grad

    for _ in range(ROUNDS):
        torch.testing.assert_close(gradient("port").cpu(), gradient("cpu"))


def test_forward_gradients_go_through_views_where_gradients_are_off() -> None:
    def tangent(device: str) -> Any:
        with torch.no_grad(), torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(_image(device), _image(device) * 3)
            return torch.autograd.forward_ad.unpack_dual(dual.view(6, 4).t() * 2).tangent

    with torch.no_grad():
        for _ in range(ROUNDS):
            _image("port").view(6, 4).t()
    torch.testing.assert_close(tangent("port").cpu(), tangent("cpu"))


def _replayed(device: str) -> list[Any]:
    """What is asked of the functions that take a view again, of views where gradients are off."""
    x = _image(device).view(6, 4) * 2
    with torch.no_grad():
        part = x[1:4]
        turned, halves = part.t(), part.split(2, dim=1)
    mixed = part.t()[1:]  # a view with gradients of one without
    other = torch.arange(24.0).view(6, 4).to(device)
    views: list[Any] = [part, turned, halves[1], mixed]
    again = [view._view_func(other) for view in views]
    with torch.no_grad(), torch.autograd._force_original_view_tracking(True):
        tracked: Any = x[1:4]
        again.append(tracked._view_func(other))
    fake = [FakeTensorMode().from_tensor(view) for view in (part, turned, mixed)]
    shown = [(tuple(one.shape), one.stride(), one.storage_offset()) for one in fake]
    return [*(one.detach().cpu().tolist() for one in again), *shown]


def test_a_view_can_be_taken_again_of_another_base() -> None:
    for _ in range(ROUNDS):
        assert _replayed("port") == _replayed("cpu")


def test_a_long_way_of_views_is_gone_and_forgotten() -> None:
    with torch.no_grad():
        x = torch.arange(6.0).to("port") * 2
        view: Any = x
        for _ in range(300):
            view = view.view(2, 3).view(6)
    assert view._base is x
    torch.testing.assert_close(view._view_func(x + 1).cpu(), torch.arange(6.0) * 2 + 1)
    del view


def test_the_way_back_from_a_view_without_gradients_is_refused() -> None:
    for _ in range(ROUNDS):
        x = _image("port") * 2
        seen: Any = x.view(6, 4).t()
        torch.testing.assert_close(seen._rev_view_func_unsafe(seen).cpu(), x.cpu())
        with torch.no_grad():
            view: Any = x.view(6, 4).t()
    with pytest.raises(NotImplementedError, match="take it where they are on"):
        view._rev_view_func_unsafe(view)


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_a_compiler_takes_views_that_were_taken_without_gradients(compiler: str) -> None:
    def program(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.mul_(3)
        return a + 1 + b.t()

    def said(device: str) -> list[Any]:
        torch._dynamo.reset()
        x = _image(device).view(6, 4) * 2
        with torch.no_grad():
            made = torch.compile(program, backend=compiler)(x[1:4], x[2:5].t())
        return [x.cpu(), made.cpu()]

    expected = said("cpu")
    for _ in range(ROUNDS):
        for got, one in zip(said("port"), expected, strict=True):
            torch.testing.assert_close(got, one)


def test_forward_gradients_come_later_to_views_that_were_taken_without() -> None:
    def tangents(device: str) -> list[Any]:
        said: list[Any] = []
        with torch.no_grad(), torch.autograd.forward_ad.dual_level():
            for part, whole in ((slice(1, None), False), (slice(1, None), True)):
                x = _image(device).view(-1) * 2
                view = x[part].view(-1) if whole else x[part].split(12)[0]
                target = x if whole else view
                dual = torch.autograd.forward_ad.make_dual(torch.ones_like(target), torch.ones_like(target) * 3)
                target.mul_(dual)
                said += [torch.autograd.forward_ad.unpack_dual(one).tangent.cpu() for one in (x, view)]
        return said

    expected = tangents("cpu")
    for _ in range(ROUNDS):
        torch.testing.assert_close(tangents("port"), expected)


@pytest.mark.parametrize("mode", MODES[:2])
def test_views_of_what_has_no_wrapper(mode: Any) -> None:
    off = torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize)
    with mode():
        for _ in range(ROUNDS):
            sparse = _image("port").view(6, 4).to_sparse()
            torch.testing.assert_close(
                sparse.unsqueeze(0).permute(2, 1, 0).to_dense().cpu(),
                _image("cpu").view(6, 4).unsqueeze(0).permute(2, 1, 0),
            )
            x = _image("port") * 2
            with torch._C._ExcludeDispatchKeyGuard(off):
                view = x.view(-1)
            assert view._is_view()
            view.add_(1)
            torch.testing.assert_close(x.cpu(), _image("cpu") * 2 + 1)


def test_transforms_take_views_of_their_own() -> None:
    for _ in range(ROUNDS):
        for device in ("cpu", "port"):
            x = _image(device)
            with torch.no_grad():
                x.view(6, 4)
        got = torch.vmap(lambda row: row.view(3, 4).t()[1:])(_image("port").view(2, 12))
        _same(got, torch.vmap(lambda row: row.view(3, 4).t()[1:])(_image("cpu").view(2, 12)))


STEPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "flat": lambda x: x.reshape(-1) if x.is_contiguous() else x,
    "t": lambda x: x.transpose(0, -1),
    "tail": lambda x: x[1:] if x.shape[0] > 1 else x,
    "even": lambda x: x[..., ::2],
    "last": lambda x: x.select(-1, -1) if x.dim() > 1 else x,
    "half": lambda x: x.split(max(x.shape[0] // 2, 1))[-1],
    "one more": lambda x: x.unsqueeze(-1),
    "turned": lambda x: x.permute(*reversed(range(x.dim()))),
    "write": lambda x: x.mul_(2),
    "new": lambda x: x + 1,
}


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=8), st.sampled_from(range(len(MODES))))
def test_any_chain_of_views_and_writes(names: list[str], mode: int) -> None:
    with MODES[mode]():
        for _ in range(3):
            seen: list[list[torch.Tensor]] = []
            for device in ("port", "cpu"):
                x = _image(device)
                chain = [x]
                for name in names:
                    x = STEPS[name](x)
                    chain.append(x)
                seen.append(chain)
            for got, expected in zip(*seen, strict=True):
                _same(got, expected)
