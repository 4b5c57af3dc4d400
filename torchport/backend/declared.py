"""Values of kinds that an engine says it has none of (:attr:`.Capabilities.dtypes`, :attr:`.Capabilities.no_empty`).

torchport holds them on the host and never gives them to the backend: ``to_device`` is not asked to take them, and
operators that read or make one are refused before ``supports`` is asked, so the interpreter runs them between the
backend's segments. It needs no PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from ..core.specs import TensorSpec
from .interface import Backend, BackendData, BackendDevice, Capabilities, Support, TensorData

if TYPE_CHECKING:
    import torch
    from torch import fx

__all__ = ["HeldData", "follow_declaration", "lacking"]


class HeldData(TensorData):
    """A value of a kind that the engine has none of, on the host."""

    __slots__ = ()


def lacking(capabilities: Capabilities, value: Any) -> str | None:
    """What an engine lacks to hold a tensor, in words, or ``None``. ``value``: a tensor, real or fake."""
    if capabilities.no_empty and value.numel() == 0:
        return "the engine has no empty tensors (Capabilities.no_empty)"
    dtype = str(value.dtype).removeprefix("torch.")
    if capabilities.dtypes and dtype not in capabilities.dtypes:
        return f"the engine has no {dtype} (Capabilities.dtypes: {', '.join(sorted(capabilities.dtypes))})"
    return None


def _refusal(capabilities: Capabilities, node: fx.Node) -> str | None:
    """Why a node is nothing for the engine, by what its arguments and results are."""
    for value in (node.meta.get("val"), *(one.meta.get("val") for one in node.all_input_nodes)):
        each: Sequence[Any] = cast("Sequence[Any]", value) if isinstance(value, (list, tuple)) else (value,)
        for one in each:
            if hasattr(one, "dtype") and (reason := lacking(capabilities, one)) is not None:
                return reason
    return None


def follow_declaration(backend: Backend, ask: bool = True) -> None:
    """Have a backend that declares its dtypes, or that it has no empty tensors, be given nothing else.

    The instance becomes one of a subclass that answers before the backend's own methods do. Without ``ask``
    capabilities that are found out when they are asked for are left alone: that may start the engine.
    """
    written: object = vars(backend).get("capabilities", type(backend).capabilities)
    capabilities = backend.capabilities if ask or isinstance(written, Capabilities) else None
    if not isinstance(capabilities, Capabilities) or not (capabilities.dtypes or capabilities.no_empty):  # pyright: ignore[reportUnnecessaryIsInstance]
        return  # what is no Capabilities is refused where the optional methods are looked for
    kind = type(backend)
    if "_declares" in vars(kind):
        return

    def supports(self: Backend, node: fx.Node) -> Support:
        reason = _refusal(capabilities, node)
        return kind.supports(self, node) if reason is None else Support.no(reason)

    def to_device(self: Backend, tensor: torch.Tensor, device: BackendDevice) -> BackendData:
        if lacking(capabilities, tensor) is not None:
            return HeldData(device, TensorSpec.of(tensor), tensor)
        return kind.to_device(self, tensor, device)

    def from_device(self: Backend, data: BackendData) -> torch.Tensor:
        if data.__class__ is HeldData:
            tensor = cast("HeldData", data).tensor
            assert tensor is not None
            return tensor
        return kind.from_device(self, data)

    def borrow(self: Any, tensor: torch.Tensor, spec: TensorSpec, device: BackendDevice) -> BackendData:
        if lacking(capabilities, tensor) is not None:
            return HeldData(device, spec, tensor)
        return cast("Any", kind).borrow(self, tensor, spec, device)

    methods: dict[str, Any] = {"supports": supports}
    if (
        kind.to_device is not Backend.to_device
        or kind.from_device is not Backend.from_device
        or capabilities.torch_free
    ):
        methods |= {"to_device": to_device, "from_device": from_device}
    if hasattr(kind, "borrow"):
        methods["borrow"] = borrow
    named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    backend.__class__ = type(kind.__name__, (kind,), {**named, **methods, "_declares": True})
