"""Everyday PyTorch on the device: questions about memory that is not there, and files that are written and read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from everyday_support import ON_PORT, everywhere, ramp, same
from torch import nn

pytestmark = pytest.mark.skipif(not ON_PORT, reason="these are about the port device; this run is on the CPU")


def place(x: torch.Tensor) -> tuple[int, int, int, int]:
    """Where a tensor begins in its storage, and how large that is, as programs ask."""
    storage = x.untyped_storage()
    return x.data_ptr() - storage.data_ptr(), x.storage_offset(), storage.nbytes(), x._typed_storage()._size()


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "itself": lambda x: x,
    "rows": lambda x: x[1:],
    "rows of rows": lambda x: x[1:][1:],
    "column": lambda x: x[:, 2],
    "last": lambda x: x.view(-1)[-1],
    "transposed": lambda x: x.t()[1:],
    "split": lambda x: x.split(2, 1)[1],
    "expanded": lambda x: x[:1].expand(5, 4),
    "strided": lambda x: x.as_strided((2, 2), (4, 1), 3),
    "bytes": lambda x: x.view(torch.int8)[1],
    "detached": lambda x: x.detach()[2:],
    "of a parameter": lambda x: nn.Parameter(x)[1],
}


@pytest.mark.parametrize("name", VIEWS)
def test_where_a_view_lies_is_what_it_is_on_the_cpu(device: torch.device, name: str) -> None:
    asked = [place(VIEWS[name](ramp(3, 4, device=on))) for on in ("cpu", device)]
    assert asked[1] == asked[0]


@everywhere
def test_a_storage_is_the_same_as_long_as_it_lives(device: torch.device) -> None:
    x, other = ramp(3, 4, device=device), ramp(3, 4, device=device)
    view, storage = x[1:], x.untyped_storage()
    address = storage.data_ptr()
    x.add_(1)
    assert view.sum().item() == sum(range(5, 13))
    assert storage == view.untyped_storage() == x.detach().untyped_storage()
    assert x.data_ptr() == address
    assert view.data_ptr() == address + 16
    assert other.untyped_storage() != storage
    assert not address - 48 < other.data_ptr() < address + 48
    assert (storage.device.type, len(storage), storage.is_shared(), storage.is_pinned()) == ("port", 48, False, False)
    assert "port:0" in repr(storage)
    former = {address, other.data_ptr()}
    del x, view, storage, other
    assert ramp(3, 4, device=device).data_ptr() not in former


def test_a_gradient_keeps_its_address_through_a_step(device: torch.device) -> None:
    net = nn.Linear(3, 2).to(device)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    net(torch.ones(4, 3, device=device)).sum().backward()
    assert net.weight.grad is not None
    address = net.weight.grad.data_ptr()
    opt.step()
    assert net.weight.grad.data_ptr() == address


@pytest.mark.parametrize("ask", ["tolist", "cpu", "clone", "__getitem__", "fill_", "resize_", "share_memory_", "byte"])
def test_contents_of_a_storage_are_refused(device: torch.device, ask: str) -> None:
    storage: Any = ramp(3, 4, device=device).untyped_storage()
    given = (0,) if ask in ("__getitem__", "fill_", "resize_") else ()
    with pytest.raises(NotImplementedError, match="has none in this process") as caught:
        getattr(storage, ask)(*given)
    assert isinstance(caught.value, RuntimeError)


def test_other_libraries_get_a_copy_through_dlpack(device: torch.device) -> None:
    x = ramp(2, 3, device=device)
    array = np.from_dlpack(x)
    assert array.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    taken = torch.from_dlpack(x)
    assert torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(x[1])).tolist() == [3.0, 4.0, 5.0]
    taken[0, 0] = 7
    assert x[0, 0].item() == 0
    with pytest.raises(BufferError, match="require gradient"):
        np.from_dlpack(x.requires_grad_())


# -- files -----------------------------------------------------------------------------------------------------------
class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.table(x)))


def trained(device: torch.device) -> tuple[Tied, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = Tied().to(device)
    opt = torch.optim.AdamW(net.parameters())
    net(torch.tensor([0, 1, 2], device=device)).square().sum().backward()
    opt.step()
    return net, opt


def blank(device: torch.device) -> Tied:
    net = Tied().to(device)
    for value in net.state_dict().values():
        value.zero_()
    return net


@everywhere
def test_safetensors_files(device: torch.device, tmp_path: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import load_file, load_model, save_file, save_model

    net, _ = trained(device)
    state = net.state_dict()
    with pytest.raises(RuntimeError, match="share memory"):
        save_file(state, tmp_path / "tied")
    del state["head.weight"]
    save_file(state, tmp_path / "state")
    read = load_file(tmp_path / "state", device="port")
    assert {value.device.type for value in read.values()} == {"port"}
    same(read, {name: state[name] for name in read}, rtol=0, atol=0)
    with safe_open(tmp_path / "state", framework="pt", device=str(device)) as file:
        rows = file.get_slice("table.weight")[1:3]
        assert sorted(file.keys()) == sorted(state)
    assert rows.device.type == "port"
    same(rows, net.table.weight[1:3].detach())
    save_model(net, str(tmp_path / "model"))
    other = blank(device)
    load_model(other, tmp_path / "model", device="port")
    same(other.state_dict(), net.state_dict(), rtol=0, atol=0)
    assert load_file(tmp_path / "state")["table.weight"].device.type == "cpu"


def test_exported_programs_are_saved_and_loaded(device: torch.device, tmp_path: Path) -> None:
    net = trained(device)[0].eval()
    x = torch.tensor([4, 2], device=device)
    torch.export.save(torch.export.export(net, (x,)), tmp_path / "net.pt2")
    read = torch.export.load(tmp_path / "net.pt2").module()
    same(read(x).detach(), net(x).detach())
    assert {value.device.type for value in read.state_dict().values()} == {"port"}


@pytest.mark.parametrize("staged", [False, True])
def test_distributed_checkpoints_of_one_process(device: torch.device, tmp_path: Path, staged: bool) -> None:
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    net, opt = trained(device)
    model, optimizer = get_state_dict(net, opt)
    saved = {"model": model, "optimizer": optimizer}
    save = (lambda *a, **k: dcp.async_save(*a, **k).result()) if staged else dcp.save
    with pytest.warns(UserWarning, match="single process"):
        save(saved, checkpoint_id=tmp_path / "c")
    other = blank(device)
    another = torch.optim.AdamW(other.parameters())
    model, optimizer = get_state_dict(other, another)
    into = {"model": model, "optimizer": optimizer}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(into, checkpoint_id=tmp_path / "c")
    set_state_dict(other, another, model_state_dict=into["model"], optim_state_dict=into["optimizer"])
    same(other.state_dict(), net.state_dict(), rtol=0, atol=0)
    same(another.state_dict()["state"], opt.state_dict()["state"], rtol=0, atol=0)
    assert other.head.weight is other.table.weight


def test_everything_is_saved_and_loaded(device: torch.device, tmp_path: Path) -> None:
    net, opt = trained(device)
    x = ramp(3, 4, device=device)
    saved = {"net": net, "opt": opt, "x": x.requires_grad_(), "generator": torch.port.get_rng_state()}  # type: ignore[attr-defined]
    torch.save(saved, tmp_path / "all")
    read = torch.load(tmp_path / "all", weights_only=False)
    same(read["net"].state_dict(), net.state_dict(), rtol=0, atol=0)
    same(read["opt"].state_dict(), opt.state_dict(), rtol=0, atol=0)
    assert read["net"].head.weight is read["net"].table.weight
    assert read["x"].requires_grad
    torch.save(net.state_dict(), tmp_path / "state")
    for options in ({"mmap": True}, {"weights_only": True}, {"map_location": "cpu"}):
        same(torch.load(tmp_path / "state", **options), net.state_dict(), rtol=0, atol=0)


def test_models_of_transformers_are_saved_and_loaded(device: torch.device, tmp_path: Path) -> None:
    import transformers

    config = transformers.GPT2Config(
        n_layer=1, n_head=2, n_embd=8, vocab_size=20, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config).to(device)
    model.save_pretrained(tmp_path / "a")
    model.save_pretrained(tmp_path / "b", state_dict=model.state_dict())
    for folder in ("a", "b"):
        read = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / folder).to(device)
        assert read.lm_head.weight is read.transformer.wte.weight
        same(read.state_dict(), model.state_dict(), rtol=0, atol=0)
