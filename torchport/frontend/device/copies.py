"""The kernels that are not generated: copies between host and device or between devices, and values read by Python."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from ...core.config import config
from ...core.errors import UnsupportedOp
from ...core.frames import user_line
from ...core.random_state import drawing_from
from ...core.specs import TensorSpec
from ...run import barriers
from ...run.device_runtime import DeviceRuntime, runtimes
from ...run.flush import flush
from ...run.future import has_failed
from ...run.values import host_tensor, leaf_from_host, settle
from ...trace.handle import DEVICE_TYPE, IndexedLazyTensor, LazyTensor, intern_spec, make_handle
from ...trace.layouts import kind_of, refusal
from ...trace.threads import threads
from ...trace.trace import COPIES_UNDER_GRAD, Trace
from ...trace.trie import NONE
from ...trace.wrapping import call_above, inner_of, is_below, is_bypassed, unwrap, wrap
from . import layouts
from .generators import owner_of
from .opaque import opaque
from .storages import HostStorage

__all__ = ["elsewhere", "install", "kernels", "special_kernels", "with_generator"]

aten = torch.ops.aten
kernels: Final[dict[Any, Any]] = {}
"""The generated kernels, filled in by ``install``."""
SAME_VALUE: Final = (aten.detach_copy.default, aten.alias_copy.default)
"""Operators that give another handle of the same value."""


def _trace_of(value: Any) -> Trace:
    return threads.of(value.get_device()) if isinstance(value, IndexedLazyTensor) else threads.of(0)


def _call(op: Any, trace: Trace, *args: Any, **kwargs: Any) -> Any:
    """Call the generated kernel of an op on a trace."""
    kernel = kernels[op]
    return kernel.fast(*args, **kwargs) if trace.index == 0 else kernel.indexed(trace, *args, **kwargs)


def _index_of(device: Any) -> int | None:
    """The index of a device as it was asked for: the one that it stands for. ``None`` where none was named."""
    if device is None:
        return None
    index: int | None = device.index
    return threads.of(index).index if index and device.type == DEVICE_TYPE else index


# -- host ↔ device -----------------------------------------------------------------------------------------------
def _private_copy(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """A CPU tensor nobody else can write to, also of one on another accelerator."""
    if not tensor.is_cpu:
        return tensor.to("cpu", dtype)
    if dtype is not None and dtype != tensor.dtype:
        return tensor.to(dtype)
    return tensor.clone()


def _host_to_device(tensor: torch.Tensor, index: int, dtype: torch.dtype | None) -> torch.Tensor:
    trace = threads.of(index)
    if config.flush_on_copy and trace.fresh and tensor.numel() > 1:
        # A new batch arrives while work on the former one is pending: that work is one computation.
        trace.copies += 1
        if trace.copies >= COPIES_UNDER_GRAD:
            flush(trace, "copy")
    if trace.direct and tensor.numel() > 1:
        trace.end_direct()  # a new batch also ends the interpretation of operators at once
    plain = tensor.detach()
    if plain.layout is not torch.strided:
        raise UnsupportedOp(
            refusal(kind_of(plain.layout)),
            op="aten._to_copy.default",
            source=user_line(),
        )
    if plain.shape == (0,) and plain.stride() == (1,):
        return _empty(trace, plain, dtype or plain.dtype)
    made = leaf_from_host(trace.runtime, _private_copy(plain, dtype), private=True)
    made.fresh = tensor.numel() > 1
    return made


def _empty(trace: Trace, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A copy of an empty host tensor, without one: libraries make many, all of which have one value per dtype."""
    runtime: DeviceRuntime = trace.runtime  # type: ignore[assignment]
    known = runtime.empties.get(dtype)
    if known is None:
        known = leaf_from_host(runtime, _private_copy(tensor, dtype))
        known.spec = intern_spec(TensorSpec.of(known))
        if not runtime.is_lost:
            runtime.empties[dtype] = known
    return _same_value(known)


def _shared_copy(tensor: LazyTensor, dtype: torch.dtype | None) -> torch.Tensor:
    """A CPU tensor with the value, copied when somebody writes to it (PyTorch's copy-on-write), not before."""
    held = host_tensor(tensor)
    if dtype is not None and dtype != held.dtype:
        return held.to(dtype)
    try:
        return torch._lazy_clone(held)
    except RuntimeError:  # memory PyTorch did not allocate, such as a NumPy array's, has no copy-on-write
        return held.clone()


