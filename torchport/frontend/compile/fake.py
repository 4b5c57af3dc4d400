"""How Dynamo sees a ``port`` tensor: one shim where PyTorch makes a fake tensor of a real one.

Private torch APIs used here: ``torch._subclasses.meta_utils.MetaTensorDescriber.describe_tensor``, which takes every
functionalization wrapper apart except those of the devices ``xla`` and ``lazy``. A ``port`` tensor is such a wrapper,
too, and is to be described as what the user sees: a plain strided tensor, whose storage says which tensors are views
of one another.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import torch

from ...lazy.tensor import DEVICE_TYPE
from ..device.shims import TorchWithoutWrapping, storages_are_names

__all__ = ["install"]


def install() -> None:
    """Wrap the describer. Tensors of this device are described by a copy of it that sees other globals."""
    import torch._subclasses.meta_utils as module

    describer: Any = module.MetaTensorDescriber
    original = describer.describe_tensor
    ours: Any = types.FunctionType(original.__code__, {**vars(module), "torch": TorchWithoutWrapping()})
    ours.__kwdefaults__ = original.__kwdefaults__

    @functools.wraps(original)
    def describe_tensor(self: Any, t: torch.Tensor, *, recurse: bool = True, trace: bool = False) -> Any:
        if t.device.type != DEVICE_TYPE or not torch._is_functional_tensor(t):
            return original(self, t, recurse=recurse, trace=trace)
        torch._sync(t)
        with storages_are_names():
            return ours(self, t, recurse=recurse, trace=trace)

    describer.describe_tensor = describe_tensor
