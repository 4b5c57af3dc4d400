"""First uses of the device by modules, factories and files."""

from __future__ import annotations

import copy
import io
import os
import pickle
import tempfile
import warnings
import weakref
from pathlib import Path
from typing import Any

import torch
from first_uses_support import KINDS, Kind, Tied, as_warm, kind, train, weights
from torch import nn


# -- modules ---------------------------------------------------------------------------------------------------------
@kind
def module_to_tied(device: str) -> Any:
    model = Tied()
    weight = model.outer.weight
    model.to(device)
    return [weight is model.outer.weight, model.inner[0].weight is weight, train(model, device)]


@kind
def module_to_after_optimizer(device: str) -> Any:
    model = Tied()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model.to(device)
    return train(model, device, optimizer)


@kind
def module_to_with_references(device: str) -> Any:
    model = nn.Linear(4, 4)
    seen: list[str] = []
    with torch.no_grad():
        model.weight.copy_(weights(4, 4))
        model.bias.zero_()
    model.weight.register_hook(lambda grad: seen.append("hook"))
    model.weight.mark = "mine"  # type: ignore[attr-defined]
    reference, identity = weakref.ref(model.weight), id(model.weight)
    model(torch.ones(1, 4)).sum().backward()
    model.to(device)
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(torch.ones(1, 4, device=device)).sum().backward()
    same = [reference() is model.weight, id(model.weight) == identity, model.weight.mark]
    return [same, type(model.weight).__name__, grads, model.weight.grad, seen, model.weight.is_leaf]


@kind
def module_method(device: str) -> Any:
    model = Tied()
    weight = model.outer.weight
    getattr(model, device)()
    return [weight is model.outer.weight, train(model, device)]


@kind
def module_half(device: str) -> Any:
    model = Tied().half()
    weight = model.outer.weight
    model.to(device)
    return [weight is model.outer.weight, model.outer.weight, model.scale, len(list(model.parameters()))]


@kind
def module_to_device_and_dtype(device: str) -> Any:
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model.to(device, torch.float64)
    loss = model(weights(3, 4).to(device).double()).sum()
    loss.backward()
    optimizer.step()
    return [loss.item(), list(model.state_dict().values())]


@kind
def module_to_empty(device: str) -> Any:
    model = Tied()
    weight = model.outer.weight
    model.to_empty(device=device)
    with torch.no_grad():
        for value in model.state_dict().values():
            value.fill_(0.5)
    return [weight is model.outer.weight, train(model, device)]


@kind
def module_from_meta(device: str) -> Any:
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    model.to_empty(device=device)
    model.load_state_dict({"weight": weights(4, 4), "bias": weights(4)})
    return train(model, device)


@kind
def lazy_module(device: str) -> Any:
    model = nn.LazyLinear(4)
    weight = model.weight
    model.to(device)
    model(torch.ones(2, 4, device=device))
    return [weight is model.weight, weight.shape, weight.device.type == device]


@kind
def lstm_and_buffers(device: str) -> Any:
    model = nn.ModuleDict({"lstm": nn.LSTM(4, 3), "norm": nn.BatchNorm1d(3)})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(weights(*parameter.shape))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.to(device)
    out = model["norm"](model["lstm"](weights(5, 4).to(device))[0])
    out.square().sum().backward()
    optimizer.step()
    return [out, dict(model.state_dict())]


@kind
def parametrized_module(device: str) -> Any:
    model = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(weights(*parameter.shape))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.to(device)
    return train(model, device, optimizer)


@kind
def load_state_dict_assign(device: str) -> Any:
    model = Tied()
    state = {name: value.to(device) for name, value in Tied().state_dict().items()}
    model.load_state_dict(state, assign=True)
    return [model(weights(3, 4).to(device)), model.outer.weight.device.type == device]


@kind
def deepcopy_after_to(device: str) -> Any:
    model = copy.deepcopy(Tied().to(device))
    return [model.outer.weight is model.inner[0].weight, train(model, device)]


@kind
def apply_counts_calls(device: str) -> Any:
    shapes: list[Any] = []
    model = nn.Linear(4, 2)
    model._apply(lambda tensor: (shapes.append(list(tensor.shape)), tensor.double())[1])
    return [shapes, model.weight.dtype == torch.float64, torch.ones(2, device=device)]


