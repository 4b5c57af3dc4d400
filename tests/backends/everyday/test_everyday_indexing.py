"""Everyday PyTorch on the device: indexing with slices, masks and index tensors; results of data-dependent shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from everyday_support import agree, everywhere, ramp

Fn = Callable[[torch.Tensor], Any]


def index(x: torch.Tensor, *values: int) -> torch.Tensor:
    return torch.tensor(values, device=x.device)


GET: dict[str, Fn] = {
    "int": lambda x: x[1],
    "negative int": lambda x: x[-1, -2],
    "slice": lambda x: x[1:, ::2],
    "ellipsis and none": lambda x: x[..., None, 1],
    "tuple": lambda x: x[(1, 2)],
    "bool mask": lambda x: x[x > 4],
    "row mask": lambda x: x[torch.tensor([True, False, True], device=x.device)],
    "mask from the host": lambda x: x[torch.tensor([True, False, True])],
    "column mask": lambda x: x[:, x[0] > 1],
    "mask of nothing": lambda x: x[x > 100],
    "index tensor": lambda x: x[index(x, 2, 0, 0)],
    "index tensor from the host": lambda x: x[torch.tensor([2, 0])],
    "negative index tensor": lambda x: x[index(x, -1, -3)],
    "two index tensors": lambda x: x[index(x, 0, 2), index(x, 1, 3)],
    "broadcast index tensors": lambda x: x[index(x, 0, 2)[:, None], index(x, 1, 3)],
    "index tensor and slice": lambda x: x[index(x, 0, 2), 1:3],
    "slice and index tensor": lambda x: x[1:, index(x, 3, 0)],
    "zero-dim index": lambda x: x[torch.tensor(1, device=x.device)],
    "list": lambda x: x[[0, 2]],
    "list of lists": lambda x: x[[0, 2], [1, 1]],
    "bool scalar": lambda x: (x[True], x[False]),
    "mask and int": lambda x: x[x[:, 0] > 2, 1],
    "gather": lambda x: x.gather(1, index(x, 0, 1, 2)[:, None]),
    "take": lambda x: x.take(index(x, 0, 5, 11)),
    "take_along_dim": lambda x: x.take_along_dim(x.argsort(1, descending=True), 1),
    "index_select": lambda x: x.index_select(1, index(x, 3, 1)),
    "where": lambda x: torch.where(x > 4, x, -x),
    "topk": lambda x: x.topk(2, dim=1),
    "sort": lambda x: (-x).sort(dim=0),
    "unbind": lambda x: x.unbind(1),
    "split": lambda x: x.split([1, 2]),
    "chunk": lambda x: x.chunk(2, dim=1),
    "tensor_split": lambda x: x.tensor_split(3, dim=1),
    "embedding": lambda x: torch.nn.functional.embedding(index(x, 2, 2, 0), x),
}

DATA_DEPENDENT: dict[str, Fn] = {
    "nonzero": lambda x: x.nonzero(),
    "nonzero as tuple": lambda x: x.nonzero(as_tuple=True),
    "nonzero of a mask": lambda x: (x > 5).nonzero().squeeze(1),
    "argwhere": lambda x: torch.argwhere(x > 5),
    "where of one argument": lambda x: torch.where(x > 5),
    "masked_select": lambda x: x.masked_select(x % 2 == 0),
    "unique": lambda x: (x % 3).unique(),
    "unique with counts": lambda x: (x % 3).unique(return_inverse=True, return_counts=True),
    "unique along a dim": lambda x: (x % 2).unique(dim=1),
    "unique_consecutive": lambda x: (x // 3).unique_consecutive(return_counts=True),
    "repeat_interleave": lambda x: x.repeat_interleave(index(x, 0, 2, 1), dim=0),
    "repeat_interleave of one tensor": lambda x: torch.repeat_interleave(index(x, 0, 2, 1)),
    "bincount": lambda x: x.long().flatten().bincount(),
    "one_hot": lambda x: torch.nn.functional.one_hot(index(x, 0, 2, 1)),
    "combinations": lambda x: torch.combinations(x[0]),
    "histc": lambda x: x.histc(4, 0, 11),
    "use of the result": lambda x: x[x > 4].reshape(1, -1) * 2 + x[x > 4].numel(),
    "shape of the result": lambda x: torch.zeros(x[x > 4].shape, device=x.device) + x[x > 4],
    "loop over nonzero": lambda x: [x[tuple(i)].item() for i in (x > 9).nonzero()],
    "cat of selections": lambda x: torch.cat([row[row > 5] for row in x]),
    "empty result": lambda x: (x > 100).nonzero(),
}


def _write(action: Callable[[torch.Tensor], object]) -> Fn:
    def run(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        action(y)
        return y

    return run


SET: dict[str, Fn] = {
    "int": _write(lambda y: y.__setitem__(0, 5.0)),
    "element": _write(lambda y: y.__setitem__((1, 2), 5)),
    "slice": _write(lambda y: y.__setitem__((slice(1, None), slice(None, None, 2)), 7)),
    "slice from a tensor": _write(lambda y: y.__setitem__(slice(0, 2), -y[1:])),
    "row from the host": _write(lambda y: y.__setitem__(1, torch.ones(4))),
    "zero-dim value": _write(lambda y: y.__setitem__(0, torch.tensor(3.0, device=y.device))),
    "other dtype": _write(lambda y: y.__setitem__(0, torch.arange(4, device=y.device))),
    "bool mask": _write(lambda y: y.__setitem__(y > 4, 0)),
    "bool mask, tensor value": _write(lambda y: y.__setitem__(y > 8, torch.ones(3, device=y.device))),
    "row mask": _write(lambda y: y.__setitem__(y[:, 0] > 2, -1)),
    "index tensor": _write(lambda y: y.__setitem__(index(y, 2, 0), -1)),
    "index tensor, tensor value": _write(lambda y: y.__setitem__(index(y, 2, 0), y[:2].clone())),
    "two index tensors": _write(lambda y: y.__setitem__((index(y, 0, 1), index(y, 2, 3)), 9)),
    "slice and index tensor": _write(lambda y: y.__setitem__((slice(None), index(y, 0, 3)), 9)),
    "augmented": _write(lambda y: y.__setitem__(index(y, 0, 0), y[index(y, 0, 0)] + 1)),
    "ellipsis": _write(lambda y: y.__setitem__(..., 4)),
    "through a view": _write(lambda y: y.t()[1].__setitem__(slice(0, 2), 8)),
    "masked_fill_": _write(lambda y: y.masked_fill_(y > 4, -1)),
    "masked_scatter_": _write(lambda y: y.masked_scatter_(y > 8, torch.ones(12, device=y.device))),
    "index_put_ accumulate": _write(
        lambda y: y.index_put_((index(y, 0, 0),), torch.ones(2, 4, device=y.device), accumulate=True)
    ),
    "index_add_": _write(lambda y: y.index_add_(0, index(y, 0, 2, 0), torch.ones(3, 4, device=y.device))),
    "index_copy_": _write(lambda y: y.index_copy_(0, index(y, 2, 0), torch.ones(2, 4, device=y.device))),
    "index_fill_": _write(lambda y: y.index_fill_(1, index(y, 1), -3)),
    "scatter_": _write(lambda y: y.scatter_(1, index(y, 0, 1, 2)[:, None], 9.0)),
    "scatter_add_": _write(lambda y: y.scatter_add_(1, index(y, 0, 1, 2)[:, None], torch.ones(3, 1, device=y.device))),
    "put_": _write(lambda y: y.put_(index(y, 0, 7), torch.ones(2, device=y.device))),
    "fill_diagonal_": _write(lambda y: y.fill_diagonal_(-2)),
}


@everywhere
@pytest.mark.parametrize("name", ["bool mask", "index tensor and slice", "gather"])
def test_get_on_every_backend(device: torch.device, name: str) -> None:
    agree(lambda d: GET[name](ramp(3, 4, device=d)), device)


@pytest.mark.parametrize("name", GET)
def test_get(device: torch.device, name: str) -> None:
    agree(lambda d: GET[name](ramp(3, 4, device=d)), device)


@pytest.mark.parametrize("name", GET)
def test_get_from_a_computed_transposed_tensor(device: torch.device, name: str) -> None:
    agree(lambda d: GET[name]((ramp(4, 3, device=d) + 1).t()), device)


@pytest.mark.parametrize("name", DATA_DEPENDENT)
def test_results_of_data_dependent_shape(device: torch.device, name: str) -> None:
    agree(lambda d: DATA_DEPENDENT[name](ramp(3, 4, device=d)), device)


@pytest.mark.parametrize("name", SET)
def test_set(device: torch.device, name: str) -> None:
    agree(lambda d: SET[name](ramp(3, 4, device=d)), device)


@everywhere
@pytest.mark.parametrize("name", ["bool mask", "index tensor, tensor value", "through a view"])
def test_set_on_every_backend(device: torch.device, name: str) -> None:
    agree(lambda d: SET[name](ramp(3, 4, device=d)), device)


@pytest.mark.parametrize("name", ["bool mask", "two index tensors", "index_select", "gather", "take", "embedding"])
def test_gradient_of_get(device: torch.device, name: str) -> None:
    def use(d: torch.device) -> Any:
        x = ramp(3, 4, device=d).requires_grad_()
        (GET[name](x) ** 2).sum().backward()
        return x.grad

    agree(use, device)


def test_gradient_through_set(device: torch.device) -> None:
    def use(d: torch.device) -> Any:
        x = ramp(3, 4, device=d).requires_grad_()
        w = torch.ones(4, device=d, requires_grad=True)
        y = x * 2
        y[1] = w * 3
        y[:, 0] *= w[0]
        (y**2).sum().backward()
        return x.grad, w.grad

    agree(use, device)


@pytest.mark.parametrize("bad", [(5,), (0, 9), (0, 0, 0)])
def test_an_index_out_of_range_raises_index_error(device: torch.device, bad: tuple[int, ...]) -> None:
    with pytest.raises(IndexError):
        _ = ramp(3, 4, device=device)[bad]


def test_an_index_tensor_out_of_range_raises(device: torch.device, backend: str) -> None:
    x = ramp(3, 4, device=device)
    if backend == "xla":  # cannot raise from inside a computation (docs/xla.md)
        assert x[torch.tensor([7], device=device)].isnan().all()
    else:
        with pytest.raises((IndexError, RuntimeError), match=r"(?i)index|range|bounds"):
            x[torch.tensor([7], device=device)].tolist()
    assert x[0, 1].item() == 1
