"""Everyday PyTorch on the device: parameters, modules, copies, files, and what moves with ``.to``."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from everyday_support import ON_PORT, agree, everywhere, ramp, randn, same
from torch import nn

from torchport import StorageAccess


def mlp(device: torch.device | str, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)).to(device)


class Tied(nn.Module):
    """A table used twice: to embed and, transposed, to predict."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("hidden", torch.ones(2), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(tokens)) * self.scale


# -- modules -----------------------------------------------------------------------------------------------------------
@everywhere
def test_module_to_moves_parameters_and_buffers_in_place(device: torch.device) -> None:
    net = mlp("cpu")
    weight = net[0].weight
    assert net.to(device) is net
    assert all(p.device.type == device.type for p in net.parameters())
    assert all(b.device.type == device.type for b in net.buffers())
    assert isinstance(net[0].weight, nn.Parameter)
    assert net[0].weight is weight, "as on CUDA, the parameter object stays and its data moves"
    assert net[0].weight.is_leaf
    assert net[0].weight.requires_grad


@pytest.mark.parametrize("move", ["to", "to with dtype", "to_empty", "apply", "back and forth"])
def test_ways_to_move_a_module(device: torch.device, move: str) -> None:
    net = Tied()
    if move == "to":
        net.to(device)
    elif move == "to with dtype":
        net.to(device, torch.float64)
    elif move == "to_empty":
        net.to_empty(device=device)
    elif move == "apply":
        net._apply(lambda t: t.to(device))
    else:
        net.to(device).cpu().to(device)
    assert net.head.weight is net.table.weight
    assert net.scale.device.type == device.type
    assert net(torch.tensor([1], device=device)).shape == (1, 5)


def test_a_parameter_that_moves_keeps_what_is_set_on_it(device: torch.device) -> None:
    linear = nn.Linear(2, 2, bias=False)
    weight: Any = linear.weight
    weight.note, weight.grad = "kept", torch.ones(2, 2)
    before = weight.detach().clone()
    linear.to(device)
    assert linear.weight is weight
    assert weight.note == "kept"
    assert weight.requires_grad
    assert weight.is_leaf
    torch.optim.SGD([weight], lr=1.0).step()
    linear.to("cpu")
    assert weight.note == "kept"
    torch.testing.assert_close(weight.detach(), before - 1)


def test_tied_weights_stay_tied_and_their_gradients_add_up(device: torch.device) -> None:
    def use(d: torch.device) -> Any:
        torch.manual_seed(0)
        net = Tied().to(d)
        assert net.head.weight is net.table.weight
        assert len(list(net.parameters())) == 1
        net(torch.tensor([1, 3], device=d)).square().sum().backward()
        return net.table.weight.grad, net.head.weight

    agree(use, device)


@everywhere
def test_an_optimizer_made_before_the_move_keeps_working(device: torch.device) -> None:
    def use(d: torch.device) -> Any:
        net = mlp("cpu")
        opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        net.to(d)
        for step in range(3):
            opt.zero_grad()
            net(randn(8, 4, device=d, seed=step)).square().mean().backward()
            opt.step()
        return [p.detach() for p in net.parameters()]

    agree(use, device, rtol=1e-4, atol=1e-6)


def test_gradients_move_with_the_module(device: torch.device) -> None:
    net = mlp("cpu")
    net(randn(8, 4, device="cpu")).sum().backward()
    expected = net[0].weight.grad.clone()
    net.to(device)
    assert net[0].weight.grad.device.type == device.type
    same(net[0].weight.grad, expected)


def test_batch_norm_running_statistics(device: torch.device) -> None:
    def use(d: torch.device) -> Any:
        norm = nn.BatchNorm1d(4).to(d)
        outs = [norm(randn(16, 4, device=d, seed=s) * 3 + 1) for s in range(3)]
        norm.eval()
        outs.append(norm(randn(2, 4, device=d)))
        return outs, norm.running_mean, norm.running_var, norm.num_batches_tracked

    agree(use, device, rtol=1e-4, atol=1e-5)


def test_lazy_modules_and_parametrizations(device: torch.device) -> None:
    def use(d: torch.device) -> Any:
        torch.manual_seed(0)
        normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)).to(d)
        return normed(randn(2, 4, device=d)), normed.weight

    agree(use, device)
    lazy = nn.LazyLinear(3, device=device)
    assert lazy(randn(2, 4, device=device)).shape == (2, 3)
    assert lazy.weight.shape == (3, 4)


