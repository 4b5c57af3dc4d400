"""What programs do on CUDA besides computing: control flow, profiles, sparse gradients."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import torchport


@pytest.fixture(autouse=True)
def _reference() -> None:
    torchport.use("reference")


def _branched(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 2, lambda x: x * 2, lambda x: x - 1, (x,))


@pytest.mark.parametrize("compiler", [None, "eager", "aot_eager", "torchport"])
def test_results_of_cond_are_tensors_of_the_device(compiler: str | None) -> None:
    """They were marked as tensors of a transformation, which printing and what asks for such tensors tell apart."""
    torch.compiler.reset()
    branched = _branched if compiler is None else torch.compile(_branched, backend=compiler)
    for x in (torch.ones(3), torch.zeros(3)):
        made = branched(x.to("port"))
        assert made.tolist() == _branched(x).tolist()
        assert not torch._C._functorch.is_functorch_wrapped_tensor(made)
        assert repr(made).startswith("tensor([")


@pytest.mark.parametrize("expanded", [False, True])
def test_gradients_go_through_cond(expanded: bool) -> None:
    """The gradient of a sum shows one element in all places, and a branch is traced with a tensor of such strides."""
    x = torch.ones(3, device="port", requires_grad=True)
    made = _branched(x)
    (made.sum() if expanded else (made * torch.ones(3, device="port")).sum()).backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 2.0, 2.0]


def test_while_loop_gives_a_tensor_of_the_device() -> None:
    from torch._higher_order_ops import while_loop

    (made,) = while_loop(lambda x: x < 3, lambda x: (x + 1,), (torch.zeros((), device="port"),))
    assert repr(made) == "tensor(3., device='port:0')"


def test_assertions_about_values() -> None:
    fine, wrong = torch.ones((), device="port"), torch.zeros((), device="port")
    torch._assert_async(fine, "all is well")
    with pytest.raises(RuntimeError, match="not so"):
        torch._assert_async(wrong, "not so")


def _ranges(profile: Any) -> dict[str, int]:
    return {row.key: row.count for row in profile.key_averages() if row.key.startswith("torchport::")}


@pytest.mark.compiled
def test_a_profile_shows_computations_and_compilations() -> None:
    net, x = torch.nn.Linear(3, 7).to("port"), torch.ones(5, 3).to("port")
    torchport.sync()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as first:
        for _ in range(3):
            net(x).sum().item()
    (executed,) = [name for name in _ranges(first) if name.startswith("torchport::execute reference, ")]
    assert _ranges(first) == {executed: 3, "torchport::compile reference": 1}
    assert next(row for row in first.key_averages() if row.key == executed).cpu_time_total > 0
    with torch.profiler.profile(activities=activities) as again:
        net(x).sum().item()
    assert _ranges(again) == {executed: 1}


@pytest.mark.compiled
def test_a_profile_shows_what_would_run_beside_the_program() -> None:
    before = torchport.config.execution
    net, x = torch.nn.Linear(64, 64).to("port"), torch.ones(64, 64).to("port")
    assert before == "auto"
    for _ in range(3):
        net(x).sum().item()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        made = net(x).sum()
        torchport.sync()
        made.item()
    assert sum(_ranges(profile).values()) >= 1


_Bag: Any = functools.partial(torch.nn.EmbeddingBag, mode="sum")


@pytest.mark.parametrize("kind", [torch.nn.Embedding, _Bag], ids=["Embedding", "EmbeddingBag"])
@pytest.mark.parametrize("options", [{}, {"padding_idx": 1}])
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam])
def test_sparse_embeddings_have_sparse_gradients(kind: Any, options: dict[str, Any], optimizer: Any) -> None:
    ids = torch.tensor([[1, 2, 2, 4]])

    def trained(on: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        table = kind(5, 3, sparse=True, **options).to(on)
        opt = optimizer(table.parameters(), lr=0.1)
        for _ in range(3):
            opt.zero_grad()
            table(ids.to(on)).square().sum().backward()
            assert table.weight.grad.layout is torch.sparse_coo
            opt.step()
        return [table.weight.grad.to_dense().cpu(), table.weight.detach().cpu()]

    for mine, theirs in zip(trained("port"), trained("cpu"), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_adding_a_sparse_gradient_computes_on_the_device() -> None:
    """Plain SGD of a sparse embedding reads nothing back and runs nothing on the host."""
    table = torch.nn.Embedding(5, 3, sparse=True).to("port")
    opt = torch.optim.SGD(table.parameters(), lr=0.1)
    ids = torch.tensor([1, 2, 2, 4]).to("port")
    before = torchport.metrics.counter("Fallback")
    for _ in range(3):
        opt.zero_grad()
        table(ids).square().sum().backward()
        opt.step()
    table.weight.tolist()
    assert torchport.metrics.counter("Fallback") == before
    table.weight.grad.coalesce()
    assert torchport.metrics.counter("Fallback") > before


def test_dlpack_goes_out_through_the_host() -> None:
    x = torch.arange(3.0, device="port")
    assert torch.from_dlpack(x).tolist() == [0.0, 1.0, 2.0]
    with pytest.raises(BufferError):
        x.__dlpack__(copy=False)


def test_only_index_0_can_be_current_and_the_error_says_what_to_write() -> None:
    torch.port.set_device(0)
    with pytest.raises(RuntimeError, match=r"torch\.device\('port', index\)"):
        torch.port.set_device(1)


def test_what_a_meta_tensor_lacks_is_said_in_pytorchs_words() -> None:
    """``Module.to`` looks for these words, and adds ``to_empty``."""
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor; no data!"):
        torch.ones(2, device="meta").to("port")
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor; no data!"):
        torch.ones(2, device="port").copy_(torch.ones(2, device="meta"))
    with pytest.raises(NotImplementedError, match="to_empty"):
        torch.nn.Linear(2, 2, device="meta").to("port")
    assert torch.nn.Linear(2, 2, device="meta").to_empty(device="port").weight.device.type == "port"
