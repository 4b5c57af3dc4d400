"""In-place operators without the detour: functionalization runs each on meta tensors first, in Python, to check shapes.

On this device the trace has inferred the shapes already, so the functional operator's kernel is called directly and its
result put into the wrapper. Measured on torch 2.13: a traced AdamW step of a small MLP takes a quarter of the time.
Every other tensor, and every call whose result would change shape or dtype, goes to PyTorch's own kernel. A write
through a view is taken back to the base by functionalization; through an expanded one, by :mod:`.expanded`.

Private torch APIs used here: ``torch._functionalize_replace``, ``torch._functionalize_commit_update``,
``torch._functionalize_sync``, ``torch._is_functional_tensor`` (what functionalization does after such an op).
"""

from __future__ import annotations

import functools
import operator
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Final, NamedTuple, TypeAlias

import torch

from ...core.errors import DeviceMismatch, UnsupportedOp
from ...core.frames import user_line
from ...trace.handle import DEVICE_TYPE, IndexedLazyTensor, LazyTensor
from ...trace.kernels import Kernel
from ...trace.layouts import is_sparse_here
from ...trace.threads import threads
from ...trace.wrapping import inner_of
from . import sparse
from .expanded import ExactWrites, call_exactly, is_of_expanded, write_back
from .opaque import opaque
from .registered import aten_operator, names_with_kernel
from .writes import boxable, refuse_as_cpu, share_memory

__all__ = [
    "KernelPair",
    "Kernels",
    "install",
    "may_share_memory",
    "overriding",
    "refuse_overlap",
    "storage_name",
    "unwrapped",
    "write_each",
]

_is_functional = torch._is_functional_tensor
_sync = torch._functionalize_sync
_replace = torch._functionalize_replace
_commit = torch._functionalize_commit_update
_written = torch.autograd.graph.increment_version
"""Increments tensors' versions, by which autograd notices that a saved tensor has been written."""


@contextmanager
def overriding() -> Iterator[None]:
    """Silence PyTorch's warning about overridden kernels, which are kept here and called for other devices."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*[Oo]verriding a previously registered kernel")
        yield


class KernelPair(NamedTuple):
    """The device's own kernels of an operator, in place of a generated :class:`Kernel`, by the same two names."""

    fast: Callable[..., Any]
    indexed: Callable[..., Any]


Kernels: TypeAlias = Kernel | KernelPair
"""A functional operator's kernels: ``fast`` for handles of index 0, ``indexed`` for handles of a trace's index."""


def install(library: torch.library.Library, functional: Mapping[Any, Kernels]) -> dict[Any, Any]:
    """Register the in-place operators whose functional forms have kernels here; returns them by functional operator."""
    in_place: dict[Any, Any] = {}
    with overriding():
        for name in names_with_kernel("Functionalize"):
            found = _pair(name, functional)
            short = name.removeprefix("aten::")
            if found is not None:
                op, form, forms = found
                if form._overloadname == op._overloadname:
                    in_place[form] = op
                original = torch.library.get_kernel(name, "Functionalize")
                listed = str(op._schema.arguments[0].real_type) == "List[Tensor]"
                restride = functional[torch.ops.aten.copy.default]
                fn = (_of_list if listed else _of_tensor)(op, forms, original, restride)
                if op is torch.ops.aten._foreach_copy_.default:
                    fn = _of_copies(fn)
            elif short == "copy_":
                original = torch.library.get_kernel(name, "Functionalize")
                fn = _of_copy(aten_operator(short), functional[torch.ops.aten.copy.default], original)
            elif short in _OTHER_WRITES:
                fn = _guarded(aten_operator(short), torch.library.get_kernel(name, "Functionalize"))
            else:
                continue
            library.impl(short, opaque(fn), "Functionalize", with_keyset=True, allow_override=True)
    return in_place


def _pair(name: str, functional: Mapping[Any, Kernels]) -> tuple[Any, Any, Kernels] | None:
    """An in-place operator, its functional form and the form's kernels; ``None`` if more than the write differs."""
    base, _, overload = name.removeprefix("aten::").partition(".")
    if not base.endswith("_") or base.endswith("__") or base == "copy_":
        return None
    op = aten_operator(name)
    form = _OTHER_NAMES.get(op) or getattr(getattr(torch.ops.aten, base[:-1], None), overload or "default", None)
    forms = functional.get(form)
    arguments = op._schema.arguments
    if forms is None or form is None or _shape(op) != _shape(form):
        return None
    written = [a.alias_info is not None for a in arguments]
    first = str(arguments[0].real_type)
    return (op, form, forms) if written[0] and sum(written) == 1 and first in {"Tensor", "List[Tensor]"} else None


