"""Tensors of the device on their way to gloo and back: host tensors, bytes, and reductions that gloo does not know."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist

from ...core.errors import DeviceMismatch, UnsupportedOp
from ...core.frames import user_line
from ...run.flush import flush
from ...run.values import host_tensor
from ...trace.handle import LazyTensor
from ...trace.threads import threads
from ..device.inplace import unwrapped

__all__ = ["Reduction", "as_bytes", "describe", "handles_of", "host_values", "reduction_of"]


def handles_of(op: str, tensors: Sequence[torch.Tensor]) -> list[LazyTensor]:
    """The handles of tensors of one device index. Raises :class:`DeviceMismatch` for others."""
    found: list[Any] = [unwrapped(tensor) for tensor in tensors]
    for handle in found:
        if not isinstance(handle, LazyTensor) or handle.get_device() != found[0].get_device():
            devices = ", ".join(dict.fromkeys(str(tensor.device) for tensor in tensors))
            raise DeviceMismatch(f"a collective takes tensors of one device, got {devices}", op=op, source=user_line())
    return found


def host_values(op: str, handles: Sequence[LazyTensor], private: bool = False) -> list[torch.Tensor]:
    """Contiguous CPU tensors with the values, for reading only unless ``private``. What is pending is computed."""
    if any(handle.value is None and handle.failure is None for handle in handles):
        flush(threads.of(handles[0].get_device()), f"collective {op}")
    values: list[torch.Tensor] = []
    for handle in handles:
        held = host_tensor(handle)
        whole = held.contiguous()
        values.append(whole.clone() if private and whole is held else whole)
    return values


def as_bytes(host: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous CPU tensor: what is only moved has no dtype that gloo could refuse."""
    if not host.numel():  # its strides may be anything
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return host.reshape(-1).view(torch.uint8)


def describe(tensors: Sequence[torch.Tensor]) -> str:
    """Dtypes and shapes, as far as they are few."""
    texts = [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors[:8]]
    if len(tensors) > 8:
        texts.append(f"and {len(tensors) - 8} more of {sum(t.numel() for t in tensors[8:])} elements")
    return ", ".join(texts)


@dataclass(frozen=True)
class Reduction:
    """How values are reduced: what is done before, gloo's operator, and what is done after."""

    name: str
    op: Any
    before: Callable[[torch.Tensor], torch.Tensor] | None
    after: Callable[[torch.Tensor], torch.Tensor] | None

    def prepare(self, host: torch.Tensor) -> torch.Tensor:
        """What gloo gets; ``host`` itself where there is nothing to do."""
        return host if self.before is None else self.before(host)

    def restore(self, reduced: torch.Tensor) -> torch.Tensor:
        """The result."""
        return reduced if self.after is None else self.after(reduced)


_GLOO: Final = frozenset(
    {
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int8,
        torch.uint8,
        torch.int32,
        torch.int64,
    }
)
_Op: Final[Any] = dist.ReduceOp.RedOpType  # type: ignore[attr-defined]


def reduction_of(kind: Any, dtype: torch.dtype, size: int) -> Reduction:
    """How values of a dtype are reduced over ``size`` ranks. Raises :class:`UnsupportedOp` where they cannot be.

    ``kind``: a ``ReduceOp.RedOpType``, or the name that functional collectives have for one.
    """
    kind = _Op.__members__[kind.upper()] if isinstance(kind, str) else _Op(kind)
    if kind == _Op.AVG:
        whole = not (dtype.is_floating_point or dtype.is_complex)
        mean: Any = (lambda x: x.div_(size, rounding_mode="trunc")) if whole else (lambda x: x.div_(size))
        return _over("AVG", _Op.SUM, dtype, mean)
    if kind == _Op.PREMUL_SUM:
        raise UnsupportedOp(
            "PyTorch does not say by what PREMUL_SUM multiplies; multiply first and reduce by SUM", source=user_line()
        )
    return _over(kind.name, kind, dtype, None)


def _over(name: str, kind: Any, dtype: torch.dtype, after: Any) -> Reduction:
    """A reduction by gloo's operator, through a dtype that gloo has."""
    op = dist.ReduceOp(kind)  # type: ignore[call-arg]
    if dtype in _GLOO:
        return Reduction(name, op, None, after)
    if dtype is torch.bool and kind in (_Op.SUM, _Op.MAX, _Op.BOR, _Op.MIN, _Op.PRODUCT, _Op.BAND):
        either = kind in (_Op.SUM, _Op.MAX, _Op.BOR)
        op = dist.ReduceOp(_Op.MAX if either else _Op.MIN)  # type: ignore[call-arg]
        return Reduction(name, op, lambda x: x.to(torch.uint8), lambda x: x.to(torch.bool))
    if dtype in (torch.int16, torch.uint16):
        return Reduction(name, op, lambda x: x.to(torch.int32), lambda x: _then(after, x).to(dtype))
    if dtype.is_complex and kind == _Op.SUM:
        apart = lambda x: torch.view_as_real(x.resolve_conj())  # noqa: E731
        return Reduction(name, op, apart, lambda x: _then(after, torch.view_as_complex(x)))
    raise UnsupportedOp(f"values of {dtype} cannot be reduced by {name} between ranks", source=user_line())


def _then(after: Any, reduced: torch.Tensor) -> torch.Tensor:
    return reduced if after is None else after(reduced)
