"""Everyday PyTorch on the device: values come to Python, dtypes convert, odd sizes work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from everyday_support import CPU, agree, everywhere, ramp, same

ALL_DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
]

PYTHON_VALUES: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda x: x[1, 2].item(),
    "item of a sum": lambda x: (x * 2).sum().item(),
    "tolist": lambda x: x.tolist(),
    "tolist of a view": lambda x: x.t()[1].tolist(),
    "float": lambda x: float(x[0, 1]),
    "int": lambda x: int(x[1, 1]),
    "complex": lambda x: complex(x[1, 1]),
    "bool": lambda x: bool(x[0, 1]),
    "if": lambda x: "large" if x.sum() > 5 else "small",
    "while": lambda x: _halvings(x.sum()),
    "index": lambda x: list(range(10))[x[0, 2].to(torch.int64)],
    "len": lambda x: len(x),
    "iteration": lambda x: [row.sum().item() for row in x],
    "unpacking": lambda x: [v.item() for v in (lambda a, b: (a[0], b[0]))(*x)],
    "contains": lambda x: (3 in x, 77 in x),
    "format": lambda x: f"{x.mean().item():.3f} {x[0, 1]:.2f}",
    "min and max": lambda x: (min(x[0]).item(), max(x[0]).item()),
    "sum of Python": lambda x: sum(x[0]).item(),
    "size": lambda x: (x.size(), x.size(1), x.shape, x.dim(), x.ndim, x.numel(), x.nelement()),
    "kind": lambda x: (x.is_floating_point(), x.is_complex(), x.is_signed(), x.element_size(), x.itemsize, x.nbytes),
    "flags": lambda x: (x.is_leaf, x.requires_grad, x.is_sparse, x.is_quantized, x.is_meta, x.layout),
    "equal": lambda x: (torch.equal(x, x.clone()), torch.equal(x, x + 1), x.equal(x.clone())),
    "allclose": lambda x: (torch.allclose(x, x + 1e-9), x.allclose(x + 1)),
    "is_nonzero": lambda x: x[0, 1].is_nonzero(),
    "same size": lambda x: (x.is_same_size(x.clone()), x.is_same_size(x[0])),
    "type": lambda x: (torch.is_tensor(x), torch.is_floating_point(x), torch.numel(x), x.dtype),
    "numpy": lambda x: x.cpu().numpy().sum().item(),
    "numpy comparison": lambda x: bool((x.cpu().numpy() == np.arange(6, dtype=np.float32).reshape(2, 3)).all()),
    "assert_close": lambda x: torch.testing.assert_close(x, x.clone()),
    "argmax": lambda x: x.argmax().item(),
    "all and any": lambda x: ((x >= 0).all().item(), (x > 4).any().item()),
    "stride": lambda x: (x.stride(), x.t().stride(), x.storage_offset(), x.is_contiguous()),
}


def _halvings(total: torch.Tensor) -> int:
    count = 0
    while total > 1:
        total = total / 2
        count += 1
    return count


@everywhere
@pytest.mark.parametrize("name", PYTHON_VALUES)
def test_a_value_comes_to_python(device: torch.device, name: str) -> None:
    same(PYTHON_VALUES[name](ramp(2, 3, device=device)), PYTHON_VALUES[name](ramp(2, 3, device="cpu")))


def test_the_storage_offset_of_a_view(device: torch.device) -> None:
    """Tensors of the device have no memory, but views know where they lie in what they are views of."""
    assert ramp(2, 3, device=device)[1].storage_offset() == 3


def test_repr_shows_values_dtype_and_device(device: torch.device) -> None:
    text = repr(ramp(2, 2, device=device) / 4)
    assert "0.2500" in text
    assert "0.7500" in text
    if device.type != "cpu":
        assert "device='port:0'" in text
    assert str(torch.tensor(3, device=device)).startswith("tensor(3")
    assert "dtype=torch.float64" in repr(torch.ones(1, dtype=torch.float64, device=device))
    assert "requires_grad=True" in repr(torch.ones(1, device=device, requires_grad=True))
    assert "grad_fn=<MulBackward0>" in repr(torch.ones(1, device=device, requires_grad=True) * 2)
    assert "size=(0, 3)" in repr(torch.ones(0, 3, device=device))
    assert "Parameter containing" in repr(torch.nn.Parameter(torch.ones(1, device=device)))
    assert "..." in repr(torch.zeros(100, 100, device=device))


def test_print_does_not_change_the_value(device: torch.device, capsys: pytest.CaptureFixture[str]) -> None:
    x = ramp(3, device=device)
    y = x + 1
    print(y, y, x)
    y += 1
    print(y)
    assert "tensor([1., 2., 3.]" in capsys.readouterr().out
    same(y, torch.tensor([2.0, 3.0, 4.0]))


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_every_dtype_survives_the_round_trip_and_arithmetic(device: torch.device, dtype: torch.dtype) -> None:
    def use(d: torch.device) -> Any:
        x = torch.tensor([0, 1, 2, 1]).to(dtype).to(d)
        y = torch.tensor([1, 1, 0, 1], device=d).to(dtype)
        made = [torch.zeros(2, dtype=dtype, device=d), torch.ones_like(x), torch.full((2,), 1, dtype=dtype, device=d)]
        return x, y, x * y, x == y, torch.stack([x, y]), x[1:].clone(), torch.where(x == y, x, y), made

    agree(use, device)


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_conversion_between_dtypes(device: torch.device, dtype: torch.dtype) -> None:
    def use(d: torch.device) -> Any:
        x = torch.tensor([0, 1, 2], device=d)
        if not dtype.is_complex:
            return x.to(dtype), x.to(dtype).float(), x.type(dtype), x.to(dtype).to(torch.int64), x.to(dtype).bool()
        return x.to(dtype), x.to(dtype).real, x.type(dtype)

    agree(use, device)


def test_conversion_methods(device: torch.device) -> None:
    def use(d: torch.device) -> Any:
        x = torch.tensor([0.0, 1.5, -2.5], device=d)
        named = [x.double(), x.half(), x.bfloat16(), x.int(), x.long(), x.short(), x.char(), x.abs().byte(), x.bool()]
        return *named, x.cfloat(), x.to(torch.ones(1, dtype=torch.int16, device=d)), x.type_as(x.double()), x.int() / 2

    agree(use, device)


def test_to_is_the_identity_where_nothing_changes(device: torch.device) -> None:
    x = ramp(3, device=device)
    assert x.to(device) is x
    assert x.to(x.dtype) is x
    assert x.to(x.device) is x
    assert x.to(device, copy=True) is not x
    assert x.float() is x
    assert x.cpu().device.type == "cpu"


def test_copies_in_both_directions_are_independent(device: torch.device) -> None:
    host = torch.zeros(3)
    x = host.to(device, copy=True)
    host += 1
    y = x.to("cpu", copy=True)
    x += 5
    same(y, torch.zeros(3))
    same(x, torch.full((3,), 5.0))
    back = torch.zeros(3)
    back.copy_(x)
    x.copy_(torch.arange(3.0))
    same(back, torch.full((3,), 5.0))
    same(x, torch.arange(3.0))


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("source_on_cpu", [False, True])
def test_copies_of_lists_in_both_directions(device: torch.device, mode: Any, source_on_cpu: bool) -> None:
    """Also below autograd, as in inference mode, where nothing has brought the source over."""
    here, there = (device, CPU) if source_on_cpu else (CPU, device)
    source = torch.full((3,), 5.0).to(there)
    with mode():
        targets = [torch.zeros(3).to(here), torch.zeros(2, 3, dtype=torch.float64).to(here)]
        targets[0].copy_(source)
        torch._foreach_copy_(targets[1:], [source])
        torch._foreach_copy_([targets[1][0], torch.zeros(3).to(there)], [source + 1, source])
    same(targets[0], torch.full((3,), 5.0))
    same(targets[1], torch.tensor([[6.0] * 3, [5.0] * 3], dtype=torch.float64))
    assert all(target.device.type == here.type for target in targets)


def test_complex_numbers(device: torch.device) -> None:
    def use(d: torch.device) -> Any:
        x = torch.tensor([1 + 2j, 3 - 1j], device=d)
        pairs = torch.view_as_real(x)
        back = torch.view_as_complex(pairs.clone() * 2)
        spectrum = torch.fft.ifft(torch.fft.fft(x))
        return x.conj() * x, x.real, x.imag, x.abs(), x.angle(), pairs, back, spectrum, x.conj().resolve_conj()

    agree(use, device)


def test_writing_the_imaginary_part_writes_the_number(device: torch.device) -> None:
    def use(d: torch.device) -> Any:
        x = torch.tensor([1 + 2j, 3 - 1j], device=d)
        x.imag += 1
        x.real[0] = 7
        return x, x.conj().clone()

    agree(use, device)


def test_zero_size_and_zero_dim_tensors(device: torch.device) -> None:
    def use(d: torch.device) -> Any:
        none, one = torch.empty(0, 3, device=d), torch.tensor(2.0, device=d)
        joined = torch.cat([none, torch.ones(2, 3, device=d)])
        reduced = none.sum(), none.sum(0), none.prod(), none.t().shape, none @ torch.ones(3, 2, device=d)
        scalars = one + 1, one * one, one.reshape(1), one.expand(3), one[None], one.item(), one.sum(), one.squeeze()
        nothing = torch.ones(3, device=d)[torch.zeros(3, dtype=torch.bool, device=d)], none.clone(), none + 1
        return joined, reduced, scalars, nothing, torch.linspace(0, 1, 0, device=d), torch.zeros((), device=d)

    agree(use, device)


def test_python_and_numpy_numbers_mix_with_tensors(device: torch.device) -> None:
    def use(d: torch.device) -> Any:
        x = torch.tensor([1, 2, 3], device=d)
        host = torch.tensor(2.5)
        return x + 1, x + 1.5, 2 / x, 2**x, x // 2, x % 2, x * host, x.float() - host, True + x, x + np.int64(3)

    agree(use, device)


def test_type_promotion_follows_the_cpu(device: torch.device) -> None:
    def use(d: torch.device) -> Any:
        kinds = [torch.ones(2, dtype=t, device=d) for t in (torch.int32, torch.int16, torch.float64, torch.bool)]
        zero_dim = [torch.tensor(1, dtype=t, device=d) for t in (torch.int64, torch.float64, torch.complex64)]
        return [a + b for a in kinds for b in kinds + zero_dim]

    agree(use, device)


def test_from_numpy_and_lists(device: torch.device) -> None:
    array = np.arange(6.0).reshape(2, 3)
    same(torch.as_tensor(array, device=device), torch.as_tensor(array))
    same(torch.from_numpy(array).to(device), torch.from_numpy(array))
    same(torch.tensor(array.tolist(), device=device), torch.tensor(array.tolist()))
    same(torch.tensor([[True], [False]], device=device), torch.tensor([[True], [False]]))
    assert np.allclose(torch.as_tensor(array, device=device).cpu().numpy(), array)


def test_numpy_of_a_device_tensor_raises_as_on_cuda(device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("on the CPU, numpy() works")
    with pytest.raises(TypeError, match=r"(?i)cpu"):
        ramp(3, device=device).numpy()
    with pytest.raises(TypeError, match=r"(?i)cpu"):
        np.asarray(ramp(3, device=device))


def test_factories(device: torch.device) -> None:
    def use(d: torch.device) -> Any:
        like = torch.ones(2, 3, dtype=torch.float64, device=d)
        ranges = torch.arange(5, device=d), torch.arange(1, 2, 0.25, device=d), torch.linspace(0, 1, 3, device=d)
        shaped = torch.eye(3, device=d), torch.tril_indices(3, 3, device=d), torch.full((2,), 3, device=d)
        likes = torch.zeros_like(like), torch.full_like(like, 2), like.new_zeros(2), like.new_tensor([1, 2])
        return ranges, shaped, likes, torch.tensor(5, device=d), like.new_full((2,), 4), like.new_ones(1, 2)

    agree(use, device)


def test_default_device_and_device_context(device: torch.device) -> None:
    with torch.device(device):
        assert torch.ones(2).device.type == device.type
        assert torch.nn.Linear(2, 2).weight.device.type == device.type
        assert torch.tensor([1.0]).device.type == device.type
    assert torch.ones(2).device.type == "cpu"
    torch.set_default_device(device)
    assert torch.zeros(2).device.type == device.type
    assert torch.arange(3).sum().item() == 3
    assert torch.get_default_device().type == device.type
    torch.set_default_device(None)
    assert torch.zeros(2).device.type == "cpu"


def test_the_device_string_with_and_without_index(device: torch.device) -> None:
    x = torch.ones(2, device=device.type)
    y = torch.ones(2, device=f"{device.type}:0")
    assert x.device == y.device
    same(x + y, torch.full((2,), 2.0))
    if device.type == "port":
        assert x.device == torch.device("port:0")
        assert x.get_device() == 0
        assert torch.device("port", 0) == x.device


@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_an_operator_whose_shape_rule_is_wrong(device: torch.device, reduction: str) -> None:
    def use(d: torch.device) -> Any:
        x = torch.tensor([0.1, 0.2, 0.4, 0.8], device=d, requires_grad=True)
        target = torch.tensor([3, 0, -1, 1], device=d)
        loss = torch.nn.functional.multilabel_margin_loss(x, target, reduction=reduction)
        (gradient,) = torch.autograd.grad(loss, x)
        return loss, gradient

    agree(use, device)


def test_a_result_that_is_asked_for_on_the_cpu(device: torch.device) -> None:
    x = ramp(2, 3, device=device)
    made = [
        torch.zeros_like(x, device="cpu"),
        torch.ones_like(x, device="cpu"),
        torch.full_like(x, 2.0, device="cpu"),
        torch.randn_like(x, device="cpu"),
        torch.empty_like(x, device="cpu"),
        x.new_zeros(3, device="cpu"),
        x.new_full((2,), 3.0, device="cpu"),
        x.new_empty_strided((2, 2), (1, 2), device="cpu"),
        torch.linspace(x[0, 0], x[0, 1], 4, device="cpu"),
        torch.linspace(0.0, x[0, 1], 4, device="cpu"),
    ]
    for uninitialised in (made[4], made[7]):  # whatever was in memory, which may be no number
        uninitialised.zero_()
    for tensor in made:
        assert tensor.device.type == "cpu"
        before = torch.tensor(tensor.tolist())
        tensor.add_(1)
        assert tensor.tolist() == (before + 1).tolist()
        assert tensor.numpy().shape == tuple(tensor.shape)
    assert made[7].stride() == (1, 2)
    assert torch.zeros_like(x).device.type == device.type
    assert torch.zeros_like(torch.ones(2), device=device).tolist() == [0.0, 0.0]


def test_evenly_spaced_between_tensors(device: torch.device) -> None:
    agree(lambda to: torch.linspace(ramp(1, device=to)[0], ramp(3, device=to)[2], 5, device=to), device)
    agree(lambda to: torch.logspace(ramp(1, device=to)[0], 3, 4, device=to), device)