_OTHER_NAMES: Final[Mapping[Any, Any]] = {
    torch.ops.aten.pow_.Tensor: torch.ops.aten.pow.Tensor_Tensor,
    torch.ops.aten.pow_.Scalar: torch.ops.aten.pow.Tensor_Scalar,
    torch.ops.aten.floor_divide_.Tensor: torch.ops.aten.floor_divide.default,
    torch.ops.aten.ldexp_.default: torch.ops.aten.ldexp.Tensor,
}
"""Functional forms whose overloads have other names."""

_OTHER_WRITES: Final = {"normal_", "bernoulli_.float", "conj_physical_"}
"""In-place operators that keep PyTorch's own functionalization, behind a check for elements that share memory."""


def _shape(op: Any) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.real_type)) for argument in op._schema.arguments]


def unwrapped(value: Any) -> Any:
    if value.__class__ is LazyTensor:
        return value
    if isinstance(value, torch.Tensor):
        if _is_functional(value):
            _sync(value)
            return inner_of(value)
        return value
    if value.__class__ is list and value and isinstance(value[0], torch.Tensor):
        return _inner_list(value)
    return value


def _of_tensor(op: Any, forms: Kernels, original: Any, copy: Kernels) -> Callable[..., Any]:
    kernel, restride = forms.fast, copy.fast
    scalar_form = getattr(op.overloadpacket, "Scalar", None) if op._overloadname == "Tensor" else None

    # A random operator reads nothing of what it overwrites, so equal strides do not show that no elements overlap.
    draws = torch.Tag.nondeterministic_seeded in op.tags

    def inplace(keys: Any, self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        inner = unwrapped(self)
        if inner.__class__ is not LazyTensor or inner is self:
            if inner.__class__ is IndexedLazyTensor and inner is not self:
                return at_index(keys, self, inner, args, kwargs)
            if scalar_form is not None and args and isinstance(args[0], (bool, int, float, complex)):
                # A number that became a tensor here would be a constant of whatever traces the program (torch.export).
                return scalar_form.redispatch(keys, self, *args, **kwargs)
            return call_exactly(op, original.call_boxed, [self], keys, self, *boxable(op, args, first=1), **kwargs)
        for value in args:
            if share_memory(self, value):
                refuse_as_cpu(op, (self, *args), kwargs)
                break
        try:
            out = kernel(inner, *map(unwrapped, args), **{name: unwrapped(value) for name, value in kwargs.items()})
        except DeviceMismatch:
            if not any(map(is_sparse_here, args)):
                raise
            return sparse.write(op, self, args, kwargs)
        node = threads.of(0).cursor
        if node.fits and node.ready is out:
            pass
        elif out.shape != inner.shape or out.dtype is not inner.dtype:
            refuse_as_cpu(op, (self, *args), kwargs)
            _refuse_cast(op, out, inner)
            if out.shape != inner.shape:  # ``resize_``
                return call_exactly(op, original.call_boxed, [self], keys, self, *boxable(op, args, first=1), **kwargs)
            out = restride(inner, out)
        elif not draws and out.stride() == inner.stride():
            node.fits = node.ready is out
        else:
            if _overlaps(inner):
                return _write_overlapping(op, self, args, kwargs)
            if out.stride() != inner.stride():
                out = restride(inner, out)  # a write never changes strides: views and ``reshape`` go by them
        return write_back(self, out)

    def at_index(keys: Any, self: torch.Tensor, inner: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if _overlaps(inner):
            return _write_overlapping(op, self, args, kwargs)
        for value in args:
            if share_memory(self, value):
                refuse_as_cpu(op, (self, *args), kwargs)
                break
        trace = threads.of(inner.get_device())
        given = {name: unwrapped(value) for name, value in kwargs.items()}
        try:
            out = forms.indexed(trace, inner, *map(unwrapped, args), **given)
        except DeviceMismatch:
            if not any(map(is_sparse_here, args)):
                raise
            return sparse.write(op, self, args, kwargs)
        if out.shape != inner.shape or out.dtype is not inner.dtype:
            refuse_as_cpu(op, (self, *args), kwargs)
            _refuse_cast(op, out, inner)
            if out.shape != inner.shape:
                return call_exactly(op, original.call_boxed, [self], keys, self, *boxable(op, args, first=1), **kwargs)
            out = copy.indexed(trace, inner, out)
        elif out.stride() != inner.stride():
            out = copy.indexed(trace, inner, out)
        return write_back(self, out)

    return inplace


def _refuse_cast(op: Any, out: torch.Tensor, written: torch.Tensor) -> None:
    """Raise :class:`UnsupportedOp` if a result cannot be written to a tensor of this dtype, as the CPU refuses it."""
    if not torch.can_cast(out.dtype, written.dtype):
        raise UnsupportedOp(
            f"result type {out.dtype} can't be cast to the desired output type {written.dtype}; write to a tensor of "
            f"{out.dtype}, or leave the argument unchanged: {op._schema.name.removeprefix('aten::').removesuffix('_')}",
            op=str(op),
            source=user_line(),
        )


def _of_list(op: Any, forms: Kernels, original: Any, copy: Kernels) -> Callable[..., Any]:
    kernel, restride = forms.fast, copy.fast

    # An optimizer's step calls a dozen list operators on all parameters, so the work per tensor is done by ``map``.
    def inplace(keys: Any, selfs: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        inner = _inner_list(selfs)
        fast = set(map(type, inner)) == _ONE_LAZY and not any(map(operator.is_, inner, selfs))
        ours = fast or (inner and isinstance(inner[0], LazyTensor))
        if ours and len(selfs) > 1 and may_share_memory(selfs):
            # Each write must see the ones before it.
            for at in range(len(selfs)):
                one = [a[at : at + 1] if isinstance(a, (list, tuple)) else a for a in args]
                op(selfs[at : at + 1], *one, **kwargs)
            return None
        if set(map(type, inner)) == _ONE_INDEXED and not any(map(operator.is_, inner, selfs)):
            return at_index(keys, selfs, inner, args, kwargs)
        if not fast:
            result = call_exactly(op, original.call_boxed, selfs, keys, selfs, *args, **kwargs)
            if ours:
                _written(selfs)
            return result
        outs = kernel(inner, *map(unwrapped, args), **{name: unwrapped(value) for name, value in kwargs.items()})
        node = threads.of(0).cursor
        if not (node.fits and node.ready is outs):
            fitting = fitted(inner, outs, restride)
            if fitting is None:
                return call_exactly(op, original.call_boxed, selfs, keys, selfs, *args, **kwargs)
            if fitting is outs:
                node.fits = node.ready is outs
            outs = fitting
        write_each(selfs, outs)
        return None

    def fitted(inner: Sequence[Any], outs: Sequence[Any], restride: Callable[..., Any]) -> Sequence[Any] | None:
        """The results, with the strides of what they replace; ``None`` if they do not fit."""
        if any(o.shape != i.shape or o.dtype is not i.dtype for o, i in zip(outs, inner, strict=True)):
            for out, before in zip(outs, inner, strict=True):
                _refuse_cast(op, out, before)
            return None
        same = [out.stride() == before.stride() for before, out in zip(inner, outs, strict=True)]
        if all(same):
            return outs
        for before, is_same in zip(inner, same, strict=True):
            if not is_same:
                refuse_overlap(op, before)
        return [o if fits else restride(i, o) for i, o, fits in zip(inner, outs, same, strict=True)]

    def at_index(keys: Any, selfs: Any, inner: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        trace = threads.of(inner[0].get_device())
        given = {name: unwrapped(value) for name, value in kwargs.items()}
        outs = fitted(
            inner, forms.indexed(trace, inner, *map(unwrapped, args), **given), functools.partial(copy.indexed, trace)
        )
        if outs is None:
            return call_exactly(op, original.call_boxed, selfs, keys, selfs, *args, **kwargs)
        write_each(selfs, outs)
        return None

    return inplace


def _of_copies(inplace: Callable[..., Any]) -> Callable[..., Any]:
    """The list operator that copies also takes tensors from one device to another, as ``copy_`` does."""

    def copies(
        keys: Any, selfs: Sequence[torch.Tensor], src: Sequence[torch.Tensor], non_blocking: bool = False
    ) -> Any:
        try:
            return inplace(keys, selfs, src, non_blocking)
        except DeviceMismatch:  # before anything is written
            for target, source in zip(selfs, src, strict=True):
                target.copy_(source, non_blocking)

    return copies


_ONE_LAZY: Final = {LazyTensor}
_ONE_INDEXED: Final = {IndexedLazyTensor}
_exhaust: Final[Callable[[Iterable[Any]], Any]] = deque[Any](maxlen=0).extend


def write_each(wrappers: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Replace the wrappers' values and increment their versions, which PyTorch does for single tensors only."""
    exact = any(map(is_of_expanded, wrappers))
    _exhaust(map(_replace, wrappers, values))
    with ExactWrites() if exact else nullcontext():
        _exhaust(map(_commit, wrappers))
        _exhaust(map(_sync, wrappers))
    _written(wrappers)


def _inner_list(tensors: Sequence[torch.Tensor]) -> list[Any]:
    try:
        _exhaust(map(_sync, tensors))
        return list(map(inner_of, tensors))
    except (RuntimeError, TypeError):  # some are no wrappers, or not even tensors
        return [unwrapped(item) for item in tensors]


_NO_DATA: Final = "Cannot copy out of meta tensor; no data!"
"""PyTorch's words. ``Module.to`` looks for exactly these, and adds what to write instead."""


def _of_copy(op: Any, forms: Kernels, original: Any) -> Callable[..., Any]:
    copy = forms.fast

    # PyTorch's own functionalization runs a copy on meta tensors first. It still does where shapes differ, as it knows
    # what broadcasts, and where the source is of another device or index.

    def inplace(keys: Any, self: torch.Tensor, src: Any, non_blocking: bool = False) -> Any:
        inner = unwrapped(self)
        if inner is not self and isinstance(inner, LazyTensor):
            refuse_overlap(op, inner)
            if share_memory(self, src):
                refuse_as_cpu(op, (self, src), {})
            given = unwrapped(src)
            if given.__class__ is LazyTensor is inner.__class__ and given is not src and given.shape == inner.shape:
                return write_back(self, copy(inner, given))
        elif self.device.type == DEVICE_TYPE:
            refuse_overlap(op, self)
        elif isinstance(src, torch.Tensor) and isinstance(
            unwrapped(src), LazyTensor
        ):  # in inference mode, and where autograd has been
            return self.copy_(src.to(self.device), non_blocking)
        if isinstance(src, torch.Tensor) and src.device.type == "meta" != self.device.type:
            raise NotImplementedError(_NO_DATA)
        return call_exactly(op, original.call_boxed, [self], keys, self, *boxable(op, (src,), first=1), non_blocking)

    return inplace


def _guarded(op: Any, original: Any) -> Callable[..., Any]:
    def inplace(keys: Any, self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.device.type == DEVICE_TYPE:
            refuse_overlap(op, self)
        return call_exactly(op, original.call_boxed, [self], keys, self, *boxable(op, args, first=1), **kwargs)

    return inplace


# -- elements that share memory --------------------------------------------------------------------------------------
_storage_of: Final[Callable[[torch.Tensor], Any]] = torch.Tensor.untyped_storage  # as it is before the shims guard it
_name_of: Final = operator.attrgetter("_cdata")


def storage_name(tensor: torch.Tensor) -> int:
    """A number that is equal for tensors of one storage."""
    return _name_of(_storage_of(tensor))


def may_share_memory(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether two of the tensors are the same, views of one, or the same without gradients (0.1 µs per tensor)."""
    return len(set(map(_name_of, map(_storage_of, tensors)))) != len(tensors)


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether two elements of a tensor share a place in memory, as in an expanded or unfolded tensor."""
    if tensor.is_contiguous() or not tensor.numel():
        return False
    dims = sorted((step, size) for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    if dims and dims[0][0] == 0:
        return True  # expanded, and then perhaps too large to list
    reach = 0
    for step, size in dims:
        if step <= reach:
            break
        reach += step * (size - 1)
    else:
        return False
    places = torch.zeros(1, dtype=torch.int64)
    for step, size in dims:
        places = (places[:, None] + torch.arange(size) * step).flatten()
    return places.unique().numel() != places.numel()


def refuse_overlap(op: Any, tensor: torch.Tensor) -> None:
    """Raise :class:`UnsupportedOp` if elements of a tensor that is to be written share memory, as on the CPU."""
    if _overlaps(tensor):
        raise UnsupportedOp(
            "unsupported operation: more than one element of the written-to tensor refers to a single memory location. "
            "Please clone() the tensor before performing the operation",
            op=str(op),
            source=user_line(),
        )


def _write_overlapping(op: Any, self: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor:
    """Filling an expanded tensor, or a threshold, which is the same twice as once, writes what it shows.

    Other writes to elements that share memory are refused.
    """
    aten = torch.ops.aten
    part = self
    if op in (aten.fill_.Scalar, aten.zero_.default, aten.threshold_.default):
        for dim, (step, size) in enumerate(zip(self.stride(), self.shape, strict=True)):
            if step == 0 and size > 1:
                part = part.narrow(dim, 0, 1)
    refuse_overlap(op, part)
    op(part, *args, **kwargs)
    _sync(self)
    return self
