"""Backends that run what another backend has compiled in a way of their own: in pieces, or with padding."""

from __future__ import annotations

from typing import TypeVar, cast

import torch
from torch import fx

from ..core.specs import CompileSpecs
from .interface import Backend, BackendData, BackendDevice, Processed

__all__ = ["Runner", "owner_of", "runner_of"]

_Kind = TypeVar("_Kind", bound="Runner")


class Runner(Backend):
    """Calls computations of a backend, ``of``, whose values its own are. It compiles nothing."""

    def __init__(self, backend: Backend) -> None:
        self.of = backend
        self.name = backend.name  # type: ignore[misc]  # errors are told of it
        self.version = backend.version  # type: ignore[misc]
        self.capabilities = backend.capabilities  # type: ignore[misc]

    def preprocess(self, graph: fx.GraphModule, specs: CompileSpecs) -> Processed:
        raise NotImplementedError("the backend itself compiles")

    def from_device(self, data: BackendData) -> torch.Tensor:
        return self.of.from_device(data)

    def to_device(self, tensor: torch.Tensor, device: BackendDevice) -> BackendData:
        return self.of.to_device(tensor, device)


def runner_of(backend: Backend, kind: type[_Kind]) -> _Kind:
    """A backend's runner of a kind, made once."""
    known = cast("dict[type[Runner], Runner]", vars(backend).setdefault("_runners", {}))
    found = known.get(kind)
    if found is None:
        found = known[kind] = kind(backend)
    return cast("_Kind", found)


def owner_of(backend: Backend) -> Backend:
    """The backend that compiled what another runs."""
    return backend.of if isinstance(backend, Runner) else backend
