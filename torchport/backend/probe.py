"""What the CPU refuses: an operator's own CPU kernel, asked on tensors of the same dtypes and little else.

PyTorch's shape rules let pass what its CPU kernels refuse: dtypes that do not mix, numbers that do not fit a dtype,
in-place results that cannot be cast. A program that was written on the CPU expects the error at the call. So an
operator with arguments of a new kind runs once on the CPU, on zeros and, if that fails, on ones: what refuses both
refuses for another reason than the values.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.utils._pytree import tree_leaves, tree_map

from ..core.specs import TensorSpec, contiguous_strides
from .normal_form import is_view

__all__ = ["PlacedSpec", "cpu_result", "depends_on_values"]

aten = torch.ops.aten

LARGEST: Final = 1 << 13
"""Elements of arguments and results up to which an operator is tried on the real shapes: tens of microseconds."""

LARGEST_UNSETTLED: Final = 1 << 18
"""The same for an elementwise operator where what the sizes and strides say of the result's strides depends on the
kernel: less than a millisecond, once."""

_SMALL: Final = 2
"""What the larger sizes become where a try on the real shapes would take long. Sizes that fit together still do."""

_VALUES_MATTER: Final = frozenset(
    {"segment_reduce", "_segment_reduce_backward", "_ctc_loss", "_ctc_loss_backward", "repeat_interleave",
     "_jagged_to_padded_dense_forward", "_padded_dense_to_jagged_forward", "_pack_padded_sequence",
     "_pack_padded_sequence_backward", "_pad_packed_sequence", "_nested_view_from_jagged", "_nested_tensor_from_mask"}
)  # fmt: skip
"""Operators whose arguments fit together by their values, such as lengths with a sum."""

_VALUES_ARE_PLACES: Final = frozenset({"linalg_ldl_solve", "linalg_lu_solve"})
"""Operators that write where their values say: LAPACK looks at no pivot, and pivots count from 1."""

_OF_DTYPES: Final = re.compile(r"\bd?types?\b|not implemented for")
"""What errors say that are about dtypes and not about shapes."""

_REFUSALS: Final = (RuntimeError, TypeError, ValueError, IndexError, ArithmeticError)


@dataclass(frozen=True, slots=True)
class PlacedSpec(TensorSpec):
    """The spec of a tensor that shares memory with others: which memory, and where it begins in it, in elements."""

    memory: int
    offset: int


def _is_spec(value: Any) -> bool:
    return isinstance(value, TensorSpec)


def _specs(value: Any) -> list[TensorSpec]:
    return [leaf for leaf in tree_leaves(value, is_leaf=_is_spec) if isinstance(leaf, TensorSpec)]


def _filled(spec: TensorSpec, value: int) -> torch.Tensor:
    """A CPU tensor of one number, of these strides: an expanded one takes little memory."""
    if 0 in spec.shape:
        return torch.empty_strided(spec.shape, spec.strides, dtype=spec.dtype)
    extent = 1 + sum((size - 1) * step for size, step in zip(spec.shape, spec.strides, strict=True))
    return torch.full((extent,), value, dtype=spec.dtype).as_strided(spec.shape, spec.strides)


def _memories(specs: Sequence[TensorSpec], value: int) -> dict[int, torch.Tensor]:
    """The memory that tensors share, by identity, filled with one number."""
    found: dict[int, torch.Tensor] = {}
    for spec in specs:
        if isinstance(spec, PlacedSpec):
            end = spec.offset + 1 + sum((n - 1) * step for n, step in zip(spec.shape, spec.strides, strict=True))
            known = found.get(spec.memory)
            if known is None or known.numel() < end:
                found[spec.memory] = torch.full((max(end, 1),), value, dtype=spec.dtype)
    return found


def _shrunk(spec: TensorSpec) -> TensorSpec:
    """The same with no size above a few; expanded dimensions stay that."""
    shape = tuple(min(size, _SMALL) for size in spec.shape)
    strides, reach = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda d: spec.strides[d]):
        if spec.strides[dim] or spec.shape[dim] <= 1:
            strides[dim], reach = reach, reach * max(shape[dim], 1)
    return TensorSpec(shape, spec.dtype, tuple(strides))


def _is_elementwise(op: Any) -> bool:
    """Whether an operator takes sizes that fit together without regard to what they are."""
    return torch.Tag.pointwise in op.tags or op._schema.name.startswith(("aten::_foreach_", "aten::fill"))


_SIZED: Final = frozenset({aten.full.default, aten.new_full.default, aten.full_like.default, aten.scalar_tensor.default,
                           aten.fill.Scalar, aten.masked_fill.Scalar, aten.masked_fill.Tensor})  # fmt: skip
"""Operators of one number and any shape; those that take a size are tried with a small one."""


def _with_small_size(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    names = [argument.name for argument in op._schema.arguments]
    small = [[_SMALL] if name == "size" else value for name, value in zip(names, args, strict=False)]
    return small, {name: [_SMALL] if name == "size" else value for name, value in kwargs.items()}


def _attempt(op: Any, args: Any, kwargs: Any, value: int) -> Any:
    """The operator's result on the CPU, or the error it raises."""
    made: dict[int, torch.Tensor] = {}
    memories = _memories(_specs((args, kwargs)), value)

    def real(given: Any) -> Any:
        if not isinstance(given, TensorSpec):
            return given
        if id(given) not in made:  # one spec object that stands in two places is one tensor
            if isinstance(given, PlacedSpec):
                memory = memories[given.memory].view(given.dtype)
                made[id(given)] = memory.as_strided(given.shape, given.strides, given.offset)
            else:
                made[id(given)] = _filled(given, value)
        return made[id(given)]

    args, kwargs = tree_map(real, (list(args), dict(kwargs)), is_leaf=_is_spec)
    try:
        return op(*args, **kwargs)
    except torch.linalg.LinAlgError:
        return None  # a matrix of one number is singular
    except _REFUSALS as error:
        return error


