"""Functions whose writes and views PyTorch's part of torch.compile loses or refuses: right here, compiled or not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.utils._pytree import tree_leaves

import torchport
from torchport.core import releases

pytestmark = [
    pytest.mark.usefixtures("reference"),
    pytest.mark.filterwarnings("error:a computation failed as a whole"),
]


@pytest.mark.parametrize("device", ["cpu", "port"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int64], ids=str)
def test_a_write_to_an_input_without_dimensions(dtype: torch.dtype, device: str) -> None:
    """Dynamo takes a float64 one for a number, and PyTorch drops what is written to it."""

    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return x + y

    compiled = torch.compile(fn, backend="torchport", options={"backend": "reference"})
    for value in (3, 4):
        x, want = (torch.tensor(value, dtype=dtype, device=at) for at in (device, "cpu"))
        y = torch.ones(3, dtype=dtype)
        assert torch.equal(compiled(x, y.to(device)).cpu(), fn(want, y))
        assert torch.equal(x.cpu(), want)


@pytest.mark.filterwarnings("ignore:.*inputs of different dtypes share memory")
@pytest.mark.parametrize("device", ["cpu", "port"])
@pytest.mark.parametrize("shape", [(), (3,)])
def test_an_input_of_another_dtype_is_written(shape: tuple[int, ...], device: str) -> None:
    """AOTAutograd compares elements of two sizes: it takes ``x`` and ``x.imag`` without dimensions for strangers."""

    def fn(x: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        part.copy_(1.5)
        return x.roll(1)

    compiled = torch.compile(fn, backend="torchport", options={"backend": "reference"})
    x, want = (torch.full(shape, 1 + 1j, device=at) for at in (device, "cpu"))
    before = torchport.metrics.counter("NotFollowedByAOTAutograd")
    assert torch.equal(compiled(x, x.imag).cpu(), fn(want, want.imag))
    assert torch.equal(x.cpu(), want)
    assert torchport.metrics.counter("NotFollowedByAOTAutograd") == before + 1


@pytest.mark.parametrize("device", ["cpu", "port"])
def test_an_input_that_is_reshaped_in_place_and_written(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        view = x.view(-1)
        view.unsqueeze_(0)
        view.add_(1)
        return view

    compiled = torch.compile(fn, backend="torchport", options={"backend": "reference"})
    x, want = torch.zeros(2, 2, device=device), torch.zeros(2, 2)
    with pytest.warns(UserWarning, match=r"unsqueeze_\(\) changes the shape of .* in place at .*test_not_followed"):
        result = compiled(x)
    assert torch.equal(result.cpu(), fn(want))
    assert torch.equal(x.cpu(), want)
    torch._dynamo.reset()
    monkeypatch.setattr(torchport.config, "fallback", "error")
    with pytest.raises(Exception, match="give the function clones"):
        compiled(torch.zeros(2, 2, device=device))


@pytest.mark.parametrize("device", ["cpu", "port"])
def test_results_that_are_conjugate_views_of_one_another(device: str) -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x * 2
        return y.conj(), y

    compiled = torch.compile(fn, backend="torchport", options={"backend": "reference"})
    with pytest.warns(UserWarning, match="results of the function are conjugate views of one another"):
        shown, value = compiled(torch.ones(2, dtype=torch.complex64, device=device))
    shown.add_(5j)
    assert value.cpu().tolist() == [2 - 5j, 2 - 5j]


@pytest.mark.parametrize("device", ["cpu", "port"])
def test_a_write_with_a_gradient_to_an_input_that_shares_memory(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fn(weight: torch.Tensor, x: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        first = x[0]
        part.mul_(weight)
        return first

    def called(fn: Callable[..., torch.Tensor], device: str) -> torch.Tensor:
        weight = torch.full((4,), 3.0, device=device, requires_grad=True)
        x = torch.arange(1.0, 5.0, device=device)
        fn(weight, x, x[:]).backward()
        assert weight.grad is not None
        return weight.grad.cpu()

    compiled = torch.compile(fn, backend="torchport", options={"backend": "reference"})
    with pytest.warns(UserWarning, match="inputs share memory, and one is written with gradients on"):
        got = called(compiled, device)
    assert torch.equal(got, called(fn, "cpu"))
    torch._dynamo.reset()
    monkeypatch.setattr(torchport.config, "fallback", "error")
    with pytest.raises(Exception, match=r"write under torch\.no_grad\(\)"):
        called(compiled, device)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_results_that_are_views_of_another_result_where_sizes_vary(requires_grad: bool) -> None:
    """AOTAutograd would take them by their storage offset, and every tensor of the device begins at 0."""

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        y = x * 2
        return y[:], y.tensor_split(2)[1], y[1:].t()

    compiled = torch.compile(fn, backend="torchport", options={"backend": "reference"}, dynamic=True)
    for rows in (4, 6):
        x = torch.arange(2.0 * rows).reshape(rows, 2)
        want = fn(x.clone().requires_grad_(requires_grad))
        got = compiled(x.to("port").requires_grad_(requires_grad))
        for tensors in (got, want):
            tensors[1].detach().add_(100)
        assert all(torch.equal(a.cpu(), b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize(
    ("fn", "match"),
    [
        (lambda x: ((y := (x * 2).t()), y.detach()), "one is detached from the history of another"),
        (lambda x: x.as_strided((2,), (1,), 1) * 2, "counts in the memory that an input of port is a view of"),
    ],
)
def test_views_that_compiled_graphs_do_not_follow(fn: Callable[..., object], match: str) -> None:
    whole = torch.arange(9.0, device="port").reshape(3, 3)
    x = whole[:, 1:].requires_grad_()
    compiled = torch.compile(fn, backend="torchport", options={"backend": "reference"})
    with pytest.warns(UserWarning, match=match):
        got = compiled(x)
    want = fn(torch.arange(9.0).reshape(3, 3)[:, 1:])
    for one, other in zip(tree_leaves(got), tree_leaves(want), strict=True):
        assert torch.equal(one.detach().cpu(), other)


def _gradient(fn: Callable[[torch.Tensor], torch.Tensor], device: str) -> torch.Tensor:
    """That of a leaf, through a function of what was computed from it."""
    leaf = torch.arange(1.0, 5.0, device=device, requires_grad=True)
    fn(leaf * 2).sum().backward()
    assert leaf.grad is not None
    return leaf.grad.cpu()


@pytest.mark.parametrize("device", ["cpu", "port"])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("detached", ["x.data", "x.detach()", "x.view(-1).detach()", "x.view(torch.float32)"])
def test_a_detached_alias_of_an_input_that_gains_history(
    detached: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dynamo and AOTAutograd would take the result of the input again, without the gradient of the write."""
    take = eval(f"lambda x: {detached}")

    def fn(x: torch.Tensor) -> torch.Tensor:
        y = take(x)
        y.mul_(x)
        return y

    compiled = torch.compile(fn, backend="torchport", options={"backend": "reference"})
    with pytest.warns(UserWarning, match=r"a detached tensor at .*test_not_followed\.py:\d+ in fn shares the memory"):
        got = _gradient(compiled, device)
    assert torch.equal(got, _gradient(fn, "cpu"))
    torch._dynamo.reset()
    monkeypatch.setattr(torchport.config, "fallback", "error")
    with pytest.raises(Exception, match="write to a clone"):
        _gradient(compiled, device)


