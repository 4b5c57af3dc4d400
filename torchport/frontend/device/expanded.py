"""Writes through views of expanded tensors: the written element becomes the element of the base, exactly.

Functionalization takes such a write back to the base as ``base + (new - base).sum()``. That sum is not exact:
``inf - inf`` is NaN, a large number swallows a small one, the sign of zero is lost, and bools cannot be subtracted.
Here the elements that differ from the base's are picked instead.

Private torch APIs used here: ``torch._C._functionalization.get_view_meta_sequence``, ``expand_ViewMeta``,
``unfold_ViewMeta`` and ``as_strided_ViewMeta`` (which views a tensor is made by), ``torch._is_functional_tensor``,
``torch._is_functional_tensor_base``, ``torch._subclasses.functional_tensor.{FunctionalTensor, FunctionalTensorMode}``
(what compilers make programs functional with), ``torch._functionalize_replace``,
``torch._functionalize_commit_update``, ``torch._functionalize_sync`` (what functionalization does after a write).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...core.errors import DeviceMismatch, UnsupportedOp
from ...core.frames import user_line
from ...trace.handle import DEVICE_TYPE
from .patches import replaced
from .places import as_view

__all__ = ["ExactWrites", "call_exactly", "exact_writes", "is_of_expanded", "write_back"]

aten = torch.ops.aten
_views: Final[Any] = torch._C._functionalization  # type: ignore[attr-defined]
_views_of: Final[Callable[[torch.Tensor], Sequence[Any]]] = _views.get_view_meta_sequence
_is_functional: Final = torch._is_functional_tensor
_is_base: Final = torch._is_functional_tensor_base
_replace: Final = torch._functionalize_replace
_commit: Final = torch._functionalize_commit_update
_sync: Final = torch._functionalize_sync
_WRITTEN_WITH_CARE: Final = frozenset({_views.expand_ViewMeta, _views.unfold_ViewMeta, _views.as_strided_ViewMeta})

_TO_ANOTHER_DEVICE: Final = "mutating a non-functional tensor with a functional tensor is not allowed"
"""What functionalization says of an operator that is to write to another device's tensor."""


def is_of_expanded(tensor: torch.Tensor) -> bool:
    """Whether a functionalization wrapper that is to be written is an expanded tensor or a view of one.

    Raises :class:`UnsupportedOp` for a view by ``unfold``, unless its windows lie side by side and fill the dimension:
    functionalization would take the write back as a sum over windows, and as zeros between them. Raises it, too, for
    ``as_strided`` of another view, which functionalization cannot take back.
    """
    if not _is_functional(tensor) or _is_base(tensor):
        return False
    views = _views_of(tensor)
    if _WRITTEN_WITH_CARE.isdisjoint(map(type, views)):
        return False
    if any(isinstance(view, _views.unfold_ViewMeta) and not _fills(tensor, views, n) for n, view in enumerate(views)):
        raise UnsupportedOp(
            "a write through a view by unfold() whose windows overlap or leave something out is not taken back to the "
            "tensor that it is a view of; write to that tensor by index, or to a clone of the view",
            op="aten.unfold.default",
            source=user_line(),
        )
    if any(isinstance(view, _views.as_strided_ViewMeta) for view in views[1:]):
        raise UnsupportedOp(
            "a write through as_strided() of a detached view, or of another one whose base is not known, is not "
            "taken back to the tensor that it is a view of; take as_strided() of that tensor itself, or write to it by "
            "index",
            op="aten.as_strided.default",
            source=user_line(),
        )
    return any(isinstance(view, _views.expand_ViewMeta) for view in views)


def _fills(tensor: torch.Tensor, views: Sequence[Any], position: int) -> bool:
    """Whether the windows of an ``unfold``, the view at this position, show each element of the dimension once."""
    dim, size, step = views[position].as_tuple()[-3:]
    base: Any = tensor._base
    if size != step or base is None:
        return False
    source = torch.empty_strided(base.shape, base.stride(), dtype=base.dtype, device="meta")
    first = len(_views_of(base))
    shape = _views.apply_view_meta_sequence(source, [as_view(view) for view in views[first:position]]).shape
    return shape[dim] % size == 0