def _ask(op: Any, args: Any, kwargs: Any) -> Any:
    """The operator's result on zeros or ones, or the error that both end in."""
    draws = torch.Tag.nondeterministic_seeded in op.tags
    state = torch.default_generator.get_state() if draws else None
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = _attempt(op, args, kwargs, 0)
            return _attempt(op, args, kwargs, 1) if isinstance(result, Exception) else result
    finally:
        if state is not None:
            torch.default_generator.set_state(state)


def depends_on_values(op: Any) -> bool:
    """Whether shapes of results, or which arguments fit together, depend on values."""
    return (
        not isinstance(op, torch._ops.OpOverload)
        or op.namespace != "aten"
        or torch.Tag.dynamic_output_shape in op.tags
        or torch.Tag.data_dependent_output in op.tags
        or op._schema.name.removeprefix("aten::") in _VALUES_MATTER
    )


def _can_be_asked(op: Any) -> bool:
    return (
        isinstance(op, torch._ops.OpOverload)
        and op.namespace == "aten"
        and not is_view(op)
        and op._schema.name.removeprefix("aten::") not in _VALUES_MATTER | _VALUES_ARE_PLACES
        and torch._C._dispatch_has_computed_kernel_for_dispatch_key(op.name(), "CPU")
    )


def _has_mask(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator is indexed with a mask: how many elements that means depends on its values."""
    named = {argument.name: value for argument, value in zip(op._schema.arguments, args, strict=False)} | dict(kwargs)
    indices = named.get("indices")
    return isinstance(indices, (list, tuple)) and any(
        isinstance(one, TensorSpec) and one.dtype in (torch.bool, torch.uint8) for one in indices
    )


def _is_unsettled(spec: TensorSpec) -> bool:
    """Whether a tensor has dimensions of size 1 with strides that are not those of its place."""
    return 1 in spec.shape and spec.strides != contiguous_strides(spec.shape)


def cpu_result(op: Any, args: Any, kwargs: Any, results: Sequence[Any] = ()) -> Any:
    """What the CPU's kernel of an operator gives, ``None`` where it was not asked on these shapes.

    ``args`` and ``kwargs`` hold a :class:`TensorSpec` for a tensor, ``results`` the specs of what is expected.
    Raises what the CPU raises whatever the values are.
    """
    if not _can_be_asked(op) or _has_mask(op, args, kwargs):
        return None
    count = sum(math.prod(spec.shape) for spec in (*_specs((args, kwargs)), *_specs(list(results))))
    largest = LARGEST_UNSETTLED if _is_elementwise(op) and any(map(_is_unsettled, _specs((args, kwargs)))) else LARGEST
    if count <= largest or any(isinstance(spec, PlacedSpec) for spec in _specs((args, kwargs))):
        found = _ask(op, args, kwargs)
        if isinstance(found, Exception):
            raise found
        return found
    if op in _SIZED:
        args, kwargs = _with_small_size(op, args, kwargs)
    shrunk: dict[int, TensorSpec] = {}

    def small(value: Any) -> Any:
        return shrunk.setdefault(id(value), _shrunk(value)) if isinstance(value, TensorSpec) else value

    if not _specs((args, kwargs)) and op not in _SIZED:
        return None  # what it makes is large whatever is shrunk
    args, kwargs = tree_map(small, (list(args), dict(kwargs)), is_leaf=_is_spec)
    found = _ask(op, args, kwargs)
    # Other operators may refuse the small shapes: then the words tell.
    certain = op in _SIZED or _is_elementwise(op)
    if isinstance(found, Exception) and (certain or _OF_DTYPES.search(str(found))):
        raise found
    return None
