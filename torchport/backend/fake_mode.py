"""PyTorch's fake tensor mode, made without importing ``torch._dynamo``.

``FakeTensorMode.__init__`` reads one flag of ``torch._dynamo.config`` and so imports Dynamo, Inductor's settings and
``torch.distributed.tensor``: more than a second at the start of every process, also of one that compiles nothing. Here
the mode's attributes are set as that constructor sets them; a test compares them with a mode that it has made.

Private torch APIs used here: ``torch._subclasses.fake_tensor.FakeTensorMode``, ``FakeTensorConverter``,
``torch._functorch.config``, ``torch._C._TorchDispatchModeKey.FAKE``.
"""

from __future__ import annotations

import sys
import traceback
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["make_fake_mode"]


def make_fake_mode() -> Any:
    """``FakeTensorMode(allow_non_fake_inputs=True)``."""
    from torch._functorch import config as functorch_config
    from torch._subclasses.fake_tensor import FakeTensorConverter, FakeTensorMode

    if "torch._dynamo.config" in sys.modules:  # it may have been changed there
        return FakeTensorMode(allow_non_fake_inputs=True)
    import torch.nested._internal.nested_tensor as nested

    settings: Any = functorch_config
    mode: Any = FakeTensorMode.__new__(FakeTensorMode)
    TorchDispatchMode.__init__(mode)
    mode.allow_fallback_kernels = True
    mode.propagate_real_tensors = settings.fake_tensor_propagate_real_tensors
    mode.fake_tensor_converter = FakeTensorConverter(copy_data=mode.propagate_real_tensors, export=False)
    mode.static_shapes = True
    mode.allow_scalar_outputs = False
    mode._allow_unsafe_data_ptr_access = settings.fake_tensor_allow_unsafe_data_ptr_access
    mode.allow_meta = settings.fake_tensor_allow_meta
    mode.cache_enabled = not mode.propagate_real_tensors
    mode.cache_crosscheck_enabled = False
    mode.allow_non_fake_inputs = True
    mode.in_kernel_invocation = False
    mode.enter_stack = []
    mode.shape_env = None
    mode._stack_trace = traceback.extract_stack(limit=1)
    mode._stack = None
    mode._mode_key = torch._C._TorchDispatchModeKey.FAKE  # type: ignore[attr-defined]
    mode.nt_tensor_id_initial_count = nested._tensor_id_counter
    mode.nt_tensor_id_counter = mode.nt_tensor_id_initial_count
    return mode
