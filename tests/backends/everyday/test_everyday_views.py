"""Everyday PyTorch on the device: views, in-place operations, aliasing both ways, and memory layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from everyday_support import ON_PORT, agree, everywhere, ramp, randn, same

Fn = Callable[[torch.Tensor], torch.Tensor]

VIEWS: dict[str, Fn] = {
    "select": lambda x: x[1],
    "slice": lambda x: x[1:, 1:3],
    "step": lambda x: x[:, ::2],
    "transpose": lambda x: x.t(),
    "permute": lambda x: x.reshape(3, 2, 2).permute(2, 0, 1),
    "view": lambda x: x.view(2, 6),
    "reshape": lambda x: x.reshape(4, 3),
    "flatten": lambda x: x.flatten(),
    "unsqueeze": lambda x: x[:, None],
    "squeeze": lambda x: x[:, None].squeeze(1),
    "diagonal": lambda x: x.diagonal(1),
    "unfold": lambda x: x.unfold(1, 2, 2),
    "as_strided": lambda x: x.as_strided((2, 3), (4, 1), 1),
    "unbind": lambda x: x.unbind(1)[2],
    "split": lambda x: x.split(2)[0],
    "chunk": lambda x: x.chunk(2, 1)[1],
    "narrow": lambda x: x.narrow(0, 1, 2),
    "movedim": lambda x: x.movedim(0, 1),
    "unflatten": lambda x: x.unflatten(1, (2, 2)),
    "view_as": lambda x: x.view_as(torch.empty(12, device=x.device)),
    "view as integers": lambda x: x.view(torch.int32).view(torch.float32)[1],
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "view of a view": lambda x: x.t()[1:].view(3, 3)[:, 1],
    "view of a view of a view": lambda x: x[1:].t().unsqueeze(0)[0, 2:],
    "alias": lambda x: x[:],
    "ellipsis": lambda x: x[...],
}

WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "add_": lambda v: v.add_(1),
    "mul_": lambda v: v.mul_(2),
    "fill_": lambda v: v.fill_(7),
    "zero_": lambda v: v.zero_(),
    "copy_": lambda v: v.copy_(torch.full(v.shape, 3.0, device=v.device)),
    "copy_ from the host": lambda v: v.copy_(torch.full(v.shape, 3.0)),
    "clamp_": lambda v: v.clamp_(2, 5),
    "setitem": lambda v: v.__setitem__(0, -1),
    "augmented": lambda v: v.__iadd__(10),
    "exp_": lambda v: v.div_(10).exp_(),
}


@pytest.mark.parametrize("write", ["add_", "copy_ from the host", "setitem"])
@pytest.mark.parametrize("name", VIEWS)
def test_a_write_to_a_view_changes_the_base(device: torch.device, name: str, write: str) -> None:
    def use(d: torch.device) -> Any:
        x = ramp(3, 4, device=d)
        view = VIEWS[name](x)
        WRITES[write](view)
        return x, view

    agree(use, device, strides=True)


@pytest.mark.parametrize("write", WRITES)
def test_every_write_through_a_slice(device: torch.device, write: str) -> None:
    def use(d: torch.device) -> Any:
        x = ramp(3, 4, device=d) + 0
        WRITES[write](x[:2, 1:])
        return x

    agree(use, device)


@pytest.mark.parametrize("name", VIEWS)
def test_a_write_to_the_base_changes_the_view(device: torch.device, name: str) -> None:
    def use(d: torch.device) -> Any:
        x = ramp(3, 4, device=d)
        view = VIEWS[name](x)
        x.mul_(3)
        seen = view.clone()
        x[1] = 50
        return x, view, seen

    agree(use, device)


@everywhere
def test_aliasing_both_ways_on_every_backend(device: torch.device) -> None:
    def use(d: torch.device) -> Any:
        x = ramp(3, 4, device=d)
        a, b = x.t(), x[1]
        a += 1
        b *= 2
        x[0, 0] = 9
        return x, a, b, x.sum().item()

    agree(use, device)


def test_writes_interleaved_with_reads(device: torch.device) -> None:
    def use(d: torch.device) -> Any:
        x = ramp(3, 4, device=d)
        row, column = x[1], x[:, 2]
        read = []
        for step in range(3):
            row += step
            read.append(column.tolist())
            column -= 1
            read.append(row.sum().item())
        return read, x

    agree(use, device)


def test_two_views_that_overlap(device: torch.device) -> None:
    def use(d: torch.device) -> Any:
        x = ramp(6, device=d)
        left, right = x[:4], x[2:]
        left += right.clone()
        right.copy_(left.flip(0))
        return x, left, right

    agree(use, device)


def test_a_view_outlives_its_base(device: torch.device) -> None:
    def use(d: torch.device) -> Any:
        view = (ramp(3, 4, device=d) + 1).t()[1]
        view *= 2
        return view, view.sum()

    agree(use, device)


def test_in_place_chains_return_the_tensor_itself(device: torch.device) -> None:
    x = ramp(3, device=device)
    y = x
    assert x.add_(1).mul_(2) is x
    x += 1
    assert y is x
    same(y, torch.tensor([3.0, 5.0, 7.0]))


def test_out_arguments(device: torch.device) -> None:
    def use(d: torch.device) -> Any:
        out, base = torch.empty(3, device=d), torch.zeros(2, 3, device=d)
        returned = torch.add(ramp(3, device=d), 1, out=out)
        torch.mul(ramp(3, device=d), 2, out=base[1])
        values, places = torch.empty(0, device=d), torch.empty(0, dtype=torch.int64, device=d)
        torch.max(ramp(2, 3, device=d), 1, out=(values, places))
        return out, returned is out, base, values, places

    agree(use, device)


def test_data_is_an_alias_that_autograd_does_not_see(device: torch.device) -> None:
    def use(d: torch.device) -> Any:
        x = ramp(3, device=d).requires_grad_()
        y = (x * x).sum()
        x.data += 1
        x.data[0] = 10
        y.backward()
        p = torch.nn.Parameter(torch.ones(2, device=d))
        p.data = torch.tensor([5.0, 6.0], device=d)
        return x, x.data, p, p.data.requires_grad

    agree(use, device)


def test_detach_shares_the_value(device: torch.device) -> None:
    def use(d: torch.device) -> Any:
        x = ramp(3, device=d).requires_grad_()
        y = x * 1
        z = y.detach()
        z += 1
        w = x.detach().clone().requires_grad_()
        return y, z, w, z.is_leaf

    agree(use, device)


def test_swapped_and_resized_data(device: torch.device) -> None:
    def use(d: torch.device) -> Any:
        a, b = ramp(2, device=d), ramp(3, device=d) + 5
        a.data, b.data = b.data, a.data
        grown = ramp(2, 2, device=d).resize_(4)
        return a, b, grown, a.shape, torch.zeros(0, device=d).set_(ramp(2, device=d)).shape

    agree(use, device)


LAYOUTS: dict[str, Callable[[torch.device], Any]] = {
    "transpose": lambda d: ramp(3, 4, device=d).t(),
    "permute": lambda d: ramp(2, 3, 4, device=d).permute(2, 0, 1),
    "permute and compute": lambda d: ramp(2, 3, 4, device=d).permute(2, 0, 1) * 2,
    "contiguous": lambda d: ramp(3, 4, device=d).t().contiguous(),
    "clone keeps": lambda d: ramp(3, 4, device=d).t().clone(),
    "clone contiguous": lambda d: ramp(3, 4, device=d).t().clone(memory_format=torch.contiguous_format),
    "expand": lambda d: ramp(3, 1, device=d).expand(3, 4),
    "channels_last": lambda d: ramp(2, 3, 4, 5, device=d).to(memory_format=torch.channels_last),
    "channels_last from the host": lambda d: (
        ramp(2, 3, 4, 5, device="cpu").contiguous(memory_format=torch.channels_last).to(d)
    ),
    "channels_last and compute": lambda d: ramp(2, 3, 4, 5, device=d).to(memory_format=torch.channels_last).relu() + 1,
    "transposed from the host": lambda d: ramp(3, 4, device="cpu").t().to(d),
    "sliced from the host": lambda d: ramp(4, 4, device="cpu")[:, ::2].to(d, copy=True),
    "expanded from the host": lambda d: torch.ones(3, 1).expand(3, 4).to(d, copy=True),
    "empty_like": lambda d: torch.zeros_like(ramp(3, 4, device=d).t()),
    "empty_strided": lambda d: torch.empty_strided((2, 3), (1, 2), device=d).zero_(),
    "sum of mixed layouts": lambda d: ramp(3, 4, device=d).t() + ramp(4, 3, device=d),
    "matmul of transposed": lambda d: ramp(3, 4, device=d).t() @ ramp(3, 2, device=d),
    "diagonal": lambda d: ramp(3, 3, device=d).diagonal(),
    "select": lambda d: ramp(3, 4, device=d)[:, 1],
    "reshape": lambda d: ramp(3, 4, device=d).t().reshape(2, 6),
    "gradient": lambda d: _gradient_of_transposed(d),
}


def _gradient_of_transposed(d: torch.device) -> torch.Tensor:
    x = ramp(3, 4, device=d).t().requires_grad_()
    (x * x).sum().backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("name", LAYOUTS)
def test_strides_are_those_of_the_cpu(device: torch.device, name: str) -> None:
    agree(LAYOUTS[name], device, strides=True)


@pytest.mark.parametrize("name", LAYOUTS)
def test_strides_survive_the_way_back(device: torch.device, name: str) -> None:
    expected = LAYOUTS[name](torch.device("cpu"))
    actual = LAYOUTS[name](device).cpu()
    if "expand" not in name and "sliced" not in name and name not in {"diagonal", "select"}:
        assert actual.stride() == expected.stride()
    same(actual, expected)


@everywhere
def test_channels_last_convolution(device: torch.device) -> None:
    def use(d: torch.device) -> Any:
        torch.manual_seed(3)
        net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU())
        net = net.to(memory_format=torch.channels_last).to(d)
        x = randn(2, 3, 8, 8, device="cpu").to(memory_format=torch.channels_last).to(d)
        assert x.is_contiguous(memory_format=torch.channels_last)
        y = net(x)
        y.square().mean().backward()
        return y, net[0].weight.grad

    agree(use, device, rtol=1e-4, atol=1e-5)


def test_channels_last_layout_of_results(device: torch.device) -> None:
    def use(d: torch.device) -> Any:
        x = randn(2, 3, 8, 8, device=d).to(memory_format=torch.channels_last)
        return torch.nn.functional.max_pool2d(x, 2).stride(), torch.cat([x, x], 1).stride(), x.mean(1).stride()

    agree(use, device)


OVERLAPPING = {
    "an expanded tensor": lambda d: torch.ones(2, 1, device=d).expand(2, 3),
    "a slice of one": lambda d: torch.ones(2, 1, device=d).expand(2, 3)[:, 1:],
    "windows": lambda d: torch.ones(4, device=d).unfold(0, 2, 1),
}


@pytest.mark.parametrize("name", OVERLAPPING)
@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.add_(1),
        lambda x: x.mul_(2.5),
        lambda x: x.copy_(torch.ones(x.shape, device=x.device)),
        lambda x: x.normal_(),
        lambda x: x.uniform_(),
        lambda x: x.bernoulli_(0.5),
        lambda x: torch._foreach_add_([x], 1),
    ],
)
def test_a_write_to_elements_that_share_memory_is_refused(device: torch.device, name: str, write: Any) -> None:
    """As the CPU does, where it notices; what such a write means depends on the order of the elements."""
    if name == "windows" and not ON_PORT:
        pytest.skip("the CPU does not notice")
    with pytest.raises(RuntimeError, match="single memory location"):
        write(OVERLAPPING[name](device))


def test_an_expanded_tensor_can_be_filled(device: torch.device) -> None:
    def run(d: torch.device) -> Any:
        base = ramp(2, 1, device=d)
        shown = base.expand(2, 3)
        shown.fill_(3)
        first = base.clone()
        shown[:1, :2].zero_()
        return first, base, shown, base.expand(3, 2, 2).fill_(7.0)

    agree(run, device)


def test_a_threshold_of_an_expanded_tensor_is_itself(device: torch.device) -> None:
    """It is the same twice as once, so PyTorch lets it write to elements that share memory."""

    def run(d: torch.device) -> Any:
        base = ramp(1, 6, device=d)
        shown = torch.nn.functional.threshold_(base.expand(3, 6), 2.5, 0.5)
        return shown, base

    agree(run, device)


@pytest.mark.parametrize(
    "write",
    [
        lambda a: torch._foreach_add_(a, 1),
        lambda a: torch._foreach_mul_(a, [2.0, 3.0]),
        lambda a: torch._foreach_add_(a, a, alpha=2),
        lambda a: torch._foreach_lerp_(a, [x.clone() for x in a], [0.5, 0.25]),
        lambda a: torch._foreach_zero_(a[:1]) or torch._foreach_add_(a, [1.5, 2.5]),
        lambda a: torch._foreach_tanh_(a),
    ],
)
@pytest.mark.parametrize("same_twice", [False, True])
def test_lists_of_tensors_that_overlap(device: torch.device, write: Any, same_twice: bool) -> None:
    """Each write sees the ones before it."""

    def run(d: torch.device) -> Any:
        base = ramp(4, device=d)
        write([base, base] if same_twice else [base[:3], base[1:]])
        return base

    agree(run, device)


@pytest.mark.parametrize("cut", [lambda: None, lambda: torch.port.synchronize() if ON_PORT else None])  # type: ignore[attr-defined]
def test_a_view_of_a_view_goes_by_the_strides_of_the_first(device: torch.device, cut: Callable[[], None]) -> None:
    """Also when the first view was computed meanwhile: on the device it has no gaps then, but the program sees them."""

    def run(d: torch.device) -> Any:
        base = ramp(2, 4, device=d)
        columns, row, wide = base[:, :2], base[1:, ::2], base[:, :1].expand(2, 3)
        cut()
        columns.t().t().reshape(-1).zero_()  # of a copy: the columns are not in one piece
        row.view(-1).mul_(3)
        views = [columns.t(), columns[1:], row.t(), wide.t(), wide[1:], columns.unsqueeze(0), columns[..., None]]
        cut()
        return base, *views, *(view[:1].transpose(0, -1) for view in views)

    agree(run, device, strides=True)


@pytest.mark.parametrize("detached", [lambda x: x.detach(), lambda x: x.data])
@pytest.mark.parametrize("cut", [lambda x: None, lambda x: x.tolist()], ids=["pending", "computed"])
def test_as_strided_of_a_detached_view_is_right_or_refused(
    device: torch.device, detached: Callable[[torch.Tensor], torch.Tensor], cut: Callable[[torch.Tensor], object]
) -> None:
    """Its offset counts from the start of a base that nothing knows of."""

    def run(d: torch.device) -> Any:
        base = ramp(8, device=d)
        whole, part = detached(base.view(2, 4)), detached(base[1:])
        cut(part)
        turned = detached(base.view(2, 4).t())
        others = turned.as_strided((2, 2), (4, 1), 1), turned.as_strided((4, 2), (2, 1))
        whole = whole.as_strided((2, 2), (4, 1), 2)
        return *others, whole, part.as_strided((2, 2), (1, 2)), base[1:].as_strided((2,), (1,), 2)

    agree(run, device)
    part = detached(ramp(8, device=device)[1:])
    cut(part)
    if not ON_PORT:
        return
    for op in (torch.as_strided, torch.as_strided_copy):
        with pytest.raises(RuntimeError, match=r"not known on this device after detach\(\) or \.data"):
            op(part, (2,), (1,), 2)
    with pytest.raises(RuntimeError, match="mismatch in length of strides and shape"):
        part.as_strided((2,), (4, 1))
    with pytest.raises(RuntimeError, match="not known on this device"):
        torch.as_strided_scatter(part, torch.zeros(2, device=device), (2,), (1,), 2)


@pytest.mark.parametrize("view", [lambda x: x[:, :], lambda x: x.view(-1), lambda x: x.t(), lambda x: x[1:]])
def test_writes_through_as_strided_of_a_view(
    device: torch.device, view: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    def run(d: torch.device) -> Any:
        base = ramp(4, 4, device=d)
        strided = view(base).as_strided((2, 2), (1, 2), 1)
        strided *= 2
        strided[0] += 1
        return base, strided

    agree(run, device)


def test_a_write_through_as_strided_of_a_detached_view_is_right_or_refused(device: torch.device) -> None:
    """Functionalization takes back what is written through ``as_strided`` of no view but the first."""
    base, expected = ramp(4, 4, device=device), ramp(4, 4, device=torch.device("cpu"))
    strided = base.view(16).detach().as_strided((2, 2), (1, 2), 1)
    for write in (lambda: strided.mul_(2), lambda: strided[0].fill_(1), lambda: torch._foreach_add_([strided], 1)):
        if ON_PORT:
            with pytest.raises(RuntimeError, match=r"as_strided\(\) of a detached view"):
                write()
            assert base.tolist() == expected.tolist()
            assert strided.tolist() == expected.as_strided((2, 2), (1, 2), 1).tolist()
        else:
            write()
