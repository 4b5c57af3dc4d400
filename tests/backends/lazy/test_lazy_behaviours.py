"""What PyTorch tests of its own lazy device (``test/lazy``), shown on this one."""

from __future__ import annotations

from typing import Any

import fakes
import pytest
import torch
from everyday_support import agree, counted, everywhere, needs_counters, ramp, randn, same
from torch import nn

import torchport

pytestmark = needs_counters


@everywhere
def test_gradients_of_a_convolution(device: torch.device) -> None:
    def run(d: torch.device) -> Any:
        x = randn(2, 3, 6, 6, device=d).requires_grad_()
        w = randn(4, 3, 3, 3, device=d, seed=1).requires_grad_()
        b = randn(4, device=d, seed=2).requires_grad_()
        out = nn.functional.conv2d(x, w, b, stride=2, padding=1)
        return [out, *torch.autograd.grad(out.square().sum(), (x, w, b))]

    agree(run, device, rtol=1e-4, atol=1e-4)


def test_an_alias_survives_a_step(device: torch.device) -> None:
    x = torch.zeros(4, device=device)
    view = x[:2]
    torchport.sync()
    x.add_(1)
    torchport.sync()
    view.mul_(3)
    torchport.sync()
    assert x.tolist() == [3, 3, 1, 1]
    assert view.tolist() == [3, 3]


def test_a_constructor_and_a_view(device: torch.device) -> None:
    a = torch.rand(1, 2, 3, 4, device=device)
    b = a.view(-1)
    assert b.shape == (24,)
    b[0] = 5
    assert a[0, 0, 0, 0].item() == 5
    same(a.view(-1), b)


def test_a_lazily_initialised_view_costs_one_value(device: torch.device) -> None:
    with counted() as counts:
        x = torch.ones(3, 4, device=device)
        view = x.view(4, 3)
        del x
        torchport.sync()
        assert view.sum().item() == 12
    assert counts["Execute"] == 2, "the view, and its sum"
    assert counts["Moved"] == 0


@pytest.mark.parametrize("reuse", [False, True], ids=["new trace", "known trace"])
def test_the_right_counter_for_each_operator(device: torch.device, reuse: bool) -> None:
    def run() -> None:
        x = ramp(3, device=device)
        (x + x - x * 2).sum().item()

    if reuse:
        run()
    with counted() as counts:
        run()
    found = {name: count for name, count in counts.items() if name.startswith("lazy::") and count}
    assert found == {"lazy::add.Tensor": 1, "lazy::sub.Tensor": 1, "lazy::mul.Tensor": 1, "lazy::sum": 1}


def test_the_real_size_after_nonzero(device: torch.device) -> None:
    x = torch.tensor([0.0, 1.0, 0.0, 2.0]).to(device)
    for values, expected in ((x, [[1], [3]]), (x * 0, [])):
        found = torch.nonzero(values)
        assert found.shape == (len(expected), 1)
        assert found.tolist() == expected
        assert (found + 1).shape == found.shape


def test_a_fork_of_the_trie(device: torch.device) -> None:
    x = ramp(3, device=device)

    def run(branch: bool) -> list[float]:
        y = x * 2.5
        y = y.sin() if branch else y.cos()
        return (y + 1).tolist()

    first = [run(True), run(False)]
    with counted() as counts:
        for _ in range(3):
            assert [run(True), run(False)] == first
    assert counts["UncachedCompile"] == 0
    assert counts["Execute"] == 6
    assert first[0] == pytest.approx((torch.arange(3) * 2.5).sin().add(1).tolist(), rel=1e-5)


def test_a_fallback_inside_a_known_trace() -> None:
    refusing = fakes.Refusing.install(register_kernels=lambda *_: None)
    x = ramp(4, device=refusing.device)

    def run(offset: float) -> list[float]:
        return ((x + offset).sin() * 2).cos().tolist()

    run(0.5)
    with counted() as counts:
        for step in range(3):
            expected = ((torch.arange(4.0) + step).sin() * 2).cos().tolist()
            assert run(float(step)) == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert counts["aten::sin"] == 3
    assert counts["UncachedCompile"] <= 1, "an offset of 0 or 1 is no number that varies"


