"""Everyday PyTorch on the device: random numbers are reproducible, and the generator's state is the user's."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest
import torch
from everyday_support import DEVICE, ON_PORT, agree, counted, everywhere, needs_counters, randn, same
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


def test_a_generator_of_the_cpu_draws_the_numbers_of_the_cpu(device: torch.device) -> None:
    def seeded(seed: int) -> torch.Tensor:
        return torch.randn(8, generator=torch.Generator().manual_seed(seed), device=device).cpu()

    same(seeded(5), torch.randn(8, generator=torch.Generator().manual_seed(5)), rtol=0, atol=0)
    assert not torch.equal(seeded(5), seeded(6))


OPERATORS: dict[str, Callable[[torch.device, torch.Generator], torch.Tensor]] = {
    "rand": lambda d, g: torch.rand(9, generator=g, device=d),
    "randn": lambda d, g: torch.randn(9, generator=g, device=d),
    "randint": lambda d, g: torch.randint(0, 1000, (9,), generator=g, device=d),
    "randperm": lambda d, g: torch.randperm(50, generator=g, device=d),
    "normal": lambda d, g: torch.normal(torch.zeros(9, device=d), 1.0, generator=g),
    "uniform_": lambda d, g: torch.empty(9, device=d).uniform_(generator=g),
    "normal_": lambda d, g: nn.init.normal_(torch.empty(9, device=d), generator=g),
    "exponential_": lambda d, g: torch.empty(9, device=d).exponential_(generator=g),
    "bernoulli": lambda d, g: torch.bernoulli(torch.full((99,), 0.5, device=d), generator=g),
    "multinomial": lambda d, g: torch.multinomial(torch.ones(50, device=d), 9, generator=g),
    "poisson": lambda d, g: torch.poisson(torch.full((9,), 100.0, device=d), generator=g),
    "of the CPU": lambda d, g: torch.randperm(50, generator=g),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_a_generator_of_the_device_draws_what_its_state_says(device: torch.device, name: str) -> None:
    draw = OPERATORS[name]
    generator = torch.Generator(device).manual_seed(3)
    global_state = state()
    first = draw(device, generator).cpu()
    kept = generator.get_state()
    second = draw(device, generator).cpu()
    assert not torch.equal(first, second)
    same(draw(device, generator.set_state(kept)).cpu(), second, rtol=0, atol=0)
    same(draw(device, generator.manual_seed(3)).cpu(), first, rtol=0, atol=0)
    same(state(), global_state, rtol=0, atol=0)  # the device's own generator has drawn nothing
    if name not in ("of the CPU", "poisson"):
        torch.manual_seed(3)
        same(draw(device, None).cpu(), first, rtol=0, atol=0)  # type: ignore[arg-type]


@everywhere
def test_a_generator_is_one_of_pytorchs(device: torch.device) -> None:
    generator = torch.Generator(device=device)
    assert isinstance(generator, torch.Generator)
    assert isinstance(torch.default_generator, torch.Generator)
    assert isinstance(torch.Generator(), torch.Generator)
    assert generator.device == torch.ones(1, device=device).device
    assert generator.manual_seed(5).initial_seed() == 5
    torch.rand(3, generator=generator, device=device)
    other = pickle.loads(pickle.dumps(generator))
    expected = torch.rand(3, generator=generator.clone_state(), device=device)
    same(torch.rand(3, generator=other, device=device), expected, rtol=0, atol=0)
    assert generator.seed() == generator.initial_seed() != 5
    with pytest.raises(ValueError, match="no state of a generator") if ON_PORT else pytest.raises(RuntimeError):
        generator.set_state(torch.zeros(3, dtype=torch.uint8))


def test_samplers_and_loaders_take_a_generator_of_the_device(device: torch.device) -> None:
    def epochs() -> list[list[int]]:
        generator = torch.Generator(device).manual_seed(1)
        parts = torch.utils.data.random_split(range(40), [30, 10], generator=generator)
        loader = torch.utils.data.DataLoader(parts[0], batch_size=5, shuffle=True, generator=generator)
        return [batch.tolist() for _ in range(2) for batch in loader]

    first = epochs()
    assert first == epochs()
    assert first[:6] != first[6:]
    torch.set_default_device(device)
    assert epochs() == epochs()


@pytest.mark.compiled
@needs_counters
def test_another_seed_compiles_nothing(device: torch.device) -> None:
    generator = torch.Generator(device)

    def step(seed: int) -> None:
        torch.randn(7, 3, generator=generator.manual_seed(seed), device=device).sum().item()

    step(0)
    with counted() as counts:
        for seed in range(1, 4):
            step(seed)
    assert counts["UncachedCompile"] == 0
    assert counts["Execute"] == 3


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