def test_initialisers_write_into_parameters(device: torch.device) -> None:
    w = nn.Parameter(torch.empty(20, 30, device=device))
    nn.init.ones_(w)
    assert w.sum().item() == 600
    nn.init.xavier_uniform_(w)
    assert 0 < w.abs().max().item() < 0.4
    nn.init.normal_(w, std=2.0)
    assert 1.5 < w.std().item() < 2.5
    nn.init.orthogonal_(w)
    same((w @ w.t()).detach(), torch.eye(20), atol=1e-4)
    nn.init.trunc_normal_(w, std=0.02)
    assert w.abs().max().item() <= 2


# -- copies ------------------------------------------------------------------------------------------------------------
def test_deepcopy_of_tensors(device: torch.device) -> None:
    x = ramp(2, 3, device=device)
    leaf = ramp(3, device=device).requires_grad_()
    (leaf * 2).sum().backward()
    view = x.t()
    copied, leaf_copy, view_copy = copy.deepcopy([x, leaf, view])
    x += 1
    same(copied, ramp(2, 3, device="cpu"))
    same(view_copy, ramp(2, 3, device="cpu").t(), strides=True)
    assert leaf_copy.requires_grad
    same(leaf_copy.grad, torch.full((3,), 2.0))
    assert copy.copy(x) is not x
    same(copy.copy(x), x.cpu())


def test_deepcopy_keeps_objects_but_not_views(device: torch.device) -> None:
    """Tensors without storage, as on XLA: a tensor met twice is one copy; a view becomes a tensor of its own."""
    x = ramp(2, 3, device=device)
    base, view, again = copy.deepcopy([x, x[0], x])
    assert base is again
    base += 10
    same(view, torch.tensor([10.0, 11.0, 12.0] if not ON_PORT else [0.0, 1.0, 2.0]))
    same(x, ramp(2, 3, device="cpu"))


def test_deepcopy_of_a_result_of_autograd_raises_as_on_the_cpu(device: torch.device) -> None:
    y = ramp(3, device=device).requires_grad_() * 2
    with pytest.raises(RuntimeError, match="deepcopy protocol"):
        copy.deepcopy(y)


def test_deepcopy_of_a_module_and_an_optimizer(device: torch.device) -> None:
    net = mlp(device)
    opt = torch.optim.Adam(net.parameters())
    net(randn(8, 4, device=device)).sum().backward()
    opt.step()
    twin, twin_opt = copy.deepcopy((net, opt))
    before = net[0].weight.detach().cpu()
    twin_opt.zero_grad()
    twin(randn(8, 4, device=device)).sum().backward()
    twin_opt.step()
    same(net[0].weight.detach(), before)
    assert (twin[0].weight.cpu() - before).abs().max() > 1e-5
    tied = copy.deepcopy(Tied().to(device))
    assert tied.head.weight is tied.table.weight


# -- files -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("weights_only", [True, False])
def test_save_and_load_keep_the_device(device: torch.device, tmp_path: Path, weights_only: bool) -> None:
    path = tmp_path / "x.pt"
    kept = {"x": ramp(2, 3, device=device), "int": torch.tensor([1, 2], device=device), "n": 3, "t": torch.ones(2)}
    torch.save(kept, path)
    loaded = torch.load(path, weights_only=weights_only)
    assert loaded["x"].device.type == device.type
    assert loaded["t"].device.type == "cpu"
    same(loaded, {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in kept.items()})
    loaded["x"] += 1
    same(loaded["x"], ramp(2, 3, device="cpu") + 1)


@pytest.mark.parametrize("weights_only", [True, False])
def test_map_location_both_ways(device: torch.device, tmp_path: Path, weights_only: bool) -> None:
    there, here = tmp_path / "there.pt", tmp_path / "here.pt"
    torch.save({"x": ramp(3, device=device) * 2}, there)
    torch.save({"x": ramp(3, device="cpu") * 2}, here)
    for target in ("cpu", torch.device("cpu"), lambda storage, location: storage.cpu()):
        loaded = torch.load(there, map_location=target, weights_only=weights_only)["x"]
        assert loaded.device.type == "cpu"
        same(loaded, torch.tensor([0.0, 2.0, 4.0]))
    for target in (device, str(device), {"cpu": str(device)}):
        loaded = torch.load(here, map_location=target, weights_only=weights_only)["x"]
        assert loaded.device.type == device.type
        same(loaded, torch.tensor([0.0, 2.0, 4.0]))
    same(torch.load(there, map_location=device, weights_only=weights_only)["x"], torch.tensor([0.0, 2.0, 4.0]))


def test_views_that_share_memory_share_it_in_the_file(device: torch.device, tmp_path: Path) -> None:
    x = ramp(2, 3, device=device)
    torch.save([x, x.t(), x], tmp_path / "x.pt")
    base, view, again = torch.load(tmp_path / "x.pt")
    same([base, view, again], [t.cpu() for t in (x, x.t(), x)], strides=True)