class ExactWrites(TorchDispatchMode):
    """The mode in which functionalization takes a write back to the base: :func:`_written` replaces the inexact sum.

    ``writing``: the operator that writes, if its functional form runs in this mode, too.
    """

    def __init__(self, writing: Any = None) -> None:
        super().__init__()
        # The first subtraction is then the program's own.
        self._own = writing is not None and writing._schema.name in ("aten::sub_", "aten::sub")
        self._pending: tuple[Any, Any] | None = None

    def __torch_dispatch__(self, op: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if op is aten.sub.Tensor and not self._own:
            self._pending = (args[1], args[0])
            return aten.zeros_like.default(args[0])  # a stand-in, whose sum the addition below ignores
        self._own = self._own and op is not aten.sub.Tensor
        if op is aten.add.Tensor and self._pending is not None and args[0] is self._pending[0]:
            base, new = self._pending
            self._pending = None
            return _written(base, new)
        return op(*args, **(kwargs or {}))


def _written(base: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """The base with those elements that differ in ``new``, which shows each element of the base once or several times.

    The result has the strides of the base: a write changes no strides, and later views go by them.
    """
    if base.dtype.is_complex:
        parts = _written(aten.view_as_real_copy.default(base), aten.view_as_real_copy.default(new))
        return aten.view_as_complex_copy.default(parts)
    leading = new.dim() - base.dim()
    ahead = list(range(leading))
    inner = [dim for dim in range(base.dim()) if base.shape[dim] == 1 and new.shape[leading + dim] != 1]
    if not ahead and not inner:
        return aten.copy.default(base, new)
    if any(new.shape[dim] == 0 for dim in (*ahead, *(leading + dim for dim in inner))):
        return aten.clone.default(base)
    differs = _differs(new, base)
    # Written elements do not overlap, so of the elements that show one element of the base at most one differs.
    largest = aten.where.self(differs, new, aten.full_like.default(new, _lowest(new.dtype)))
    for dims, keep in ((ahead, False), (inner, True)):
        if dims:
            largest, differs = aten.amax.default(largest, dims, keep), aten.amax.default(differs, dims, keep)
    return aten.copy.default(base, aten.where.self(differs, largest, base))


def _differs(new: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    differs = aten.ne.Tensor(new, base)
    if not new.dtype.is_floating_point:
        return differs
    neither = aten.logical_and.default(aten.ne.Tensor(new, new), aten.ne.Tensor(base, base))  # NaN is not itself
    signs = aten.ne.Tensor(aten.signbit.default(new), aten.signbit.default(base))
    return aten.logical_or.default(aten.logical_and.default(differs, aten.logical_not.default(neither)), signs)


def _lowest(dtype: torch.dtype) -> float | int | bool:
    if dtype is torch.bool:
        return False
    return -torch.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def write_back(wrapper: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Replace a wrapper's value, as functionalization does after an operator that writes; returns the wrapper."""
    # The common case. Every in-place operator comes here, so the check is written out instead of called.
    if _is_base(wrapper) or _WRITTEN_WITH_CARE.isdisjoint(map(type, _views_of(wrapper))) or not is_of_expanded(wrapper):
        _replace(wrapper, value)
        _commit(wrapper)
        _sync(wrapper)
        return wrapper
    _replace(wrapper, value)
    with ExactWrites():
        _commit(wrapper)
        _sync(wrapper)
    return wrapper


def call_exactly(op: Any, original: Callable[..., Any], written: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
    """Call functionalization's kernel of an operator that writes to the tensors ``written``, with exact writes.

    Raises :class:`DeviceMismatch` where it is given tensors of this device, and is to write to another's.
    """
    try:
        if not any(tensor is not None and is_of_expanded(tensor) for tensor in written):
            return original(*args, **kwargs)
        with ExactWrites(op):
            return original(*args, **kwargs)
    except RuntimeError as error:
        if _TO_ANOTHER_DEVICE not in str(error):
            raise
        raise _to_another_device(op, written) from error


def _to_another_device(op: Any, written: Sequence[Any]) -> DeviceMismatch:
    """In place of functionalization's words, which ask for a report to PyTorch."""
    found = (str(one.device) for one in written if isinstance(one, torch.Tensor) and one.device.type != DEVICE_TYPE)
    where = next(found, "another device")
    return DeviceMismatch(
        f"expected all tensors to be on the same device, but found at least two devices, {where}, which is written to, "
        f"and {DEVICE_TYPE}; move the tensors of {DEVICE_TYPE} with .to({where!r}), or write to one that is there",
        op=str(op),
        source=user_line(),
    )


@contextmanager
def exact_writes() -> Iterator[None]:
    """Exact writes in programs that PyTorch's compilers functionalize meanwhile; Dynamo's lock has to be held."""
    original = FunctionalTensorMode.__torch_dispatch__

    def dispatch(mode: Any, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(op, torch._ops.OpOverload) and op._schema.is_mutable:
            arguments = zip(op._schema.arguments, args, strict=False)
            written = [value for argument, value in arguments if argument.alias_info and argument.alias_info.is_write]
            outs = [kwargs[a.name] for a in op._schema.arguments if kwargs and a.is_out and a.name in kwargs]
            tensors = [leaf.elem for leaf in tree_leaves((written, outs)) if isinstance(leaf, FunctionalTensor)]
            return call_exactly(op, original, tensors, mode, op, types, args, kwargs)
        return original(mode, op, types, args, kwargs)

    with replaced("torch._subclasses.functional_tensor.FunctionalTensorMode.__torch_dispatch__", dispatch):
        yield
