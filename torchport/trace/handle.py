"""The handle of a lazy value: an inner tensor with metadata but no memory, wrapped by functionalization for the user.

Private torch APIs used here: ``torch._C._acc.create_empty_tensor`` (an inner tensor without memory),
``OpOverload._handle.redispatch_boxed`` (to give it strides), ``torch.Tensor._make_wrapper_subclass`` (indices above 0),
``torch._C._disabled_torch_function_impl``, ``torch._C.TensorBase.data``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..backend.interface import BackendData
from ..core.specs import TensorSpec

__all__ = [
    "DEVICE_TYPE",
    "IndexedLazyTensor",
    "LazyTensor",
    "ShownSpec",
    "intern_spec",
    "make_handle",
    "make_template",
    "make_unnamed",
    "shown_as",
    "shown_spec",
]

DEVICE_TYPE = "port"

_create_empty: Callable[[Sequence[int], torch.dtype], torch.Tensor] = torch._C._acc.create_empty_tensor  # type: ignore[attr-defined]
_make_wrapper: Callable[..., Any] = torch.Tensor._make_wrapper_subclass  # as it is before the shim for subclasses
_reshape_alias: Callable[..., Any] = torch.ops.aten._reshape_alias.default._handle.redispatch_boxed  # type: ignore[attr-defined]
_CPU_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


class LazyTensor(torch.Tensor):
    """A value of device index 0: pending in a trace, or held as :class:`BackendData`.

    ``value_id`` is the value's id in the trace it belongs to, -1 if it belongs to none; ``value`` its data once it is
    there; ``spec`` its interned spec once it was asked for; ``failure`` the error that its computation ended in.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    data = torch._C.TensorBase.data  # type: ignore[assignment]
    """PyTorch's own, which is faster than the program's (``frontend/device/parameters.py``)."""

    value_id: int = -1
    value: BackendData | None = None
    spec: TensorSpec | None = None
    failure: BaseException | None = None
    home: tuple[Any, int] | None = None
    """The trie node that will hand it out again once nobody else holds it, and which of its results it is."""
    fresh: bool = False
    """Whether it came from the host and no trace has used it yet."""
    viewed: bool = False
    """Whether a view was taken of it, or it is one, below functionalization; such a handle is never written to."""


def _dispatch_unset(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    raise RuntimeError(f"torchport's device is not registered, but {func} was called on one of its tensors")


class IndexedLazyTensor(LazyTensor):
    """A value of a device index above 0: PyTorch's Python-defined devices know index 0 only, wrappers know any."""

    dispatch: Callable[[Any, Sequence[Any], Mapping[str, Any]], Any] = staticmethod(_dispatch_unset)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return cls.dispatch(func, args, kwargs or {})


@dataclass(frozen=True, slots=True)
class ShownSpec(TensorSpec):
    """The spec of a value whose handle has other strides, ``shown``.

    A view that is a result of a computation becomes a value of its own, without the gaps and repetitions it has in its
    base. The program still sees the view's strides, and further views and ``reshape`` go by them.
    """

    shown: tuple[int, ...]

    def __str__(self) -> str:
        return f"{TensorSpec.__str__(self)}, seen with strides {list(self.shown)}"


def shown_as(value: TensorSpec, handle: TensorSpec) -> TensorSpec:
    """The spec of a value under a handle with this spec."""
    if value.strides == handle.strides:
        return value
    return ShownSpec(value.shape, value.dtype, value.strides, handle.strides)


def shown_spec(spec: TensorSpec) -> TensorSpec:
    """The spec of the handle of a value with this spec."""
    return TensorSpec(spec.shape, spec.dtype, spec.shown) if isinstance(spec, ShownSpec) else spec


_specs: dict[TensorSpec, TensorSpec] = {}
_MOST_SPECS = 65_536


def intern_spec(spec: TensorSpec) -> TensorSpec:
    """One object per distinct spec, so that comparing trace keys compares pointers; equal ones are equal anyway."""
    if len(_specs) > _MOST_SPECS:
        _specs.clear()
    return _specs.setdefault(spec, spec)


def make_template(spec: TensorSpec) -> LazyTensor:
    """An index-0 handle with this spec, from which ``template.data`` makes others without a dispatch.

    ``create_empty_tensor`` knows contiguous tensors only. CPU's ``_reshape_alias`` gives any strides and does not
    look at memory, so it is called directly on the handle.
    """
    if torch.is_inference_mode_enabled():  # an inference tensor could not be copied by ``.data`` outside that mode
        with torch.inference_mode(False):
            return make_template(spec)
    handle = make_unnamed(spec)
    handle.spec = intern_spec(spec)
    return handle


def make_unnamed(spec: TensorSpec) -> LazyTensor:
    """An index-0 handle with these shape, dtype and strides that does not know its spec yet. Not in inference mode."""
    handle: Any = _create_empty(spec.shape, spec.dtype)
    if handle.stride() != spec.strides:
        handle = _reshape_alias(_CPU_KEYS, handle, spec.shape, spec.strides)
    handle.__class__ = LazyTensor
    return handle


def make_handle(spec: TensorSpec, index: int) -> LazyTensor:
    """A fresh handle with this spec on a device index, with neither id nor value."""
    if index == 0:
        return make_template(spec)
    if torch.is_inference_mode_enabled():  # a view's handle has to be what its base's is, which may be older
        with torch.inference_mode(False):
            return make_handle(spec, index)
    handle = _make_wrapper(
        IndexedLazyTensor,
        spec.shape,
        strides=spec.strides,
        dtype=spec.dtype,
        device=torch.device(DEVICE_TYPE, index),
    )
    handle.spec = intern_spec(spec)
    return handle
