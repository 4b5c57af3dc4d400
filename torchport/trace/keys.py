"""Keys: what tells one operator call from another, as a tuple that a node's children are found by.

A part of a key stands for an argument: a value of the trace by its id, a value from before the trace (a *leaf*) by
its spec when it is first used, a scalar input by a token, and everything else by itself.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..core.specs import TensorSpec
from .handle import IndexedLazyTensor, LazyTensor, intern_spec
from .trace import COPIES_UNDER_GRAD, Trace
from .trie import FLOAT, FLOATS, FOREIGN_DEVICE, LEAF, LIMITS, WRAPPED, Sights
from .wrapping import is_bypassed, unwrap

__all__ = [
    "beginning",
    "beginning_of",
    "constant",
    "constants",
    "filler",
    "foreign",
    "host_scalar",
    "leaf",
    "parts",
    "scalar",
    "scalars",
    "sized",
    "tensors",
]


def beginning(op: Any, key: Any) -> str:
    """What a path begins with, in words that are the same in any process and for any sizes."""
    specs = [part for part in parts(key) if isinstance(part, TensorSpec)]
    return " ".join([str(op), *(f"{spec.dtype} {len(spec.shape)}" for spec in specs)])


def beginning_of(sights: Sights) -> str:
    """What a path that is not recorded begins with; empty where that is not known yet."""
    if not sights.begins and sights.first is not None:
        sights.begins = beginning(*sights.first)
    return sights.begins


def parts(key: Any) -> Iterator[Any]:
    """The parts of a key, those in tuples, too."""
    for part in key:
        if part.__class__ is tuple:
            yield from parts(part)
        else:
            yield part


def leaf(trace: Trace, tensor: LazyTensor) -> Any:
    """Key part of a value that is not of this trace: its spec on first use, its value id afterwards."""
    known = trace.leaf_ids.get(id(tensor))
    if known is not None:
        tensor.value_id = known  # another thread may have used it meanwhile and left its own id
        return known
    if (tensor.get_device() if tensor.__class__ is IndexedLazyTensor else 0) != trace.index:
        return FOREIGN_DEVICE
    if tensor.value is None or tensor.value.info is not trace.runtime:
        try:
            trace.runtime.settle(trace, tensor)
        except BaseException:
            # The key is half made: the leaves and scalar inputs it has brought so far belong to no op.
            trace.runtime.flush(trace, "failure")
            raise
    spec = tensor.spec
    if spec is None:
        spec = tensor.spec = intern_spec(TensorSpec.of(tensor))
    if tensor.fresh:
        tensor.fresh = False
        trace.fresh = True
        if not torch.is_grad_enabled():
            trace.copies = COPIES_UNDER_GRAD
    first = trace.base + LEAF
    other = trace.leaf_ids.get(id(tensor.value))
    if other is not None and other - first < len(trace.leaves):
        held = trace.leaves[other - first]
        if held.value is tensor.value and held.spec is spec:
            # Another handle of the same value is a leaf already: as two, neither could be donated.
            tensor.value_id = other
            trace.keep(tensor)
            return other
    value_id = tensor.value_id = first + len(trace.leaves)
    trace.leaves.append(tensor)
    trace.leaf_ids[id(tensor)] = trace.leaf_ids[id(tensor.value)] = value_id
    return spec


def scalar(trace: Trace, value: Any) -> Any:
    """Key part of a Python number: a finite float becomes a scalar input, the rest stays constant."""
    if value.__class__ is float:
        if value - value != 0.0:  # infinite or NaN
            return constant(value)
        trace.scalar_inputs.append(value)
        return FLOAT
    return constant(value)


def sized(trace: Trace, value: Any) -> Any:
    """Key part of a Python number that becomes one of a tensor's dtype, where it has to fit: as :func:`scalar`."""
    part = scalar(trace, value)
    if part is not FLOAT or -LIMITS[0] <= value <= LIMITS[0]:
        return part
    return FLOATS[2 * bisect.bisect_left(LIMITS, abs(value)) - (value > 0)]


def filler(trace: Trace, value: Any) -> Any:
    """Key part of a number that a tensor is filled with: 0 and 1 stay constants, which compilers make much of."""
    return constant(value) if value == 0.0 or value == 1.0 else sized(trace, value)


def constant(value: Any) -> Any:
    """Key part of a number that stays constant; 1, 1.0 and True differ, and NaN equals itself."""
    if value is None:
        return None
    if value.__class__ is float:
        return (repr(value), float)
    if value.__class__ is complex:
        return (repr(value), complex)
    return (value, value.__class__)


def scalars(trace: Trace, values: Sequence[Any]) -> tuple[Any, ...]:
    """Key part of a list of numbers, of which the finite floats become scalar inputs."""
    return tuple([sized(trace, value) for value in values])


def constants(values: Sequence[Any]) -> tuple[Any, ...]:
    """Key part of a list of constants."""
    return tuple([constant(value) for value in values])


def foreign(trace: Trace, value: Any) -> Any:
    """Key part of what stands where a tensor does but is no handle of this device: ``None``, a number, a mistake.

    A 0-dim CPU tensor acts as a number, as on CUDA. A tensor of another device becomes :data:`FOREIGN_DEVICE` and is
    refused when the op is recorded. Where functionalization was left out, a wrapper becomes :data:`WRAPPED`.
    """
    if value is None:
        return None
    if not isinstance(value, torch.Tensor):  # a Python number: PyTorch hands wrapped numbers to Python as such
        return scalar(trace, value)
    if is_bypassed(value):
        trace.bypassed = True
        return WRAPPED
    tensor: Any = unwrap(value)
    cls = tensor.__class__
    if cls is LazyTensor or cls is IndexedLazyTensor:
        return leaf(trace, tensor) if tensor.value_id < 0 else tensor.value_id
    if tensor.dim() == 0 and tensor.device.type == "cpu":
        return host_scalar(trace, tensor)
    return FOREIGN_DEVICE


def host_scalar(trace: Trace, tensor: torch.Tensor) -> Any:
    """Key part of a 0-dim CPU tensor: its dtype, which counts in type promotion, and its value as a number."""
    return (tensor.dtype, scalar(trace, tensor.item()))


def tensors(trace: Trace, values: Sequence[Any]) -> tuple[Any, ...]:
    """Key part of a list of tensors, ``None`` allowed."""
    mixed: list[Any] = []
    for value in values:
        if value.__class__ is LazyTensor:
            mixed.append(leaf(trace, value) if value.value_id < 0 else value.value_id)
        else:
            mixed.append(foreign(trace, value))
    return tuple(mixed)
