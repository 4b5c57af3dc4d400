"""What a backend's methods answer, compared with the contract. It needs no PyTorch.

A wrong answer is a :class:`ContractError` that names the backend, the method, what came and what was expected, where it
came: later it would be an ``AttributeError`` in somebody else's code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

from ..core.errors import BackendUnavailable, ContractError
from ..core.specs import TensorSpec
from .interface import ArrayData, Backend, BackendData, BackendDevice, Processed, Support, TensorData

if TYPE_CHECKING:
    import torch

__all__ = [
    "checked_data",
    "checked_decompositions",
    "checked_devices",
    "checked_processed",
    "checked_support",
    "checked_tensor",
    "contents_of",
]


def _wrong(backend: Backend, method: str, came: str, expected: str, op: object = None) -> ContractError:
    return ContractError(f"backend {backend.name!r}: {method}() {came}; {expected}", method=method, op=op)


def _shown(value: object) -> str:
    text = repr(value) if isinstance(value, (bool, int, float, str, bytes, type(None))) else ""
    kind = type(value).__name__
    return "None" if value is None else f"a {kind}" + (f", {text[:40]}" if text else "")


def checked_support(backend: Backend, node: Any) -> Support:
    """What ``supports`` says of a node. Raises :class:`ContractError`, also for what it raises."""
    try:
        answer = backend.supports(node)
    except Exception as error:
        raise _wrong(
            backend, "supports", f"raised {type(error).__name__}: {error}, asked about {node.target}",
            "it must answer for every node; Support.no(reason) is the answer where it does not know", node.target,
        ) from error  # fmt: skip
    if not isinstance(answer, Support):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise _wrong(
            backend, "supports", f"returned {_shown(answer)}, asked about {node.target}",
            "return torchport.Support.yes() or torchport.Support.no(reason)", node.target,
        )  # fmt: skip
    return answer


def checked_decompositions(backend: Backend) -> dict[Any, Callable[..., Any]]:
    """What ``decompositions`` returned. Raises :class:`ContractError`, also for what it raises."""
    expected = "return a mapping of operator overloads, such as torch.ops.aten.silu.default, to functions on tensors"
    try:
        given: Any = backend.decompositions()
    except Exception as error:
        raise _wrong(backend, "decompositions", f"raised {type(error).__name__}: {error}", expected) from error
    if not isinstance(given, Mapping):
        raise _wrong(backend, "decompositions", f"returned {_shown(given)}", expected)
    table = dict(cast("Mapping[Any, Any]", given))
    for op, fn in table.items():
        if not hasattr(op, "_schema"):
            raise _wrong(backend, "decompositions", f"has {_shown(op)} for an operator", expected)
        if not callable(fn):
            raise _wrong(backend, "decompositions", f"has {_shown(fn)} for {op}", expected)
    return table


def checked_devices(backend: Backend) -> list[BackendDevice]:
    """What ``devices`` returned. Raises :class:`BackendUnavailable`, also for what it raises."""
    try:
        devices: Any = list(backend.devices())
    except Exception as error:
        raise BackendUnavailable(
            f"backend {backend.name!r}: devices() raised {type(error).__name__}: {error}"
        ) from error
    for device in devices:
        if not isinstance(device, BackendDevice):
            raise BackendUnavailable(
                f"backend {backend.name!r}: devices() returned {_shown(device)}; return BackendDevice(type, ordinal)s"
            )
    return devices


def checked_processed(backend: Backend, made: object) -> Processed:
    """What ``preprocess`` returned. Raises :class:`ContractError`."""
    if not isinstance(made, Processed):
        expected = "return torchport.Processed(data), data in bytes"
        raise _wrong(backend, "preprocess", f"returned {_shown(made)}", expected)
    if not isinstance(made.data, (bytes, bytearray, memoryview)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise _wrong(
            backend, "preprocess", f"returned a Processed whose data is {_shown(made.data)}",
            "data is bytes, which init() of another process could load",
        )  # fmt: skip
    return made


def checked_data(backend: Backend, method: str, data: object, spec: TensorSpec) -> BackendData:
    """A value that a method made of a tensor with this spec. Raises :class:`ContractError`."""
    if not isinstance(data, BackendData):
        raise _wrong(
            backend, method, f"returned {_shown(data)}",
            "return a BackendData, such as torchport.TensorData(device, torchport.TensorSpec.of(tensor), tensor)",
        )  # fmt: skip
    if data.spec.shape != spec.shape or data.spec.dtype != spec.dtype:
        raise _wrong(backend, method, f"returned a value that says it is {data.spec}", f"the tensor is {spec}")
    return data


def checked_tensor(backend: Backend, tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """What ``from_device`` returned for a value with this spec. Raises :class:`ContractError`."""
    shape: Any = getattr(tensor, "shape", None)
    if shape is None or not hasattr(tensor, "stride"):
        raise _wrong(backend, "from_device", f"returned {_shown(tensor)}", "return a CPU torch.Tensor")
    if tensor.device.type != "cpu":
        raise _wrong(backend, "from_device", f"returned a tensor on {tensor.device}", "return a CPU torch.Tensor")
    if tuple(shape) != spec.shape or tensor.dtype != spec.dtype:
        came = f"returned a {str(tensor.dtype).removeprefix('torch.')}{list(shape)}"
        raise _wrong(backend, "from_device", came, f"the value is {spec}")
    return tensor


def contents_of(data: BackendData) -> Any:
    """The tensor or array in a value that is one of ours, or ``None``."""
    if isinstance(data, TensorData):
        return data.tensor
    return data.array if isinstance(data, ArrayData) else None