def test_batch_norm_in_known_traces(device: torch.device) -> None:
    def run(d: torch.device) -> Any:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU()).to(d)
        outs = []
        for step in range(5):
            net.train(step != 3)
            outs.append(net(randn(2, 1, 5, 5, device=d, seed=step)))
        return [*outs, net[1].running_mean, net[1].running_var, net[1].num_batches_tracked]

    agree(run, device, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("value", [0.0, 1.0, 2.5, -3.0])
def test_scalar_addcmul_and_constant_scales(device: torch.device, value: float) -> None:
    def run(d: torch.device) -> Any:
        x, y, z = (randn(3, device=d, seed=seed) for seed in range(3))
        return [torch.addcmul(x, y, z, value=value), x.add(y, alpha=value), (x * value) / 2, x.lerp(y, value)]

    agree(run, device, rtol=1e-5)


def test_several_and_duplicate_results(device: torch.device) -> None:
    with counted() as counts:
        x = ramp(3, device=device)
        y = x + 1.5
        results = (y, y, y.detach(), x * 2, y)
        torchport.sync()
    assert counts["Execute"] == 1
    for result in (results[0], results[1], results[2], results[4]):
        assert result.tolist() == [1.5, 2.5, 3.5]
    results[0].add_(1)
    assert results[2].tolist() == [2.5, 3.5, 4.5], "detach shares memory"
    assert results[3].tolist() == [0, 2, 4]


def test_an_argument_written_in_place(device: torch.device) -> None:
    def bump(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(y)
        return x * y

    x, y = ramp(3, device=device), ramp(3, device=device)
    for _ in range(3):
        product = bump(x, y)
        torchport.sync()
    assert x.tolist() == [0, 4, 8]
    assert product.tolist() == [0, 4, 16]
    assert y.tolist() == [0, 1, 2]


def test_fallbacks_can_be_errors() -> None:
    refusing = fakes.Refusing.install(register_kernels=lambda *_: None)
    x = ramp(3, device=refusing.device)
    with torchport.config.override(fallback="error"), pytest.raises(torchport.UnsupportedOp, match="sin"):
        x.sin()
    assert (x + 1).tolist() == [1, 2, 3]


def test_errors_of_shapes_and_dtypes(device: torch.device) -> None:
    x, y = torch.ones(2, 3, device=device), torch.ones(4, 5, device=device)
    for call in (lambda: torch.addmm(x, x, y), lambda: x + y, lambda: x @ x, lambda: x.long() @ y):
        with pytest.raises(RuntimeError) as caught:
            call()
        assert any("test_lazy_behaviours.py" in note for note in caught.value.__notes__)
    for call in (lambda: x + torch.ones(2, 3), lambda: torch.addmm(x, x, torch.ones(3, 3))):
        with pytest.raises(torchport.DeviceMismatch, match="cpu"):
            call()
    assert (x + 1).sum().item() == 12


def test_dumps_carry_the_users_lines(device: torch.device) -> None:
    y = ramp(3, device=device).sin()
    assert "test_dumps_carry_the_users_lines" in torchport.dump(y)


def test_a_seeded_generator_gives_the_cpus_values(device: torch.device) -> None:
    for draw in (
        lambda g, d: torch.rand(4, generator=g, device=d),
        lambda g, d: torch.randn(2, 3, generator=g, device=d),
        lambda g, d: torch.zeros(5, device=d).uniform_(-1, 1, generator=g),
        lambda g, d: torch.randperm(6, generator=g, device=d),
    ):
        expected = draw(torch.Generator().manual_seed(11), "cpu")
        assert draw(torch.Generator().manual_seed(11), device).tolist() == expected.tolist()


def test_a_new_seed_compiles_nothing(device: torch.device) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)).to(device)

    def run(seed: int) -> list[float]:
        torch.manual_seed(seed)
        return net(torch.ones(8, 3).to(device)).flatten().tolist()

    first = run(0)
    with counted() as counts:
        others = [run(seed) for seed in range(1, 5)]
        assert run(0) == first
    assert counts["UncachedCompile"] == 0
    assert all(other != first for other in others)


def test_the_same_numbers_after_save_and_restore_of_the_state(device: torch.device) -> None:
    torch.manual_seed(5)
    torch.rand(3, device=device)
    state = torch.port.get_rng_state()  # type: ignore[attr-defined]
    first = [torch.rand(3, device=device).tolist() for _ in range(3)]
    torch.port.set_rng_state(state)  # type: ignore[attr-defined]
    with torchport.mode("eager"):
        assert [torch.rand(3, device=device).tolist() for _ in range(3)] == first


def test_a_scheduler_over_a_hundred_steps_compiles_nothing_new(device: torch.device) -> None:
    net = nn.Linear(3, 1).to(device)
    opt = torch.optim.AdamW(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 100)

    def step() -> None:
        opt.zero_grad()
        net(torch.ones(2, 3).to(device)).square().mean().backward()
        opt.step()
        scheduler.step()

    for _ in range(4):
        step()
    with counted() as counts:
        for _ in range(100):
            step()
    assert counts["UncachedCompile"] == 0
    assert counts["Execute"] == 100


def test_generation_token_by_token_reaches_a_steady_state(device: torch.device) -> None:
    torch.manual_seed(0)
    embed, cell, head = nn.Embedding(11, 8), nn.GRUCell(8, 8), nn.Linear(8, 11)
    for part in (embed, cell, head):
        part.to(device)

    def generate(length: int) -> list[int]:
        token = torch.zeros(1, dtype=torch.int64, device=device)
        hidden, tokens = torch.zeros(1, 8, device=device), []
        with torch.no_grad():
            for _ in range(length):
                hidden = cell(embed(token), hidden)
                token = head(hidden).argmax(-1)
                tokens.append(token.item())
        return tokens

    first = generate(6)
    with counted() as counts:
        assert generate(12)[:6] == first
    assert counts["UncachedCompile"] == 0
    assert counts["Execute"] == 12
