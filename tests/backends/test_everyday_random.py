"""Everyday PyTorch on the device: random numbers are reproducible, and the generator's state is the user's."""

from __future__ import annotations

import pytest
import torch
from everyday_support import DEVICE, ON_PORT, agree, everywhere, randn, same
from torch import nn


def draw(device: torch.device, count: int = 64) -> torch.Tensor:
    return torch.rand(count, device=device).cpu()


def state() -> torch.Tensor:
    return torch.get_rng_state() if DEVICE == "cpu" else torch.get_device_module(DEVICE).get_rng_state()


def set_state(value: torch.Tensor) -> None:
    if DEVICE == "cpu":
        torch.set_rng_state(value)
    else:
        torch.get_device_module(DEVICE).set_rng_state(value)


@everywhere
def test_manual_seed_makes_draws_reproducible(device: torch.device) -> None:
    torch.manual_seed(7)
    first, second = draw(device), draw(device)
    assert not torch.equal(first, second)
    torch.manual_seed(7)
    same([draw(device), draw(device)], [first, second], rtol=0, atol=0)
    torch.manual_seed(8)
    assert not torch.equal(draw(device), first)


@everywhere
def test_dropout_is_reproducible_and_differs_from_step_to_step(device: torch.device) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.5)).to(device)
    x = randn(4, 16, device=device)

    def masks() -> list[torch.Tensor]:
        torch.manual_seed(3)
        return [net(x).detach().cpu() for _ in range(4)]

    first = masks()
    same(masks(), first, rtol=0, atol=0)
    assert len({tuple((mask == 0).flatten().tolist()) for mask in first}) == 4
    assert 0.3 < (first[0] == 0).float().mean() < 0.7
    net.eval()
    assert (net(x) != 0).all()


def test_dropout_uses_the_same_mask_in_backward(device: torch.device) -> None:
    x = torch.ones(200, device=device, requires_grad=True)
    y = nn.functional.dropout(x, 0.3)
    y.sum().backward()
    same(x.grad.cpu(), y.detach().cpu())
    same(sorted(set(y.detach().cpu().tolist())), [0.0, 1 / 0.7])


def test_state_can_be_kept_and_given_back(device: torch.device) -> None:
    torch.manual_seed(1)
    draw(device)
    kept = state()
    first = draw(device)
    set_state(kept)
    same(draw(device), first, rtol=0, atol=0)
    assert not torch.equal(state(), kept)
    assert kept.dtype is torch.uint8
    assert kept.device.type == "cpu"


def test_fork_rng_leaves_no_trace(device: torch.device) -> None:
    torch.manual_seed(2)
    expected = draw(device)
    torch.manual_seed(2)
    devices = [] if device.type == "cpu" else [0]
    with torch.random.fork_rng(devices=devices, device_type=device.type if devices else "cuda"):
        torch.manual_seed(99)
        draw(device)
    same(draw(device), expected, rtol=0, atol=0)


def test_generators(device: torch.device) -> None:
    """A generator given by the caller lives on the CPU: PyTorch lets only C++ devices have generators of their own."""

    def seeded(seed: int) -> torch.Tensor:
        return torch.randn(8, generator=torch.Generator().manual_seed(seed), device=device).cpu()

    same(seeded(5), torch.randn(8, generator=torch.Generator().manual_seed(5)), rtol=0, atol=0)
    assert not torch.equal(seeded(5), seeded(6))
    if ON_PORT:
        with pytest.raises(NotImplementedError, match="getNewGenerator"):
            torch.Generator(device=device)


@pytest.mark.parametrize(
    "name", ["rand", "randn", "randint", "randperm", "bernoulli", "multinomial", "normal", "exponential", "uniform"]
)
def test_distributions_are_right_and_reproducible(device: torch.device, name: str) -> None:
    n = 4_000
    probabilities = torch.tensor([0.2, 0.8], device=device)
    draws = {
        "rand": (lambda: torch.rand(n, device=device), 0.5),
        "randn": (lambda: torch.randn(n, device=device), 0.0),
        "randint": (lambda: torch.randint(0, 11, (n,), device=device), 5.0),
        "randperm": (lambda: torch.randperm(n, device=device), (n - 1) / 2),
        "bernoulli": (lambda: torch.full((n,), 0.25, device=device).bernoulli(), 0.25),
        "multinomial": (lambda: torch.multinomial(probabilities, n, replacement=True), 0.8),
        "normal": (lambda: torch.empty(n, device=device).normal_(3.0, 0.5), 3.0),
        "exponential": (lambda: torch.empty(n, device=device).exponential_(2.0), 0.5),
        "uniform": (lambda: torch.empty(n, device=device).uniform_(-1, 3), 1.0),
    }
    make, mean = draws[name]
    torch.manual_seed(11)
    first = make().cpu()
    torch.manual_seed(11)
    same(make().cpu(), first, rtol=0, atol=0)
    assert abs(first.double().mean().item() - mean) < 0.12
    assert first.unique().numel() > 1


def test_two_random_tensors_in_one_trace_differ(device: torch.device) -> None:
    a, b = torch.rand(16, device=device), torch.rand(16, device=device)
    noise = torch.randn_like(a), torch.randn_like(a)
    assert not torch.equal(a.cpu(), b.cpu())
    assert not torch.equal(noise[0].cpu(), noise[1].cpu())


def test_a_random_value_read_twice_is_the_same(device: torch.device) -> None:
    x = torch.rand(16, device=device)
    doubled = x * 2
    first = x.cpu()
    same(x.cpu(), first, rtol=0, atol=0)
    same(doubled.cpu(), first * 2)
    same(x[3].item(), first[3].item())


def test_seeding_does_not_disturb_the_cpu_generator(device: torch.device) -> None:
    torch.manual_seed(4)
    expected = torch.rand(3)
    torch.manual_seed(4)
    if device.type != "cpu":
        torch.rand(100, device=device).sum().item()
    same(torch.rand(3), expected, rtol=0, atol=0)


def test_torch_distributions(device: torch.device) -> None:
    def use(d: torch.device) -> torch.Tensor:
        normal = torch.distributions.Normal(torch.zeros(3, device=d), torch.ones(3, device=d))
        categorical = torch.distributions.Categorical(logits=torch.zeros(4, device=d))
        assert normal.rsample((2,)).shape == (2, 3)
        assert 0 <= categorical.sample().item() < 4
        return normal.log_prob(torch.ones(3, device=d)) + normal.entropy()

    agree(use, device)
