"""The one place that uses ``torch.testing._internal``: PyTorch's databases of operators, modules and optimizers."""

from __future__ import annotations

import functools
import random
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import islice
from typing import Any

import numpy as np
import torch

from .plan import DTYPES, seed_of

if find_spec("expecttest") is None:
    raise ModuleNotFoundError(
        "torchport.testing uses PyTorch's operator database, which needs the package expecttest: "
        "pip install 'torchport[conformance]'",
        name="expecttest",
    )

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the database makes sparse tensors and calls deprecated functions when imported
    from torch.testing._internal.common_device_type import toleranceOverride
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.common_modules import module_db
    from torch.testing._internal.common_optimizers import optim_db
    from torch.testing._internal.opinfo.core import DecorateInfo, SampleInput

__all__ = [
    "SampleInput",
    "default_generators_seeded",
    "dtype_of",
    "error_inputs",
    "is_alias",
    "module_inputs",
    "modules",
    "operators",
    "optimizer_inputs",
    "optimizers",
    "reference_inputs",
    "sample_inputs",
    "tolerances",
]

_NO_CPU_KERNEL = ("jiterator_",)
_REFERENCE_INPUTS_LOOKED_AT = 400


def dtype_of(name: str) -> torch.dtype:
    """``torch.float32`` for ``"float32"``."""
    return getattr(torch, name)


def default_generators_seeded(seed: int) -> None:
    """Seed every generator that samples and operators draw from."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


@functools.cache
def operators() -> dict[str, Any]:
    """Name → ``OpInfo`` of every operator the CPU has in one of our dtypes. Variants of one operator have own names."""
    found: dict[str, Any] = {}
    for op in op_db:
        name = op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")
        if not name.startswith(_NO_CPU_KERNEL) and any(op.supports_dtype(dtype_of(d), "cpu") for d in DTYPES):
            found[name.replace("/", "_")] = op
    return found


@functools.cache
def modules() -> dict[str, Any]:
    """``nn.Linear`` → ``ModuleInfo``."""
    return {info.name: info for info in module_db}


@functools.cache
def optimizers() -> dict[str, Any]:
    """``Adam`` → ``OptimizerInfo``."""
    return {info.name: info for info in optim_db}


_kept: dict[tuple[Any, ...], tuple[Any, list[Any]]] = {}


def sample_inputs(op: Any, dtype: torch.dtype, requires_grad: bool, seed: int) -> list[Any]:
    """The operator's samples on the CPU, the same for the same seed. Kept for the next variant: do not change them."""
    key = (id(op), dtype, requires_grad, seed)
    if key not in _kept:
        if len(_kept) >= 2:
            _kept.pop(next(iter(_kept)))
        default_generators_seeded(seed_of(op.formatted_name, dtype, seed))
        _kept[key] = op, list(op.sample_inputs("cpu", dtype, requires_grad=requires_grad))
    return list(_kept[key][1])


def reference_inputs(op: Any, dtype: torch.dtype, seed: int) -> list[Any]:
    """PyTorch's larger set of samples, where the operator has one."""
    if op.reference_inputs_func is None:
        return []
    default_generators_seeded(seed_of(op.formatted_name, dtype, seed, "reference"))
    return list(islice(op.reference_inputs("cpu", dtype), _REFERENCE_INPUTS_LOOKED_AT))


def error_inputs(op: Any, seed: int) -> list[Any]:
    """Calls that must raise, as ``SampleInput``."""
    if op.error_inputs_func is None:
        return []
    default_generators_seeded(seed_of(op.formatted_name, seed, "error"))
    return [error.sample_input for error in op.error_inputs("cpu")]


def module_inputs(info: Any, dtype: torch.dtype, training: bool, seed: int) -> list[Any]:
    """Constructor and forward arguments of a module's samples."""
    default_generators_seeded(seed_of(info.name, dtype, seed))
    return list(info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=training, training=training))


def optimizer_inputs(info: Any) -> list[Any]:
    """An optimizer's keyword arguments, one per configuration."""
    return list(info.optim_inputs_func(device="cpu"))


def tolerances(op: Any, dtype: torch.dtype) -> Iterator[tuple[float, float]]:
    """(rtol, atol) of every tolerance that PyTorch's own tests use for the operator with this dtype."""
    for info in getattr(op, "decorators", ()) or ():
        if not isinstance(info, DecorateInfo) or info.cls_name not in (None, "TestCommon"):
            continue
        if info.dtypes is not None and dtype not in info.dtypes:
            continue
        for decorator in info.decorators:
            if isinstance(decorator, toleranceOverride) and dtype in decorator.d:
                yield decorator.d[dtype].rtol, decorator.d[dtype].atol


def is_alias(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two CPU tensors share memory."""
    return a.layout is torch.strided and b.layout is torch.strided and torch._C._is_alias_of(a, b)  # pyright: ignore[reportAttributeAccessIssue]
