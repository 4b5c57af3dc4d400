"""What the conformance kit found in the device, each in a few lines."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

import torchport


@pytest.fixture(autouse=True)
def _reference() -> None:
    torchport.use("reference")


def test_a_number_spread_over_a_tensor_has_memory_of_its_own() -> None:
    """Group norm's backward reads its gradient as contiguous memory; a broadcast number has one element."""
    x, scale, shift = (torch.randn(shape) for shape in ((5, 5, 5), (5,), (5,)))

    def gradients(device: str, make: Any) -> list[torch.Tensor]:
        leaves = [t.detach().to(device).requires_grad_() for t in (x, scale, shift)]
        out = nn.functional.group_norm(leaves[0], 1, *leaves[1:], 0.5)
        return [g.cpu() for g in torch.autograd.grad([out], leaves, [make(out)])]

    for make in (
        lambda t: torch.full_like(t, 0.5),
        lambda t: torch.empty_like(t).copy_(torch.full((), 0.25).to(t.device)),
    ):
        for got, want in zip(gradients("port", make), gradients("cpu", make), strict=True):
            torch.testing.assert_close(got, want)


def test_attention_of_every_other_element() -> None:
    """CPU's fused kernel steps through heads as if they were contiguous."""
    base = [torch.randn(2, 2, 4, 16) for _ in range(3)]
    expected = nn.functional.scaled_dot_product_attention(*(t[..., ::2] for t in base))
    actual = nn.functional.scaled_dot_product_attention(*(t.to("port")[..., ::2] for t in base))
    torch.testing.assert_close(actual.cpu(), expected)


def test_lazy_modules_move_before_they_know_their_shapes() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyConv1d(3, 3))
    optimizer_sees = list(model.parameters())
    model.to("port")
    assert all(isinstance(p, nn.UninitializedParameter) and p.device.type == "port" for p in model.parameters())
    out = model(torch.ones(2, 5, 6).to("port"))
    assert out.shape == (2, 3, 2)
    out.sum().backward()
    assert all(p.device.type == "port" and p.grad is not None for p in model.parameters())
    assert [id(p) for p in model.parameters()] == [id(p) for p in optimizer_sees]


def test_fewer_values_of_a_trace_whose_computation_was_dropped() -> None:
    """The reason of a compilation is told also where a plan for more values is there, without its computation."""
    x = torch.randn(3).to("port")
    for keep_both in (True, False):
        a = x * 3
        b = a + x
        if not keep_both:
            del a
            gc.collect()
        with torchport.config.override(max_computations=1):
            assert b.cpu().shape == (3,)
            (x.reshape(3, 1) @ x.reshape(1, 3)).cpu()  # takes the one place there is


def test_a_detached_handle_of_a_leaf_outlives_the_trace_it_was_made_in() -> None:
    a = torch.tensor([0.5, 0.1]).to("port")
    kept = a + 1
    detached = a.detach()
    torchport.sync()
    x = torch.tensor([9.0, 9.0]).to("port")
    other = x * 1  # the first leaf of the new trace, as ``a`` was of the old one
    assert (detached + 0).tolist() == pytest.approx([0.5, 0.1])
    assert (kept.tolist(), other.tolist()) == (pytest.approx([1.5, 1.1]), [9.0, 9.0])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # what the CPU makes of it
def test_a_transformer_with_a_padding_mask_asks_for_no_nested_tensors() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True), 1).eval()
    x, mask = torch.randn(2, 3, 4), torch.tensor([[False, False, True], [False, False, False]])
    with torch.no_grad():
        expected = model(x, src_key_padding_mask=mask)
        actual = model.to("port")(x.to("port"), src_key_padding_mask=mask.to("port"))
    kept = ~mask
    torch.testing.assert_close(actual.cpu()[kept], expected[kept])


def _shifted(x: torch.Tensor) -> torch.Tensor:
    return x + torch.ones(3, device=x.device)


_library = torch.library.Library("conform_found", "FRAGMENT")
_library.define("shifted_below(Tensor x) -> Tensor")
_library.impl("shifted_below", _shifted, "CompositeExplicitAutograd")
shifted = torch.library.custom_op("conform_found::shifted", _shifted, mutates_args=())


def test_an_operator_in_python_that_makes_tensors() -> None:
    """Its code sees what the caller has, registered with ``custom_op`` or as a composite."""
    assert shifted(torch.zeros(3).to("port")).tolist() == [1.0, 1.0, 1.0]
    assert torch.ops.conform_found.shifted_below(torch.zeros(3).to("port")).tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("dim", [0, -1])
def test_slices_of_another_shape_are_refused_as_on_the_cpu(dim: int) -> None:
    """PyTorch's shape rule of ``index_add`` lets them pass, and compilers broadcast."""
    x, index = torch.zeros(3, 3), torch.tensor([0, 2])
    with pytest.raises(RuntimeError):
        x.index_add(dim, index, torch.ones(2))
    with pytest.raises(RuntimeError):
        x.to("port").index_add(dim, index.to("port"), torch.ones(2).to("port"))
    source = torch.ones(2, 3) if dim == 0 else torch.ones(3, 2)
    found = x.to("port").index_add(dim, index.to("port"), source.to("port"))
    torch.testing.assert_close(found.cpu(), x.index_add(dim, index, source))
