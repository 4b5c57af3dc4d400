"""Everyday PyTorch on the device: optimizers, schedulers, data loaders, whole training loops."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import fakes
import pytest
import torch
from everyday_support import agree, counted, everywhere, needs_counters, randn, same
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchport
from torchport import BackendData, ExecutionContext

BUILT_IN: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "SGD momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}),
    "Adam": (torch.optim.Adam, {"lr": 0.01}),
    "Adam amsgrad": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True, "weight_decay": 0.01}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01}),
    "AdamW maximize": (torch.optim.AdamW, {"lr": 0.01, "maximize": True}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.01}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.01, "decoupled_weight_decay": True, "weight_decay": 0.1}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.01}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.05, "lr_decay": 0.01}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 0.5}),
    "ASGD": (torch.optim.ASGD, {"lr": 0.05}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "centered": True, "momentum": 0.5}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.01}),
}
WITHOUT_FOREACH: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "LBFGS": (torch.optim.LBFGS, {"lr": 0.3, "max_iter": 4}),
    "LBFGS strong_wolfe": (torch.optim.LBFGS, {"line_search_fn": "strong_wolfe", "max_iter": 4}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.05}),
}
TARGET = torch.tensor([0, 1, 0, 1, 1, 0])


def make_net(device: torch.device | str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).to(device)


def train(net: nn.Module, opt: torch.optim.Optimizer, device: torch.device, steps: int) -> list[float]:
    """Cross entropy on a fixed batch; the losses."""
    x, y = randn(6, 4, device=device), TARGET.to(device)

    def closure() -> torch.Tensor:
        opt.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        return loss

    return [opt.step(closure).item() for _ in range(steps)]


def trained(name: str, device: torch.device, **extra: Any) -> Any:
    kind, options = (BUILT_IN | WITHOUT_FOREACH)[name]
    net = make_net(device)
    losses = train(net, kind(net.parameters(), **options, **extra), device, 4)
    return losses, [p.detach() for p in net.parameters()]


@pytest.mark.parametrize("foreach", [True, False], ids=["foreach", "for-loop"])
@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_optimizers(device: torch.device, name: str, foreach: bool) -> None:
    agree(lambda d: trained(name, d, foreach=foreach), device, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", WITHOUT_FOREACH)
def test_built_in_optimizers_with_one_form(device: torch.device, name: str) -> None:
    agree(lambda d: trained(name, d), device, rtol=1e-4, atol=1e-5)


@everywhere
def test_the_default_form_of_adamw(device: torch.device) -> None:
    agree(lambda d: trained("AdamW", d), device, rtol=1e-4, atol=1e-5)


def test_muon(device: torch.device) -> None:
    def use(d: torch.device) -> Any:
        weight = nn.Parameter(randn(6, 4, device="cpu").to(d))
        opt = torch.optim.Muon([weight], lr=0.05)
        for seed in range(3):
            opt.zero_grad()
            (randn(3, 6, device=d, seed=seed) @ weight).square().sum().backward()
            opt.step()
        return weight.detach()

    agree(use, device, rtol=5e-2, atol=5e-3)


def test_sparse_adam(device: torch.device) -> None:
    def use(d: torch.device) -> Any:
        torch.manual_seed(0)
        table = nn.Embedding(6, 3, sparse=True).to(d)
        opt = torch.optim.SparseAdam(table.parameters(), lr=0.1)
        for _ in range(3):
            opt.zero_grad()
            table(torch.tensor([1, 3, 3], device=d)).square().sum().backward()
            opt.step()
        return table.weight.detach()

    agree(use, device, rtol=1e-4, atol=1e-5)


def test_a_tensor_learning_rate_and_capturable(device: torch.device) -> None:
    def use(d: torch.device) -> Any:
        net = make_net(d)
        return train(net, torch.optim.Adam(net.parameters(), lr=torch.tensor(0.01)), d, 3)

    agree(use, device, rtol=1e-4)


def test_optimizer_state_round_trip(device: torch.device) -> None:
    net = make_net(device)
    opt = torch.optim.AdamW(net.parameters(), lr=0.01)
    train(net, opt, device, 2)
    twin = make_net(device)
    twin.load_state_dict(net.state_dict())
    twin_opt = torch.optim.AdamW(twin.parameters(), lr=0.5)
    twin_opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    same(train(twin, twin_opt, device, 3), train(net, opt, device, 3))


def test_parameter_groups_and_added_groups(device: torch.device) -> None:
    def use(d: torch.device) -> Any:
        net = make_net(d)
        opt = torch.optim.SGD([{"params": net[0].parameters(), "lr": 0.1}], lr=0.01)
        train(net, opt, d, 1)
        opt.add_param_group({"params": net[2].parameters(), "momentum": 0.5})
        return train(net, opt, d, 3)

    agree(use, device, rtol=1e-4)


# -- schedulers --------------------------------------------------------------------------------------------------------
def _schedulers(opt: torch.optim.Optimizer) -> dict[str, torch.optim.lr_scheduler.LRScheduler]:
    lr = torch.optim.lr_scheduler
    return {
        "StepLR": lr.StepLR(opt, 10, 0.5),
        "CosineAnnealingLR": lr.CosineAnnealingLR(opt, 100, eta_min=1e-4),
        "OneCycleLR": lr.OneCycleLR(opt, 0.1, total_steps=120),
        "LambdaLR": lr.LambdaLR(opt, lambda step: 1 / math.sqrt(step + 1)),
        "ExponentialLR": lr.ExponentialLR(opt, 0.97),
    }


@needs_counters
@pytest.mark.parametrize("name", ["StepLR", "CosineAnnealingLR", "OneCycleLR", "LambdaLR", "ExponentialLR"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW], ids=["SGD", "AdamW"])
def test_a_scheduler_causes_no_new_compile(device: torch.device, name: str, kind: type[torch.optim.Optimizer]) -> None:
    net = make_net(device)
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    opt = kind(net.parameters(), lr=0.05, **options)
    schedule = _schedulers(opt)[name]

    def steps(count: int) -> None:
        for _ in range(count):
            train(net, opt, device, 1)
            schedule.step()

    steps(4)
    with counted() as counts:
        steps(100)
    assert counts["UncachedCompile"] == 0
    assert counts["Execute"] == 100


def test_reduce_on_plateau(device: torch.device) -> None:
    def use(d: torch.device) -> Any:
        net = make_net(d)
        opt = torch.optim.SGD(net.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=0)
        for _ in range(4):
            schedule.step(torch.ones((), device=d))
        return opt.param_groups[0]["lr"]

    agree(use, device)


def test_averaged_models(device: torch.device) -> None:
    def use(d: torch.device) -> Any:
        net = make_net(d)
        averaged = torch.optim.swa_utils.AveragedModel(
            net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(3):
            train(net, opt, d, 1)
            averaged.update_parameters(net)
        return [p.detach() for p in averaged.parameters()]

    agree(use, device, rtol=1e-4)


def test_grad_scaler_steps_and_skips(device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("torch.amp.GradScaler on the CPU is its own code; the device is what is tested")
    net = make_net(device)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device.type, init_scale=8.0)
    before = net[0].weight.detach().cpu()
    scaler.scale(net(randn(6, 4, device=device)).square().mean()).backward()
    scaler.step(opt)
    scaler.update()
    after = net[0].weight.detach().cpu()
    assert not torch.equal(before, after)
    opt.zero_grad()
    scaler.scale(net(randn(6, 4, device=device)).square().mean() * math.inf).backward()
    scaler.step(opt)
    scaler.update()
    same(net[0].weight.detach(), after)
    assert scaler.get_scale() == 4.0


# -- data --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_data_loader_with_two_workers(device: torch.device, context: str) -> None:
    torch.ones(1, device=device).sum().item()
    data = TensorDataset(torch.arange(12.0).reshape(6, 2), torch.arange(6))
    loader = DataLoader(data, batch_size=2, num_workers=2, multiprocessing_context=context)
    seen = []
    for x, y in loader:
        seen.append((x.to(device, non_blocking=True) * 2)[:, 0].tolist() + y.to(device).tolist())
    assert sorted(seen) == [[0.0, 4.0, 0, 1], [8.0, 12.0, 2, 3], [16.0, 20.0, 4, 5]]


def test_a_data_set_that_lives_on_the_device(device: torch.device) -> None:
    data = TensorDataset(torch.arange(12.0).reshape(6, 2).to(device))
    total = sum(batch.sum().item() for (batch,) in DataLoader(data, batch_size=4, shuffle=True))
    assert total == 66


# -- whole loops -------------------------------------------------------------------------------------------------------
@everywhere
def test_a_network_learns(device: torch.device) -> None:
    net = make_net(device)
    losses = train(net, torch.optim.Adam(net.parameters(), lr=0.05), device, 30)
    assert losses[-1] < losses[0] / 2
    accuracy = (net(randn(6, 4, device=device)).argmax(1) == TARGET.to(device)).float().mean()
    assert accuracy.item() >= 5 / 6


def test_a_convolutional_network_in_training_and_evaluation(device: torch.device) -> None:
    def use(d: torch.device) -> Any:
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 2)
        ).to(d)
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        losses = []
        for step in range(4):
            opt.zero_grad()
            loss = nn.functional.cross_entropy(net(randn(6, 1, 8, 8, device=d, seed=step)), TARGET.to(d))
            loss.backward()
            opt.step()
            losses.append(loss.item())
        net.eval()
        with torch.no_grad():
            return losses, net(randn(6, 1, 8, 8, device=d)), [b.clone() for b in net.buffers()]

    agree(use, device, rtol=1e-3, atol=1e-4)


class Outputs(fakes.Fake):
    """Notes how many values each computation has."""

    name = "outputs"

    def __init__(self) -> None:
        self.counts: list[int] = []

    def execute(self, handle: Any, args: Sequence[BackendData], context: ExecutionContext) -> Sequence[BackendData]:
        results = super().execute(handle, args, context)
        self.counts.append(len(results))
        return results


@pytest.mark.compiled
@needs_counters
def test_a_gradient_is_computed_once() -> None:
    """A linear layer's gradient is a view of a product, which nobody needs beside it."""
    backend = Outputs.install()
    net = make_net(backend.device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x = randn(6, 4, device=backend.device)
    torchport.sync()
    backend.counts.clear()
    net(x).sum().backward()
    optimizer.step()
    assert backend.counts == [8]  # four gradients, four parameters


def test_a_gradient_that_somebody_views_stays_a_view(device: torch.device) -> None:
    net = make_net(device)
    net(randn(6, 4, device=device)).sum().backward()
    weight: Any = next(net.parameters())
    held = weight.grad[0]
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    held.fill_(7.0)
    assert weight.grad[0].tolist() == [7.0] * 4