def _to_copy(
    self: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    inner = unwrap(self)
    if not isinstance(inner, LazyTensor):
        index = _index_of(device) or 0
        made = _host_to_device(inner, index, dtype)
        if memory_format is not None and memory_format is not torch.preserve_format:
            made = _call(aten.clone.default, threads.of(index), made, memory_format=memory_format)
        # Wrapped here, since ``torch.tensor`` copies with functionalization switched off and returns the result as is.
        return torch._to_functional_tensor(made)
    here = inner.get_device() if isinstance(inner, IndexedLazyTensor) else 0
    if device is not None and device.type != DEVICE_TYPE:
        result = _shared_copy(inner, dtype)
        if device.type != "cpu":
            result = result.to(device)
        return result if memory_format is None else result.contiguous(memory_format=memory_format)
    asked = _index_of(device)
    if asked is not None and asked != here:
        made = _host_to_device(host_tensor(inner), asked, dtype)
    else:
        made = _call(aten._to_copy.default, _trace_of(inner), inner, dtype=dtype, memory_format=memory_format)
    return made if inner is self else torch._to_functional_tensor(made)


def install(library: torch.library.Library) -> None:
    """Register ``_to_copy``, the copy between devices and dtypes, in place of functionalization's kernel.

    PyTorch's functionalization unwraps this operator's argument but wraps its result for XLA and Lazy only. The kernel
    registered here wraps the result for the program. A call below functionalization, from another library's operator
    or from functionalization itself, still gets a bare handle.
    """
    functionalized = torch.library.get_kernel(aten._to_copy.default, "Functionalize")

    def to_copy(keys: Any, self: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        if torch._is_functional_tensor(self) and isinstance(inner_of(self), LazyTensor):
            return _to_copy(self, **kwargs)
        return functionalized.call_boxed(keys, self, **kwargs)  # a wrapper of a compiler that traces

    library.impl("_to_copy", opaque(to_copy), "Functionalize", with_keyset=True, allow_override=True)


def _copy(self: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """``self.copy_(src)`` in functional form; ``src`` may be on another device."""
    target, source = unwrap(self), unwrap(src)
    index = target.get_device() if isinstance(target, IndexedLazyTensor) else 0
    trace = threads.of(index)
    if isinstance(target, LazyTensor) and has_failed(target):
        # Writing all of a tensor is the way to use it again after its computation failed.
        blank = torch.empty_strided(target.shape, target.stride(), dtype=target.dtype).zero_()
        target = leaf_from_host(trace.runtime, blank, private=True)
    if isinstance(source, LazyTensor) and (source.get_device() or 0) != index:
        source = host_tensor(source)
    if not isinstance(source, LazyTensor):
        source = _host_to_device(source, index, target.dtype)
        if TensorSpec.of(source) == TensorSpec.of(target):
            return source
    elif source.value is not None and TensorSpec.of(source) == TensorSpec.of(target):
        return _same_value(source)  # a value never changes, so the target may hold the very same one
    return _call(aten.copy.default, trace, target, source)


def _same_value(self: torch.Tensor) -> torch.Tensor:
    """``detach`` and its kin: another handle of the same value; nothing is traced."""
    if is_bypassed(self):
        return call_above(aten.alias_copy.default, (self,), {})
    inner = unwrap(self)
    if not isinstance(inner, LazyTensor):
        raise UnsupportedOp(f"expected a tensor on {DEVICE_TYPE}, got one on {inner.device}", source=user_line())
    index = inner.get_device() if isinstance(inner, IndexedLazyTensor) else 0
    trace = threads.of(index)
    if inner.value is None and inner.failure is None and not trace.holds(inner.value_id):
        settle(trace, inner)  # pending in another thread's trace, which knows its own handles only
    handle: Any = inner.data if index == 0 else make_handle(TensorSpec.of(inner), index)
    if index == 0:
        handle.__class__ = LazyTensor
    handle.value, handle.spec, handle.failure = inner.value, inner.spec, inner.failure
    # A leaf's value id ends with its trace, and the trace does not know this handle: its first use gives it an id.
    handle.value_id = inner.value_id if inner.value is None else NONE
    if inner.value is None:
        trace.keep(handle)
    return handle


def _with_host_indices(op: Any) -> Callable[..., Any]:
    """An indexing op whose index tensors may be on the host, as on CUDA: they move to the device."""

    def kernel(self: torch.Tensor, indices: Sequence[torch.Tensor | None], *args: Any) -> Any:
        target = _handle(self)
        trace = _trace_of(target)
        moved = [
            leaf_from_host(trace.runtime, i.clone(), private=True) if i is not None and i.device.type == "cpu" else i
            for i in indices
        ]
        return _call(op, trace, self, moved, *args)

    return kernel


def _copy_from(self: torch.Tensor, dst: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """``dst.copy_(self)`` where one of the two is not on this device, or inside of a ``DTensor``."""
    if is_bypassed(dst):
        return call_above(aten.copy_.default, (dst, self), {})
    inner = unwrap(self)
    if isinstance(inner, LazyTensor) and not isinstance(unwrap(dst), LazyTensor):
        return dst.copy_(host_tensor(inner))
    raise UnsupportedOp("copying into this tensor in place", op="aten._copy_from.default", source=user_line())


def _local_scalar_dense(self: torch.Tensor) -> Any:
    return host_tensor(_handle(self)).item()


def _handle(value: torch.Tensor) -> LazyTensor:
    inner = unwrap(value)
    if not isinstance(inner, LazyTensor):
        raise UnsupportedOp(f"expected a tensor on {DEVICE_TYPE}, got one on {inner.device}", source=user_line())
    return inner


def _equal(self: torch.Tensor, other: torch.Tensor) -> bool:
    if self.device != other.device:
        raise RuntimeError(f"expected both tensors on one device, but found {self.device} and {other.device}")
    return torch.equal(host_tensor(_handle(self)), host_tensor(_handle(other)))


def _allclose(self: torch.Tensor, other: torch.Tensor, *args: Any, **kwargs: Any) -> bool:
    return torch.allclose(host_tensor(_handle(self)), host_tensor(_handle(other)), *args, **kwargs)


_INDEXING: Final = (
    aten.index.Tensor,
    aten.index_put.default,
    aten._index_put_impl.default,
    aten._unsafe_index.Tensor,
    aten._unsafe_index_put.default,
)


def _set_storage(
    self: torch.Tensor, source: Any, storage_offset: int, size: Sequence[int], stride: Sequence[int] = ()
) -> torch.Tensor:
    """Called by ``torch.load`` to fill a tensor from a storage: a copy of the contents moves to the device."""
    target = _handle(self)
    index = target.get_device() if isinstance(target, IndexedLazyTensor) else 0

    def contents() -> LazyTensor:
        held = torch.empty(0, dtype=target.dtype).set_(source, storage_offset, tuple(size), tuple(stride))
        return leaf_from_host(runtimes.get(index), held.clone(), private=True)

    made = contents()
    if isinstance(source, HostStorage):
        first = made.value

        def take() -> bool:
            unused = made.value is first and made.value_id < 0
            if unused:
                made.value = contents().value
            return unused

        source.takers.append(take)
    return made


def _empty_strided(size: Sequence[int], stride: Sequence[int], **kwargs: Any) -> torch.Tensor:
    """A tensor without contents. With strides of 0 it is a view of a tensor that holds each element once."""
    held = [1 if step == 0 else n for n, step in zip(size, stride, strict=False)]
    if held == [*size] or len(size) != len(stride) or is_below():
        return kernels[aten.empty_strided.default].fast(size, stride, **kwargs)
    return torch.empty_strided(held, stride, **kwargs).expand(size)


def with_generator(trace: Trace, kernel: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A random op with a generator: one of this device gives random keys, a CPU one numbers that move to the device."""
    generator = next(v for v in (*args, *kwargs.values()) if isinstance(v, torch.Generator))
    if (own := owner_of(generator)) is not None:
        bare = [None if value is generator else value for value in args]
        named = {name: None if value is generator else value for name, value in kwargs.items()}
        with drawing_from(own.random):
            return _call(kernel.op, trace, *bare, **named)
    if generator.device.type != "cpu":
        raise UnsupportedOp(
            f"a generator on {generator.device}; this device takes its own and the CPU's", op=str(kernel.op)
        )
    given = {name: value for name, value in kwargs.items() if value is not None}
    result = barriers.on_host(trace, kernel.op, args, given)
    return wrap(result) if kernel.is_factory else result


def elsewhere(trace: Trace, kernel: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """An op on a tensor of this trace whose result was asked for on another device: made here, then moved."""
    device = kwargs["device"]
    made = _call(kernel.op, trace, *args, **{**kwargs, "device": None})
    if device.type == DEVICE_TYPE:
        there = _index_of(device)
        if there == trace.index:
            return made
        return torch._to_functional_tensor(_host_to_device(host_tensor(made), there or 0, None))
    return _shared_copy(made, None).to(device)


@functools.cache
def special_kernels() -> dict[Any, Callable[..., Any]]:
    """Operator → kernel, for those that move data or return Python values."""
    table: dict[Any, Callable[..., Any]] = {
        aten._to_copy.default: _to_copy,
        aten.copy.default: _copy,
        aten._copy_from.default: _copy_from,
        aten._local_scalar_dense.default: _local_scalar_dense,
        aten.equal.default: _equal,
        aten.allclose.default: _allclose,
        # Asked by nn.TransformerEncoder before it makes nested tensors, which this device does not hold.
        aten._nested_tensor_from_mask_left_aligned.default: lambda tensor, mask: False,
        **dict.fromkeys(SAME_VALUE, _same_value),
        **{op: _with_host_indices(op) for op in _INDEXING},
        aten.set.source_Storage_storage_offset: _set_storage,
        aten.empty_strided.default: _empty_strided,
        **layouts.refusing(kernels),
    }
    return table
