"""Shape inference of a first-time op, with fake tensors: shapes, dtypes and strides as CPU eager would give them.

Private torch APIs used here: ``torch._subclasses.fake_tensor.FakeTensorMode`` and its two exceptions for results
whose shape or value depends on data.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map

from ..core.specs import TensorSpec

__all__ = ["DataDependent", "Inferred", "NoShapeRule", "fake_mode", "fake_tensor", "infer"]


@dataclass(frozen=True, slots=True)
class Inferred:
    """An op's results: one spec per tensor (``None`` for an undefined one), and the sequence type around several."""

    container: type | None
    specs: tuple[TensorSpec | None, ...]


class DataDependent(Exception):
    """The shape of a result depends on values, so the op cannot be part of a graph of static shapes."""


class NoShapeRule(Exception):
    """PyTorch has no shape inference for the op."""


@functools.cache
def fake_mode() -> Any:
    """The process's one fake tensor mode; scalars that stand beside fake tensors may be real."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_tensor(spec: TensorSpec) -> torch.Tensor:
    """A fake CPU tensor with this spec."""
    with fake_mode():
        return torch.empty_strided(spec.shape, spec.strides, dtype=spec.dtype, device="cpu")


def _describe(result: Any) -> Inferred:
    if isinstance(result, torch.Tensor):
        return Inferred(None, (_spec(result),))
    if isinstance(result, (list, tuple)):
        return Inferred(list if isinstance(result, list) else tuple, tuple(_spec(item) for item in result))
    raise NoShapeRule(f"the op returns a {type(result).__name__}")


def _spec(value: Any) -> TensorSpec | None:
    if value is None:
        return None
    if not isinstance(value, torch.Tensor):
        raise NoShapeRule(f"the op returns a {type(value).__name__}")
    if value.layout is not torch.strided:
        raise NoShapeRule(f"the op returns a tensor of layout {value.layout}")
    if any(not isinstance(size, int) for size in value.shape):
        raise DataDependent("the shape of the result depends on values")
    return TensorSpec.of(value)


def infer(op: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Inferred:
    """What the op returns for these arguments, specs standing for tensors.

    Raises :class:`DataDependent`, :class:`NoShapeRule`, or what PyTorch raises for wrong arguments.
    """
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        UnsupportedOperatorException,
    )

    def to_fake(value: Any) -> Any:
        return fake_tensor(value) if isinstance(value, TensorSpec) else value

    args, kwargs = tree_map(to_fake, (list(args), dict(kwargs)), is_leaf=lambda v: isinstance(v, TensorSpec))
    try:
        with fake_mode(), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _describe(op(*args, **kwargs))
    except (DynamicOutputShapeException, DataDependentOutputException) as error:
        raise DataDependent("the shape of its result depends on values") from error
    except UnsupportedOperatorException as error:
        raise NoShapeRule(f"no shape rule for {op}") from error
    except NotImplementedError as error:
        raise NoShapeRule(f"no shape rule for {op}: {error}") from error