@pytest.mark.parametrize("device", ["cpu", "port"])
def test_what_is_written_by_data_is_not_counted_as_a_change(device: str) -> None:
    """As in eager, the backward of what was computed before takes no notice."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        x.data.mul_(2)
        return x * 3

    compiled = torch.compile(fn, backend="torchport", options={"backend": "reference"})
    with pytest.warns(UserWarning, match=r"is written at .*test_not_followed\.py:\d+ in fn by x\.data"):
        got = _gradient(lambda x: x * x + compiled(x), device)  # the product saves x
    assert torch.equal(got, _gradient(lambda x: x * x + fn(x), "cpu"))


@pytest.mark.parametrize("device", ["cpu", "port"])
def test_a_part_of_an_expanded_input_is_written(device: str) -> None:
    """The rows that are not written are one place in memory with those that are: AOTAutograd would write them back."""

    def fn(x: torch.Tensor, wide: torch.Tensor) -> torch.Tensor:
        wide[::2].pow_(2)
        wide[::2].mul_(2)
        return x * 1

    compiled = torch.compile(fn, backend="torchport", options={"backend": "reference"})
    x, want = (torch.arange(4.0, device=at) for at in (device, "cpu"))
    # From 2.15 on PyTorch refuses such a graph itself.
    old, new = "one of them is expanded, and a part of it is written", "more than one element of the written-to tensor"
    with pytest.warns(UserWarning, match=old if releases.version() < (2, 15) else new):
        got = compiled(x, x.expand(2, 4))
    assert torch.equal(got.cpu(), fn(want, want.expand(2, 4)))
    assert torch.equal(x.cpu(), want)