def test_a_module_and_its_optimizer_in_a_file(device: torch.device, tmp_path: Path) -> None:
    net = mlp(device)
    opt = torch.optim.Adam(net.parameters())
    net(randn(8, 4, device=device)).sum().backward()
    opt.step()
    torch.save({"net": net.state_dict(), "opt": opt.state_dict()}, tmp_path / "all.pt")
    state = torch.load(tmp_path / "all.pt", map_location="cpu", weights_only=True)
    other = mlp("cpu", seed=5)
    other_opt = torch.optim.Adam(other.parameters())
    other.load_state_dict(state["net"])
    other_opt.load_state_dict(state["opt"])
    same(list(other.state_dict().values()), [v.cpu() for v in net.state_dict().values()])
    torch.save(net, tmp_path / "net.pt")
    whole = torch.load(tmp_path / "net.pt", weights_only=False)
    same(whole.eval()(randn(2, 4, device=device)), net.eval()(randn(2, 4, device=device)).cpu().requires_grad_())


def test_pickle(device: torch.device) -> None:
    x = ramp(2, 3, device=device)
    parameter = nn.Parameter(ramp(2, device=device))
    copied, parameter_copy, module = pickle.loads(pickle.dumps((x.t(), parameter, mlp(device))))
    same(copied, x.cpu().t(), strides=True)
    assert copied.device.type == device.type
    assert isinstance(parameter_copy, nn.Parameter)
    assert next(module.parameters()).device.type == device.type


def test_save_to_a_buffer_in_the_legacy_format(device: torch.device) -> None:
    buffer = io.BytesIO()
    torch.save(ramp(3, device=device), buffer, _use_new_zipfile_serialization=False)
    buffer.seek(0)
    same(torch.load(buffer, map_location="cpu"), torch.arange(3.0))


def test_load_from_the_legacy_format_onto_the_device(device: torch.device) -> None:
    buffer = io.BytesIO()
    x = torch.arange(6.0).reshape(2, 3)
    torch.save([x, x.t(), x[1], nn.Parameter(x), mlp("cpu")], buffer, _use_new_zipfile_serialization=False)
    buffer.seek(0)
    loaded = torch.load(buffer, map_location=device, weights_only=False)
    same(loaded[:3], [x, x.t(), x[1]], strides=True)
    assert isinstance(loaded[3], nn.Parameter)
    same([loaded[3].detach(), *loaded[4].state_dict().values()], [x, *mlp("cpu").state_dict().values()])
    assert all(value.device.type == device.type for value in (*loaded[:4], *loaded[4].parameters()))


class _ComputesWhileItIsRead:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def __setstate__(self, state: dict[str, torch.Tensor]) -> None:
        self.x = state["x"] + 1


def test_the_legacy_format_has_no_values_to_compute_with_while_it_is_read(device: torch.device) -> None:
    buffer = io.BytesIO()
    torch.save(_ComputesWhileItIsRead(torch.arange(3.0)), buffer, _use_new_zipfile_serialization=False)
    buffer.seek(0)
    with pytest.raises(StorageAccess, match="computes with a tensor on"):
        torch.load(buffer, map_location=device, weights_only=False)


# -- state dictionaries ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("source", ["cpu", "device"])
def test_load_state_dict(device: torch.device, source: str, assign: bool) -> None:
    origin = mlp("cpu" if source == "cpu" else device, seed=1)
    net = mlp(device, seed=2)
    kept = net[0].weight
    report = net.load_state_dict(origin.state_dict(), assign=assign)
    assert not report.missing_keys
    assert not report.unexpected_keys
    if not assign:
        assert net[0].weight is kept
        assert all(p.device.type == device.type for p in net.parameters())
    same([v.cpu() for v in net.state_dict().values()], [v.cpu() for v in origin.state_dict().values()])


def test_a_state_dict_follows_the_parameters(device: torch.device) -> None:
    net = nn.Linear(2, 2, device=device)
    state = net.state_dict()
    with torch.no_grad():
        net.weight.fill_(3)
    same(state["weight"], torch.full((2, 2), 3.0))
    state["weight"].zero_()
    same(net.weight.detach(), torch.zeros(2, 2))


def test_buffers_persistent_and_not(device: torch.device) -> None:
    net = Tied().to(device)
    assert list(net.state_dict()) == ["scale", "table.weight", "head.weight"]
    assert net.hidden.device.type == device.type
    net.scale += 1
    assert net.state_dict()["scale"].item() == 3


def test_meta_modules_are_materialised(device: torch.device) -> None:
    with torch.device("meta"):
        net = nn.Linear(3, 2)
    net.to_empty(device=device)
    net.load_state_dict({"weight": torch.ones(2, 3), "bias": torch.zeros(2)})
    same(net(torch.ones(1, 3, device=device)).detach(), torch.full((1, 2), 3.0))
