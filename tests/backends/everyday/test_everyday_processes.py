"""Everyday PyTorch on the device: data in other processes, streams and events, modules that move while in use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.multiprocessing
from everyday_support import ON_PORT, agree, everywhere, ramp, randn, same
from torch import nn

on_port = pytest.mark.skipif(not ON_PORT, reason="these are about the port device; this run is on the CPU")


# -- other processes -------------------------------------------------------------------------------------------------
class Rows(torch.utils.data.Dataset):
    """Rows that are on the device."""

    def __init__(self, device: torch.device) -> None:
        self.rows = ramp(10, 2, device=device)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, at: int) -> dict[str, Any]:
        return {"row": self.rows[at] * 2, "at": at}


@pytest.fixture
def with_tiers() -> Iterator[None]:
    if not ON_PORT:
        yield
        return
    from torchport.core.config import config

    with config.override(tiers="auto"):
        yield


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_set_on_the_device_in_workers(device: torch.device, workers: int, with_tiers: None) -> None:
    """With tiers, as is the default: an engine that a fork leaves behind is interpreted in the workers."""
    torch.set_num_threads(1)
    loader = torch.utils.data.DataLoader(Rows(device), batch_size=4, num_workers=workers, timeout=120 if workers else 0)
    batches = list(loader)
    assert {batch["row"].device.type for batch in batches} == {device.type}
    same(torch.cat([batch["row"] for batch in batches]), ramp(10, 2, device=device) * 2, rtol=0, atol=0)
    assert [len(batch["at"]) for batch in batches] == [4, 4, 2]


def test_tensors_are_sent_between_processes(device: torch.device) -> None:
    queue: Any = torch.multiprocessing.get_context("fork").SimpleQueue()
    x, p = ramp(3, 2, device=device)[1:], nn.Parameter(ramp(2, device=device))
    queue.put((x, p))
    taken, parameter = queue.get()
    same((taken, parameter.detach()), (x, p.detach()), rtol=0, atol=0)
    assert (taken.device, type(parameter), parameter.requires_grad) == (x.device, nn.Parameter, True)
    with pytest.raises(RuntimeError, match="Cowardly refusing"):
        torch.multiprocessing.reductions.reduce_tensor(p * 2)


# -- streams and events ----------------------------------------------------------------------------------------------
@on_port
@everywhere
def test_streams_and_events_answer(device: torch.device) -> None:
    port: Any = torch.get_device_module("port")
    stream, start, end = port.Stream(), port.Event(enable_timing=True), port.Event(enable_timing=True)
    with port.stream(stream):
        start.record()
        x = randn(30, 30, device=device)
        y = x @ x
        end.record(stream)
    end.synchronize()
    assert start.elapsed_time(end) > 0
    assert end.query()
    assert stream.query()
    port.current_stream().wait_stream(stream)
    port.default_stream().wait_event(stream.record_event())
    port.set_stream(stream)
    assert isinstance(stream, torch.Stream)
    assert stream == port.current_stream() == torch.accelerator.current_stream()
    same(y, x.cpu() @ x.cpu(), rtol=1e-4, atol=1e-4)
    with pytest.raises(RuntimeError, match="enable_timing"):
        port.Event().elapsed_time(end)
    with pytest.raises(RuntimeError, match="recorded"):
        start.elapsed_time(port.Event(enable_timing=True))


# -- modules ---------------------------------------------------------------------------------------------------------
@everywhere
def test_a_module_moves_while_a_graph_of_it_lives(device: torch.device) -> None:
    def use(d: torch.device) -> Any:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
        before = net(randn(2, 4, device="cpu"))
        net.to(d)
        net(randn(2, 4, device=d)).sum().backward()
        assert before.grad_fn is not None
        return [p.grad for p in net.parameters()]

    agree(use, device)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_the_older_weight_norm_moves(device: torch.device) -> None:
    def use(d: torch.device) -> Any:
        torch.manual_seed(0)
        net = torch.nn.utils.weight_norm(nn.Linear(3, 2)).to(d)
        net(randn(4, 3, device=d)).sum().backward()
        return net.weight_g.grad, net.weight_v.grad

    agree(use, device)


def test_assertions_about_values(device: torch.device) -> None:
    torch._assert_async(ramp(2, device=device).sum() > 0)
    torch._assert_async(torch.ones((), device=device), "is not")
    with pytest.raises(RuntimeError, match="it is not"):
        torch._assert_async(torch.zeros((), device=device), "it is not")


def test_group_norm_of_what_lies_transposed(device: torch.device) -> None:
    def use(d: torch.device) -> Any:
        x = randn(1, 16, 8, device="cpu").to(d)
        found = []
        for view in (
            x.transpose(1, 2).reshape(1, 8, 4, 4),
            x.reshape(1, 8, 4, 4).permute(0, 1, 3, 2),
            x.reshape(1, 4, 4, 8).permute(0, 3, 1, 2),
            x.transpose(1, 2).reshape(1, 8, 2, 2, 4),
        ):
            leaf = view.detach().requires_grad_()
            result = nn.functional.group_norm(leaf, 2)
            result.pow(3).sum().backward()
            found += [result.detach(), leaf.grad]
        return found

    agree(use, device, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD", "Adadelta"])
def test_capturable_optimizers(device: torch.device, name: str) -> None:
    def use(d: torch.device) -> Any:
        torch.manual_seed(0)
        net = nn.Linear(4, 2).to(d)
        options = {"capturable": True} if d.type != "cpu" else {}
        opt = getattr(torch.optim, name)(net.parameters(), lr=0.01, **options)
        for step in range(3):
            opt.zero_grad()
            net(randn(3, 4, device=d, seed=step)).square().sum().backward()
            opt.step()
        return [p.detach() for p in net.parameters()]

    agree(use, device, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "Adagrad", "RMSprop", "Adadelta"])
def test_differentiable_optimizers(device: torch.device, name: str) -> None:
    def use(d: torch.device) -> Any:
        weight = randn(3, device=d).requires_grad_()
        inner = weight.clone()
        inner.retain_grad()
        opt = getattr(torch.optim, name)([inner.detach().requires_grad_()], lr=0.1, differentiable=True)
        opt.param_groups[0]["params"] = [inner]
        inner.grad = (weight * 3).square()
        opt.step()
        return torch.autograd.grad(inner.square().sum(), weight)

    agree(use, device, rtol=1e-4, atol=1e-5)