# -- factories and copies ---------------------------------------------------------------------------------------------
FACTORIES: dict[str, Kind] = {
    "ones": lambda device: torch.ones(2, 3, device=device),
    "tensor": lambda device: torch.tensor([[1, 2], [3, 4]], device=device),
    "arange": lambda device: torch.arange(5, device=device),
    "asarray": lambda device: torch.asarray([1.0, 2.0], device=device),
    "new_full": lambda device: torch.ones(2).new_full((3,), 4.0, device=device),
    "ones_like": lambda device: torch.ones_like(torch.zeros(3), device=device),
    "eye": lambda device: torch.eye(3, device=device).t() * 2,
    "to": lambda device: weights(3).to(device) + 1,
    "to_non_blocking": lambda device: weights(3).to(device, torch.float64, non_blocking=True),
    "method": lambda device: getattr(weights(3), device)(),
    "copy": lambda device: torch.zeros(3, device=device).copy_(weights(3)),
    "tril_indices": lambda device: torch.tril_indices(3, 3, device=device),
    "direct_operator": lambda device: torch.ops.aten.ones.default([2], device=torch.device(device)) + 1,
    "direct_copy": lambda device: torch.ops.aten._to_copy.default(weights(3), device=torch.device(device)),
    "out": lambda device: torch.add(1, torch.ones(2, device=device), out=torch.empty(2, device=device)),
    "repr": lambda device: repr(torch.ones(2, device=device)).replace(f", device='{device}:0'", ""),
    "requires_grad": lambda device: torch.ones(2, device=device, requires_grad=True),
    "module_on_device": lambda device: [p.shape for p in nn.Linear(2, 3, device=device).parameters()],
    "item": lambda device: torch.full((), 3.5, device=device).item(),
}
KINDS.update({f"factory_{name}": fn for name, fn in FACTORIES.items()})


@kind
def default_device(device: str) -> Any:
    torch.set_default_device(device)
    try:
        model = nn.Linear(3, 2)
        return [torch.ones(2), torch.tensor([1, 2]), model.weight.device.type == device]
    finally:
        torch.set_default_device(None)


@kind
def device_context(device: str) -> Any:
    with torch.device(device):
        made = torch.arange(3.0) + torch.tensor(1.0)
    return [made, torch.ones(2)]


@kind
def default_dtype(device: str) -> Any:
    torch.set_default_dtype(torch.float64)
    try:
        made = torch.ones(2, device=device) / 3
    finally:
        torch.set_default_dtype(torch.float32)
    return [made, made + 1, torch.ones(2, device=device) / 3, (torch.ones(2, device=device) * 0.5).sum().item()]


# -- files -------------------------------------------------------------------------------------------------------------
def saved() -> Path:
    """The folder of the files that another process saved from the device."""
    return Path(os.environ["FIRST_USES_SAVED"])


def save(device: str) -> None:
    """What the kinds that load something load."""
    values = {"a": weights(4).to(device), "b": weights(2, 2).to(device).t()}
    torch.save(values, saved() / f"{device}.pt")
    (saved() / f"{device}.pkl").write_bytes(pickle.dumps(values))
    torch.save(Tied().to(device), saved() / f"{device}-model.pt")


def _saved(value: Any, **options: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file, **options)
    file.seek(0)
    return file


@kind
def load_map_location(device: str) -> Any:
    loaded = torch.load(_saved({"a": weights(4), "b": weights(4)[1:]}), map_location=device)
    return [loaded, loaded["a"].device.type == device]


@kind
def load_map_location_function(device: str) -> Any:
    return torch.load(_saved(weights(4)), map_location=lambda storage, location: storage).to(device)


@as_warm
def load_map_location_legacy(device: str) -> Any:
    file = _saved([weights(4)], _use_new_zipfile_serialization=False)
    return torch.load(file, map_location=torch.device(device), weights_only=False)


@kind
def load_mmap(device: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        torch.save({"a": weights(4)}, f"{folder}/w.pt")
        return torch.load(f"{folder}/w.pt", map_location=device, mmap=True)


@kind
def load_what_was_saved_on_it(device: str) -> Any:
    loaded = torch.load(saved() / f"{device}.pt")
    return [loaded, all(value.device.type == device for value in loaded.values())]


@kind
def unpickle_what_was_saved_on_it(device: str) -> Any:
    loaded = pickle.loads((saved() / f"{device}.pkl").read_bytes())
    return [loaded, all(value.device.type == device for value in loaded.values())]


@kind
def unpickle_module(device: str) -> Any:
    model = torch.load(saved() / f"{device}-model.pt", weights_only=False)
    return [model.outer.weight is model.inner[0].weight, train(model, device)]


@kind
def pickle_roundtrip(device: str) -> Any:
    return pickle.loads(pickle.dumps({"a": torch.ones(2, device=device), "m": Tied().to(device)}))["m"].outer.weight


@kind
def save_and_load(device: str) -> Any:
    return torch.load(_saved(Tied().to(device).state_dict()))


@as_warm
def storage_on_device(device: str) -> Any:
    return torch.UntypedStorage(4, device=device).nbytes()


@as_warm
def storage_to_device(device: str) -> Any:
    return weights(3).untyped_storage().to(device=device).nbytes()


@as_warm
def typed_storage(device: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.FloatStorage(3, device=device).size()  # type: ignore[attr-defined]
